//! Table of plans: from any state, with and without memory.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use coracle_pod::container_spec::container_id;
use coracle_pod::objects::Objects;
use coracle_pod::observed::{
    ContainerPhase, ContainerView, Exited, Failure, Memory, Observed, RuntimeState, SandboxPhase,
    SandboxState,
};
use coracle_pod::plan::{Plan, plan};
use coracle_pod::step::{HookKind, Step, Target};
use coracle_pod::time::add;
use coracle_pod::volume::{Layout, VolumeContent};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use serde_json::{Value, json};

use crate::support::node;

/// Second at which all plans of the table are made. The VM was started at 100.
const NOW: i64 = 1000;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// Parses a container from `name#attempt state`: `created`, `running`, or `exited:code:second`; with `*streak` before it.
fn view(text: &str) -> ContainerView {
    let (named, state) = text.split_once(' ').unwrap();
    let (name, attempt) = named.split_once('#').unwrap();
    let (attempt, streak) = attempt.split_once('*').unwrap_or((attempt, "0"));
    let attempt = attempt.parse().unwrap();
    let mut words = state.split(':');
    let phase = match words.next().unwrap() {
        "created" => ContainerPhase::Created,
        "running" => ContainerPhase::Running,
        _ => ContainerPhase::Exited(Exited {
            code: words.next().unwrap().parse().unwrap(),
            at: at(words.next().unwrap().parse().unwrap()),
            signal: 0,
            oom_killed: false,
            error: String::new(),
            message: String::new(),
        }),
    };
    let created_at = match &phase {
        ContainerPhase::Exited(exited) => add(exited.at, Duration::ZERO),
        ContainerPhase::Created | ContainerPhase::Running => at(900),
    };
    ContainerView {
        id: container_id("u1", name, attempt),
        name: name.to_owned(),
        attempt,
        streak: streak.parse().unwrap(),
        started_at: (phase != ContainerPhase::Created).then_some(created_at),
        phase,
        created_at,
        image: "i:1".into(),
        image_id: "sha256:0".into(),
        user: None,
    }
}

struct World {
    pod: Pod,
    runtime: RuntimeState,
    memory: Memory,
    reported: PodStatus,
}

fn make(spec: Value, sandbox: Option<SandboxPhase>, containers: &[&str]) -> World {
    let pod = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "u1"}, "spec": spec,
    }))
    .unwrap();
    let sandbox = sandbox.map(|phase| SandboxState {
        phase,
        addresses: vec!["10.1.0.9".parse().unwrap()],
        started_at: Some(at(100)),
        message: String::new(),
    });
    let containers = containers.iter().map(|text| view(text)).collect();
    let world = World {
        pod,
        runtime: RuntimeState { sandbox, containers },
        memory: Memory::default(),
        reported: PodStatus::default(),
    };
    world.with_hosts()
}

impl World {
    fn plan(&self) -> Plan {
        let (node, objects) = (node(), Objects::default());
        plan(&Observed {
            pod: &self.pod,
            node: &node,
            objects: &objects,
            runtime: &self.runtime,
            memory: &self.memory,
            reported: &self.reported,
            failure: None,
            forced: false,
            now: at(NOW),
        })
    }

    /// Adds the hosts file, which all rows have that do not test it.
    fn with_hosts(mut self) -> Self {
        if let Some(Step::WriteVolume(hosts)) =
            self.plan().steps.into_iter().find(|step| step.verb() == "write")
        {
            self.memory.volumes.insert(hosts.name.clone(), hosts.digest());
        }
        self
    }

    fn with_image(mut self, name: &str, attempt: u32) -> Self {
        self.memory.images.insert(container_id("u1", name, attempt));
        self
    }

    fn with_deletion(mut self, second: i64) -> Self {
        self.pod.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(second)));
        self
    }
}

/// Returns steps as `verb:container`.
fn verbs(plan: &Plan) -> String {
    let one = |step: &Step| match step.container() {
        Some(name) => format!("{}:{name}", step.verb()),
        None => step.verb().to_owned(),
    };
    plan.steps.iter().map(one).collect::<Vec<_>>().join(" ")
}

fn app(policy: &str) -> Value {
    json!({"restartPolicy": policy, "containers": [{"name": "a", "image": "i:1"}, {"name": "b", "image": "i:1"}]})
}

fn with_init() -> Value {
    json!({
        "initContainers": [
            {"name": "i", "image": "i:1"}, {"name": "s", "image": "i:1", "restartPolicy": "Always"},
            {"name": "j", "image": "i:1"}],
        "containers": [{"name": "a", "image": "i:1"}],
    })
}

#[test]
fn pod_that_runs_table() {
    let ready = Some(SandboxPhase::Ready);
    for (why, spec, sandbox, containers, want, requeue) in [
        ("nothing exists: the VM first", app("Always"), None, &[][..], "start-sandbox", None),
        (
            "it boots: asks to start once more",
            app("Always"),
            Some(SandboxPhase::Starting),
            &[],
            "start-sandbox",
            None,
        ),
        ("it is off: starts again", app("Always"), Some(SandboxPhase::Down), &[], "start-sandbox", None),
        ("suspended: nothing", app("Always"), Some(SandboxPhase::Suspended), &["a#0 running"], "", None),
        ("stopping: nothing", app("Always"), Some(SandboxPhase::Stopping), &[], "", None),
        ("all of the app at once", app("Always"), ready, &[], "pull:a pull:b", None),
        (
            "made before a crash: started",
            app("Always"),
            ready,
            &["a#0 created", "b#0 running"],
            "start:a",
            None,
        ),
        ("steady state is silent", app("Always"), ready, &["a#0 running", "b#0 running"], "", None),
        ("first restart at once", app("Always"), ready, &["a#0 exited:1:999", "b#0 running"], "pull:a", None),
        ("second one waits", app("Always"), ready, &["a#1*1 exited:1:999", "b#0 running"], "", Some(9)),
        ("until its time", app("Always"), ready, &["a#1*1 exited:1:990", "b#0 running"], "pull:a", None),
        ("never", app("Never"), ready, &["a#0 exited:1:999", "b#0 running"], "", None),
        ("success is not repeated", app("OnFailure"), ready, &["a#0 exited:0:999", "b#0 running"], "", None),
        ("failure is", app("OnFailure"), ready, &["a#0 exited:1:999", "b#0 running"], "pull:a", None),
        (
            "third attempt: the first is removed",
            app("Always"),
            ready,
            &["a#0 exited:1:300", "a#1 exited:1:400", "a#2 running", "b#0 running"],
            "remove:a",
            None,
        ),
        ("first init container alone", with_init(), ready, &[], "pull:i", None),
        ("it runs: the next ones wait", with_init(), ready, &["i#0 running"], "", None),
        ("then the sidecar", with_init(), ready, &["i#0 exited:0:500"], "pull:s", None),
        ("which stays", with_init(), ready, &["i#0 exited:0:500", "s#0 running"], "pull:j", None),
        (
            "a sidecar that ended comes first",
            with_init(),
            ready,
            &["i#0 exited:0:500", "s#0 exited:0:600", "j#0 running"],
            "pull:s",
            None,
        ),
        (
            "then the app",
            with_init(),
            ready,
            &["i#0 exited:0:500", "s#0 running", "j#0 exited:0:600"],
            "pull:a",
            None,
        ),
        (
            "in a new VM all over again",
            with_init(),
            ready,
            &["i#0 exited:0:50", "s#0 exited:255:60", "j#0 exited:0:50", "a#0 exited:255:60"],
            "pull:i",
            None,
        ),
        ("the app is there: init is over", with_init(), ready, &["s#0 running", "a#0 running"], "", None),
    ] {
        let plan = make(spec, sandbox, containers).plan();
        assert_eq!(verbs(&plan), want, "{why}");
        if let Some(seconds) = requeue {
            assert_eq!(plan.requeue, Some(Duration::from_secs(seconds)), "{why}");
        }
    }
}

#[test]
fn pod_that_ends_table() {
    let ready = Some(SandboxPhase::Ready);
    let hook = |name: &str| json!({"name": name, "image": "i:1", "lifecycle": {"preStop": {"exec": {"command": ["x"]}}}});
    let hooked = json!({"containers": [hook("a")]});
    for (why, spec, sandbox, containers, deadline, want) in [
        ("hook before stop", hooked.clone(), ready, &["a#0 running"][..], 1030, "pre-stop:a"),
        ("no time for a hook", hooked, ready, &["a#0 running"], 1000, "stop:a"),
        ("all at once", app("Always"), ready, &["a#0 running", "b#0 running"], 1030, "stop:a stop:b"),
        (
            "ended ones need nothing",
            app("Always"),
            ready,
            &["a#0 exited:0:999", "b#0 running"],
            1030,
            "stop:b",
        ),
        (
            "sidecars after the app",
            with_init(),
            ready,
            &["i#0 exited:0:500", "s#0 running", "j#0 exited:0:600", "a#0 running"],
            1030,
            "stop:a",
        ),
        ("then sidecars", with_init(), ready, &["s#0 running", "a#0 exited:0:999"], 1030, "stop:s"),
        (
            "then the VM",
            app("Always"),
            ready,
            &["a#0 exited:0:999", "b#0 exited:0:999"],
            1030,
            "stop-sandbox",
        ),
        ("no container was made", app("Always"), ready, &[], 1030, "stop-sandbox"),
        ("it boots", app("Always"), Some(SandboxPhase::Starting), &[], 1030, "stop-sandbox"),
        ("its guest does not end them", app("Always"), ready, &["a#0 running"], 989, "stop-sandbox"),
        ("off: reported before it is removed", app("Always"), Some(SandboxPhase::Down), &[], 1030, ""),
        ("no VM: reported first", app("Always"), None, &[], 1030, ""),
    ] {
        assert_eq!(verbs(&make(spec, sandbox, containers).with_deletion(deadline).plan()), want, "{why}");
    }
}

#[test]
fn removal_follows_the_report_of_the_end() {
    let mut world = make(app("Always"), Some(SandboxPhase::Down), &["a#0 exited:0:999", "b#0 exited:3:999"]);
    world = world.with_deletion(1030);
    world.reported = world.plan().status;
    assert_eq!(world.reported.phase.as_deref(), Some("Failed"));
    let plan = world.plan();
    assert_eq!((verbs(&plan).as_str(), plan.finished), ("remove-sandbox", false));
    world.runtime = RuntimeState::default();
    world.memory.removed = true;
    let plan = world.plan();
    assert_eq!((verbs(&plan).as_str(), plan.finished), ("", true));
    assert_eq!(plan.status, world.reported, "what is gone keeps its status");
}

#[test]
fn step_under_way_is_waited_for_or_replaced() {
    let ready = Some(SandboxPhase::Ready);
    let busy = |world: &mut World, step: Step| drop(world.memory.busy.insert(step.target(), Arc::new(step)));
    let stop = |deadline: i64| Step::StopContainer {
        id: container_id("u1", "a", 0),
        name: "a".into(),
        grace: Duration::from_secs(30),
        deadline: at(deadline),
        why: String::new(),
    };
    let pull = Step::PullImage {
        id: container_id("u1", "a", 0),
        name: "a".into(),
        image: "i:1".into(),
        policy: coracle_host::PullPolicy::IfNotPresent,
        credentials: vec![],
    };
    let one = json!({"containers": [{"name": "a", "image": "i:1"}]});
    let mut pulling = make(one.clone(), ready, &[]);
    busy(&mut pulling, pull.clone());
    assert_eq!(verbs(&pulling.plan()), "");
    assert_eq!(verbs(&pulling.with_deletion(1030).plan()), "cancel:a stop-sandbox");
    for (deadline, want) in [(1030, ""), (1040, "stop:a")] {
        let mut stopping = make(one.clone(), ready, &["a#0 running"]).with_deletion(1030);
        busy(&mut stopping, stop(deadline));
        assert_eq!(verbs(&stopping.plan()), want, "one with deadline {deadline} is under way");
    }
    let mut hooked = make(one, ready, &["a#0 running"]);
    let hook = (container_id("u1", "a", 0), HookKind::PreStop);
    hooked.memory.hooks = BTreeSet::from([hook]);
    assert_eq!(verbs(&hooked.with_deletion(1030).plan()), "stop:a");
}

#[test]
fn pulled_image_leads_to_create_and_failed_pull_to_waiting() {
    let ready = Some(SandboxPhase::Ready);
    let one = json!({"containers": [{"name": "a", "image": "i:1"}]});
    let pulled = make(one.clone(), ready, &[]).with_image("a", 0);
    assert_eq!(verbs(&pulled.plan()), "create:a");
    let mut failed = make(one, ready, &[]);
    let failure = Failure { reason: "ImagePullBackOff", message: "no".into(), count: 2, at: at(NOW - 5) };
    failed.memory.failures.insert(Target::Container("a".into()), failure);
    let plan = failed.plan();
    assert_eq!((verbs(&plan).as_str(), plan.requeue), ("", Some(Duration::from_secs(15))));
    let state = plan.status.container_statuses.unwrap().remove(0).state.unwrap();
    assert_eq!(state.waiting.unwrap().reason.as_deref(), Some("ImagePullBackOff"));
}

#[test]
fn condition_transition_time_changes_only_with_status() {
    let mut world = make(app("Always"), Some(SandboxPhase::Ready), &["a#0 running", "b#0 running"]);
    world.reported = world.plan().status;
    let time = |status: &PodStatus, kind: &str| {
        let conditions = status.conditions.clone().unwrap();
        conditions.into_iter().find(|one| one.type_ == kind).unwrap().last_transition_time.unwrap().0
    };
    for condition in world.reported.conditions.iter_mut().flatten() {
        condition.last_transition_time = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(500)));
    }
    assert_eq!(world.plan().status, world.reported, "nothing changed");
    world.runtime.containers.remove(0);
    let status = world.plan().status;
    assert_eq!(time(&status, "PodScheduled"), at(500));
    assert_eq!((time(&status, "Ready"), time(&status, "ContainersReady")), (at(NOW), at(NOW)));
}

#[test]
fn readiness_gates_and_foreign_conditions_count() {
    let mut spec = app("Always");
    spec["readinessGates"] = json!([{"conditionType": "lb/ready"}]);
    let mut world = make(spec, Some(SandboxPhase::Ready), &["a#0 running", "b#0 running"]);
    let ready = |world: &World| {
        let conditions = world.plan().status.conditions.unwrap();
        conditions.into_iter().find(|one| one.type_ == "Ready").map(|one| (one.status, one.reason)).unwrap()
    };
    let not_yet = ("False".to_owned(), Some("ReadinessGatesNotReady".to_owned()));
    assert_eq!(ready(&world), not_yet);
    let gate = |status: &str| json!({"conditions": [{"type": "lb/ready", "status": status}]});
    world.pod.status = Some(serde_json::from_value(gate("False")).unwrap());
    assert_eq!(ready(&world), not_yet);
    world.pod.status = Some(serde_json::from_value(gate("True")).unwrap());
    assert_eq!(ready(&world), ("True".to_owned(), None));
    let kept = world.plan().status.conditions.unwrap().into_iter().any(|one| one.type_ == "lb/ready");
    assert!(kept, "a condition of others stays");
}

#[test]
fn vanished_vm_leaves_container_status_unknown() {
    let mut world = make(app("Always"), Some(SandboxPhase::Ready), &["a#0 running", "b#0 running"]);
    world.reported = world.plan().status;
    world.runtime = RuntimeState::default();
    let plan = world.plan();
    assert_eq!(verbs(&plan), "start-sandbox");
    let last = plan.status.container_statuses.unwrap().remove(0).last_state.unwrap().terminated.unwrap();
    assert_eq!((last.exit_code, last.reason.as_deref()), (137, Some("ContainerStatusUnknown")));
    world.runtime = make(app("Always"), Some(SandboxPhase::Ready), &[]).runtime;
    let steps = world.plan().steps;
    let ids: Vec<_> = steps
        .iter()
        .filter_map(|step| if let Step::PullImage { id, .. } = step { Some(id) } else { None })
        .collect();
    assert_eq!(ids[0], &container_id("u1", "a", 1), "its next attempt has the next number");
}

#[test]
fn volumes_are_written_before_the_vm_starts() {
    let mut spec = app("Always");
    spec["volumes"] = json!([{"name": "tmp", "emptyDir": {}}]);
    let mut world = make(spec, None, &[]);
    world.memory.volumes.clear();
    let plan = world.plan();
    assert_eq!(verbs(&plan), "write");
    let content = VolumeContent {
        name: "tmp".into(),
        area: coracle_pod::volume::Area::Data,
        path: "volumes/tmp".into(),
        layout: Layout::Directory,
    };
    assert_eq!(plan.steps, [Step::WriteVolume(Box::new(content.clone()))]);
    world.memory.volumes.insert("tmp".into(), content.digest());
    assert_eq!(verbs(&world.plan()), "start-sandbox");
    let files = VolumeContent { layout: Layout::Files([].into()), ..content };
    world.memory.volumes.insert("tmp".into(), files.digest());
    assert_eq!(verbs(&world.plan()), "write", "something else was written");
}

use serde_json::{Value, json};

use super::*;
use crate::set::testing::{pods_of, set_with};

/// Differences of a case from a running set.
#[derive(Default)]
struct Case {
    spec: Value,
    states: &'static str,
    saved: &'static [&'static str],
    held: &'static [&'static str],
    taken: &'static [&'static str],
    annotations: &'static [(&'static str, &'static str)],
    settings: Settings,
}

impl Case {
    fn new(spec: Value, states: &'static str) -> Self {
        Self { spec, states, ..Self::default() }
    }

    fn plan(&self) -> Plan {
        let mut set = set_with(self.spec.clone());
        for (key, value) in self.annotations {
            set.annotations_mut().insert((*key).into(), (*value).into());
        }
        let pods = pods_of(&set, self.states);
        let saved: BTreeMap<_, _> = self.saved.iter().map(|vm| ((*vm).to_owned(), true)).collect();
        plan(&Observed {
            set: &set,
            pods: &pods,
            held: &self.held.iter().map(|pod| (*pod).to_owned()).collect(),
            saved: &saved,
            taken: &self.taken.iter().map(|vm| ((*vm).to_owned(), "other/pod".to_owned())).collect(),
            settings: &self.settings,
            now: Timestamp::from_second(1_000_000).unwrap(),
        })
    }

    /// Returns phase and steps as `Phase: step step`.
    fn plan_text(&self) -> String {
        let plan = self.plan();
        let steps: Vec<_> = plan.steps.iter().map(Step::verb).collect();
        format!("{}: {}", plan.phase.as_str(), steps.join(" "))
    }
}

fn agents(replicas: i32) -> Value {
    json!({"agent": {"image": "u", "replicas": replicas}})
}

fn suspended_set(replicas: i32) -> Value {
    json!({"agent": {"image": "u", "replicas": replicas}, "suspend": true})
}

fn with_tool(name: &str) -> Value {
    json!({"agent": {"image": "u"}, "toolboxes": [{"name": name, "image": "t"}]})
}

#[test]
fn active_set_table() {
    for (why, spec, states, want) in [
        ("main first", agents(2), "", "Pending: create:demo-0"),
        ("sub-agents wait for the main agent", agents(2), "0=new", "Pending: "),
        ("then all at once", agents(2), "0=ready", "Scaling: create:demo-1 create:demo-2"),
        ("some are there", agents(2), "0=ready 1=new", "Scaling: create:demo-2"),
        ("not ready yet", agents(1), "0=ready 1=new", "Scaling: "),
        ("all ready", agents(1), "0=ready 1=ready", "Running: "),
        ("scale down", agents(1), "0=ready 1=ready 2=ready 3=new", "Scaling: delete:demo-2 delete:demo-3"),
        ("no scaling without the main agent", agents(0), "0=new 1=ready", "Pending: "),
        ("an ending main agent has no forks", agents(1), "0=ending", "Pending: "),
        ("the name of an ending pod is not free", agents(1), "0=ready 1=ending", "Scaling: "),
        ("toolbox", with_tool("db"), "0=ready", "Scaling: create:demo-db"),
        ("toolbox ready", with_tool("db"), "0=ready db=ready", "Running: "),
        ("toolbox not listed", with_tool("db"), "0=ready db=ready web=ready", "Scaling: delete:demo-web"),
        ("main agent failed", agents(1), "0=failed", "Failed: "),
        ("its node gave up", agents(1), "0=lost", "Failed: "),
        ("a failed sub-agent is left alone", agents(1), "0=ready 1=failed", "Scaling: "),
    ] {
        assert_eq!(Case::new(spec, states).plan_text(), want, "{why}");
    }
}

#[test]
fn at_most_eight_sub_agents_are_created_at_once() {
    let plan = Case::new(agents(20), "0=ready").plan();
    assert_eq!(plan.steps.len(), 8);
}

#[test]
fn suspended_set_table() {
    const MAIN: &str = "vk-prod-demo-0";
    const SUB: &str = "vk-prod-demo-1";
    let stat = json!({"agent": {"image": "u"}, "suspend": true,
        "toolboxes": [{"name": "win", "mode": "static", "staticIP": "10.0.0.9", "staticVMID": "v"}]});
    for (why, spec, states, saved, want) in [
        ("the main agent exists first", suspended_set(0), "", &[][..], "Suspending: create:demo-0"),
        ("without a VM there is no state to save", suspended_set(0), "0=new", &[], "Suspending: "),
        ("ask", suspended_set(1), "0=ready 1=ready", &[], "Suspending: hibernate:demo-0 hibernate:demo-1"),
        ("being saved", suspended_set(0), "0=hibernating", &[], "Suspending: "),
        ("the tag alone is an old one", suspended_set(0), "0=hibernating", &[MAIN], "Suspending: "),
        ("one is missing", suspended_set(1), "0=hibernated 1=hibernated", &[MAIN], "Suspending: "),
        ("saved", suspended_set(1), "0=hibernated 1=hibernated", &[MAIN, SUB], "Suspended: "),
        ("a static VM is not ours", stat, "0=hibernated win=ready", &[MAIN], "Suspended: "),
    ] {
        let case = Case { saved, ..Case::new(spec, states) };
        assert_eq!(case.plan_text(), want, "{why}");
    }
}

#[test]
fn original_settings_suspend_without_asking_the_registry() {
    let case = Case { settings: Settings::original(), ..Case::new(suspended_set(0), "0=ready") };
    assert_eq!(case.plan_text(), "Suspended: hibernate:demo-0");
    let set = set_with(suspended_set(0));
    assert!(questions(&set, &pods_of(&set, "0=hibernated"), &Settings::original()).is_empty());
    assert_eq!(questions(&set, &pods_of(&set, "0=hibernated"), &Settings::default()), ["vk-prod-demo-0"]);
}

#[test]
fn resumed_set_wakes_pods_without_a_hibernation() {
    let case = Case::new(agents(0), "0=hibernated");
    assert_eq!(case.plan_text(), "Waking: wake:demo-0");
    let held = Case { held: &["demo-0"], ..Case::new(agents(0), "0=hibernated") };
    assert_eq!(held.plan().steps, []);
    let original = Case { settings: Settings::original(), ..Case::new(agents(0), "0=hibernated") };
    assert_eq!(original.plan_text(), "Pending: wake:demo-0");
}

/// A sub-agent that is forked while its source is about to be saved would be older than the VM that wakes later.
#[test]
fn main_agent_that_is_hibernated_is_not_forked() {
    let set = set_with(agents(1));
    let mut pods = pods_of(&set, "0=ready");
    pods[0].annotations_mut().insert(keys::HIBERNATE.into(), "true".into());
    let held = BTreeSet::from(["demo-0".to_owned()]);
    let observed = Observed {
        set: &set,
        pods: &pods,
        held: &held,
        saved: &BTreeMap::new(),
        taken: &BTreeMap::new(),
        settings: &Settings::default(),
        now: Timestamp::UNIX_EPOCH,
    };
    assert_eq!(plan(&observed).steps, []);
}

/// Namespace `a` with set `b-c` has the same VM names as namespace `a-b` with set `c`.
#[test]
fn vm_name_of_another_namespace_is_not_given_twice() {
    let case = Case { taken: &["vk-prod-demo-0"], ..Case::new(agents(0), "") };
    let plan = case.plan();
    assert_eq!((plan.phase, plan.steps.len()), (SetPhase::Failed, 0));
    assert!(plan.problems[0].contains("other/pod"), "{:?}", plan.problems);
    let sub = Case { taken: &["vk-prod-demo-1"], ..Case::new(agents(2), "0=ready") };
    assert_eq!(sub.plan_text(), "Scaling: create:demo-2");
}

#[test]
fn drift_replaces_the_main_agent_first() {
    let drifts = || Settings { drift: true, ..Settings::default() };
    let pods = |image: &str| json!({"agent": {"image": image, "replicas": 1}});
    let set = set_with(pods("new"));
    let shown = |states: &str, image: &str, settings: &Settings| {
        let stored = set_with(pods(image));
        let pods = pods_of(&stored, states);
        let observed = Observed {
            set: &set,
            pods: &pods,
            held: &BTreeSet::new(),
            saved: &BTreeMap::new(),
            taken: &BTreeMap::new(),
            settings,
            now: Timestamp::UNIX_EPOCH,
        };
        plan(&observed).steps.iter().map(Step::verb).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(shown("0=ready 1=ready", "old", &drifts()), "delete:demo-0");
    assert_eq!(shown("0=ready 1=ready", "new", &drifts()), "");
    assert_eq!(shown("0=ready 1=ready", "old", &Settings::default()), "", "only when asked for");
    assert_eq!(
        shown("0=hibernated", "old", &drifts()),
        "wake:demo-0 delete:demo-0".split(' ').next().unwrap()
    );
    assert_eq!(shown("0=failed", "old", &drifts()), "delete:demo-0", "a failed one is replaced");
}

#[test]
fn sub_agents_are_rebuilt_four_times() {
    let settings = || Settings { rebuild: true, ..Settings::default() };
    let history = |count: usize, seconds: i64| {
        let at = Timestamp::from_second(1_000_000 - seconds).unwrap();
        format!(r#"{{"1":{{"count":{count},"lastDeleted":"{at}"}}}}"#)
    };
    for (why, count, seconds, observed, want) in [
        ("the first at once", 0, 0, 1, true),
        ("the second after a second", 1, 0, 1, false),
        ("the second after a second", 1, 1, 1, true),
        ("the fourth after half a minute", 3, 29, 1, false),
        ("the fourth after half a minute", 3, 30, 1, true),
        ("a new spec begins anew", 4, 0, 0, true),
    ] {
        let mut set = set_with(agents(1));
        if count > 0 {
            set.annotations_mut().insert(keys::REBUILD_HISTORY.into(), history(count, seconds));
        }
        set.status = Some(serde_json::from_value(json!({"observedGeneration": observed})).unwrap());
        let pods = pods_of(&set, "0=ready 1=failed");
        let observed = Observed {
            set: &set,
            pods: &pods,
            held: &BTreeSet::new(),
            saved: &BTreeMap::new(),
            taken: &BTreeMap::new(),
            settings: &settings(),
            now: Timestamp::from_second(1_000_000).unwrap(),
        };
        let steps = plan(&observed).steps;
        let deleted = steps.iter().any(|step| step.verb() == "delete:demo-1");
        assert_eq!(deleted, want, "{why}: {steps:?}");
        if deleted {
            assert!(steps[0].verb().starts_with("annotate:rebuild-history"), "counted first: {steps:?}");
        }
    }
}

#[test]
fn sub_agent_that_fails_too_often_is_marked_once() {
    let spent = r#"{"1":{"count":4,"lastDeleted":"1970-01-01T00:00:00Z"}}"#;
    let mut set = set_with(agents(1));
    set.annotations_mut().insert(keys::REBUILD_HISTORY.into(), spent.into());
    set.status = Some(serde_json::from_value(json!({"observedGeneration": 1})).unwrap());
    let mut pods = pods_of(&set, "0=ready 1=failed");
    let settings = Settings { rebuild: true, ..Settings::default() };
    for want in ["dead-letter:demo-1", ""] {
        let observed = Observed {
            set: &set,
            pods: &pods,
            held: &BTreeSet::new(),
            saved: &BTreeMap::new(),
            taken: &BTreeMap::new(),
            settings: &settings,
            now: Timestamp::UNIX_EPOCH,
        };
        let planned = plan(&observed);
        assert_eq!(planned.steps.iter().map(Step::verb).collect::<Vec<_>>().join(" "), want);
        assert_eq!(planned.phase, SetPhase::Scaling);
        pods[1].annotations_mut().insert(keys::DEAD_LETTER.into(), "true".into());
    }
}

const ON_NODE: &[(&str, &str)] =
    &[(keys::HIBERNATED_ON_NODE, "n1"), (keys::DELETE_VM_NAMES, "vk-prod-demo-0")];

#[test]
fn release_table() {
    const MAIN: &[&str] = &["vk-prod-demo-0"];
    let release =
        |suspend: bool| json!({"agent": {"image": "u"}, "suspend": suspend, "hibernatePolicy": "release"});
    let give_up =
        "Suspending: record:vk-prod-demo-0 annotate:hibernated-on-node=n1 keep-snapshot:demo-0 delete:demo-0";
    for (why, suspend, states, saved, annotations, want) in [
        ("save first", true, "0=ready", &[][..], &[][..], "Suspending: hibernate:demo-0"),
        ("not saved yet", true, "0=hibernated", &[], &[], "Suspending: "),
        ("saved: names and node, then the pod", true, "0=hibernated", MAIN, &[], give_up),
        (
            "interrupted before the deletion",
            true,
            "0=hibernated",
            MAIN,
            ON_NODE,
            "Suspending: keep-snapshot:demo-0 delete:demo-0",
        ),
        ("at rest", true, "", MAIN, ON_NODE, "Suspended: "),
        ("continue", false, "", MAIN, ON_NODE, "Waking: create:demo-0"),
        ("the image is not started instead", false, "", &[], ON_NODE, "Failed: "),
        ("not there yet", false, "0=new", MAIN, ON_NODE, "Pending: "),
        (
            "it runs: the tag goes",
            false,
            "0=ready",
            MAIN,
            ON_NODE,
            "Scaling: untag:vk-prod-demo-0:hibernate unannotate:hibernated-on-node",
        ),
    ] {
        let case = Case { saved, annotations, ..Case::new(release(suspend), states) };
        assert_eq!(case.plan_text(), want, "{why}");
    }
}

#[test]
fn released_main_agent_continues_near_its_node() {
    let case = Case { saved: &["vk-prod-demo-0"], annotations: ON_NODE, ..Case::new(agents(0), "") };
    let Step::CreatePod(pod) = &case.plan().steps[0] else { panic!("a pod") };
    assert_eq!(pod.annotations()[keys::RESTORE_FROM_HIBERNATE], "true");
    let pod = serde_json::to_value(pod).unwrap();
    let terms = "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution/0";
    assert_eq!(pod.pointer(terms).unwrap()["weight"], 100);
}

#[test]
fn main_agent_moves_with_its_state() {
    let moved = || json!({"agent": {"image": "u"}, "nodeName": "n2"});
    let settings = || Settings { migrate: true, ..Settings::default() };
    for (why, states, saved, want) in [
        ("save first", "0=ready", &[][..], "Migrating: hibernate:demo-0"),
        ("not saved yet", "0=hibernated", &[], "Migrating: "),
        (
            "saved",
            "0=hibernated",
            &["vk-prod-demo-0"],
            "Migrating: record:vk-prod-demo-0 annotate:hibernated-on-node=n1 keep-snapshot:demo-0 delete:demo-0",
        ),
    ] {
        let case = Case { saved, settings: settings(), ..Case::new(moved(), states) };
        assert_eq!(case.plan_text(), want, "{why}");
    }
    assert_eq!(Case::new(moved(), "0=ready").plan_text(), "Running: ", "only when asked for");
}

#[test]
fn finalizer_is_added_before_any_pod() {
    let mut set = set_with(agents(0));
    set.metadata.finalizers = None;
    let observed = Observed {
        set: &set,
        pods: &[],
        held: &BTreeSet::new(),
        saved: &BTreeMap::new(),
        taken: &BTreeMap::new(),
        settings: &Settings::default(),
        now: Timestamp::UNIX_EPOCH,
    };
    assert_eq!(plan(&observed).steps, [Step::AddFinalizer]);
}

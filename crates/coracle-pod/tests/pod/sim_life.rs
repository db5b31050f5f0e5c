//! Lifecycles of pods: exits, restarts, init containers, sidecars.

use std::time::Duration;

use anyhow::Result;
use coracle_pod::task::Ended;
use coracle_testkit::elapse;
use coracle_testkit::sim::Sim;
use serde_json::json;

use crate::fake::Behaviour;
use crate::fake::Behaviour::{Exits, Runs};
use crate::world::World;

const SEED: u64 = 7;

fn exits(seconds: u64, code: i32) -> Behaviour {
    Exits { after: Duration::from_secs(seconds), code }
}

#[test]
fn successful_pod_ends_and_its_vm_is_off() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let spec = json!({"containers": [{"name": "job", "image": "job:1"}], "restartPolicy": "Never"});
        let world = World::new(&sim, spec).with_behaviours("job", &[exits(5, 0)]);
        let _task = world.start();
        world.until("it runs", |w| w.phase() == "Running").await?;
        assert_eq!(world.condition("Ready").0, "True");
        world.until("it has ended", |w| w.phase() == "Succeeded").await?;
        assert_eq!(world.state("job"), "Completed");
        assert_eq!(world.condition("Ready"), ("False".into(), "PodCompleted".into()));
        world.until("its VM is off", |w| w.fake.effects().contains(&"stop vm".to_owned())).await?;
        assert_eq!(world.fake.effects(), ["start vm", "create job", "start job", "stop vm"]);
        assert_eq!(world.status().observed_generation, Some(1));
        Ok(())
    });
}

#[test]
fn failed_pod_keeps_exit_code_and_is_not_restarted() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let spec = json!({"containers": [{"name": "job", "image": "job:1"}], "restartPolicy": "Never"});
        let world = World::new(&sim, spec).with_behaviours("job", &[exits(1, 3)]);
        let _task = world.start();
        world.until("it has failed", |w| w.phase() == "Failed").await?;
        let end = world.container("job").state.unwrap().terminated.unwrap();
        assert_eq!((end.exit_code, end.reason.as_deref()), (3, Some("Error")));
        assert_eq!(world.condition("ContainersReady"), ("False".into(), "PodFailed".into()));
        Ok(())
    });
}

#[test]
fn crashing_container_restarts_with_growing_delay() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let spec = json!({"containers": [{"name": "web", "image": "web:1"}]});
        let world = World::new(&sim, spec).with_behaviours("web", &[exits(1, 1)]);
        let _task = world.start();
        world.until("it waits", |w| w.state("web") == "CrashLoopBackOff").await?;
        let last = world.container("web").last_state.unwrap().terminated.unwrap();
        assert_eq!(last.exit_code, 1);
        world.until("eight restarts", |w| w.container("web").restart_count == 8).await?;
        let starts = world.fake.seconds_of("start web");
        let gaps: Vec<_> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        // Each attempt runs for one second, and takes some time to be created.
        let waits: Vec<_> = gaps.iter().map(|gap| gap.saturating_sub(1) / 10 * 10).collect();
        assert_eq!(waits, [0, 10, 20, 40, 80, 160, 300, 300], "{gaps:?}");
        assert_eq!(world.phase(), "Running");
        let kept = world.fake.effects().iter().filter(|effect| *effect == "remove web").count();
        assert_eq!(kept, 7, "the latest attempt and the one before it are kept");
        Ok(())
    });
}

#[test]
fn healthy_run_ends_the_streak_of_restarts() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let spec = json!({"containers": [{"name": "web", "image": "web:1"}]});
        let behaviours = [exits(1, 1), exits(1, 1), exits(1, 1), exits(700, 1), exits(1, 1)];
        let world = World::new(&sim, spec).with_behaviours("web", &behaviours);
        let _task = world.start();
        world.until("five restarts", |w| w.container("web").restart_count == 5).await?;
        let starts = world.fake.seconds_of("start web");
        assert!(starts[4] - starts[3] <= 702, "no delay after a healthy run: {starts:?}");
        assert!((11..=13).contains(&(starts[5] - starts[4])), "the first delay again: {starts:?}");
        Ok(())
    });
}

#[test]
fn init_containers_run_in_order_and_again_on_failure() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let spec = json!({
            "initContainers": [{"name": "a", "image": "i:1"}, {"name": "b", "image": "i:1"}],
            "containers": [{"name": "web", "image": "web:1"}],
        });
        let world = World::new(&sim, spec)
            .with_behaviours("a", &[exits(2, 0)])
            .with_behaviours("b", &[exits(1, 1), exits(1, 1), exits(1, 0)]);
        let _task = world.start();
        world.until("the first runs", |w| w.state("a") == "running").await?;
        assert_eq!((world.phase(), world.state("web")), ("Pending".into(), "PodInitializing".into()));
        let initialized = ("False".into(), "ContainersNotInitialized".into());
        assert_eq!(world.condition("Initialized"), initialized);
        world.until("it runs", |w| w.phase() == "Running").await?;
        assert_eq!(world.condition("Initialized").0, "True");
        let starts: Vec<_> =
            world.fake.effects().into_iter().filter(|effect| effect.starts_with("start ")).collect();
        assert_eq!(starts, ["start vm", "start a", "start b", "start b", "start b", "start web"]);
        assert!(world.container("a").ready && world.container("b").restart_count == 2);
        Ok(())
    });
}

#[test]
fn failed_init_container_fails_a_pod_that_never_restarts() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let spec = json!({
            "initContainers": [{"name": "a", "image": "i:1"}],
            "containers": [{"name": "web", "image": "web:1"}], "restartPolicy": "Never",
        });
        let world = World::new(&sim, spec).with_behaviours("a", &[exits(1, 9)]);
        let _task = world.start();
        world.until("it has failed", |w| w.phase() == "Failed").await?;
        assert_eq!(world.condition("Initialized"), ("False".into(), "ContainersNotInitialized".into()));
        assert!(!world.fake.effects().contains(&"create web".to_owned()));
        Ok(())
    });
}

#[test]
fn sidecars_start_first_and_end_last_in_reverse() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let probe = json!({"tcpSocket": {"port": 1}, "periodSeconds": 1, "failureThreshold": 100});
        let spec = json!({
            "initContainers": [
                {"name": "log", "image": "s:1", "restartPolicy": "Always", "startupProbe": probe},
                {"name": "mesh", "image": "s:1", "restartPolicy": "Always"},
            ],
            "containers": [{"name": "job", "image": "job:1"}], "restartPolicy": "OnFailure",
        });
        let world = World::new(&sim, spec).with_behaviours("job", &[exits(5, 0)]);
        world.fake.with(|state| state.down_ports.insert(1));
        let mut task = world.start();
        world.until("the first sidecar runs", |w| w.state("log") == "running").await?;
        elapse(Duration::from_secs(5)).await; // the next one waits for the startup of the first, without a limit
        assert_eq!(world.state("mesh"), "PodInitializing");
        assert_eq!(world.container("log").started, Some(false));
        world.fake.with(|state| state.down_ports.clear());
        world.until("it has ended", |w| w.phase() == "Succeeded").await?;
        let effects: Vec<_> = world.fake.effects().into_iter().filter(|e| !e.starts_with("create")).collect();
        assert_eq!(
            effects,
            ["start vm", "start log", "start mesh", "start job", "stop mesh", "stop log", "stop vm"]
        );
        world.delete(30);
        assert_eq!(task.wait_for_end().await, Ended::Removed);
        Ok(())
    });
}

#[test]
fn sidecar_that_ends_is_restarted_while_the_app_runs() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let spec = json!({
            "initContainers": [{"name": "log", "image": "s:1", "restartPolicy": "Always"}],
            "containers": [{"name": "web", "image": "web:1"}], "restartPolicy": "Never",
        });
        let world = World::new(&sim, spec).with_behaviours("log", &[exits(3, 0), Runs]);
        let _task = world.start();
        world
            .until("it is there again", |w| w.container("log").restart_count == 1 && w.container("log").ready)
            .await?;
        assert_eq!((world.phase(), world.container("web").restart_count), ("Running".into(), 0));
        Ok(())
    });
}

#[test]
fn vm_that_crashes_starts_again_with_all_containers() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let spec = json!({
            "initContainers": [{"name": "i", "image": "i:1"}],
            "containers": [{"name": "a", "image": "a:1"}, {"name": "b", "image": "b:1"}],
        });
        let world = World::new(&sim, spec).with_behaviours("i", &[exits(1, 0)]);
        let _task = world.start();
        world.until("it is ready", |w| w.condition("Ready").0 == "True").await?;
        world.fake.crash_vm();
        world
            .until("all are there again", |w| {
                w.container("a").restart_count == 1
                    && w.container("b").restart_count == 1
                    && w.condition("Ready").0 == "True"
            })
            .await?;
        assert_eq!(world.fake.seconds_of("start vm").len(), 2);
        assert_eq!(world.container("i").restart_count, 1, "init containers run again in the new VM");
        Ok(())
    });
}

#[test]
fn exit_code_can_restart_all_containers() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let rule =
            json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [88]}}]);
        let spec = json!({
            "initContainers": [{"name": "i", "image": "i:1"}],
            "containers": [
                {"name": "a", "image": "a:1", "restartPolicy": "Never", "restartPolicyRules": rule},
                {"name": "b", "image": "b:1"},
            ],
        });
        let world = World::new(&sim, spec)
            .with_behaviours("i", &[exits(1, 0)])
            .with_behaviours("a", &[exits(5, 88), Runs]);
        let _task = world.start();
        world
            .until("all run again", |w| {
                w.container("b").restart_count == 1 && w.condition("Ready").0 == "True"
            })
            .await?;
        let effects = world.fake.effects();
        let at = |wanted: &str| effects.iter().rposition(|effect| effect == wanted).unwrap();
        assert!(at("remove b") < at("remove a"), "the cause is removed last: {effects:?}");
        assert!(at("remove a") < at("start i") && at("start i") < at("start a"), "{effects:?}");
        assert_eq!(world.fake.seconds_of("start vm").len(), 1, "in the same VM");
        assert_eq!(world.container("a").restart_count, 1);
        Ok(())
    });
}

#[test]
fn pod_start_needs_few_status_writes() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let container = |name: &str| json!({"name": name, "image": "web:1", "readinessProbe": {"exec": {"command": ["true"]}}});
        let containers = json!({"containers": [container("a"), container("b"), container("c")]});
        let world = World::new(&sim, containers);
        let _task = world.start();
        world.until("it is ready", |w| w.condition("Ready").0 == "True").await?;
        let writes = world.fake.read(|state| state.reports);
        assert!(writes <= 3, "{writes} writes from creation to Ready");
        Ok(())
    });
}

#[test]
fn pod_whose_volume_outgrows_its_limit_is_evicted() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let spec = json!({
            "containers": [{"name": "web", "image": "web:1"}],
            "volumes": [
                {"name": "cache", "emptyDir": {"sizeLimit": "1Mi"}},
                {"name": "work", "emptyDir": {"sizeLimit": "2Mi"}},
                {"name": "ram", "emptyDir": {"medium": "Memory", "sizeLimit": "2Mi"}},
                {"name": "free", "emptyDir": {}},
            ],
        });
        let world = World::new(&sim, spec).with_behaviours("web", &[Runs]);
        let hold = |name: &str, bytes| {
            world.fake.with(|state| {
                state.held.insert(name.to_owned(), bytes);
            });
        };
        hold("free", 1 << 30);
        hold("cache", 1 << 20);
        let _task = world.start();
        world.until("it runs", |w| w.phase() == "Running").await?;
        elapse(Duration::from_secs(60)).await;
        assert_eq!(world.phase(), "Running", "the limit itself may be used");
        // The size of a volume in memory is its limit.
        hold("ram", (2 << 20) + 1);
        hold("work", (2 << 20) + 1);
        world.until("it is evicted", |w| w.phase() == "Failed").await?;
        let status = world.status();
        assert_eq!(status.reason.as_deref(), Some("Evicted"));
        let message = "Usage of EmptyDir volume \"work\" exceeds the limit \"2Mi\".";
        assert_eq!(status.message.as_deref(), Some(message));
        assert_eq!(world.condition("DisruptionTarget"), ("True".into(), "TerminationByKubelet".into()));
        hold("work", 0);
        world.until("its VM is off", |w| w.fake.effects().contains(&"stop vm".to_owned())).await?;
        assert_eq!(world.phase(), "Failed");
        Ok(())
    });
}

//! Changes of running pods: probes, deletion, missing objects, an unavailable API server.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use coracle_pod::objects::Objects;
use coracle_pod::observed::PodFailure;
use coracle_pod::task::Ended;
use coracle_testkit::elapse;
use coracle_testkit::sim::Sim;
use k8s_openapi::api::core::v1::EphemeralContainer;
use serde_json::{Value, json};

use crate::fake::Behaviour::{Exits, Stubborn};
use crate::world::World;

const SEED: u64 = 11;

fn web(extra: Value) -> Value {
    let mut container = json!({"name": "web", "image": "web:1"});
    container.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    json!({"containers": [container], "terminationGracePeriodSeconds": 10})
}

#[test]
fn failed_liveness_restarts_the_container() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let probe = json!({"httpGet": {"port": 80}, "periodSeconds": 5, "failureThreshold": 2});
        let world = World::new(&sim, web(json!({"livenessProbe": probe})));
        let _task = world.start();
        world.until("it is ready", |w| w.condition("Ready").0 == "True").await?;
        world.fake.with(|state| state.down_ports.insert(80));
        world.until("it is killed", |w| w.fake.effects().contains(&"stop web".to_owned())).await?;
        world.fake.with(|state| state.down_ports.clear());
        world
            .until("it runs again", |w| w.container("web").restart_count == 1 && w.container("web").ready)
            .await?;
        assert!(world.fake.has_event("Unhealthy") && world.fake.has_event("Killing"));
        Ok(())
    });
}

#[test]
fn readiness_moves_with_its_probe_and_restarts_nothing() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let probe = json!({"tcpSocket": {"port": 80}, "periodSeconds": 1});
        let world = World::new(&sim, web(json!({"readinessProbe": probe})));
        world.fake.with(|state| state.down_ports.insert(80));
        let _task = world.start();
        world.until("it runs", |w| w.state("web") == "running").await?;
        assert_eq!(world.condition("Ready"), ("False".into(), "ContainersNotReady".into()));
        world.fake.with(|state| state.down_ports.clear());
        world.until("it is ready", |w| w.condition("Ready").0 == "True").await?;
        world.fake.with(|state| state.down_ports.insert(80));
        world.until("it is not", |w| w.condition("Ready").0 == "False").await?;
        assert_eq!(world.container("web").restart_count, 0);
        Ok(())
    });
}

#[test]
fn startup_gates_liveness_and_its_failure_restarts() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let startup = json!({"tcpSocket": {"port": 1}, "periodSeconds": 1, "failureThreshold": 3});
        let liveness = json!({"tcpSocket": {"port": 2}, "periodSeconds": 1, "failureThreshold": 1});
        let world = World::new(&sim, web(json!({"startupProbe": startup, "livenessProbe": liveness})));
        world.fake.with(|state| state.down_ports.extend([1, 2]));
        let _task = world.start();
        world.until("startup failed", |w| w.fake.effects().contains(&"stop web".to_owned())).await?;
        let seconds = world.fake.seconds_of("stop web")[0] - world.fake.seconds_of("start web")[0];
        assert!(seconds >= 2, "liveness, which fails at once, waits for startup: {seconds} s");
        Ok(())
    });
}

#[test]
fn deletion_runs_hooks_stops_reports_and_removes() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let hooks = json!({"lifecycle": {
            "postStart": {"exec": {"command": ["warm"]}}, "preStop": {"exec": {"command": ["drain"]}}}});
        let world = World::new(&sim, web(hooks));
        let mut task = world.start();
        world.until("it is ready", |w| w.condition("Ready").0 == "True").await?;
        world.delete(10);
        assert_eq!(task.wait_for_end().await, Ended::Removed);
        assert_eq!(
            world.fake.effects(),
            [
                "start vm",
                "create web",
                "start web",
                "exec web: warm",
                "exec web: drain",
                "stop web",
                "stop vm",
                "remove vm"
            ]
        );
        let end = world.container("web").state.unwrap().terminated.unwrap();
        assert_eq!((world.phase(), end.exit_code), ("Succeeded".into(), 0), "the final state was reported");
        assert!(world.fake.read(|state| state.object_removed && state.volumes.is_empty()));
        Ok(())
    });
}

#[test]
fn stubborn_container_and_hook_are_killed_in_time() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let hooks = json!({"lifecycle": {"preStop": {"exec": {"command": ["hang"]}}}});
        let world = World::new(&sim, web(hooks)).with_behaviours("web", &[Stubborn]);
        let mut task = world.start();
        world.until("it runs", |w| w.state("web") == "running").await?;
        let began = world.fake.now();
        world.delete(10);
        assert_eq!(task.wait_for_end().await, Ended::Removed);
        let took = world.fake.now().duration_since(began).as_secs();
        assert!((12..=13).contains(&took), "10 s of the hook and at least 2 s: {took} s");
        assert_eq!(world.container("web").state.unwrap().terminated.unwrap().exit_code, 137);
        assert!(world.fake.has_event("FailedPreStopHook"));
        Ok(())
    });
}

#[test]
fn second_deletion_shortens_the_grace() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let world = World::new(&sim, web(json!({}))).with_behaviours("web", &[Stubborn]);
        let mut task = world.start();
        world.until("it runs", |w| w.state("web") == "running").await?;
        let began = world.fake.now();
        world.delete(600);
        elapse(Duration::from_secs(5)).await; // the first deletion is under way
        world.delete(3);
        assert_eq!(task.wait_for_end().await, Ended::Removed);
        let took = world.fake.now().duration_since(began).as_secs();
        assert!((8..=9).contains(&took), "{took} s");
        Ok(())
    });
}

#[test]
fn vanished_pod_object_ends_the_pod_without_hooks() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let hooks = json!({"lifecycle": {"preStop": {"exec": {"command": ["drain"]}}}});
        let world = World::new(&sim, web(hooks)).with_behaviours("web", &[Stubborn]);
        let mut task = world.start();
        world.until("it runs", |w| w.state("web") == "running").await?;
        let began = world.fake.now();
        world.change(|input| input.forced = true);
        assert_eq!(task.wait_for_end().await, Ended::Removed);
        assert!(world.fake.now().duration_since(began).as_secs() < 1);
        assert!(!world.fake.effects().contains(&"exec web: drain".to_owned()));
        Ok(())
    });
}

#[test]
fn deletion_during_a_pull_does_not_wait_for_it() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let world = World::new(&sim, web(json!({})));
        world.fake.with(|state| state.bad_images.insert("web:1".to_owned()));
        let mut task = world.start();
        world.until("the pull fails", |w| w.state("web") == "ErrImagePull").await?;
        world.until("and again", |w| w.state("web") == "ImagePullBackOff").await?;
        assert_eq!(world.phase(), "Pending");
        world.delete(30);
        assert_eq!(task.wait_for_end().await, Ended::Removed);
        assert_eq!(world.fake.effects(), ["start vm", "stop vm", "remove vm"]);
        Ok(())
    });
}

#[test]
fn image_that_appears_lets_the_pod_run() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let world = World::new(&sim, web(json!({})));
        world.fake.with(|state| state.bad_images.insert("web:1".to_owned()));
        let _task = world.start();
        world.until("the pull fails", |w| w.state("web") == "ImagePullBackOff").await?;
        world.fake.with(|state| state.bad_images.clear());
        world.until("it runs", |w| w.phase() == "Running").await
    });
}

#[test]
fn missing_secret_holds_the_container_until_it_appears() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let env = json!({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]});
        let world = World::new(&sim, web(env));
        let _task = world.start();
        world.until("it waits", |w| w.state("web") == "CreateContainerConfigError").await?;
        assert!(world.fake.has_event("MandatorySecretNotFound"));
        let secret = serde_json::from_value(json!({"data": {"k": "dg=="}}))?;
        let secrets = [("s".to_owned(), Arc::new(secret))].into();
        world.change(|input| input.objects = Arc::new(Objects { secrets, ..Objects::default() }));
        world.until("it runs", |w| w.phase() == "Running").await
    });
}

#[test]
fn changed_config_and_old_tokens_are_written_again() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let mut spec = web(json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}));
        spec["volumes"] = json!([{"name": "v", "projected": {"sources": [
            {"configMap": {"name": "m"}}, {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}}]}}]);
        let world = World::new(&sim, spec);
        let config = |text: &str| {
            let map = serde_json::from_value(json!({"data": {"k": text}})).unwrap();
            Arc::new(Objects { config_maps: [("m".to_owned(), Arc::new(map))].into(), ..Objects::default() })
        };
        let written = |w: &World| w.fake.read(|state| state.volumes.get("v").cloned().unwrap_or_default());
        let _task = world.start();
        world.until("it waits for its volume", |w| w.fake.has_event("FailedMount")).await?;
        assert!(world.fake.effects().is_empty(), "no VM is started for it");
        world.change(|input| input.objects = config("1"));
        world.until("it runs", |w| w.phase() == "Running").await?;
        assert_eq!(written(&world), "k=1 token=token1");
        world.change(|input| input.objects = config("2"));
        world.until("the change is written", |w| written(w) == "k=2 token=token1").await?;
        let before = world.fake.now();
        world.until("the token is renewed", |w| written(w) == "k=2 token=token2").await?;
        let age = world.fake.now().duration_since(before).as_secs();
        assert!((475..=485).contains(&age), "after 80 % of its life: {age} s");
        assert_eq!(world.container("web").restart_count, 0);
        Ok(())
    });
}

#[test]
fn pod_keeps_running_while_the_api_server_is_down() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let world = World::new(&sim, web(json!({})))
            .with_behaviours("web", &[Exits { after: Duration::from_secs(3), code: 1 }]);
        world.fake.with(|state| state.api_down = true);
        let _task = world.start();
        world.until("it restarts", |w| w.fake.seconds_of("start web").len() == 3).await?;
        assert_eq!(world.fake.read(|state| state.reports), 0);
        world.fake.with(|state| state.api_down = false);
        world.until("it is reported", |w| w.container("web").restart_count >= 2).await
    });
}

#[test]
fn deadline_and_eviction_fail_the_pod() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let mut spec = web(json!({}));
        spec["activeDeadlineSeconds"] = json!(60);
        let world = World::new(&sim, spec);
        let _task = world.start();
        world.until("its time is over", |w| w.phase() == "Failed").await?;
        assert_eq!(world.status().reason.as_deref(), Some("DeadlineExceeded"));
        let ran = world.fake.seconds_of("stop web")[0];
        assert!((60..=62).contains(&ran), "{ran} s");
        let evicted = World::new(&sim, web(json!({})));
        let _task = evicted.start();
        evicted.until("it runs", |w| w.phase() == "Running").await?;
        let (reason, message) = ("Evicted".to_owned(), "the node is low on memory".to_owned());
        let deadline = evicted.fake.now();
        let failure = PodFailure { reason, message, deadline, disruption: Some("TerminationByKubelet") };
        evicted.change(|input| input.failure = Some(failure));
        evicted.until("it is evicted", |w| w.phase() == "Failed").await?;
        assert_eq!(evicted.condition("DisruptionTarget"), ("True".into(), "TerminationByKubelet".into()));
        Ok(())
    });
}

#[test]
fn rejected_pod_fails_without_a_vm() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let mut spec = web(json!({}));
        spec["hostNetwork"] = json!(true);
        let world = World::new(&sim, spec);
        let _task = world.start();
        world.until("it is rejected", |w| w.phase() == "Failed").await?;
        let status = world.status();
        assert_eq!(status.reason.as_deref(), Some("UnsupportedFields"));
        assert!(status.message.unwrap().contains("spec.hostNetwork"));
        assert!(world.fake.effects().is_empty());
        Ok(())
    });
}

#[test]
fn debugger_is_added_to_a_running_pod() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let world = World::new(&sim, web(json!({})));
        let world = world.with_behaviours("debug", &[Exits { after: Duration::from_secs(5), code: 1 }]);
        let _task = world.start();
        world.until("it is ready", |w| w.condition("Ready").0 == "True").await?;
        let debugger = EphemeralContainer {
            name: "debug".into(),
            image: Some("tools:1".into()),
            ..EphemeralContainer::default()
        };
        world.change_pod(|pod| pod.spec.as_mut().unwrap().ephemeral_containers = Some(vec![debugger]));
        world.until("it has ended", |w| w.state("debug") == "Error").await?;
        elapse(Duration::from_secs(60)).await; // longer than the restart delay
        assert_eq!(
            (world.container("debug").restart_count, world.condition("Ready").0.as_str()),
            (0, "True")
        );
        Ok(())
    });
}

#[test]
fn failed_post_start_hook_kills_the_container() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let hooks = json!({"lifecycle": {"postStart": {"exec": {"command": ["warm"]}}}});
        let world = World::new(&sim, web(hooks));
        world.fake.with(|state| state.bad_commands.insert("warm".to_owned()));
        let _task = world.start();
        world.until("it is killed", |w| w.fake.effects().contains(&"stop web".to_owned())).await?;
        assert!(world.fake.has_event("FailedPostStartHook"));
        world.fake.with(|state| state.bad_commands.clear());
        world.until("it runs", |w| w.container("web").ready).await
    });
}

#[test]
fn quiet_pod_writes_no_status() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let probe = json!({"tcpSocket": {"port": 80}, "periodSeconds": 1});
        let world = World::new(&sim, web(json!({"readinessProbe": probe, "livenessProbe": probe})));
        let _task = world.start();
        world.until("it is ready", |w| w.condition("Ready").0 == "True").await?;
        elapse(Duration::from_secs(5)).await; // until the status with readiness is written
        let before = world.fake.read(|state| state.reports);
        elapse(Duration::from_secs(600)).await; // ten minutes of probes
        assert_eq!(world.fake.read(|state| state.reports), before);
        Ok(())
    });
}

#[test]
fn changed_image_restarts_its_container() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let world = World::new(&sim, web(json!({})));
        let _task = world.start();
        world.until("it is ready", |w| w.condition("Ready").0 == "True").await?;
        world.change_pod(|pod| pod.spec.as_mut().unwrap().containers[0].image = Some("web:2".into()));
        world.until("it runs", |w| w.container("web").image == "web:2" && w.container("web").ready).await?;
        assert_eq!(world.container("web").restart_count, 1);
        Ok(())
    });
}

#[test]
fn restarted_task_repeats_no_hook_and_keeps_readiness() {
    Sim::run(SEED, async |sim| -> Result<()> {
        let startup = json!({"tcpSocket": {"port": 1}, "periodSeconds": 1});
        let readiness = json!({"tcpSocket": {"port": 80}, "periodSeconds": 1});
        let hooks = json!({"postStart": {"exec": {"command": ["warm"]}}});
        let world = World::new(
            &sim,
            web(json!({"lifecycle": hooks, "startupProbe": startup, "readinessProbe": readiness})),
        );
        let task = world.start();
        world.until("it is ready", |w| w.condition("Ready").0 == "True").await?;
        elapse(Duration::from_secs(5)).await; // until the status with readiness is written
        let before = world.fake.read(|state| state.reports);
        drop(task);
        let _task = world.start();
        elapse(Duration::from_secs(60)).await; // until the second task has observed and probed
        assert_eq!(world.fake.seconds_of("exec web: warm").len(), 1);
        assert_eq!(world.fake.read(|state| state.reports), before, "readiness did not flap");
        Ok(())
    });
}

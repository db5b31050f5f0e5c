//! Lifecycles of pods: start, failure, restart, and end.

use anyhow::Result;
use coracle_testkit::{cluster, eventually};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, ServiceAccount};
use kube::api::{Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::world::{World, container, is_ready, phase_of};

#[test]
fn pod_runs_with_few_status_writes() {
    cluster::run(async |cluster| -> Result<()> {
        use futures_util::TryStreamExt as _;
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        let container = |name: &str| {
            let image = crate::world::IMAGE;
            json!({"name": name, "image": image, "imagePullPolicy": "Never", "command": ["serve"]})
        };
        let spec = json!({"containers": [container("foo"), container("bar"), container("baz")]});
        let created = world.create("web", &["serve"], spec).await?;
        let pods = world.pods();
        let version = created.resource_version().unwrap();
        let watch = WatchParams::default().fields("metadata.name=web");
        let mut changes = std::pin::pin!(pods.watch(&watch, &version).await?);
        let mut writes = 0;
        let pod = loop {
            match changes.try_next().await? {
                Some(WatchEvent::Modified(pod)) => {
                    writes += 1;
                    if is_ready(&pod) {
                        break pod;
                    }
                }
                Some(WatchEvent::Error(error)) => anyhow::bail!("{error:?}"),
                Some(_) => {}
                None => anyhow::bail!("the watch ended"),
            }
        };
        assert!(writes <= 3, "{writes} writes from creation to Ready");
        assert_eq!(phase_of(&pod), "Running");
        let status = pod.status.clone().unwrap();
        assert!(status.pod_ip.unwrap().starts_with("10.100.0."));
        assert_eq!(status.host_ip.as_deref(), Some("127.0.0.1"));
        assert_eq!(status.qos_class.as_deref(), Some("BestEffort"));
        assert_eq!(status.observed_generation, pod.metadata.generation);
        for reason in ["Created", "Started"] {
            world.until_event("web", reason).await?;
        }
        world.delete("web").await?;
        world.until_gone("web").await?;
        daemon.until_vms(0).await?;
        assert!(!world.has_files());
        daemon.stop().await
    });
}

#[test]
fn pod_succeeds_and_leaves_no_vm_when_deleted() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        world.create("sum", &["echo", "hi"], json!({})).await?;
        let pod = world.until_phase("sum", "Succeeded").await?;
        let status = pod.status.unwrap().container_statuses.unwrap().remove(0);
        assert_eq!(status.state.unwrap().terminated.unwrap().exit_code, 0);
        world.delete("sum").await?;
        world.until_gone("sum").await?;
        daemon.until_vms(0).await?;
        daemon.stop().await
    });
}

#[test]
fn pod_fails_with_its_container() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        world.create("bad", &["exit", "3"], json!({})).await?;
        let pod = world.until_phase("bad", "Failed").await?;
        let status = pod.status.unwrap().container_statuses.unwrap().remove(0);
        assert_eq!(status.state.unwrap().terminated.unwrap().exit_code, 3);
        daemon.stop().await
    });
}

#[test]
fn container_restarts_with_back_off() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        world.create("loop", &["exit", "1"], json!({"restartPolicy": "Always"})).await?;
        // The first restart is immediate, the second one is delayed.
        let pod = world
            .until("loop", "waiting", |pod| {
                let status =
                    pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten()).next();
                let waiting =
                    status.and_then(|status| status.state.as_ref()?.waiting.as_ref()?.reason.as_deref());
                waiting == Some("CrashLoopBackOff")
            })
            .await?;
        assert!(container(&pod).1 >= 1);
        assert_eq!(phase_of(&pod), "Running");
        world.until_event("loop", "BackOff").await?;
        daemon.stop().await
    });
}

#[test]
fn pod_name_used_again_at_once_is_another_pod() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        world.create("web", &["serve"], json!({})).await?;
        let first = world.until_ready("web").await?;
        world.force_delete("web").await?;
        let second = world.create("web", &["serve"], json!({})).await?;
        assert_ne!(first.uid(), second.uid());
        let second = world.until_ready("web").await?;
        daemon.until_vms(1).await?;
        assert!(daemon.vms()[0].ends_with(&*second.uid().unwrap()), "{:?}", daemon.vms());
        assert_ne!(container(&first).0, container(&second).0);
        daemon.stop().await
    });
}

#[test]
fn pod_deleted_before_its_vm_runs_leaves_nothing() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        let secret = json!({"volumes": [{"name": "s", "secret": {"secretName": "missing"}}]});
        world.create("early", &["serve"], secret).await?;
        world
            .until("early", "seen", |pod| {
                pod.status.as_ref().is_some_and(|status| status.start_time.is_some())
            })
            .await?;
        world.delete("early").await?;
        world.until_gone("early").await?;
        daemon.until_vms(0).await?;
        daemon.stop().await
    });
}

#[test]
fn pod_with_a_finalizer_ends_once() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        world.create("held", &["serve"], json!({})).await?;
        world.until_ready("held").await?;
        let finalizers = |names: &[&str]| json!({"metadata": {"finalizers": names}});
        let patch = |names: &[&str]| Patch::Merge(finalizers(names));
        world.pods().patch("held", &PatchParams::default(), &patch(&["example.org/held"])).await?;
        world.delete("held").await?;
        daemon.until_vms(0).await?;
        let pod = world.pods().get("held").await?;
        assert!(pod.metadata.deletion_timestamp.is_some());
        // A change of the remaining object does not start the pod again.
        let label = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
        world.pods().patch("held", &PatchParams::default(), &label).await?;
        world.pods().patch("held", &PatchParams::default(), &patch(&[])).await?;
        world.until_gone("held").await?;
        assert!(daemon.vms().is_empty());
        daemon.stop().await
    });
}

#[test]
fn pods_that_do_not_fit_fail_at_once() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.options.pods_max = 1;
        let daemon = world.start().await?;
        let asks = |cpu: &str, memory: &str| {
            let resources = json!({"requests": {"cpu": cpu, "memory": memory}});
            json!({"containers": [{"name": "foo", "image": crate::world::IMAGE, "imagePullPolicy": "Never",
                "command": ["serve"], "resources": resources}]})
        };
        for (name, spec, reason) in [
            ("cpu", asks("1000", "1Mi"), "OutOfcpu"),
            ("memory", asks("1m", "100Ti"), "OutOfmemory"),
            ("selector", json!({"nodeSelector": {"example.org/no": "node"}}), "NodeAffinity"),
            ("windows", json!({"os": {"name": "windows"}}), "PodOSNotSupported"),
        ] {
            world.create(name, &["serve"], spec).await?;
            let pod = world.until_phase(name, "Failed").await?;
            assert_eq!(pod.status.unwrap().reason.as_deref(), Some(reason));
            world.until_event(name, reason).await?;
        }
        world.create("one", &["serve"], json!({})).await?;
        world.until_ready("one").await?;
        world.create("two", &["serve"], json!({})).await?;
        let pod = world.until_phase("two", "Failed").await?;
        assert_eq!(pod.status.unwrap().reason.as_deref(), Some("OutOfpods"));
        world.delete("one").await?;
        world.until_gone("one").await?;
        world.create("three", &["serve"], json!({})).await?;
        world.until_ready("three").await?;
        daemon.stop().await
    });
}

#[test]
fn label_that_the_scheduler_saw_admits_its_pod() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(world.client.clone());
        eventually("the node", async || nodes.get_opt(&world.options.name).await.ok().flatten()).await?;
        let label = Patch::Merge(json!({"metadata": {"labels": {"example.org/new": "1"}}}));
        nodes.patch(&world.options.name, &PatchParams::default(), &label).await?;
        world.create("picky", &["serve"], json!({"nodeSelector": {"example.org/new": "1"}})).await?;
        world.until_ready("picky").await?;
        daemon.stop().await
    });
}

#[test]
fn volumes_follow_objects_that_a_node_may_read() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.as_node(cluster).await?;
        let daemon = world.start().await?;
        let maps: Api<ConfigMap> = Api::namespaced(world.client.clone(), &world.namespace);
        let secrets: Api<Secret> = Api::namespaced(world.client.clone(), &world.namespace);
        let accounts: Api<ServiceAccount> = Api::namespaced(world.client.clone(), &world.namespace);
        let map = json!({"metadata": {"name": "settings"}, "data": {"greeting": "hello"}});
        maps.create(&PostParams::default(), &serde_json::from_value(map)?).await?;
        let account = json!({"metadata": {"name": "robot"}});
        accounts.create(&PostParams::default(), &serde_json::from_value(account)?).await?;
        let spec = json!({
            "serviceAccountName": "robot",
            "automountServiceAccountToken": false,
            "volumes": [
                {"name": "c", "configMap": {"name": "settings"}},
                {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
                {"name": "s", "secret": {"secretName": "late"}},
            ],
        });
        let pod = world.create("web", &["serve"], spec).await?;
        let files = world.path("run/pods").join(pod.uid().unwrap()).join("config/volumes");
        let secret = json!({"metadata": {"name": "late"}, "stringData": {"key": "now"}});
        world.until_event("web", "FailedMount").await?;
        secrets.create(&PostParams::default(), &serde_json::from_value(secret)?).await?;
        world.until_ready("web").await?;
        assert_eq!(std::fs::read_to_string(files.join("s/key"))?, "now");
        assert_eq!(std::fs::read_to_string(files.join("c/greeting"))?, "hello");
        let token = std::fs::read_to_string(files.join("t/token"))?;
        assert_eq!(token.split('.').count(), 3, "a JSON web token");
        let change = Patch::Merge(json!({"data": {"greeting": "goodbye"}}));
        maps.patch("settings", &PatchParams::default(), &change).await?;
        eventually("the change is in the volume", async || {
            std::fs::read_to_string(files.join("c/greeting")).ok().filter(|text| text == "goodbye")
        })
        .await?;
        daemon.stop().await
    });
}

#[test]
fn conditions_of_others_stay() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        world
            .create("web", &["serve"], json!({"readinessGates": [{"conditionType": "example.org/gate"}]}))
            .await?;
        let not_open = |pod: &Pod| {
            let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.into_iter().any(|one| one.reason.as_deref() == Some("ReadinessGatesNotReady"))
        };
        world.until("web", "waiting for its gate", not_open).await?;
        let open = json!({"status": {"conditions": [{"type": "example.org/gate", "status": "True"}]}});
        world.pods().patch_status("web", &PatchParams::default(), &Patch::Strategic(open)).await?;
        let pod = world.until_ready("web").await?;
        let conditions = pod.status.unwrap().conditions.unwrap();
        assert!(conditions.iter().any(|one| one.type_ == "example.org/gate" && one.status == "True"));
        daemon.stop().await
    });
}

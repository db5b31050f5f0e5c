//! Restarts of the daemon, with changes while it is down.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Result;
use coracle_testkit::cluster;
use coracle_vnode::StartPolicy;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::world::{IMAGE, World, container, phase_of};

#[test]
fn restarted_daemon_adopts_its_pods() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.as_node(cluster).await?;
        let daemon = world.start().await?;
        world.create("web", &["serve"], json!({"restartPolicy": "Always"})).await?;
        let before = world.until_ready("web").await?;
        daemon.stop().await?;
        let daemon = world.start().await?;
        world.create("second", &["serve"], json!({})).await?;
        world.until_ready("second").await?;
        let after = world.pods().get("web").await?;
        assert_eq!(container(&after), container(&before), "the container was adopted");
        assert_eq!(after.status.as_ref().unwrap().pod_ip, before.status.as_ref().unwrap().pod_ip);
        world.delete("web").await?;
        world.until_gone("web").await?;
        daemon.until_vms(1).await?;
        daemon.stop().await
    });
}

#[test]
fn vm_of_a_pod_that_is_gone_is_ended_at_start() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.as_node(cluster).await?;
        let daemon = world.start().await?;
        world.create("web", &["serve"], json!({})).await?;
        world.until_ready("web").await?;
        daemon.stop().await?;
        world.force_delete("web").await?;
        // A pod of the same name is independent of the deleted one.
        let second = world.create("web", &["serve"], json!({})).await?;
        let daemon = world.start().await?;
        world.until_ready("web").await?;
        daemon.until_vms(1).await?;
        assert!(daemon.vms()[0].ends_with(&*second.uid().unwrap()));
        daemon.stop().await
    });
}

#[test]
fn pod_deleted_while_daemon_is_down_is_removed() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        world.create("web", &["serve"], json!({})).await?;
        world.until_ready("web").await?;
        daemon.stop().await?;
        world.delete("web").await?;
        let daemon = world.start().await?;
        world.until_gone("web").await?;
        daemon.until_vms(0).await?;
        assert!(!world.has_files());
        daemon.stop().await
    });
}

#[test]
fn ended_pod_stays_ended_after_a_restart() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        world.create("sum", &["echo", "hi"], json!({})).await?;
        // The VM ends shortly after the container, and the status shows that, too.
        let is_over = |pod: &Pod| phase_of(pod) == "Succeeded" && !has_sandbox(pod);
        let before = world.until("sum", "over", is_over).await?;
        daemon.stop().await?;
        let daemon = world.start().await?;
        world.create("next", &["serve"], json!({})).await?;
        world.until_ready("next").await?;
        let after = world.pods().get("sum").await?;
        assert_eq!(after.resource_version(), before.resource_version(), "nothing is written again");
        daemon.stop().await
    });
}

#[test]
fn post_start_hook_runs_once_if_pod_changes_at_restart() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        let hooks = Counter::start().await?;
        let hook = json!({"postStart": {"httpGet": {"host": "127.0.0.1", "port": hooks.port}}});
        let container = json!({
            "name": "foo", "image": IMAGE, "imagePullPolicy": "Never", "command": ["serve"], "lifecycle": hook,
        });
        world.create("web", &[], json!({"containers": [container]})).await?;
        world.until_ready("web").await?;
        daemon.stop().await?;
        let daemon = world.start().await?;
        world.create("next", &["serve"], json!({})).await?;
        let change = async {
            for turn in 0_u32.. {
                let annotation = json!({"metadata": {"annotations": {"turn": turn.to_string()}}});
                world.pods().patch("web", &PatchParams::default(), &Patch::Merge(annotation)).await?;
            }
            anyhow::Ok(())
        };
        tokio::select! {
            ready = world.until_ready("next") => drop(ready?),
            changed = change => changed?,
        }
        world.until_ready("web").await?;
        assert_eq!(hooks.requests.load(Ordering::Relaxed), 1, "the object says that the hook ran");
        daemon.stop().await
    });
}

#[test]
fn files_of_pods_that_never_had_a_vm_are_removed() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        for dir in ["state/pods/lost/data", "run/pods/lost/config"] {
            std::fs::create_dir_all(world.path(dir))?;
        }
        let daemon = world.start().await?;
        coracle_testkit::eventually("no files", async || (!world.has_files()).then_some(())).await?;
        daemon.stop().await
    });
}

#[test]
fn vm_without_a_pod_is_not_deleted() {
    cluster::run(async |cluster| -> Result<()> {
        use coracle_host::VmSpec;
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        let spec = VmSpec::of("db".parse()?, crate::world::IMAGE);
        daemon.host.create(spec, std::sync::Arc::new(coracle_oci::NoProgress)).await?;
        world.create("web", &["serve"], json!({})).await?;
        world.until_ready("web").await?;
        world.force_delete("web").await?;
        daemon.until_vms(1).await?;
        assert_eq!(daemon.vms(), ["db"]);
        daemon.stop().await
    });
}

#[test]
fn failed_reconcile_at_start_ends_without_a_node() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.options.start = StartPolicy::ExitUnlessReconciled;
        world.create("web", &["serve"], json!({})).await?;
        // The user may create Nodes and may not read pods, so that registration before the read would succeed.
        world.as_user(cluster, "no-reader").await?;
        let daemon = world.start().await?;
        let error = daemon.wait_for_end().await.unwrap_err().to_string();
        assert_eq!(error, format!("cannot read the pods of virtual node {:?}", world.options.name));
        let nodes: Api<Node> = Api::all(world.client.clone());
        assert!(nodes.get_opt(&world.options.name).await?.is_none(), "it did not register");

        world.as_node(cluster).await?;
        let daemon = world.start().await?;
        world.until_ready("web").await?;
        assert!(nodes.get_opt(&world.options.name).await?.is_some());
        daemon.stop().await
    });
}

/// Server that counts its requests.
struct Counter {
    port: u16,
    requests: Arc<AtomicU32>,
    _task: JoinSet<std::io::Result<()>>,
}

impl Counter {
    async fn start() -> Result<Self> {
        let requests = Arc::new(AtomicU32::new(0));
        let counted = requests.clone();
        let count = move || async move { _ = counted.fetch_add(1, Ordering::Relaxed) };
        let router = axum::Router::new().fallback(count);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (port, mut task) = (listener.local_addr()?.port(), JoinSet::new());
        task.spawn(axum::serve(listener, router).into_future());
        Ok(Self { port, requests, _task: task })
    }
}

/// Returns whether the VM of the pod runs, by the pod's status.
fn has_sandbox(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "PodReadyToStartContainers" && one.status == "True")
}

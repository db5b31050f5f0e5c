//! `vk-cocoon`: the binary under the name of the original with its variables, real VMs, and a registry.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use coracle_api::cocoon::{LifecycleState, VmRuntimeAnnotations, keys};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::{cluster, tools};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::json;
use tokio::process::{Child, Command};

use crate::support::{CORACLE, coracle_ok, node_tools, until};
use crate::{get, ports, stop};

/// Time limit of a VM's boot beside the VMs of other tests.
const LIMIT: Duration = Duration::from_secs(90);
const IMAGE: &str = "localhost/idle:1";
/// Address of the node, which cannot be derived without a default route.
const ADDRESS: &str = "10.98.0.7";

/// Starts the program with the variables of the original, and with those that place the test's files.
fn start(dir: &Path, registry: &str, metrics: &str) -> anyhow::Result<Child> {
    let log = std::fs::File::options().create(true).append(true).open(dir.join("vk-cocoon.log"))?;
    let mut command = Command::new(dir.join("vk-cocoon"));
    command.env("KUBECONFIG", dir.join("kubeconfig")).env("VK_LOG_LEVEL", "info").env("VK_NODE_IP", ADDRESS);
    command.env("EPOCH_URL", format!("http://{registry}")).env("VK_COCOON_BIN", "/usr/local/bin/cocoon");
    command.env("VK_LEASES_PATH", dir.join("dnsmasq.leases")).env("VK_ORPHAN_POLICY", "alert");
    command.env("VK_METRICS_ADDR", metrics).env("VK_SSH_PASSWORD", "swordfish");
    command.env("CORACLE_STATE", dir.join("state")).env("CORACLE_NODE_ACCELERATOR", "tcg");
    command.env("CORACLE_NODE_BOOT", tools::tools_dir().join("guest/current"));
    Ok(command.stdout(Stdio::null()).stderr(log).kill_on_drop(true).spawn()?)
}

/// Returns a pod as users of the original write it: bound to the node, with name and image of a VM.
fn sample() -> Pod {
    let pod = json!({
        "metadata": {"name": "sample", "annotations": {
            keys::VM_NAME: "vk-sample-0", keys::MODE: "run", keys::IMAGE: IMAGE, keys::MANAGED: "true",
        }},
        "spec": {
            "nodeName": "cocoon-pool",
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{"key": keys::TAINT_KEY, "operator": "Exists"}],
            "containers": [{"name": "agent", "image": keys::CONTAINER_IMAGE,
                "resources": {"limits": {"cpu": "1", "memory": "128Mi"}}}],
        },
    });
    serde_json::from_value(pod).unwrap()
}

/// Waits until the Node is ready, and returns it.
async fn node(nodes: &Api<Node>, log: impl Fn() -> String) -> Node {
    until("Node cocoon-pool is Ready", LIMIT, async || {
        let node = nodes.get_opt("cocoon-pool").await.map_err(|e| e.to_string())?.ok_or_else(&log)?;
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ready = conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True");
        if ready { Ok(node) } else { Err(log()) }
    })
    .await
}

fn check_node(node: &Node) {
    let (spec, status) = (node.spec.clone().unwrap(), node.status.clone().unwrap());
    let taints: Vec<_> = spec.taints.unwrap().into_iter().map(|t| (t.key, t.value, t.effect)).collect();
    let taint = (keys::TAINT_KEY.to_owned(), Some("cocoon".to_owned()), "NoSchedule".to_owned());
    assert!(taints.contains(&taint), "{taints:?}");
    for (label, value) in [
        (keys::POOL_LABEL, "default"),
        (keys::ROLE_LABEL, ""),
        ("type", "virtual-kubelet"),
        ("kubernetes.io/role", "agent"),
        ("kubernetes.io/hostname", "cocoon-pool"),
    ] {
        assert_eq!(node.labels().get(label).map(String::as_str), Some(value), "{label}");
    }
    let capacity = status.capacity.unwrap();
    for (resource, amount) in [("cpu", "128"), ("pods", "256")] {
        assert_eq!(capacity[resource].0, amount, "{resource}");
    }
    assert_eq!(coracle_api::Amount::of(&capacity["memory"]).units(), 512 << 30);
    let addresses: Vec<_> = status.addresses.unwrap().into_iter().map(|a| (a.type_, a.address)).collect();
    let address = |kind: &str, value: &str| (kind.to_owned(), value.to_owned());
    assert!(addresses.contains(&address("InternalIP", ADDRESS)), "{addresses:?}");
    assert!(addresses.contains(&address("Hostname", "cocoon-pool")), "{addresses:?}");
    assert_eq!(status.daemon_endpoints.unwrap().kubelet_endpoint.unwrap().port, 10250);
    let of = |kind: &str| {
        let all = status.conditions.clone().unwrap_or_default();
        all.into_iter().find(|one| one.type_ == kind).map(|one| (one.status, one.reason.unwrap_or_default()))
    };
    assert_eq!(of("Ready"), Some(address("True", "KubeletReady")));
    for kind in ["DiskPressure", "MemoryPressure", "PIDPressure", "NetworkUnavailable"] {
        assert_eq!(of(kind).map(|(status, _)| status).as_deref(), Some("False"), "{kind}");
    }
}

/// Waits until the VM is ready, and returns the annotations of the pod.
async fn ready(pods: &Api<Pod>, log: impl Fn() -> String) -> VmRuntimeAnnotations {
    until("the VM is ready", LIMIT, async || {
        let pod = pods.get("sample").await.map_err(|e| e.to_string())?;
        let noted = VmRuntimeAnnotations::from_pod(&pod);
        let is_ready = noted.lifecycle_state == Some(LifecycleState::Ready);
        if is_ready { Ok(noted) } else { Err(format!("{:#?}\n{}", pod.status, log())) }
    })
    .await
}

async fn delete(pods: &Api<Pod>, log: impl Fn() -> String) {
    pods.delete("sample", &DeleteParams::default()).await.unwrap();
    until("the pod is gone", LIMIT, async || match pods.get_opt("sample").await {
        Ok(None) => Ok(()),
        other => Err(format!("{other:?}\n{}", log())),
    })
    .await;
}

/// Checks that a VM whose state cannot be saved when its pod is deleted is kept, with its memory.
async fn save_fails(pods: &Api<Pod>, state: &Path, log: impl Fn() -> String + Copy) {
    pods.create(&PostParams::default(), &sample()).await.unwrap();
    ready(pods, log).await;
    // A file in place of the directory: writing below it fails, also for root.
    let snapshots = state.join("snapshots");
    std::fs::remove_dir_all(&snapshots).unwrap();
    std::fs::write(&snapshots, "").unwrap();
    delete(pods, log).await;
    let kept = coracle_ok(state, &["ps", "-a"]).await;
    assert!(kept.contains("vk-sample-0") && kept.to_lowercase().contains("hibernated"), "{kept}");
    let tries = log().lines().filter(|line| line.contains("step failed") && line.contains("Copy")).count();
    // A late change of the pod causes one more attempt.
    assert!(tries >= 3, "{}", log());
}

#[test]
fn provider_runs_vms_with_only_the_original_variables() {
    if node_tools().is_none() || tools::require(["docker-registry"]).is_none() {
        return;
    }
    cluster::run_within(Duration::from_secs(300), |cluster| async move {
        let dir = tempfile::tempdir()?;
        let dir = dir.path();
        let registry = DebianRegistry::start()?;
        let registry_at = registry.address().to_string();
        let add = ["ip", "address", "add", &format!("{ADDRESS}/32"), "dev", "lo"];
        Command::new("busybox").args(add).output().await?;
        std::os::unix::fs::symlink(CORACLE, dir.join("vk-cocoon"))?;
        std::fs::copy(cluster.kubeconfig(), dir.join("kubeconfig"))?;
        let metrics = format!("127.0.0.1:{}", ports()?[0]);
        let log = || std::fs::read_to_string(dir.join("vk-cocoon.log")).unwrap_or_default();
        let child = start(dir, &registry_at, &metrics)?;
        let client = cluster.client();
        check_node(&node(&Api::all(client.clone()), log).await);

        let busybox = std::fs::read(tools::tool("busybox").unwrap())?;
        let layer = LayerTar::new().file("bin/busybox", 0o755, &busybox).finish();
        let command = ["/bin/busybox", "sleep", "100000"].map(str::to_owned).to_vec();
        write_layout(
            &dir.join("layout"),
            &[layer],
            &ImageSpec { cmd: command, ..ImageSpec::default() },
            "1",
        )?;
        let (state, layout) = (dir.join("state"), format!("oci:{}:1", dir.join("layout").display()));
        coracle_ok(&state, &["image", "import", &layout, IMAGE]).await;
        let pods: Api<Pod> = Api::namespaced(client, &cluster.namespace().await?);
        pods.create(&PostParams::default(), &sample()).await?;
        let before = ready(&pods, log).await;
        assert!(!before.id.is_empty() && !before.ip.is_empty(), "{before:?}");
        let scrape = get(&format!("http://{metrics}/metrics")).await.unwrap();
        for line in [
            "vk_cocoon_pod_lifecycle_total{op=\"create\",result=\"ok\"} 1",
            "vk_cocoon_vm_table_size 1",
            "vk_cocoon_orphan_vm_total 0",
            "vk_cocoon_snapshot_push_total{result=\"ok\"} 0",
        ] {
            assert!(scrape.contains(line), "{line} is not in\n{scrape}");
        }

        // Restarts the program as systemd does: the VM is adopted by its id.
        stop(child, &log()).await?;
        let child = start(dir, &registry_at, &metrics)?;
        until("the VM is adopted", LIMIT, async || {
            let scrape = get(&format!("http://{metrics}/metrics")).await?;
            if scrape.contains("vk_cocoon_vm_table_size 1\n") { Ok(()) } else { Err(log()) }
        })
        .await;
        assert_eq!(ready(&pods, log).await, before);

        delete(&pods, log).await;
        let tags = get(&format!("http://{registry_at}/v2/vk-sample-0/tags/list")).await.unwrap();
        assert!(tags.contains("\"latest\""), "{tags}");
        save_fails(&pods, &state, log).await;
        stop(child, &log()).await?;
        coracle_ok(&state, &["down"]).await;
        let left = coracle_hypervisor_testing::instances::processes_of(&state);
        assert!(left.is_empty(), "{left:?}");
        anyhow::Ok(())
    });
}

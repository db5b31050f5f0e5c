//! Pods whose container is a VM: clone, run, static and fork; hibernation; saved states in a real registry.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use coracle_api::cocoon::{LifecycleState, VmRuntimeAnnotations, VmSpecAnnotations, keys};
use coracle_oci::{NoProgress, Reference};
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::{cluster, eventually, tools};
use coracle_types::VmState;
use coracle_vm_pod::exported::ExportedSnapshots;
use coracle_vnode::VmPodOptions;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::world::{Daemon, IMAGE, World, is_ready, phase_of};

/// Returns a world with a registry for saved states.
async fn world(cluster: &cluster::Cluster) -> Result<Option<(World, DebianRegistry)>> {
    let Some(_) = tools::require(["docker-registry"]) else { return Ok(None) };
    let registry = DebianRegistry::start()?;
    let mut world = World::new(cluster).await?;
    let at = coracle_vm_pod::saved::Registry::at(&registry.address().to_string());
    world.options.vms = VmPodOptions { registry: Some(at), ..VmPodOptions::default() };
    Ok(Some((world, registry)))
}

impl World {
    /// Creates a pod with annotations, on the node.
    pub(crate) async fn create_vm(&self, name: &str, annotations: &[(&str, &str)]) -> Result<Pod> {
        self.create_vm_in(&self.namespace, name, annotations).await
    }

    async fn create_vm_in(&self, namespace: &str, name: &str, annotations: &[(&str, &str)]) -> Result<Pod> {
        let annotations: BTreeMap<_, _> = annotations.iter().copied().collect();
        let pod = json!({
            "metadata": {"name": name, "annotations": annotations},
            "spec": {
                "nodeName": self.options.name,
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "agent", "image": keys::CONTAINER_IMAGE}],
            },
        });
        let pods = kube::Api::<Pod>::namespaced(self.client.clone(), namespace);
        Ok(pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?)
    }

    async fn annotate(&self, name: &str, key: &str, value: Value) -> Result<()> {
        let patch = json!({"metadata": {"annotations": {key: value}}});
        self.pods().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    pub(crate) async fn until_state(&self, name: &str, state: LifecycleState) -> Result<Pod> {
        self.until(name, state.as_str(), |pod| vm_annotations(pod).lifecycle_state == Some(state)).await
    }
}

fn vm_annotations(pod: &Pod) -> VmRuntimeAnnotations {
    VmRuntimeAnnotations::from_pod(pod)
}

/// Returns the annotations of a pod that runs an image.
fn run(vm: &str) -> Vec<(&str, &str)> {
    vec![(keys::VM_NAME, vm), (keys::MODE, "run"), (keys::IMAGE, IMAGE), (keys::MANAGED, "true")]
}

async fn tag(daemon: &Daemon, registry: &DebianRegistry, vm: &str, tag: &str) -> Result<bool> {
    let reference: Reference = format!("{}/{vm}:{tag}", registry.address()).parse()?;
    Ok(daemon.host.remote_snapshot(&reference).await?.is_some())
}

fn waiting_reason(pod: &Pod) -> String {
    let status = pod.status.clone().unwrap_or_default().container_statuses.unwrap_or_default();
    let waiting = status.into_iter().next().and_then(|one| one.state?.waiting?.reason);
    waiting.unwrap_or_default()
}

#[test]
fn run_pod_has_id_and_address_in_the_cluster() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, _registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        world.create_vm("demo-0", &run("vk-prod-demo-0")).await?;
        let pod = world.until_state("demo-0", LifecycleState::Ready).await?;
        let pod = if is_ready(&pod) { pod } else { world.until_ready("demo-0").await? };
        let view = daemon.host.get("vk-prod-demo-0")?;
        assert_eq!(vm_annotations(&pod).id, view.record.id.to_string());
        assert_eq!(vm_annotations(&pod).ip, view.record.address.context("an address")?.to_string());
        assert_eq!(
            pod.status.as_ref().and_then(|status| status.pod_ip.clone()),
            Some(vm_annotations(&pod).ip)
        );
        assert_eq!(phase_of(&pod), "Running");
        daemon.stop().await
    });
}

#[test]
fn pod_without_vm_name_waits_with_invalid_annotations() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, _registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        world.create_vm("nameless", &[(keys::IMAGE, IMAGE)]).await?;
        let pod =
            world.until("nameless", "explained", |pod| waiting_reason(pod) == "InvalidAnnotations").await?;
        assert_eq!(phase_of(&pod), "Pending");
        daemon.until_vms(0).await?;
        world.delete("nameless").await?;
        world.until_gone("nameless").await?;
        daemon.stop().await
    });
}

const DISK: &str = "localhost/test/disk:1";

async fn import_disk(world: &World, daemon: &Daemon) -> Result<()> {
    let disk = world.path("disk.raw");
    std::fs::write(&disk, vec![0; 1 << 20])?;
    daemon.host.import_disk(&disk, Some(DISK.parse()?), Arc::new(NoProgress)).await?;
    Ok(())
}

/// As in the samples of vk-cocoon: no annotation, and the container's image is a disk image.
#[test]
fn pod_whose_image_is_a_disk_becomes_a_vm() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, _registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        import_disk(&world, &daemon).await?;
        let container = |name| json!({"name": name, "image": DISK, "imagePullPolicy": "Never"});
        world.create("bare", &[], json!({"containers": [container("agent")]})).await?;
        let pod = world.until_state("bare", LifecycleState::Ready).await?;
        let vm = format!("vk-{}-bare", world.namespace);
        let said = VmSpecAnnotations::from_pod(&pod);
        assert_eq!((said.vm_name.as_str(), said.image.as_str()), (vm.as_str(), DISK));
        assert_eq!(daemon.host.get(&vm)?.record.id.to_string(), vm_annotations(&pod).id);
        daemon.until_vms(1).await?;
        assert_eq!(phase_of(&world.until_ready("bare").await?), "Running");

        // A pod with a second container cannot become a VM.
        world.create("two", &[], json!({"containers": [container("agent"), container("other")]})).await?;
        let message = world.until_event("two", "Failed").await?;
        assert!(message.contains("is a disk image"), "{message}");
        // A running pod is not ended because of the image of a debug container.
        let app = json!({"name": "app", "image": IMAGE, "imagePullPolicy": "Never", "command": ["serve"]});
        world.create("app", &["serve"], json!({"containers": [app]})).await?;
        let before = world.until_ready("app").await?;
        let debug = json!({"spec": {"ephemeralContainers": [container("debug")]}});
        let patch = Patch::Strategic(debug);
        world.pods().patch_ephemeral_containers("app", &PatchParams::default(), &patch).await?;
        let message = world.until_event("app", "Failed").await?;
        assert!(message.contains("is a disk image"), "{message}");
        let after = world.pods().get("app").await?;
        assert_eq!(VmSpecAnnotations::from_pod(&after).vm_name, "");
        let run = |pod: &Pod| pod.status.clone().unwrap().container_statuses.unwrap()[0].container_id.clone();
        assert_eq!((is_ready(&after), run(&after)), (true, run(&before)));
        for name in ["bare", "two", "app"] {
            world.delete(name).await?;
            world.until_gone(name).await?;
        }
        daemon.until_vms(0).await?;
        assert!(!world.has_files(), "of a pod");
        daemon.stop().await
    });
}

/// The identity of a node is not allowed to write annotations of pods.
#[test]
fn node_that_cannot_annotate_a_disk_pod_sends_an_event() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.as_node(cluster).await?;
        let daemon = world.start().await?;
        import_disk(&world, &daemon).await?;
        let containers = json!([{"name": "agent", "image": DISK, "imagePullPolicy": "Never"}]);
        world.create("bare", &[], json!({"containers": containers})).await?;
        eventually("an event says why", async || {
            let events = world.events("bare").await.ok()?;
            events.iter().any(|(_, message)| message.contains("cannot make it a VM")).then_some(())
        })
        .await?;
        daemon.until_vms(0).await?;
        world.delete("bare").await?;
        world.until_gone("bare").await?;
        daemon.stop().await
    });
}

#[test]
fn hibernated_pod_keeps_running_without_a_vm_and_wakes() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        let vm = "vk-prod-sleeper-0";
        world.create_vm("sleeper", &run(vm)).await?;
        world.until_ready("sleeper").await?;
        let before = world.until_state("sleeper", LifecycleState::Ready).await?;
        world.annotate("sleeper", keys::HIBERNATE, json!("true")).await?;
        let asleep = world.until_state("sleeper", LifecycleState::Hibernated).await?;
        assert_eq!((vm_annotations(&asleep).id, vm_annotations(&asleep).ip), (String::new(), String::new()));
        let asleep = world.until("sleeper", "asleep", |pod| waiting_reason(pod) == "Hibernated").await?;
        assert_eq!((phase_of(&asleep), is_ready(&asleep)), ("Running", false));
        daemon.until_vms(0).await?;
        assert!(tag(&daemon, &registry, vm, "hibernate").await?);

        // A restarted daemon does not create a VM for a hibernated pod.
        daemon.stop().await?;
        let daemon = world.start().await?;
        world.create_vm("other", &run("vk-prod-other-0")).await?;
        world.until_ready("other").await?;
        daemon.until_vms(1).await?;
        assert!(tag(&daemon, &registry, vm, "hibernate").await?);

        world.annotate("sleeper", keys::HIBERNATE, Value::Null).await?;
        let awake = world.until_state("sleeper", LifecycleState::Ready).await?;
        assert_eq!(vm_annotations(&awake).id, vm_annotations(&before).id, "the same VM");
        let record = daemon.host.get(vm)?.record.clone();
        let woken = record.metadata.contains_key("coracle.dev/vm-pod-woken");
        assert_eq!((record.state, woken), (VmState::Running, true), "from its memory, not from its image");
        assert!(!tag(&daemon, &registry, vm, "hibernate").await?, "the saved state is used up");
        assert_eq!(daemon.host.snapshots().await?.len(), 0, "no copy is left on the node");
        daemon.stop().await
    });
}

#[test]
fn snapshot_policy_decides_what_is_pushed() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        for (policy, vm, pushed) in [
            ("always", "vk-a-1", true),
            ("main-only", "vk-b-0", true),
            ("main-only", "vk-c-1", false),
            ("never", "vk-d-0", false),
        ] {
            let annotations = [run(vm), vec![(keys::SNAPSHOT_POLICY, policy)]].concat();
            world.create_vm("saved", &annotations).await?;
            world.until_ready("saved").await?;
            world.delete("saved").await?;
            world.until_gone("saved").await?;
            daemon.until_vms(0).await?;
            assert_eq!(tag(&daemon, &registry, vm, "latest").await?, pushed, "{policy} {vm}");
            assert_eq!(daemon.host.snapshots().await?.len(), 0, "{policy} {vm}: no copy is left");
        }
        // A saved state can be cloned on any node.
        world.create_vm("copy", &[(keys::VM_NAME, "vk-e-0"), (keys::IMAGE, "vk-a-1")]).await?;
        world.until_ready("copy").await?;
        assert_eq!(daemon.host.get("vk-e-0")?.record.message, "");
        daemon.stop().await
    });
}

#[test]
fn saved_state_of_another_namespace_is_not_cloned() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, _registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        let other = cluster.namespace().await?;
        let theirs = kube::Api::<Pod>::namespaced(world.client.clone(), &other);
        world.create_vm_in(&other, "first", &run("vk-theirs-0")).await?;
        eventually("the first pod is ready", async || theirs.get("first").await.ok().filter(is_ready))
            .await?;
        theirs.delete("first", &kube::api::DeleteParams::default()).await?;
        daemon.until_vms(0).await?;
        world.create_vm("thief", &[(keys::VM_NAME, "vk-mine-0"), (keys::IMAGE, "vk-theirs-0")]).await?;
        world.until("thief", "refused", |pod| waiting_reason(pod) == "SnapshotNotShared").await?;
        assert_eq!(daemon.host.snapshots().await?.len(), 0, "nothing was brought here");
        world
            .create_vm_in(&other, "again", &[(keys::VM_NAME, "vk-theirs-1"), (keys::IMAGE, "vk-theirs-0")])
            .await?;
        eventually("their own is ready", async || theirs.get("again").await.ok().filter(is_ready)).await?;
        daemon.stop().await
    });
}

/// Saves the VM of a pod and exports the snapshot to a directory, like an administrator.
async fn export(daemon: &Daemon, vm: &str, dir: &std::path::Path) -> Result<()> {
    std::fs::create_dir(dir)?;
    let saved = daemon.host.save_snapshot(vm, Some("golden".parse()?)).await?;
    let file = std::fs::File::create(dir.join(coracle_vm_pod::exported::FILE))?;
    daemon.host.export_snapshot(saved.name.as_str(), file).await?;
    daemon.host.delete_snapshot("golden").await?;
    Ok(())
}

#[test]
fn pod_is_cloned_from_an_exported_snapshot() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((mut world, _registry)) = world(cluster).await? else { return Ok(()) };
        let dir = tempfile::tempdir()?;
        let parent = dir.path().join("exported");
        std::fs::create_dir(&parent)?;
        world.options.vms.exported = ExportedSnapshots::below(vec![parent.clone()]);
        let daemon = world.start().await?;
        world.create_vm("first", &run("vk-first-0")).await?;
        world.until_ready("first").await?;
        let (golden, hidden) = (parent.join("golden"), dir.path().join("hidden"));
        export(&daemon, "vk-first-0", &golden).await?;
        std::fs::create_dir(&hidden)?;
        let from = |dir: &std::path::Path| dir.to_str().expect("a path").to_owned();
        let (golden, hidden) = (from(&golden), from(&hidden));
        let clone = |vm, dir| [(keys::VM_NAME, vm), (keys::CLONE_FROM_DIR, dir)];
        world.create_vm("copy-1", &clone("vk-copy-1", &golden)).await?;
        world.create_vm("copy-2", &clone("vk-copy-2", &golden)).await?;
        for copy in ["copy-1", "copy-2"] {
            world.until_ready(copy).await?;
        }
        assert_eq!(daemon.host.snapshots().await?.len(), 1, "both are of one snapshot");

        world.create_vm("outside", &clone("vk-outside-0", &hidden)).await?;
        let refused =
            world.until("outside", "refused", |pod| waiting_reason(pod) == "ErrSnapshotPull").await?;
        let status = serde_json::to_string(&refused.status)?;
        assert!(status.contains("is not below a directory that this node has"), "{status}");
        let other = cluster.namespace().await?;
        world.create_vm_in(&other, "thief", &clone("vk-thief-0", &golden)).await?;
        let theirs = kube::Api::<Pod>::namespaced(world.client.clone(), &other);
        let refused =
            async || theirs.get("thief").await.ok().filter(|pod| waiting_reason(pod) == "SnapshotNotShared");
        eventually("the pod of another namespace is refused", refused).await?;
        daemon.stop().await
    });
}

#[test]
fn vm_that_cannot_be_pushed_is_kept_on_the_node() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((mut world, registry)) = world(cluster).await? else { return Ok(()) };
        drop(registry);
        let closed = DebianRegistry::start_with_password()?;
        let at = closed.address().to_string();
        world.options.vms.registry = Some(coracle_vm_pod::saved::Registry::at(&at));
        let daemon = world.start().await?;
        world.create_vm("saved", &run("vk-a-0")).await?;
        world.until_ready("saved").await?;
        world.delete("saved").await?;
        world.until_gone("saved").await?;
        daemon.until_vms(0).await?;
        let kept: Vec<_> =
            daemon.host.snapshots().await?.into_iter().map(|info| info.name.to_string()).collect();
        assert_eq!(kept, ["vk-a-0"]);
        assert!(world.until_event("saved", "PushFailed").await?.contains(&at));
        daemon.stop().await
    });
}

#[test]
fn static_vm_outlives_its_pod() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        world.create_vm("owner", &run("vk-a-0")).await?;
        world.until_ready("owner").await?;
        let record = daemon.host.get("vk-a-0")?.record.clone();
        let ip = record.address.context("an address")?.to_string();
        let brought = [
            (keys::VM_NAME, "vk-a-0-again"),
            (keys::MODE, "static"),
            (keys::VM_ID, record.id.as_str()),
            (keys::VM_IP, ip.as_str()),
        ];
        world.create_vm("visitor", &brought).await?;
        let pod = world.until_state("visitor", LifecycleState::Ready).await?;
        assert_eq!(vm_annotations(&pod).ip, ip);
        world.delete("visitor").await?;
        world.until_gone("visitor").await?;
        assert_eq!(daemon.host.get("vk-a-0")?.record.state, VmState::Running);
        assert!(!tag(&daemon, &registry, "vk-a-0-again", "latest").await?);
        daemon.stop().await
    });
}

#[test]
fn name_that_another_namespace_uses_is_refused() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, _registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        let other = cluster.namespace().await?;
        world.create_vm_in(&other, "first", &run("vk-a-b-c-0")).await?;
        let first = kube::Api::<Pod>::namespaced(world.client.clone(), &other);
        eventually("the first pod is ready", async || first.get("first").await.ok().filter(is_ready)).await?;
        let log = |pod: &Pod| {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            std::fs::read_to_string(world.path("state/pods").join(uid).join("vm-output/1.log")).ok()
        };
        let owner = first.get("first").await?;
        let printed = eventually("the output of the first", async || log(&owner)).await?;
        assert!(printed.ends_with("stdout F /bin/true\n"), "{printed}");
        world.create_vm("second", &run("vk-a-b-c-0")).await?;
        let second = world.until("second", "refused", |pod| waiting_reason(pod) == "VMNameTaken").await?;
        world.create_vm("third", &run("vk-d-0")).await?;
        world.until_ready("third").await?;
        assert_eq!(log(&second), None, "output of another namespace");
        world.delete("second").await?;
        world.until_gone("second").await?;
        let record = daemon.host.get("vk-a-b-c-0")?.record.clone();
        assert_eq!((record.state, &record.owner.namespace), (VmState::Running, &other));
        daemon.stop().await
    });
}

#[test]
fn fork_is_of_the_vm_that_runs_now() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, _registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        let never = (keys::SNAPSHOT_POLICY, "never");
        let fork = |vm| vec![(keys::VM_NAME, vm), (keys::FORK_FROM, "vk-a-0"), never];
        world.create_vm("early", &fork("vk-a-1")).await?;
        world.until("early", "waiting", |pod| waiting_reason(pod) == "ForkSourceMissing").await?;
        world.create_vm("main", &[run("vk-a-0"), vec![never]].concat()).await?;
        world.until_ready("early").await?;
        let first = daemon.host.snapshot("fork-vk-a-0").await?;
        // The next fork uses the same copy; after the source VM was created anew, the fork uses a new copy.
        world.create_vm("next", &fork("vk-a-2")).await?;
        world.until_ready("next").await?;
        assert_eq!(daemon.host.snapshot("fork-vk-a-0").await?, first);
        world.delete("main").await?;
        world.until_gone("main").await?;
        assert!(daemon.host.snapshot("fork-vk-a-0").await.is_err(), "it goes with the VM that it is of");
        world.create_vm("main", &[run("vk-a-0"), vec![never]].concat()).await?;
        world.until_ready("main").await?;
        world.create_vm("later", &fork("vk-a-3")).await?;
        world.until_ready("later").await?;
        assert!(daemon.host.snapshot("fork-vk-a-0").await?.taken_at > first.taken_at);
        daemon.stop().await
    });
}

#[test]
fn restarted_daemon_keeps_vms_of_pods_and_leaves_orphans() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, _registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        world.create_vm("stays", &run("vk-a-0")).await?;
        world.create_vm("goes", &run("vk-b-0")).await?;
        world.until_ready("stays").await?;
        let before = world.until_state("stays", LifecycleState::Ready).await?;
        world.until_ready("goes").await?;
        daemon.stop().await?;
        world.force_delete("goes").await?;
        let daemon = world.start().await?;
        world.create_vm("new", &run("vk-c-0")).await?;
        world.until_ready("new").await?;
        let after = world.pods().get("stays").await?;
        assert_eq!(vm_annotations(&after).id, vm_annotations(&before).id);
        assert_eq!(daemon.host.get("vk-a-0")?.record.boots, 1, "it was adopted");
        assert_eq!(daemon.host.get("vk-b-0")?.record.state, VmState::Running, "orphans are left alone");
        daemon.stop().await
    });
}

#[test]
fn hibernated_pod_wakes_on_another_node() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((first, registry)) = world(cluster).await? else { return Ok(()) };
        let mut second = World::new(cluster).await?;
        second.namespace.clone_from(&first.namespace);
        second.options.vms.registry.clone_from(&first.options.vms.registry);
        let (here, there) = (first.start().await?, second.start().await?);
        let vm = "vk-prod-mover-0";
        first.create_vm("mover", &run(vm)).await?;
        first.until_state("mover", LifecycleState::Ready).await?;
        first.annotate("mover", keys::HIBERNATE, json!("true")).await?;
        first.until_state("mover", LifecycleState::Hibernated).await?;
        first.delete("mover").await?;
        first.until_gone("mover").await?;
        here.until_vms(0).await?;
        assert!(tag(&here, &registry, vm, "hibernate").await?, "the pod went, and its saved state stays");

        let again = [run(vm), vec![(keys::RESTORE_FROM_HIBERNATE, "true")]].concat();
        second.create_vm("mover", &again).await?;
        second.until_state("mover", LifecycleState::Ready).await?;
        let record = there.host.get(vm)?.record.clone();
        let woken = record.metadata.contains_key("coracle.dev/vm-pod-woken");
        assert_eq!((record.state, woken), (VmState::Running, true), "from its memory, not from its image");
        assert!(!tag(&there, &registry, vm, "hibernate").await?, "the saved state is used up");
        assert_eq!(there.host.snapshots().await?.len(), 0, "no copy is left on the node");
        here.stop().await?;
        there.stop().await
    });
}

#[test]
fn vm_that_cannot_be_saved_is_kept() {
    cluster::run(async |cluster| -> Result<()> {
        let Some((world, registry)) = world(cluster).await? else { return Ok(()) };
        let daemon = world.start().await?;
        world.create_vm("unlucky", &run("vk-a-0")).await?;
        world.until_ready("unlucky").await?;
        // The snapshot directory is made unwritable, for root as well.
        let snapshots = world.path("state/snapshots");
        let _absent = std::fs::remove_dir_all(&snapshots);
        std::fs::write(&snapshots, "not a directory")?;
        world.delete("unlucky").await?;
        let why = world.until_event("unlucky", "SaveFailed").await?;
        assert!(why.contains("vk-a-0"), "{why}");
        world.until_gone("unlucky").await?;
        let record = daemon.host.get("vk-a-0")?.record.clone();
        assert_eq!(record.state, VmState::Hibernated, "at rest, with all that it did");
        assert!(!tag(&daemon, &registry, "vk-a-0", "latest").await?);
        daemon.stop().await
    });
}

//! Disk pods over in-memory VMMs: the sandbox record has the status while no VM runs, and each attempt is a VM of its own.

use std::sync::Arc;

use coracle_host::COMMIT_ANNOTATION;
use coracle_oci::NoProgress;
use coracle_proto::cri::*;
use coracle_testkit::eventually;
use coracle_types::VmState;
use tonic::Code;

use crate::support::{Daemon, IMAGE, Kubelet, Node, container, sandbox};

const DISK: &str = "localhost/test/disk:1";

impl Node {
    /// Opens a daemon whose node has a disk image.
    async fn open_with_disk(&self) -> Daemon {
        let daemon = self.open().await;
        let file = self.dir.path().join("disk.raw");
        std::fs::File::create(&file).unwrap().set_len(8 << 20).unwrap();
        std::fs::write(&daemon.host.config().agent, b"agent").unwrap();
        daemon.host.import_disk(&file, Some(DISK.parse().unwrap()), Arc::new(NoProgress)).await.unwrap();
        daemon
    }
}

fn attempt(name: &str, attempt: u32) -> ContainerConfig {
    let config = container(name, DISK, &["build"]);
    ContainerConfig { metadata: Some(ContainerMetadata { name: name.into(), attempt }), ..config }
}

async fn disk_sandbox(kubelet: &mut Kubelet, name: &str) -> String {
    let request = RunPodSandboxRequest { config: Some(sandbox(name)), runtime_handler: "macvm".to_owned() };
    kubelet.runtime.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id
}

async fn wait_for_exit(kubelet: &Kubelet, id: &str) -> ContainerStatus {
    let ended = eventually("the container ends", async || {
        let status = kubelet.clone().status(id).await.ok()?;
        (status.state() == ContainerState::ContainerExited).then_some(status)
    });
    ended.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_sandbox_has_its_address_before_a_vm() {
    let node = Node::new().await;
    let mut daemon = node.open_with_disk().await;
    let kubelet = &mut daemon.kubelet;
    let id = disk_sandbox(kubelet, "mac").await;
    let status = kubelet.sandbox_status(&id).await.unwrap();
    assert_eq!((status.state(), status.runtime_handler.as_str()), (PodSandboxState::SandboxReady, "macvm"));
    let address = status.network.unwrap().ip;
    assert!(address.starts_with("10.100.0."), "{address}");
    assert_eq!(node.machines.running(), 0);

    let main = kubelet.create(&id, attempt("main", 0), sandbox("mac")).await.unwrap();
    assert_eq!(kubelet.status(&main).await.unwrap().state(), ContainerState::ContainerCreated);
    assert_eq!(node.machines.running(), 0, "nothing runs before it is started");
    kubelet.start(&main).await.unwrap();
    let status = kubelet.status(&main).await.unwrap();
    assert_eq!(status.state(), ContainerState::ContainerRunning);
    assert!(status.started_at > 0 && status.image_id.starts_with("sha256:"));
    assert_eq!(node.machines.running(), 1);
    let vm = daemon.host.get(&main).unwrap();
    assert_eq!(vm.record.address.unwrap().to_string(), address, "that of the sandbox");

    // A restart of the daemon keeps the ids, the address and the running VM.
    daemon.end().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    assert_eq!(kubelet.sandbox_status(&id).await.unwrap().network.unwrap().ip, address);
    assert_eq!(kubelet.status(&main).await.unwrap().state(), ContainerState::ContainerRunning);
    assert_eq!(node.machines.starts(), 1);
    kubelet.remove_sandbox(&id).await.unwrap();
    assert_eq!((node.machines.running(), daemon.host.list().len()), (0, 0));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_container_restarts_as_a_new_vm() {
    let node = Node::new().await;
    let mut daemon = node.open_with_disk().await;
    let kubelet = &mut daemon.kubelet;
    let id = disk_sandbox(kubelet, "mac").await;
    let first = kubelet.create(&id, attempt("main", 0), sandbox("mac")).await.unwrap();
    let refused = kubelet.create(&id, attempt("main", 1), sandbox("mac")).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "one at a time: {refused}");
    let refused = kubelet.create(&id, attempt("other", 0), sandbox("mac")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "one container: {refused}");
    kubelet.start(&first).await.unwrap();
    let host = daemon.host.clone();
    let instance = eventually("it runs", async || {
        let record = host.get(&first).unwrap().record.clone();
        record.instance.clone().filter(|_| record.state == VmState::Running)
    });
    let instance = instance.await.unwrap();
    node.machines.exit_workload(&instance, 3);
    let status = wait_for_exit(kubelet, &first).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (3, "Error"));
    assert!(status.finished_at > 0);
    let ready = kubelet.sandbox_status(&id).await.unwrap();
    assert_eq!(ready.state(), PodSandboxState::SandboxReady, "the end of the VM is the container's");

    let address = |id: &str| host.get(id).unwrap().record.address;
    let second = kubelet.create(&id, attempt("main", 1), sandbox("mac")).await.unwrap();
    assert_eq!(address(&second), address(&first));
    kubelet.start(&second).await.unwrap();
    kubelet.remove(&first).await.unwrap();
    assert_eq!(address(&second).unwrap().to_string(), ready.network.unwrap().ip);
    kubelet.stop(&second, 0).await.unwrap();
    let status = kubelet.status(&second).await.unwrap();
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 137));
    kubelet.stop_sandbox(&id).await.unwrap();
    let status = kubelet.sandbox_status(&id).await.unwrap();
    assert_eq!((status.state(), status.network), (PodSandboxState::SandboxNotready, None));
    kubelet.remove_sandbox(&id).await.unwrap();
    assert!(daemon.host.list().is_empty());
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rebooted_guest_runs_its_command_again() {
    let node = Node::new().await;
    let mut daemon = node.open_with_disk().await;
    let kubelet = &mut daemon.kubelet;
    let logs = PodSandboxConfig { log_directory: node.dir.path().display().to_string(), ..sandbox("mac") };
    let request = RunPodSandboxRequest { config: Some(logs.clone()), runtime_handler: "macvm".to_owned() };
    let id = kubelet.runtime.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
    let config = ContainerConfig { log_path: "main/0.log".into(), ..attempt("main", 0) };
    let main = kubelet.create(&id, config, logs).await.unwrap();
    kubelet.start(&main).await.unwrap();
    let log = node.dir.path().join("main/0.log");
    let printed = async |times: usize| {
        let printed = eventually("its command prints", async || {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<_> = text.lines().filter_map(|line| line.split(' ').nth(3)).collect();
            (lines == vec!["build"; times]).then_some(())
        });
        printed.await.unwrap();
    };
    printed(1).await;
    let instance = daemon.host.get(&main).unwrap().record.instance.clone().unwrap();
    for times in [2, 3] {
        assert!(node.machines.reboot(&instance));
        printed(times).await;
        assert_eq!(kubelet.status(&main).await.unwrap().state(), ContainerState::ContainerRunning);
    }
    // A later daemon still has the output from before the reboots.
    daemon.end().await;
    let daemon = node.open().await;
    node.machines.exit_workload(&instance, 0);
    let status = wait_for_exit(&daemon.kubelet, &main).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (0, "Completed"));
    printed(3).await;
    assert_eq!(node.machines.starts(), 1, "all of it in one VMM");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_of_a_disk_container_runs_in_the_guest() {
    let node = Node::new().await;
    let mut daemon = node.open_with_disk().await;
    let kubelet = &mut daemon.kubelet;
    let id = disk_sandbox(kubelet, "mac").await;
    let main = kubelet.create(&id, attempt("main", 0), sandbox("mac")).await.unwrap();
    kubelet.start(&main).await.unwrap();
    let cmd = ["hello", "there"].map(str::to_owned).to_vec();
    let request = ExecSyncRequest { container_id: main.clone(), cmd, timeout: 10 };
    let said = kubelet.runtime.exec_sync(request).await.unwrap().into_inner();
    assert_eq!((String::from_utf8(said.stdout).unwrap().trim(), said.exit_code), ("hello there", 0));
    let stats = kubelet.runtime.list_container_stats(ListContainerStatsRequest::default()).await.unwrap();
    assert_eq!(stats.into_inner().stats[0].attributes.as_ref().unwrap().id, main);
    let request = PortForwardRequest { pod_sandbox_id: id.clone(), port: vec![80] };
    assert!(kubelet.runtime.port_forward(request).await.unwrap().into_inner().url.contains("/portforward/"));
    kubelet.remove_sandbox(&id).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn image_of_the_wrong_kind_names_the_handler() {
    let node = Node::new().await;
    let mut daemon = node.open_with_disk().await;
    let kubelet = &mut daemon.kubelet;
    let disk = disk_sandbox(kubelet, "mac").await;
    let vm = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    for (sandbox_id, image, says) in [(&disk, IMAGE, "handler coracle"), (&vm, DISK, "handler coracle-disk")]
    {
        let refused =
            kubelet.create(sandbox_id, container("x", image, &["x"]), sandbox("x")).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(says), "{refused}");
    }
    let mut config = sandbox("commit");
    config.annotations.insert(COMMIT_ANNOTATION.to_owned(), "Not A Reference".to_owned());
    let request = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: "macvm".to_owned() };
    let id = kubelet.runtime.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
    let refused = kubelet.create(&id, attempt("main", 0), config).await.unwrap_err();
    assert!(refused.message().contains(COMMIT_ANNOTATION), "{refused}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_images_are_listed_and_removed() {
    let node = Node::new().await;
    let mut daemon = node.open_with_disk().await;
    let kubelet = &mut daemon.kubelet;
    let image = kubelet.image_status(DISK).await.unwrap();
    assert_eq!((image.repo_tags.clone(), image.uid.is_some()), (vec![DISK.to_owned()], true));
    assert!(image.size > 0 && image.id.starts_with("sha256:"));
    assert_eq!(kubelet.image_status(&image.id).await, Some(image.clone()), "by id, too");
    assert_eq!(kubelet.pull(DISK, None).await.unwrap(), image.id, "an import is never asked for");
    assert_eq!(kubelet.image_list().await.len(), 2);
    kubelet.remove_image(&image.id).await.unwrap();
    assert_eq!(kubelet.image_status(DISK).await, None);
    daemon.end().await;
}

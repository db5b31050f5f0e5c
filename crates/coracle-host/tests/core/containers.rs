//! Containers of a sandbox, with a fake guest.

use std::sync::Arc;
use std::time::Duration;

use coracle_host::{
    ContainerId, ContainerRecord, ContainerSpec, ContainerState, Host, HostError, PullOrigin, PullPolicy,
    Resources, Sandbox, VmSpec, Workload,
};
use coracle_oci::NoProgress;
use coracle_testkit::eventually;

use super::support::{IMAGE, Node};

fn id(text: &str) -> ContainerId {
    text.parse().unwrap()
}

fn spec(argv: &[&str]) -> ContainerSpec {
    let argv = argv.iter().map(|a| (*a).to_owned()).collect();
    ContainerSpec {
        image: IMAGE.to_owned(),
        process: Workload { argv, ..Workload::default() },
        ..ContainerSpec::default()
    }
}

async fn create(host: &Host, name: &str, spec: ContainerSpec) -> Result<ContainerRecord, HostError> {
    let from = (PullPolicy::Never, PullOrigin::Local);
    host.create_container("pod", id(name), spec, from, Arc::new(NoProgress)).await
}

async fn run(host: &Host, name: &str, argv: &[&str]) -> ContainerRecord {
    create(host, name, spec(argv)).await.unwrap();
    host.start_container("pod", &id(name)).await.unwrap()
}

async fn sandbox(host: &Host) {
    let spec = VmSpec { sandbox: Some(Sandbox::default()), ..VmSpec::of("pod".parse().unwrap(), "") };
    host.create(spec, Arc::new(NoProgress)).await.unwrap();
    host.start("pod", None).await.unwrap();
}

fn log(node: &Node, host: &Host, name: &str) -> String {
    let vm = host.get("pod").unwrap().record.id.to_string();
    let path = node.state().join("vms").join(vm).join("containers").join(format!("{name}.log"));
    std::fs::read_to_string(path).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_start_and_exit_while_the_vm_runs() {
    let node = Node::new().await;
    let host = node.open().await;
    sandbox(&host).await;
    run(&host, "main", &["serve"]).await;
    run(&host, "echo", &["echo", "hello", "world"]).await;
    let ended = host.wait_container("pod", &id("echo")).await.unwrap();
    assert_eq!((ended.state, ended.exit.unwrap().code, ended.oom_killed), (ContainerState::Exited, 0, false));
    assert!(
        log(&node, &host, "echo").ends_with(" stdout F hello world\n"),
        "its output is there before its end"
    );
    run(&host, "greedy", &["oom"]).await;
    assert!(host.wait_container("pod", &id("greedy")).await.unwrap().oom_killed);
    // The containers share one image in one slot.
    let view = host.get("pod").unwrap();
    assert_eq!(view.record.images.iter().map(|image| image.slot).collect::<Vec<_>>(), [1]);
    assert_eq!(view.containers[&id("main")].state, ContainerState::Running);
    assert!(view.containers[&id("main")].started_at.is_some());

    let stopped = host.stop_container("pod", &id("main"), Duration::from_secs(1)).await.unwrap();
    assert_eq!(stopped.exit.map(|exit| exit.code), Some(143));
    let again = host.stop_container("pod", &id("main"), Duration::ZERO).await.unwrap();
    assert_eq!(again.state, ContainerState::Exited);
    for name in ["main", "echo", "greedy"] {
        host.remove_container("pod", &id(name)).await.unwrap();
    }
    let view = host.get("pod").unwrap();
    assert!(view.containers.is_empty() && view.record.images.is_empty(), "its slot is free again");
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_name_the_container() {
    let node = Node::new().await;
    let host = node.open().await;
    sandbox(&host).await;
    run(&host, "main", &["serve"]).await;
    assert_eq!(run(&host, "main", &["serve"]).await.state, ContainerState::Running, "the same again");
    let other = create(&host, "main", spec(&["other"])).await.unwrap_err();
    assert_eq!(
        (other.code(), other.to_string().as_str()),
        ("COR-CTR-002", "VM pod has a container main already")
    );
    let missing = host.start_container("pod", &id("nope")).await.unwrap_err();
    assert_eq!(
        (missing.code(), missing.to_string().as_str()),
        ("COR-CTR-001", "VM pod has no container nope")
    );
    create(&host, "idle", spec(&["serve"])).await.unwrap();
    let idle = host.stop_container("pod", &id("idle"), Duration::ZERO).await.unwrap_err();
    assert_eq!(idle.code(), "COR-CTR-003");
    host.kill_container("pod", &id("main"), 9).await.unwrap();
    let ended = host.wait_container("pod", &id("main")).await.unwrap();
    assert_eq!(ended.exit.map(|exit| exit.signal), Some(9));
    let again = host.start_container("pod", &id("main")).await.unwrap_err();
    assert_eq!(again.to_string(), "cannot start container main of VM pod: it has ended");
    let limits = Resources { pids_max: Some(9), ..Resources::default() };
    let updated = host
        .update_container("pod", &id("idle"), limits, [("a".to_owned(), "b".to_owned())].into())
        .await
        .unwrap();
    assert_eq!((updated.spec.resources.pids_max, updated.spec.metadata["a"].as_str()), (Some(9), "b"));
    create(&host, "missing", spec(&["missing"])).await.unwrap();
    let missing = host.start_container("pod", &id("missing")).await.unwrap();
    assert_eq!(missing.exit.unwrap().error, "missing: not found", "the answer says why");

    let workload = VmSpec::of("web".parse().unwrap(), IMAGE);
    host.create(workload, Arc::new(NoProgress)).await.unwrap();
    host.start("web", None).await.unwrap();
    let from = (PullPolicy::Never, PullOrigin::Local);
    let refused = host.create_container("web", id("main"), spec(&["x"]), from, Arc::new(NoProgress)).await;
    assert!(refused.unwrap_err().to_string().contains("has a workload of its own"));
    let image = VmSpec { sandbox: Some(Sandbox::default()), ..VmSpec::of("odd".parse().unwrap(), IMAGE) };
    assert!(host.create(image, Arc::new(NoProgress)).await.is_err(), "a sandbox has no image");
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_of_the_daemon_leaves_containers_running() {
    let node = Node::new().await;
    let host = node.open().await;
    sandbox(&host).await;
    let before = run(&host, "main", &["serve"]).await;
    run(&host, "echo", &["echo", "once"]).await;
    host.wait_container("pod", &id("echo")).await.unwrap();
    create(&host, "idle", spec(&["serve"])).await.unwrap();
    host.shutdown().await;
    drop(host);
    let host = node.open().await;
    host.guest("pod").await.unwrap();
    let after = host.get("pod").unwrap().containers[&id("main")].clone();
    assert_eq!(*after, before);
    host.start_container("pod", &id("idle")).await.unwrap();
    assert_eq!(log(&node, &host, "echo").matches("once").count(), 1, "nothing is written twice");
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_end_with_their_vm() {
    let node = Node::new().await;
    let host = node.open().await;
    sandbox(&host).await;
    run(&host, "main", &["serve"]).await;
    host.stop("pod", Duration::ZERO, None).await.unwrap();
    let lost = host.get("pod").unwrap().containers[&id("main")].clone();
    assert_eq!(lost.exit.as_ref().unwrap().error, "its VM ended");
    let refused = create(&host, "next", spec(&["serve"])).await.unwrap_err();
    assert_eq!(refused.code(), "COR-VM-005", "{refused}");
    host.remove_container("pod", &id("main")).await.unwrap();
    host.start("pod", None).await.unwrap();
    run(&host, "next", &["serve"]).await;
    host.delete("pod", true, None).await.unwrap();
    assert_eq!(std::fs::read_dir(node.state().join("vms")).unwrap().count(), 0);
    host.shutdown().await;
}

/// A lost session is opened again, and interrupted operations are settled.
#[tokio::test(flavor = "multi_thread")]
async fn container_without_a_record_is_removed_from_the_guest() {
    let node = Node::new().await;
    let host = node.open().await;
    sandbox(&host).await;
    run(&host, "main", &["serve"]).await;
    let guest = host.guest("pod").await.unwrap();
    let stray = coracle_proto::guest::CreateContainerRequest {
        id: "stray".into(),
        process: Some(coracle_proto::guest::Process { argv: vec!["x".into()], ..Default::default() }),
        ..Default::default()
    };
    guest.create_container(stray).await.unwrap();
    guest.close();
    let settled = eventually("the stray is removed", async || {
        let guest = host.guest("pod").await.ok()?;
        let listed = guest.list_containers().await.ok()?;
        (listed.iter().all(|status| status.id != "stray")).then_some(listed)
    });
    assert_eq!(settled.await.unwrap().len(), 1);
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_sandbox_gives_its_memory_back() {
    let node = Node::new().await;
    let host = node.open().await;
    sandbox(&host).await;
    assert_ne!(host.capacity().memory_declared_mib, 0);
    host.stop("pod", Duration::ZERO, None).await.unwrap();
    assert_eq!((host.capacity().memory_declared_mib, host.capacity().vcpus_declared), (0, 0));
    super::support::create(&host, "web").await;
    let with_one = host.capacity().memory_declared_mib;
    host.start("web", None).await.unwrap();
    host.stop("web", Duration::ZERO, None).await.unwrap();
    assert_eq!(host.capacity().memory_declared_mib, with_one, "a stopped VM may start again");
    host.start("pod", None).await.unwrap();
    assert!(host.capacity().memory_declared_mib > with_one, "a sandbox that runs again counts");
    host.shutdown().await;
}

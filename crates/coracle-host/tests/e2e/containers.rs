//! Containers of a real VM: two images, files of the node, a restarted daemon.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{
    ContainerId, ContainerMount, ContainerMountSource, ContainerSpec, ContainerState, Host, PullOrigin,
    PullPolicy, Resources, Sandbox, VmSpec, VolumeRequest, Workload,
};
use coracle_oci::NoProgress;
use coracle_testkit::oci::LayerTar;
use coracle_testkit::{eventually, netns};

use crate::support::{IMAGE, Node, guest};

const OTHER: &str = "localhost/test/other:1";

pub(crate) fn id(text: &str) -> ContainerId {
    text.parse().unwrap()
}

pub(crate) fn spec(image: &str, line: &str) -> ContainerSpec {
    let argv = ["sh", "-c", line].map(str::to_owned).to_vec();
    let process = Workload { argv, ..Workload::default() };
    ContainerSpec { image: image.to_owned(), process, ..ContainerSpec::default() }
}

fn mount(target: &str, volume: &str, sub_path: &str) -> ContainerMount {
    let source = ContainerMountSource::Volume { name: volume.to_owned(), sub_path: sub_path.to_owned() };
    ContainerMount { target: target.to_owned(), read_only: true, source }
}

pub(crate) async fn run(host: &Host, name: &str, spec: ContainerSpec) {
    let from = (PullPolicy::Never, PullOrigin::Local);
    host.create_container("pod", id(name), spec, from, Arc::new(NoProgress)).await.unwrap();
    host.start_container("pod", &id(name)).await.unwrap();
}

pub(crate) async fn code(host: &Host, name: &str) -> i32 {
    let ended = tokio::time::timeout(Duration::from_secs(30), host.wait_container("pod", &id(name))).await;
    ended.expect("it ends in time").unwrap().exit.unwrap().code
}

pub(crate) fn lines(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| line.splitn(4, ' ').skip(1).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn two_images_share_a_vm_through_daemon_restarts() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        node.import(OTHER, LayerTar::new().file("etc/other", 0o644, b"another image\n")).await;
        let volume_dirs = vec![node.dir.path().to_owned()];
        let open = async || {
            node.open_with(|config| {
                config.templates.enabled = true;
                config.volume_dirs = volume_dirs.clone();
            })
            .await
        };
        let host = open().await;
        host.warm_template(1.try_into().unwrap(), 128.try_into().unwrap(), "", None).await.unwrap();
        let sandbox = Sandbox { resolver_options: vec!["ndots:5".into()], ..Sandbox::default() };
        let vm = VmSpec { sandbox: Some(sandbox), ..VmSpec::of("pod".parse().unwrap(), "") };
        host.create(vm, Arc::new(NoProgress)).await.unwrap();
        let record = host.start("pod", None).await.unwrap();
        assert!(record.template.is_some(), "a sandbox is a clone of the same template");

        // Directory of the node with the layout of kubelets' Secrets: `..data` is swapped.
        let shared = node.dir.path().join("secret");
        std::fs::create_dir_all(shared.join("..one")).unwrap();
        std::fs::write(shared.join("..one/password"), "first").unwrap();
        std::os::unix::fs::symlink("..one", shared.join("..data")).unwrap();
        std::os::unix::fs::symlink("..data/password", shared.join("password")).unwrap();
        std::fs::write(shared.join("hosts"), "10.0.0.9\tkubernetes\n").unwrap();
        let source = shared.to_str().unwrap().to_owned();
        let request = VolumeRequest { name: "secret".into(), source, ..VolumeRequest::default() };
        host.attach_volume("pod", request, None).await.unwrap();

        let log = node.dir.path().join("pods/main/0.log");
        let count = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done";
        run(&host, "main", ContainerSpec { log_path: Some(log.clone()), ..spec(IMAGE, count) }).await;
        let read = "cat /etc/other /etc/hosts; grep -c ndots /etc/resolv.conf; cat /secret/password; touch /secret/x; exit 3";
        let mounts = vec![mount("/secret", "secret", ""), mount("/etc/hosts", "secret", "hosts")];
        run(&host, "side", ContainerSpec { mounts: mounts.clone(), ..spec(OTHER, read) }).await;
        assert_eq!(code(&host, "side").await, 3);
        let state = node.state().join("vms").join(record.id.as_str());
        let side = lines(&state.join("containers/side.log"));
        let want = ["stdout F another image", "stdout F 10.0.0.9\tkubernetes", "stdout F 1"];
        assert_eq!(side[..3], want, "{side:?}");
        assert!(side.iter().any(|line| line.ends_with("first")), "{side:?}");
        assert!(side.iter().any(|line| line.contains("Read-only file system")), "{side:?}");

        // The secret is rotated: a running container sees the new one.
        let watch = "until grep -q second /secret/password; do sleep 0.2; done; exit 5";
        run(&host, "watch", ContainerSpec { mounts, ..spec(OTHER, watch) }).await;
        std::fs::create_dir(shared.join("..two")).unwrap();
        std::fs::write(shared.join("..two/password"), "second").unwrap();
        std::os::unix::fs::symlink("..two", shared.join("..data.new")).unwrap();
        std::fs::rename(shared.join("..data.new"), shared.join("..data")).unwrap();
        assert_eq!(code(&host, "watch").await, 5);

        // One container is OOM-killed; the other one is not affected.
        let limits = Resources { memory_max_bytes: Some(8 << 20), ..Resources::default() };
        let greedy =
            spec(OTHER, "x=$(dd if=/dev/zero bs=1048576 count=16 | md5sum); y=a; while :; do y=$y$y; done");
        run(&host, "greedy", ContainerSpec { resources: limits, ..greedy }).await;
        code(&host, "greedy").await;
        let ended = host.get("pod").unwrap().containers[&id("greedy")].clone();
        assert!(ended.oom_killed, "{ended:?}");

        // The daemon is killed twice; the containers and their log continue.
        let started = host.get("pod").unwrap().containers[&id("main")].started_at;
        let mut host = host;
        for _ in 0..2 {
            host.shutdown().await;
            drop(host);
            host = open().await;
            guest(&host, "pod").await;
            let seen = lines(&log).len();
            eventually("the log continues", async || (lines(&log).len() > seen + 3).then_some(()))
                .await
                .unwrap();
        }
        let main = host.get("pod").unwrap().containers[&id("main")].clone();
        assert_eq!((main.state, main.started_at), (ContainerState::Running, started));
        host.stop_container("pod", &id("main"), Duration::ZERO).await.unwrap();
        let counted = lines(&log);
        let want: Vec<_> = (1..=counted.len()).map(|n| format!("stdout F {n}")).collect();
        assert_eq!(counted, want, "without a gap and without a repetition");

        // Another attempt of the same image, in the same VM.
        run(&host, "main-1", ContainerSpec { attempt: 1, ..spec(IMAGE, "exit 0") }).await;
        assert_eq!(code(&host, "main-1").await, 0);
        let statistics = eventually("statistics", async || host.container_statistics("pod").ok().flatten());
        assert!(statistics.await.unwrap().sandbox.is_some());
        host.delete("pod", true, None).await.unwrap();
        assert!(!state.exists());
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn hibernated_sandbox_wakes_with_its_containers() {
    netns::run_within(Duration::from_secs(120), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let vm = VmSpec { sandbox: Some(Sandbox::default()), ..VmSpec::of("pod".parse().unwrap(), "") };
        host.create(vm, Arc::new(NoProgress)).await.unwrap();
        host.start("pod", None).await.unwrap();
        run(&host, "main", spec(IMAGE, "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done")).await;
        let record = host.hibernate("pod", None).await.unwrap();
        let log = node.state().join("vms").join(record.id.as_str()).join("containers/main.log");
        assert_eq!(host.get("pod").unwrap().containers[&id("main")].state, ContainerState::Running);
        host.resume("pod", None).await.unwrap();
        let seen = lines(&log).len();
        eventually("it counts on", async || (lines(&log).len() > seen + 3).then_some(())).await.unwrap();
        host.stop_container("pod", &id("main"), Duration::ZERO).await.unwrap();
        let counted = lines(&log);
        assert_eq!(counted, (1..=counted.len()).map(|n| format!("stdout F {n}")).collect::<Vec<_>>());
        host.delete("pod", true, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

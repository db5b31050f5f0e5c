//! Groups of critest: Container basic, volume, log, OOM, image volume, multiple containers.

use std::time::Duration;

use coracle_proto::cri::*;
use coracle_testkit::eventually_within;
use tonic::Code;

use crate::pod::{Pod, Row, shell, with_security_context};
use crate::rows;
use crate::support::IMAGE;

pub(crate) fn rows() -> Vec<Row> {
    rows![
        runtime_should_support_creating_container,
        runtime_should_support_starting_container,
        runtime_should_support_stopping_container,
        runtime_should_support_removing_created_container,
        runtime_should_support_removing_running_container,
        runtime_should_support_removing_stopped_container,
        runtime_should_support_exec_sync,
        runtime_should_support_exec_sync_with_timeout,
        listing_stats_for_a_container,
        runtime_should_support_starting_container_with_volume,
        runtime_should_support_volume_when_host_path_is_symlink,
        termination_message_is_in_the_file_of_the_host,
        mounts_of_files_and_missing_directories,
        volume_in_memory_is_a_tmpfs_that_the_containers_share,
        mount_with_rprivate_should_not_support_propagation,
        mount_with_rslave_should_support_propagation_from_host,
        mount_with_rshared_is_refused,
        should_support_non_recursive_readonly_mounts,
        should_support_recursive_readonly_mounts,
        should_reject_a_recursive_readonly_mount_that_cannot_be,
        runtime_should_support_starting_container_with_log,
        runtime_should_support_reopening_container_log,
        runtime_should_output_oom_killed_reason,
        image_volume_should_be_read_only_with_its_digest,
        image_volume_should_refuse_readonly_false,
        image_volume_should_mount_a_sub_path,
        image_volume_should_fail_for_a_missing_sub_path,
        runtime_should_support_network_of_multiple_containers,
        runtime_should_support_exec_in_multiple_containers,
        runtime_should_update_container_resources,
        container_that_cannot_start_says_why,
    ]
}

async fn runtime_should_support_creating_container(pod: Pod) {
    let id = pod.create(shell("create", "sleep 1000")).await.unwrap();
    assert_eq!(pod.status(&id).await.state(), ContainerState::ContainerCreated);
    pod.remove(&id).await;
}

async fn runtime_should_support_starting_container(pod: Pod) {
    let id = pod.run(shell("start", "sleep 1000")).await;
    let status = pod.status(&id).await;
    assert_eq!(status.state(), ContainerState::ContainerRunning);
    assert!(status.started_at >= status.created_at && status.finished_at == 0);
    assert_eq!(status.user.unwrap().linux.unwrap().uid, 0);
    pod.remove(&id).await;
}

async fn runtime_should_support_stopping_container(pod: Pod) {
    let line = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done";
    let id = pod.run(shell("stop", line)).await;
    let ready = eventually_within(Duration::from_secs(20), "the trap is set", async || {
        (!pod.log(&pod.status(&id).await).is_empty()).then_some(())
    });
    ready.await.unwrap();
    pod.stop(&id, 20).await;
    let status = pod.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 5));
    pod.remove(&id).await;
    let id = pod.run(shell("kill", "trap '' TERM; while :; do sleep 0.1; done")).await;
    pod.stop(&id, 0).await;
    let status = pod.status(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "Error"));
    pod.remove(&id).await;
}

async fn runtime_should_support_removing_created_container(pod: Pod) {
    let id = pod.create(shell("remove", "sleep 1000")).await.unwrap();
    pod.remove(&id).await;
    let request = ContainerStatusRequest { container_id: id, verbose: false };
    let gone = pod.kubelet.clone().runtime.container_status(request).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
}

async fn runtime_should_support_removing_running_container(pod: Pod) {
    let id = pod.run(shell("remove", "sleep 1000")).await;
    pod.remove(&id).await;
}

async fn runtime_should_support_removing_stopped_container(pod: Pod) {
    let id = pod.run(shell("remove", "sleep 1000")).await;
    pod.stop(&id, 0).await;
    pod.remove(&id).await;
}

async fn runtime_should_support_exec_sync(pod: Pod) {
    let id = pod.run(shell("exec", "sleep 1000")).await;
    assert_eq!(pod.exec(&id, &["echo", "-n", "hello"]).await, ("hello".to_owned(), 0));
    let failed = pod.try_exec(&id, &["sh", "-c", "echo out; echo err >&2; exit 3"], 0).await.unwrap();
    assert_eq!((failed.stdout.as_slice(), failed.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(failed.exit_code, 3, "an answer, not an error");
    pod.remove(&id).await;
}

async fn runtime_should_support_exec_sync_with_timeout(pod: Pod) {
    let id = pod.run(shell("timeout", "sleep 1000")).await;
    let late = pod.try_exec(&id, &["sh", "-c", "sleep 4321 & sleep 4321"], 1).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
    let (left, _) = pod.exec(&id, &["sh", "-c", "ps -o args | grep '[s]leep 4321' | wc -l"]).await;
    assert_eq!(left.trim(), "0", "all that it started is gone");
    pod.remove(&id).await;
}

async fn listing_stats_for_a_container(pod: Pod) {
    let id = pod.run(shell("stats", "while :; do :; done")).await;
    let mut runtime = pod.kubelet.clone().runtime;
    let request = || ContainerStatsRequest { container_id: id.clone() };
    let first = runtime.container_stats(request()).await.unwrap().into_inner().stats.unwrap();
    assert!(first.cpu.unwrap().timestamp > 0 && first.memory.unwrap().timestamp > 0, "at once");
    let used = eventually_within(Duration::from_secs(15), "the guest reports", async || {
        let stats = pod.kubelet.clone().runtime.container_stats(request()).await.ok()?.into_inner().stats?;
        let cpu = stats.cpu?.usage_core_nano_seconds?.value;
        (cpu > 0 && stats.memory?.working_set_bytes?.value > 0).then_some(cpu)
    });
    used.await.unwrap();
    let pods = runtime.list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}).await.unwrap().into_inner();
    let of_container = pods.pod_metrics.iter().flat_map(|pod| &pod.container_metrics);
    let metrics = &of_container.into_iter().find(|one| one.container_id == id).unwrap().metrics;
    let value = |name: &str| metrics.iter().find(|m| m.name == name).unwrap().value.unwrap().value;
    assert!(value("container_processes") >= 1 && value("container_file_descriptors") >= 3);
    assert!(value("container_fs_limit_bytes") > 0 && value("container_memory_usage_bytes") > 0);
    pod.remove(&id).await;
}

fn mount_config(name: &str, line: &str, host_path: &str, readonly: bool) -> ContainerConfig {
    let mount =
        Mount { container_path: "/data".into(), host_path: host_path.into(), readonly, ..Mount::default() };
    ContainerConfig { mounts: vec![mount], ..shell(name, line) }
}

async fn runtime_should_support_starting_container_with_volume(pod: Pod) {
    let dir = pod.dir.join("volume");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("in"), "from the host\n").unwrap();
    let config = mount_config("volume", "cat /data/in; echo out > /data/out", dir.to_str().unwrap(), false);
    let (code, log) = pod.output(config).await;
    assert_eq!((code, log), (0, vec!["from the host".to_owned()]));
    assert_eq!(std::fs::read_to_string(dir.join("out")).unwrap(), "out\n");
    let config = mount_config("readonly", "touch /data/x", dir.to_str().unwrap(), true);
    assert_ne!(pod.output(config).await.0, 0, "read-only on the host");
}

async fn runtime_should_support_volume_when_host_path_is_symlink(pod: Pod) {
    let (dir, link) = (pod.dir.join("target"), pod.dir.join("link"));
    std::fs::create_dir_all(&dir).unwrap();
    std::os::unix::fs::symlink(&dir, &link).unwrap();
    let config = mount_config("symlink", "touch /data/made", link.to_str().unwrap(), false);
    assert_eq!(pod.output(config).await.0, 0);
    assert!(dir.join("made").exists());
}

async fn termination_message_is_in_the_file_of_the_host(pod: Pod) {
    let file = pod.dir.join("termination");
    std::fs::write(&file, "").unwrap();
    let mount = Mount {
        container_path: "/dev/termination-log".into(),
        host_path: file.display().to_string(),
        ..Mount::default()
    };
    let config = ContainerConfig {
        mounts: vec![mount.clone()],
        ..shell("message", "echo -n why > /dev/termination-log; exit 1")
    };
    let id = pod.run(config).await;
    let (status, _) = pod.wait_for_exit(&id).await;
    assert_eq!(status.mounts, [mount], "where the kubelet looks");
    assert_eq!(std::fs::read_to_string(file).unwrap(), "why", "before the end is reported");
    pod.remove(&id).await;
}

async fn mounts_of_files_and_missing_directories(pod: Pod) {
    let hosts = pod.dir.join("hosts");
    std::fs::write(&hosts, "10.0.0.9 kubernetes\n").unwrap();
    let missing = pod.dir.join("made/by/the/runtime");
    let mount = |container_path: &str, host_path: &std::path::Path| Mount {
        container_path: container_path.into(),
        host_path: host_path.display().to_string(),
        ..Mount::default()
    };
    let mounts =
        vec![mount("/data/deep", &missing), mount("/etc/hosts", &hosts), mount("/data", &pod.dir.join("x"))];
    let config = ContainerConfig { mounts, ..shell("files", "cat /etc/hosts; touch /data/deep/here") };
    assert_eq!(pod.output(config).await, (0, vec!["10.0.0.9 kubernetes".to_owned()]));
    assert!(missing.join("here").exists());
}

/// Volumes as the kubelet creates them for `emptyDir` with `medium: Memory`.
async fn volume_in_memory_is_a_tmpfs_that_the_containers_share(pod: Pod) {
    use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};
    let of_pod = pod.dir.join("pods/u1");
    let volume = of_pod.join("volumes/kubernetes.io~empty-dir/cache");
    let part = of_pod.join("volume-subpaths/cache/second/0");
    for dir in [&volume, &part] {
        std::fs::create_dir_all(dir).unwrap();
    }
    mount("tmpfs", &volume, "tmpfs", MountFlags::empty(), Some(c"size=8m,mode=0777,gid=2000")).unwrap();
    std::fs::create_dir(volume.join("part")).unwrap();
    mount_bind(volume.join("part"), &part).unwrap();
    let with = |name: &str, line: &str, dir: &std::path::Path| {
        mount_config(name, line, dir.to_str().unwrap(), false)
    };
    let line = "grep ' /data ' /proc/mounts | sed 's/ rw.*//'; ls -ldn /data; echo shared > /data/file; \
                dd if=/dev/zero of=/data/large bs=1M count=16 2>&1 | head -n 1; rm /data/large";
    let (code, log) = pod.output(with("first", line, &volume)).await;
    assert_eq!((code, log[0].as_str()), (0, "tmpfs /data tmpfs"), "{log:?}");
    assert!(log[1].starts_with("drwxrwxrwx") && log[1].contains(" 2000 "), "{log:?}");
    assert!(log[2].contains("No space left on device"), "{log:?}");
    // The volume belongs to its pod, also while no container mounts it.
    let config = with_security_context(with("second", "echo mine > /data/file", &part), |context| {
        context.run_as_user = Some(Int64Value { value: 1000 });
    });
    assert_eq!(pod.output(config).await.0, 0, "a part of it, that any user may write");
    let (_, log) = pod.output(with("third", "cat /data/file /data/part/file", &volume)).await;
    assert_eq!(log, ["shared", "mine"]);
    assert!(std::fs::read_dir(&volume).unwrap().flatten().all(|entry| entry.file_name() == "part"));
    let holds = "dd if=/dev/zero of=/data/held bs=1M count=6 2>/dev/null; while :; do sleep 1; done";
    let id = pod.run(with("holder", holds, &volume)).await;
    let counted = eventually_within(Duration::from_secs(15), "its memory is the container's", async || {
        let request = ContainerStatsRequest { container_id: id.clone() };
        let stats = pod.kubelet.clone().runtime.container_stats(request).await.ok()?.into_inner().stats?;
        (stats.memory?.working_set_bytes?.value >= 6 << 20).then_some(())
    });
    counted.await.unwrap();
    pod.remove(&id).await;
    for mounted in [part, volume] {
        unmount(mounted, UnmountFlags::empty()).expect("nothing holds it on the node");
    }
}

/// Checks the propagation of a mount that the host creates below a directory of a container, and of one that the container
/// creates.
async fn check_propagation(pod: &Pod, propagation: MountPropagation) {
    use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
    let is_private = propagation == MountPropagation::PropagationPrivate;
    let dir = pod.dir.join(propagation.as_str_name());
    let (source, place) = (dir.join("source"), dir.join("mnt/place"));
    for dir in [&source, &place, &dir.join("mnt/own")] {
        std::fs::create_dir_all(dir).unwrap();
    }
    std::fs::write(source.join("flag"), "").unwrap();
    mount_bind(dir.join("mnt"), dir.join("mnt")).unwrap();
    let kind = if is_private { MountPropagationFlags::PRIVATE } else { MountPropagationFlags::SHARED };
    mount_change(dir.join("mnt"), kind | MountPropagationFlags::REC).unwrap();
    let mut config = mount_config("propagation", "sleep 1000", dir.join("mnt").to_str().unwrap(), false);
    config.mounts[0].propagation = propagation.into();
    let id = pod.run(with_security_context(config, |context| context.privileged = true)).await;
    assert_eq!(pod.status(&id).await.mounts[0].propagation(), propagation);
    mount_bind(&source, &place).unwrap();
    let (seen, _) = pod.exec(&id, &["ls", "-A", "/data/place"]).await;
    assert_eq!(seen, if is_private { "" } else { "flag\n" }, "{propagation:?}");
    assert_eq!(pod.exec(&id, &["mount", "--bind", "/etc", "/data/own"]).await.1, 0);
    let own: Vec<_> = std::fs::read_dir(dir.join("mnt/own")).unwrap().collect();
    assert!(own.is_empty(), "a mount of the guest is the guest's: {own:?}");
    for mounted in [place, dir.join("mnt")] {
        unmount(mounted, UnmountFlags::DETACH).unwrap();
    }
    pod.remove(&id).await;
}

async fn mount_with_rprivate_should_not_support_propagation(pod: Pod) {
    check_propagation(&pod, MountPropagation::PropagationPrivate).await;
}

async fn mount_with_rslave_should_support_propagation_from_host(pod: Pod) {
    check_propagation(&pod, MountPropagation::PropagationHostToContainer).await;
}

async fn mount_with_rshared_is_refused(pod: Pod) {
    let mut config = mount_config("shared", "true", pod.dir.to_str().unwrap(), false);
    config.mounts[0].propagation = MountPropagation::PropagationBidirectional.into();
    assert_eq!(pod.create(config).await.unwrap_err().code(), Code::InvalidArgument);
}

/// Checks writes to another file system below a read-only directory.
async fn writes_below_a_read_only_mount(pod: &Pod, recursive: bool) {
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
    let dir = pod.dir.join(format!("recursive-{recursive}"));
    std::fs::create_dir_all(dir.join("tmpfs")).unwrap();
    mount("none", dir.join("tmpfs"), "tmpfs", MountFlags::empty(), None).unwrap();
    let mut config = mount_config("submounts", "sleep 1000", dir.to_str().unwrap(), true);
    config.mounts[0].recursive_read_only = recursive;
    let id = pod.run(config).await;
    let touch = async |path: &str| pod.try_exec(&id, &["touch", path], 20).await.unwrap();
    let top = touch("/data/file").await;
    assert!(String::from_utf8_lossy(&top.stderr).contains("Read-only file system"), "{top:?}");
    let below = touch("/data/tmpfs/file").await;
    assert_eq!(below.exit_code == 0, !recursive, "recursive: {recursive}, {below:?}");
    assert_eq!(dir.join("tmpfs/file").exists(), !recursive);
    pod.remove(&id).await;
    unmount(dir.join("tmpfs"), UnmountFlags::empty()).expect("removed containers leave what they had");
}

async fn should_support_non_recursive_readonly_mounts(pod: Pod) {
    writes_below_a_read_only_mount(&pod, false).await;
}

async fn should_support_recursive_readonly_mounts(pod: Pod) {
    writes_below_a_read_only_mount(&pod, true).await;
}

async fn should_reject_a_recursive_readonly_mount_that_cannot_be(pod: Pod) {
    for (propagation, readonly) in [
        (MountPropagation::PropagationHostToContainer, true),
        (MountPropagation::PropagationBidirectional, true),
        (MountPropagation::PropagationPrivate, false),
    ] {
        let mut config = mount_config("refused", "true", pod.dir.to_str().unwrap(), readonly);
        (config.mounts[0].propagation, config.mounts[0].recursive_read_only) = (propagation.into(), true);
        let refused = pod.create(config).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{propagation:?}");
    }
}

async fn runtime_should_support_starting_container_with_log(pod: Pod) {
    let long = "x".repeat(20_000);
    let line = format!("echo hello; echo err >&2; echo {long}; echo -n rest");
    let id = pod.run(shell("log", &line)).await;
    let (status, _) = pod.wait_for_exit(&id).await;
    let text = std::fs::read_to_string(&status.log_path).unwrap();
    for line in text.lines() {
        let fields: Vec<_> = line.splitn(4, ' ').collect();
        let (time, nanoseconds) = fields[0].split_once('.').unwrap();
        assert_eq!((time.len(), nanoseconds.trim_end_matches('Z').len()), (19, 9), "{line:.60}");
        assert!(["stdout", "stderr"].contains(&fields[1]) && ["F", "P"].contains(&fields[2]), "{line:.60}");
        assert!(fields[3].len() <= 16_384);
    }
    assert!(text.contains(" stdout F hello\n") && text.contains(" stderr F err\n"));
    assert!(text.contains(" stdout P xxx") && text.contains(" stdout F xxx"), "{text:.300}");
    assert!(text.ends_with(" stdout F rest\n"), "the end of the stream ends the line");
    pod.remove(&id).await;
    assert!(std::path::Path::new(&status.log_path).exists());
}

async fn runtime_should_support_reopening_container_log(pod: Pod) {
    let id = pod.run(shell("reopen", "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done")).await;
    let path = pod.status(&id).await.log_path;
    let reopen = || ReopenContainerLogRequest { container_id: id.clone() };
    let lines = |path: &str| std::fs::read_to_string(path).unwrap_or_default().lines().count();
    let waits = |what: &'static str, path: String| async move {
        eventually_within(Duration::from_secs(20), what, async || (lines(&path) > 2).then_some(()))
            .await
            .unwrap();
    };
    waits("the log grows", path.clone()).await;
    let old = format!("{path}.20260801-100000");
    std::fs::rename(&path, &old).unwrap();
    pod.kubelet.clone().runtime.reopen_container_log(reopen()).await.unwrap();
    assert!(std::path::Path::new(&path).exists(), "made before the answer");
    waits("the new log grows", path.clone()).await;
    pod.stop(&id, 0).await;
    let refused = pod.kubelet.clone().runtime.reopen_container_log(reopen()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let content = |path: &str| std::fs::read_to_string(path).unwrap();
    let both = [content(&old), content(&path)].concat();
    let counted: Vec<_> = both.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect();
    assert_eq!(counted, (1..=counted.len()).map(|n| n.to_string()).collect::<Vec<_>>(), "nothing is lost");
    pod.remove(&id).await;
}

async fn runtime_should_output_oom_killed_reason(pod: Pod) {
    let resources = LinuxContainerResources { memory_limit_in_bytes: 15 << 20, ..Default::default() };
    let linux = Some(LinuxContainerConfig { resources: Some(resources), ..Default::default() });
    let config = shell("oom", "dd if=/dev/zero of=/dev/null bs=20M");
    let id = pod.run(ContainerConfig { linux, ..config }).await;
    let (status, _) = pod.wait_for_exit(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "OOMKilled"));
    pod.remove(&id).await;
}

fn of_image(name: &str, line: &str, readonly: bool, image_sub_path: &str) -> ContainerConfig {
    let mount = Mount {
        container_path: "/model".into(),
        readonly,
        image: Some(ImageSpec { image: IMAGE.into(), ..ImageSpec::default() }),
        image_sub_path: image_sub_path.into(),
        ..Mount::default()
    };
    ContainerConfig { mounts: vec![mount], ..shell(name, line) }
}

async fn image_volume_should_be_read_only_with_its_digest(pod: Pod) {
    let line = "/model/bin/busybox cat /model/model/en/words; touch /model/x; exit 0";
    let id = pod.run(of_image("image-ro", line, true, "")).await;
    let (status, log) = pod.wait_for_exit(&id).await;
    assert_eq!(log[0], "hello", "programs of the image run");
    assert!(log[1].contains("Read-only file system"), "{log:?}");
    let image = status.mounts[0].image.clone().unwrap();
    assert_eq!(image.image_ref, status.image_id, "what a pull answers");
    pod.remove(&id).await;
}

async fn image_volume_should_refuse_readonly_false(pod: Pod) {
    let refused = pod.create(of_image("image", "true", false, "")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

async fn image_volume_should_mount_a_sub_path(pod: Pod) {
    let (code, log) = pod.output(of_image("image", "cat /model/words", true, "model/en")).await;
    assert_eq!((code, log), (0, vec!["hello".to_owned()]));
}

async fn image_volume_should_fail_for_a_missing_sub_path(pod: Pod) {
    let refused = pod.create(of_image("image", "true", true, "no/such")).await.unwrap_err();
    assert!(refused.message().starts_with("ImageVolumeMountFailed"), "{refused}");
}

async fn runtime_should_support_network_of_multiple_containers(pod: Pod) {
    let server = pod.run(shell("server", "httpd -f -p 127.0.0.1:8080 -h /www")).await;
    let line = "until wget -q -O - http://127.0.0.1:8080/; do sleep 0.2; done";
    let (code, log) = pod.output(shell("client", line)).await;
    assert_eq!((code, log.last().map(String::as_str)), (0, Some("hello")));
    pod.remove(&server).await;
}

async fn runtime_should_support_exec_in_multiple_containers(pod: Pod) {
    let (one, two) = (pod.run(shell("one", "sleep 1000")).await, pod.run(shell("two", "sleep 1000")).await);
    pod.exec(&one, &["sh", "-c", "echo one > /tmp/which"]).await;
    pod.exec(&two, &["sh", "-c", "echo two > /tmp/which"]).await;
    assert_eq!(pod.exec(&one, &["cat", "/tmp/which"]).await.0, "one\n");
    assert_eq!(pod.exec(&two, &["cat", "/tmp/which"]).await.0, "two\n");
    pod.remove(&one).await;
    pod.remove(&two).await;
}

async fn runtime_should_update_container_resources(pod: Pod) {
    let config = with_security_context(shell("resize", "sleep 1000"), |context| context.privileged = true);
    let id = pod.run(config).await;
    let resources = LinuxContainerResources {
        memory_limit_in_bytes: 32 << 20,
        cpu_quota: 25_000,
        cpu_period: 50_000,
        ..LinuxContainerResources::default()
    };
    let request = UpdateContainerResourcesRequest {
        container_id: id.clone(),
        linux: Some(resources),
        ..UpdateContainerResourcesRequest::default()
    };
    pod.kubelet.clone().runtime.update_container_resources(request).await.unwrap();
    let linux = pod.status(&id).await.resources.unwrap().linux.unwrap();
    assert_eq!((linux.memory_limit_in_bytes, linux.cpu_quota, linux.cpu_period), (32 << 20, 25_000, 50_000));
    let (memory, _) = pod.exec(&id, &["cat", "/sys/fs/cgroup/memory.max"]).await;
    let (cpu, _) = pod.exec(&id, &["cat", "/sys/fs/cgroup/cpu.max"]).await;
    assert_eq!((memory.trim(), cpu.trim()), ("33554432", "50000 100000"));
    pod.remove(&id).await;
}

async fn container_that_cannot_start_says_why(pod: Pod) {
    let config = ContainerConfig { command: vec!["/no/such".into()], ..shell("missing", "") };
    let id = pod.create(config).await.unwrap();
    let refused = pod.start(&id).await.unwrap_err();
    assert!(refused.message().contains("/no/such: not found"), "{refused}");
    let status = pod.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 128));
    assert_eq!(status.reason, "StartError");
    pod.remove(&id).await;
}

//! Disk pods on real VMs: Debian with systemd, whose agent comes on a disk from the node.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_host::COMMIT_ANNOTATION;
use coracle_oci::NoProgress;
use coracle_proto::cri::*;
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::{eventually_within, tools};
use tokio::io::AsyncReadExt as _;

use crate::pod::Pod;
use crate::support::Daemon;

pub(crate) const DISK: &str = "localhost/test/debian:12";
/// Time limit for booting a full operating system without KVM.
const BOOT_LIMIT: Duration = Duration::from_secs(300);

fn image() -> Option<PathBuf> {
    let image = tools::system_image();
    if image.is_none() {
        tools::skip("no disk image; `cargo xtask setup` makes it");
    }
    image
}

fn mount(container_path: &str, host_path: &Path, readonly: bool) -> Mount {
    let (container_path, host_path) = (container_path.to_owned(), host_path.display().to_string());
    Mount { container_path, host_path, readonly, ..Mount::default() }
}

/// Returns a container that runs a shell command line in the guest of the disk image.
fn shell(attempt: u32, line: &str) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: "mac".into(), attempt }),
        image: Some(ImageSpec { image: DISK.into(), ..ImageSpec::default() }),
        command: ["sh", "-c", line].map(str::to_owned).to_vec(),
        log_path: format!("mac/{attempt}.log"),
        linux: Some(LinuxContainerConfig::default()),
        ..ContainerConfig::default()
    }
}

impl Daemon {
    async fn disk_pod(&self, name: &str) -> Pod {
        self.disk_pod_with(name, "").await
    }

    /// Runs a disk pod whose disk is pushed as the image `commit`.
    async fn disk_pod_with(&self, name: &str, commit: &str) -> Pod {
        let linux = LinuxContainerResources {
            memory_limit_in_bytes: 448 << 20,
            cpu_quota: 100_000,
            cpu_period: 100_000,
            ..LinuxContainerResources::default()
        };
        let mut config = self.config(name);
        config.linux.get_or_insert_default().resources = Some(linux);
        config.annotations.insert("coracle.dev/extra-disk".to_owned(), "512Mi".to_owned());
        if !commit.is_empty() {
            config.annotations.insert(COMMIT_ANNOTATION.to_owned(), commit.to_owned());
        }
        self.pod_with(config, "macvm").await
    }
}

/// Returns the first bytes of a container's display.
async fn banner(daemon: &Daemon, container: &str) -> String {
    let mut screen = daemon.host.display(container).await.unwrap();
    let mut said = [0; 12];
    let read = tokio::time::timeout(Duration::from_secs(20), screen.read_exact(&mut said));
    read.await.expect("it speaks first").unwrap();
    String::from_utf8_lossy(&said).into_owned()
}

/// Returns the MiB that the files below a directory allocate on the host.
fn allocated_mib(dir: &Path) -> i64 {
    let output = std::process::Command::new("du").args(["-sm"]).arg(dir).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().next().and_then(|mib| mib.parse().ok()).unwrap()
}

async fn wait_for_exit(pod: &Pod, id: &str) -> ContainerStatus {
    let ended = eventually_within(BOOT_LIMIT, "the container ends", async || {
        let status = pod.status(id).await;
        (status.state() == ContainerState::ContainerExited).then_some(status)
    });
    ended.await.unwrap()
}

/// Checks command, arguments, environment, mounts, log and exit code. A second attempt has a new disk and the same address.
pub(crate) async fn disk_pod_passes(daemon: &Daemon) {
    let Some(image) = image() else { return };
    let name = DISK.parse().unwrap();
    daemon.host.import_disk(&image, Some(name), Arc::new(NoProgress)).await.unwrap();
    let pod = daemon.disk_pod("mac").await;
    let status = pod.sandbox_status().await;
    let address = status.network.unwrap().ip;

    let scripts = pod.dir.join("scripts");
    std::fs::create_dir_all(&scripts).unwrap();
    std::fs::write(scripts.join("run.sh"), "echo run by a script of $NAME; echo wrong >&2\n").unwrap();
    let message = pod.dir.join("message");
    std::fs::write(&message, "").unwrap();
    let before = allocated_mib(&daemon.host.config().state_dir);
    let line = "sh /scripts/run.sh; df -m /mnt/extra | tail -1 | awk '$2 > 400 && $3 < 100 {print \"empty disk\"}'; \
                head -c 32M /dev/urandom > /mnt/extra/left; head -c 32M /dev/urandom > /root/big; sync; touch /scripts/x 2>/dev/null || echo read-only; \
                echo said > /dev/termination-log; touch /root/left; printf unfinished; exit 3";
    let config = ContainerConfig {
        envs: vec![KeyValue { key: "NAME".into(), value: b"kube-7".to_vec() }],
        mounts: vec![mount("/scripts", &scripts, true), mount("/dev/termination-log", &message, false)],
        ..shell(0, line)
    };
    let first = pod.run(config).await;
    assert_eq!(pod.status(&first).await.state(), ContainerState::ContainerRunning, "before its system is up");
    let status = wait_for_exit(&pod, &first).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (3, "Error"), "{}", status.message);
    assert_eq!(std::fs::read_to_string(&message).unwrap(), "said\n");
    let text = std::fs::read_to_string(&status.log_path).unwrap();
    let lines: Vec<_> = text.lines().filter_map(|line| line.split_once(' ').map(|(_, rest)| rest)).collect();
    for want in [
        "stdout F run by a script of kube-7",
        "stdout F empty disk",
        "stderr F wrong",
        "stdout F read-only",
        "stdout F unfinished",
    ] {
        assert!(lines.contains(&want), "{want}: {text}");
    }

    // The disk of the image is shared: only written data take space.
    let written = allocated_mib(&daemon.host.config().state_dir) - before;
    assert!((64..256).contains(&written), "{written} MiB of a disk that has 450 and 64 that were written");

    // Restart: a new copy of the disk, the same address.
    let second = pod.run(shell(1, "trap 'echo asked; exit 5' TERM; while :; do sleep 1; done")).await;
    assert_eq!(banner(daemon, &second).await, "RFB 003.008\n", "a screen before the system is up");
    let look = [
        "sh",
        "-c",
        "ls /root/left /mnt/extra/left 2>&1; hostname; ip -4 -o addr; cat /sys/class/graphics/fb0/virtual_size",
    ];
    let said = pod.try_exec(&second, &look, 0).await.unwrap().stdout;
    let said = String::from_utf8(said).unwrap();
    assert!(
        said.matches("No such file").count() == 2 && said.contains("\nmac\n") && said.contains(&address),
        "{said}"
    );
    let failed = pod.try_exec(&second, &["sh", "-c", "exit 7"], 20).await.unwrap();
    assert_eq!(failed.exit_code, 7);
    let stats = eventually_within(Duration::from_secs(60), "statistics", async || {
        let request = ContainerStatsRequest { container_id: second.clone() };
        let stats = pod.kubelet.clone().runtime.container_stats(request).await.unwrap().into_inner().stats?;
        let cpu = stats.cpu?.usage_core_nano_seconds?.value;
        let disk = stats.writable_layer?.used_bytes?.value;
        (cpu > 0 && disk > 0).then_some(stats.memory?.working_set_bytes?.value)
    });
    assert!(stats.await.unwrap() > 16 << 20, "of the whole guest");
    pod.stop(&second, 30).await;
    let status = pod.status(&second).await;
    assert_eq!(
        (status.state(), status.exit_code),
        (ContainerState::ContainerExited, 5),
        "{}",
        status.message
    );
    assert!(pod.log(&status).contains(&"asked".to_owned()), "{:?}", pod.log(&status));
    pod.remove(&first).await;
    pod.remove(&second).await;
    let left = allocated_mib(&daemon.host.config().state_dir) - before;
    assert!(left < 16, "{left} MiB are left of containers that are removed");
    assert_eq!(pod.sandbox_status().await.network.unwrap().ip, address);
}

/// The command of a pod installs a unit that starts the agent from the node's disk, and its disk is pushed. The next pod runs
/// on that image, which does not contain cloud-init any more. A failing command pushes nothing.
pub(crate) async fn disk_pod_becomes_an_image(daemon: &Daemon) {
    let (Some(image), Some(_)) = (image(), tools::require(["docker-registry"])) else { return };
    let registry = DebianRegistry::start().unwrap();
    let name = DISK.parse().unwrap();
    daemon.host.import_disk(&image, Some(name), Arc::new(NoProgress)).await.unwrap();
    let result = format!("{}/build/xcode:26", registry.address());
    let build = daemon.disk_pod_with("build", &result).await;
    let unit = include_str!("../../../../examples/coracle-agent.service");
    let scripts = build.dir.join("unit");
    std::fs::create_dir_all(&scripts).unwrap();
    std::fs::write(scripts.join("coracle-agent.service"), unit).unwrap();
    let line = "set -e; cp /unit/coracle-agent.service /etc/systemd/system/; \
                systemctl enable coracle-agent.service; touch /etc/cloud/cloud-init.disabled; echo built > /root/built";
    let config = ContainerConfig { mounts: vec![mount("/unit", &scripts, true)], ..shell(0, line) };
    let built = build.run(config).await;
    let status = wait_for_exit(&build, &built).await;
    assert_eq!(status.exit_code, 0, "{}: {:?}", status.message, build.log(&status));
    let failed = build.run(shell(1, "exit 4")).await;
    assert_eq!(wait_for_exit(&build, &failed).await.exit_code, 4, "and no image");

    let image = Some(ImageSpec { image: result.clone(), ..ImageSpec::default() });
    let request = PullImageRequest { image, ..PullImageRequest::default() };
    let id = build.kubelet.clone().images.pull_image(request).await.unwrap().into_inner().image_ref;
    let pod = daemon.disk_pod("runner").await;
    let image = Some(ImageSpec { image: id, user_specified_image: result, ..ImageSpec::default() });
    let line = "cat /root/built; systemctl is-active cloud-init || true";
    let ran = pod.run(ContainerConfig { image, ..shell(0, line) }).await;
    let status = wait_for_exit(&pod, &ran).await;
    let log = pod.log(&status);
    assert_eq!((status.exit_code, log.join("\n").as_str()), (0, "built\ninactive"), "{}", status.message);
}

//! Pods whose VM has no guest agent: SSH to a real sshd, and help texts for guests without SSH.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use coracle_api::cocoon::{LifecycleState, keys};
use coracle_testkit::{cluster, eventually, tools};
use coracle_vm_pod::ssh::Password;
use futures_util::{AsyncBufReadExt as _, SinkExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::Node;
use kube::api::{AttachParams, AttachedProcess, LogParams, TerminalSize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::provider_suite::reachable_world;
use crate::world::World;

/// Address of the guest with SSH. The second one never answers.
const GUEST: &str = "10.98.0.4";
/// Password of root in the guest, and its entry for shadow(5).
const PASSWORD: &str = "swordfish";
const SHADOW: &str = "root:$6$coracle$Wv7Ehg8jDpoOet5fpIQXDWh84ihYiN.rAMjJw6l7vX6RCPYTl0zhGaskzcQ/zG9resHzQmx3PNIt1pYHAOG051:19000:0:99999:7:::\nsshd:!:19000::::::\n";
/// Fake journalctl that prints its arguments, and does not exit with `--follow`.
const JOURNALCTL: &str = r#"#!/bin/sh
echo "$@"
case "$*" in *--follow*) while echo more; do sleep 0.1; done ;; esac
"#;

/// Starts an sshd with that password, in its own mount namespace.
async fn sshd(dir: &Path) -> Result<Child> {
    // The address exists already when the test runs again in this network namespace.
    let address = ["ip", "address", "add", &format!("{GUEST}/32"), "dev", "lo"];
    Command::new("busybox").args(address).output().await?;
    let path = |name: &str| dir.join(name).display().to_string();
    std::fs::create_dir(path("bin"))?;
    std::fs::write(path("bin/journalctl"), JOURNALCTL)?;
    std::fs::set_permissions(path("bin/journalctl"), std::fs::Permissions::from_mode(0o755))?;
    std::fs::write(path("shadow"), SHADOW)?;
    let key = ["-q", "-t", "ed25519", "-N", "", "-f", &path("key")];
    ensure!(Command::new("ssh-keygen").args(key).status().await?.success(), "ssh-keygen");
    let config = format!(
        "ListenAddress {GUEST}:22\nHostKey {}\nPidFile none\nUsePAM no\nPermitRootLogin yes\nStrictModes no\n\
         SetEnv PATH={}:/usr/bin:/bin\n",
        path("key"),
        path("bin"),
    );
    std::fs::write(path("config"), config)?;
    let script =
        "mount --bind $0 /etc/shadow && mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec $1 -D -e -f $2";
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "sh", "-c", script, &path("shadow"), "/usr/sbin/sshd", &path("config")]);
    let log = std::fs::File::create(path("log"))?;
    let child = unshare.stderr(log).kill_on_drop(true).spawn()?;
    let listens = eventually("sshd listens", async || TcpStream::connect((GUEST, 22)).await.ok().map(drop));
    listens.await.with_context(|| std::fs::read_to_string(path("log")).unwrap_or_default())?;
    Ok(child)
}

/// Waits until the API server knows the address of the node. A pod that brings its VM may be Ready before that.
async fn until_reachable(world: &World) -> Result<()> {
    let nodes: kube::Api<Node> = kube::Api::all(world.client.clone());
    let known = async || nodes.get(&world.options.name).await.ok()?.status?.addresses.map(drop);
    eventually("the node has addresses", known).await
}

/// Creates a pod that brings a VM of another machine.
async fn create_static_pod(world: &World, name: &str, os: &str) -> Result<()> {
    until_reachable(world).await?;
    let vm = format!("vk-prod-{name}");
    let annotations = [
        (keys::VM_NAME, vm.as_str()),
        (keys::MODE, "static"),
        (keys::OS, os),
        (keys::VM_ID, "elsewhere"),
        (keys::VM_IP, GUEST),
    ];
    world.create_vm(name, &annotations).await?;
    world.until_state(name, LifecycleState::Ready).await.map(drop)
}

/// Returns the output of the command, and its result.
async fn result(mut process: AttachedProcess) -> Result<(String, String)> {
    let mut printed = String::new();
    let mut stdout = process.stdout().context("an output")?;
    stdout.read_to_string(&mut printed).await?;
    let status = process.take_status().context("a status")?.await.context("an outcome")?;
    Ok((printed, status.message.or(status.status).unwrap_or_default()))
}

#[test]
fn guest_without_an_agent_is_entered_by_ssh() {
    cluster::run_within(Duration::from_secs(120), async |cluster| -> Result<()> {
        let Some(_) = tools::require(["/usr/sbin/sshd", "ssh-keygen"]) else { return Ok(()) };
        let mut world = reachable_world(cluster).await?;
        std::fs::create_dir(world.path("ssh"))?;
        let _sshd = sshd(&world.path("ssh")).await?;
        world.options.vms.ssh = Some(Password::new(PASSWORD));
        let daemon = world.start().await?;
        create_static_pod(&world, "guest", "linux").await?;
        let pods = world.pods();

        let script = ["sh", "-c", "cat; echo \"it's $0\" >&2; exit 7", "a  b"];
        let streams = AttachParams::default().stdin(true).stderr(true);
        let mut process = pods.exec("guest", script, &streams).await?;
        let mut stdin = process.stdin().context("an input")?;
        stdin.write_all(b"from the client").await?;
        stdin.shutdown().await?;
        let mut stderr = process.stderr().context("an output of errors")?;
        let (printed, outcome) = result(process).await?;
        let mut errors = String::new();
        stderr.read_to_string(&mut errors).await?;
        assert_eq!((printed.as_str(), errors.as_str()), ("from the client", "it's a  b\n"));
        assert!(outcome.contains("exit code: 7"), "{outcome}");

        let wait = "until test \"$(stty size)\" = '50 132'; do sleep 0.1; done; echo large";
        let mut process = pods.exec("guest", ["sh", "-c", wait], &AttachParams::interactive_tty()).await?;
        let mut sizes = process.terminal_size().context("a terminal")?;
        sizes.send(TerminalSize { height: 50, width: 132 }).await?;
        assert_eq!(result(process).await?, ("large\r\n".to_owned(), "Success".to_owned()));

        let logs = async |params: LogParams| pods.logs("guest", &params).await;
        let last = LogParams { tail_lines: Some(5), ..LogParams::default() };
        assert_eq!(logs(last).await?, "--no-pager --quiet --lines=5\n");
        assert_eq!(logs(LogParams::default()).await?, "--no-pager --quiet --lines=200\n");
        let few = LogParams { limit_bytes: Some(4), ..LogParams::default() };
        assert_eq!(logs(few).await?, "--no");
        let follow = LogParams { follow: true, ..LogParams::default() };
        let lines = pods.log_stream("guest", &follow).await?.lines().take(3);
        let lines: Vec<_> = lines.map(|line| line.unwrap_or_default()).collect().await;
        assert_eq!(lines, ["--no-pager --quiet --lines=200 --follow", "more", "more"]);
        daemon.stop().await
    });
}

#[test]
fn unreachable_guest_reports_the_reason() {
    cluster::run_within(Duration::from_secs(120), async |cluster| -> Result<()> {
        let mut world = reachable_world(cluster).await?;
        world.options.vms.ssh = Some(Password::new("wrong"));
        let daemon = world.start().await?;
        create_static_pod(&world, "windows", "windows").await?;
        let pods = world.pods();
        let help = pods.logs("windows", &LogParams::default()).await?;
        assert!(
            help.contains("Windows") && help.contains(&format!("RDP:\n  address: {GUEST}:3389")),
            "{help}"
        );
        let process = pods.exec("windows", ["cmd"], &AttachParams::default()).await?;
        let (printed, outcome) = result(process).await?;
        assert_eq!(printed, help);
        assert!(outcome.contains("exit code: 1"), "a command that was not run did not succeed: {outcome}");

        create_static_pod(&world, "silent", "linux").await?;
        let process = pods.exec("silent", ["true"], &AttachParams::default()).await?;
        let (_, outcome) = result(process).await?;
        assert!(outcome.contains(&format!("cannot log in to {GUEST}:22 by SSH")), "{outcome}");
        let error = pods.logs("silent", &LogParams::default()).await.unwrap_err().to_string();
        assert!(error.contains("by SSH"), "{error}");
        daemon.stop().await
    });
}

//! `coracle down`: stops and removes a local system, including one whose processes were killed.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use coracle_hypervisor::{ProcessId, find_by_argument, launch, remove_cgroup};
use coracle_net::{BridgeNetwork, Network};
use coracle_proto::host as pb;
use coracle_types::InstanceId;
use miette::{IntoDiagnostic, WrapErr};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{cluster, kubelet};
use coracle_cli::cli::{DownArgs, Global};
use coracle_cli::client;

/// Time limit for the supervisor: a system with many guests needs a while to power them off.
const SUPERVISOR_LIMIT: Duration = Duration::from_secs(90);

/// File with the process id and start time of a supervisor.
pub(crate) const SUPERVISOR_FILE: &str = "up.pid";

/// Time for a guest to power off.
const GUEST_GRACE_MS: u32 = 5_000;

/// Programs of a system that are not our own.
const PROGRAMS: [&str; 5] =
    ["etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubelet"];
const OWN_PROGRAMS: [&str; 3] = ["node", "operator", "registry"];

/// Stops everything of this state directory. Idempotent: prints a message if nothing runs.
pub(crate) async fn run(global: &Global, args: DownArgs) -> miette::Result<()> {
    let state = global.state();
    let supervisor = supervisor(&state);
    if let Some(process) = supervisor {
        eprintln!("{}", stop_message(count_running_vms(global).await));
        signal(process, Signal::TERM);
        if timeout(SUPERVISOR_LIMIT, process.exited()).await.is_err() {
            eprintln!("the system does not stop, killing it");
            process.kill().await.into_diagnostic()?;
        }
    }
    // Does what the supervisor could not do because it was killed.
    stop_vms(global).await;
    end_leftovers(&state).await;
    remove_traces(&state).await?;
    cluster::withdraw(&state).await;
    let _absent = std::fs::remove_file(state.join("up.ready"));
    if args.purge && state.exists() {
        std::fs::remove_dir_all(&state)
            .into_diagnostic()
            .wrap_err_with(|| format!("remove {}", state.display()))?;
    }
    eprintln!("{}", if supervisor.is_some() { "down" } else { "nothing was up" });
    Ok(())
}

/// Returns the number of running VMs; 0 if their node does not answer.
async fn count_running_vms(global: &Global) -> usize {
    let Ok(mut client) = client::open(&global.socket()).await else { return 0 };
    let Ok(vms) = client.list_vms(pb::ListVmsRequest {}).await else { return 0 };
    vms.into_inner().vms.iter().filter(|vm| vm.vmm_pid != 0).count()
}

/// Returns the line that says what the stop waits for. Pure.
fn stop_message(vms: usize) -> String {
    let parts = "node, operator and control plane";
    match vms {
        0 => format!("stopping {parts}"),
        1 => format!("stopping 1 VM (at most {} s), {parts}", GUEST_GRACE_MS / 1000),
        _ => format!("stopping {vms} VMs (at most {} s), {parts}", GUEST_GRACE_MS / 1000),
    }
}

/// Returns the running `coracle up` of this directory, from the process id that it wrote at its start.
fn supervisor(state: &Path) -> Option<ProcessId> {
    let bytes = std::fs::read(state.join(SUPERVISOR_FILE)).ok()?;
    let process: ProcessId = serde_json::from_slice(&bytes).ok()?;
    process.is_alive().unwrap_or(false).then_some(process)
}

fn command_line(process: ProcessId) -> Vec<String> {
    let cmdline = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
    cmdline.split(|b| *b == 0).map(|w| String::from_utf8_lossy(w).into_owned()).collect()
}

/// Returns the file name of the executable of a process of this user. The process name is not used: any user may name a process
/// `etcd` and pass this state directory in its arguments (proc(5), `exe`).
fn own_program(process: ProcessId) -> Option<String> {
    let at = format!("/proc/{}", process.pid);
    if std::fs::metadata(&at).ok()?.uid() != rustix::process::geteuid().as_raw() {
        return None;
    }
    let path = std::fs::read_link(format!("{at}/exe")).ok()?;
    let name = path.file_name()?.to_string_lossy().into_owned();
    // The kernel adds this suffix if the executable was replaced.
    Some(name.strip_suffix(" (deleted)").unwrap_or(&name).to_owned())
}

fn signal(process: ProcessId, signal: Signal) {
    if let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) {
        let _already_gone = kill_process(pid, signal);
    }
}

/// Powers all VMs off through their node, in parallel. Does nothing without a node.
pub(crate) async fn stop_vms(global: &Global) {
    let Ok(mut client) = client::open(&global.socket()).await else { return };
    let Ok(vms) = client.list_vms(pb::ListVmsRequest {}).await else { return };
    let mut stops = JoinSet::new();
    for vm in vms.into_inner().vms {
        let mut client = client.clone();
        let request = pb::StopVmRequest { vm: vm.id, grace_ms: Some(GUEST_GRACE_MS), ..Default::default() };
        stops.spawn(async move { client.stop_vm(request).await.is_ok() });
    }
    stops.join_all().await;
}

/// Ends children of a supervisor that was killed. Affects only our programs with this state directory in their arguments, not a
/// `tail` of its logs.
pub(crate) async fn end_leftovers(state: &Path) {
    for process in find_by_argument(state).unwrap_or_default() {
        let Some(program) = own_program(process) else { continue };
        let is_daemon =
            || command_line(process).get(1).is_some_and(|word| OWN_PROGRAMS.contains(&word.as_str()));
        let own = program == "coracle" && is_daemon();
        if !own && !PROGRAMS.contains(&program.as_str()) {
            continue;
        }
        signal(process, Signal::TERM);
        if timeout(Duration::from_secs(10), process.exited()).await.is_err() {
            let _already_gone = process.kill().await;
        }
    }
}

/// Returns the ids of VMM instances, from their directories.
fn instances(state: &Path) -> Vec<InstanceId> {
    let dirs = std::fs::read_dir(state.join("instances")).into_iter().flatten().flatten();
    dirs.filter_map(|dir| dir.file_name().to_str()?.parse().ok()).collect()
}

/// Returns whether the tap exists and belongs to no bridge (Linux, Documentation/ABI/testing/sysfs-class-net).
fn is_off_the_bridge(tap: &str) -> bool {
    let device = Path::new("/sys/class/net").join(tap);
    device.exists() && !device.join("brport").exists()
}

/// Removes VMMs, network and sockets.
pub(crate) async fn remove_traces(state: &Path) -> miette::Result<()> {
    let run_dir = coracle_host::run_dir_of(state);
    for dir in std::fs::read_dir(&run_dir).into_iter().flatten().flatten() {
        if let Some(vmm) = launch::find_in(&dir.path()).into_diagnostic().wrap_err("find a VMM")? {
            vmm.kill().await.into_diagnostic().wrap_err("end a VMM")?;
        }
    }
    kubelet::remove_traces(state)?;
    for id in instances(state) {
        remove_cgroup(&id, None).into_diagnostic().wrap_err_with(|| format!("remove the cgroup of {id}"))?;
    }
    if rustix::process::geteuid().is_root() && state.join("network.json").exists() {
        let network = BridgeNetwork::open(state, None).await.into_diagnostic()?;
        // A tap that is not on the bridge yet is only known by its instance.
        for id in instances(state).into_iter().filter(|id| is_off_the_bridge(&id.tap_name())) {
            network
                .detach(&id)
                .await
                .into_diagnostic()
                .wrap_err_with(|| format!("remove the tap of {id}"))?;
        }
        network.teardown().await.into_diagnostic().wrap_err("remove the network")?;
    }
    match std::fs::remove_dir_all(&run_dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).into_diagnostic().wrap_err_with(|| format!("remove {}", run_dir.display()))
        }
        _ => Ok(()),
    }
}

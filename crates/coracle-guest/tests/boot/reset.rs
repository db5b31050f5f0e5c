//! A real guest shows no trace of its earlier identity after a reset.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use coracle_proto::guest::*;
use tonic::Code;

use crate::client::{Session, exec, process, sh};
use crate::machine::Machine;
use crate::{BOOT, Client, check_announcement, request};

const OFF: Duration = Duration::from_secs(20);
/// Commands that print the identity of a guest.
const WHO: &str = "hostname; cat /etc/hosts /etc/hostname /etc/resolv.conf /etc/machine-id; ip addr; ip route; \
    ip -6 route; ls / /sys/fs/cgroup; cat /sys/fs/cgroup/cgroup.subtree_control";
/// Traces of [`request`], and of the processes that ran.
const TRACES: [&str; 11] = [
    "web-0",
    "02:00:00:00:00:2a",
    "10.0.2.15",
    "192.168.0.0",
    "fd2",
    "mtu 1450",
    "0123456789abcdef",
    "trace",
    "memory pids",
    "workload",
    "containers",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_guest_has_no_earlier_identity() -> Result<()> {
    let Some(mut machine) = Machine::boot()? else { return Ok(()) };
    let told = scenario(&mut machine).await;
    told.with_context(|| machine.diagnostics())
}

async fn scenario(machine: &mut Machine) -> Result<()> {
    let session = Session::open(&machine.socket(), BOOT).await?;
    let mut c = session.client.clone();
    reset(&mut c).await.context("one that is not configured")?;
    c.prepare(PrepareRequest { overlay_device: "/dev/vdb".into(), ..PrepareRequest::default() }).await?;

    c.configure(request()).await?;
    run_workload(&mut c, "echo first; touch /trace; read line").await.context("the first workload")?;
    ensure!(is_refused(&mut c).await, "its workload runs");
    c.signal_workload(SignalWorkloadRequest { signal: 9 }).await?;
    wait_workload_end(&mut c).await?;
    reset(&mut c).await.context("after a workload")?;
    reset(&mut c).await.context("again")?;
    let status = c.status(StatusRequest {}).await?.into_inner();
    ensure!(!status.configured && status.workload == WorkloadState::NotStarted as i32, "{status:?}");

    let of_containers = ConfigureSandboxRequest {
        hostname: "web-0".into(),
        network: request().network,
        overlay_device: "/dev/vdb".into(),
        limits: request().limits,
        ..ConfigureSandboxRequest::default()
    };
    c.configure_sandbox(of_containers).await?;
    let container = CreateContainerRequest {
        id: "trace".into(),
        image_device: "/dev/vda".into(),
        image_fs: "erofs".into(),
        process: Some(sh("touch /trace")),
        ..CreateContainerRequest::default()
    };
    c.create_container(container).await?;
    ensure!(is_refused(&mut c).await, "it has a container");
    c.remove_container(RemoveContainerRequest { id: "trace".into() }).await?;
    reset(&mut c).await.context("after a container")?;

    configure_another(machine, &mut c).await?;
    c.shutdown(ShutdownRequest { grace_ms: 0 }).await?;
    machine.wait_exit(OFF)?;
    Ok(())
}

/// A warm-up has a root of its own, and its device can be used afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warmed_up_guest_has_no_earlier_identity() -> Result<()> {
    let Some(mut machine) = Machine::boot()? else { return Ok(()) };
    let told = warm_up(&mut machine).await;
    told.with_context(|| machine.diagnostics())
}

async fn warm_up(machine: &mut Machine) -> Result<()> {
    let session = Session::open(&machine.socket(), BOOT).await?;
    let mut c = session.client.clone();
    let prepare = PrepareRequest {
        overlay_device: "/dev/vdb".into(),
        warm_up_image_device: "/dev/vdc".into(),
        ..PrepareRequest::default()
    };
    c.prepare(prepare).await?;
    let root = RootMount {
        image_device: "/dev/vdc".into(),
        image_fs: "erofs".into(),
        overlay_device: "/dev/vdb".into(),
        root_first: true,
    };
    let program = process(&["/bin/program", WARM_UP]);
    c.configure(ConfigureRequest { root: Some(root), ..request() }).await?;
    c.start_workload(StartWorkloadRequest { process: Some(program.clone()) }).await?;
    let exit = c.wait_workload(WaitWorkloadRequest {}).await?.into_inner().exit;
    ensure!(exit.as_ref().is_some_and(|exit| exit.code == 0), "{exit:?}");
    wait_workload_end(&mut c).await?;
    reset(&mut c).await.context("after the warm-up")?;

    let of_containers =
        ConfigureSandboxRequest { overlay_device: "/dev/vdb".into(), ..ConfigureSandboxRequest::default() };
    c.configure_sandbox(of_containers).await?;
    let container = CreateContainerRequest {
        id: "container".into(),
        image_device: "/dev/vdc".into(),
        image_fs: "erofs".into(),
        process: Some(program),
        ..CreateContainerRequest::default()
    };
    c.create_container(container).await.context("on the device of the warm-up")?;
    let started = c.start_container(StartContainerRequest { id: "container".into() }).await?.into_inner();
    ensure!(started.exit.is_none(), "{started:?}");
    c.remove_container(RemoveContainerRequest { id: "container".into() }).await?;
    reset(&mut c).await.context("after a container")?;

    configure_another(machine, &mut c).await?;
    c.shutdown(ShutdownRequest { grace_ms: 0 }).await?;
    machine.wait_exit(OFF)?;
    Ok(())
}

/// Configures the guest for another VM, and checks that it has no trace of earlier ones.
async fn configure_another(machine: &Machine, c: &mut Client) -> Result<()> {
    let other = ConfigureRequest {
        hostname: "other".into(),
        machine_id: "f".repeat(32),
        network: Some(Network {
            mac: "02:00:00:00:00:2b".into(),
            address: "10.0.3.7/24".into(),
            ..Network::default()
        }),
        limits: None,
        ..request()
    };
    let addresses = c.configure(other).await?.into_inner().addresses;
    ensure!(addresses == ["10.0.3.7/24"], "{addresses:?}");
    check_announcement(machine, [2, 0, 0, 0, 0, 0x2b], [10, 0, 3, 7]).await?;
    run_workload(c, "echo second; read line").await.context("the second workload")?;
    let who = exec(c, sh(WHO), vec![]).await?.text();
    ensure!(who.starts_with("other\n") && who.contains("mtu 1500"), "{who}");
    for trace in TRACES {
        ensure!(!who.contains(trace), "{trace} is left: {who}");
    }
    Ok(())
}

/// Starts a workload and checks that it first prints the second word of `script`.
async fn run_workload(c: &mut Client, script: &str) -> Result<()> {
    c.start_workload(StartWorkloadRequest { process: Some(Process { stdin: true, ..sh(script) }) }).await?;
    let mut logs = c.logs(LogsRequest { from_offset: 0 }).await?.into_inner();
    let first = logs.message().await?.context("no output")?;
    let printed = String::from_utf8(first.data)?;
    ensure!(first.offset == 0 && Some(printed.trim()) == script.split([' ', ';']).nth(1), "{printed:?}");
    Ok(())
}

/// Waits for the exit of the workload, and for the end of its output.
async fn wait_workload_end(c: &mut Client) -> Result<()> {
    c.wait_workload(WaitWorkloadRequest {}).await?;
    let mut logs = c.logs(LogsRequest { from_offset: 0 }).await?.into_inner();
    while logs.message().await?.is_some() {}
    Ok(())
}

async fn reset(c: &mut Client) -> Result<()> {
    c.reset(ResetRequest {}).await?;
    Ok(())
}

async fn is_refused(c: &mut Client) -> bool {
    c.reset(ResetRequest {}).await.is_err_and(|e| e.code() == Code::FailedPrecondition)
}

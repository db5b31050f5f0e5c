//! ps, inspect, start, stop, rm, wait.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle_proto::host as pb;
use serde_json::{Value, json};

use crate::cli::{Format, Global, InspectArgs, NamesArgs, PsArgs, RmArgs, StopArgs};
use crate::client::connect;
use crate::error::Failure;
use crate::output::{self, Columns};

/// `coracle ps`.
pub(crate) async fn ps(global: &Global, args: PsArgs) -> miette::Result<u8> {
    let vms = connect(global).await?.list_vms(pb::ListVmsRequest {}).await.map_err(Failure::from)?;
    let off =
        |vm: &pb::Vm| matches!(vm.state(), pb::VmState::Stopped | pb::VmState::Failed | pb::VmState::Created);
    let vms: Vec<_> = vms.into_inner().vms.into_iter().filter(|vm| args.all || !off(vm)).collect();
    let format = if args.quiet { Format::Name } else { args.output };
    match format {
        Format::Json | Format::Yaml => output::list(format, "VM", vms.iter().map(document).collect())?,
        Format::Name => output::write(&vms.iter().map(|vm| format!("{}\n", vm.name)).collect::<String>())?,
        Format::Table if vms.is_empty() => {
            eprintln!("no VMs{}; start one with `coracle run IMAGE`", if args.all { "" } else { " run" });
        }
        Format::Table => table(&vms)?,
    }
    Ok(0)
}

fn table(vms: &[pb::Vm]) -> Result<(), Failure> {
    let mut columns = Columns::new(&["NAME", "STATE", "DRIVER", "CPU", "MEMORY", "IP", "IMAGE", "AGE"]);
    for vm in vms {
        let dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
        let driver = if vm.accelerator.is_empty() {
            vm.driver.clone()
        } else {
            format!("{}/{}", vm.driver, vm.accelerator)
        };
        columns.row(&[
            vm.name.clone(),
            state_word(vm),
            driver,
            vm.vcpus.to_string(),
            format!("{} MiB", vm.memory_mib),
            dash(&vm.ip_address),
            vm.image.clone(),
            output::age(now_ms() - vm.created_at_ms),
        ]);
    }
    columns.print()
}

/// The state, with the exit code where it says more.
fn state_word(vm: &pb::Vm) -> String {
    let word = state_name(vm.state());
    match (&vm.exit, vm.state()) {
        (Some(exit), pb::VmState::Stopped) => format!("{word} ({})", exit.code),
        _ => word.to_owned(),
    }
}

fn state_name(state: pb::VmState) -> &'static str {
    match state {
        pb::VmState::Unspecified => "Unknown",
        pb::VmState::Created => "Created",
        pb::VmState::Starting => "Starting",
        pb::VmState::Running => "Running",
        pb::VmState::Stopping => "Stopping",
        pb::VmState::Stopped => "Stopped",
        pb::VmState::Failed => "Failed",
        pb::VmState::Deleting => "Deleting",
    }
}

/// A VM as a document: intent in `spec`, observation in `status`.
pub(crate) fn document(vm: &pb::Vm) -> Value {
    let time = |ms: i64| {
        (ms > 0).then(|| jiff::Timestamp::from_millisecond(ms).ok()).flatten().map(|t| t.to_string())
    };
    let ports: Vec<_> = vm
        .ports
        .iter()
        .map(|p| json!({"hostAddress": p.host_address, "hostPort": p.host_port, "guestPort": p.guest_port}))
        .collect();
    json!({
        "apiVersion": "coracle.dev/v1",
        "kind": "VM",
        "metadata": {"name": vm.name, "id": vm.id, "createdAt": time(vm.created_at_ms), "annotations": vm.metadata},
        "spec": {"image": vm.image, "cpus": vm.vcpus, "memoryMiB": vm.memory_mib, "command": vm.command, "ports": ports},
        "status": {
            "state": state_name(vm.state()),
            "message": vm.message,
            "imageDigest": vm.image_digest,
            "ipAddress": vm.ip_address,
            "mac": vm.mac,
            "driver": vm.driver,
            "accelerator": vm.accelerator,
            "vmmPid": vm.vmm_pid,
            "startedAt": time(vm.started_at_ms),
            "finishedAt": time(vm.finished_at_ms),
            "exit": vm.exit.as_ref().map(|e| json!({"code": e.code, "signal": e.signal, "error": e.error})),
            "boots": vm.boots,
            "bootMs": vm.boot_ms,
            "agentConnected": vm.agent_connected,
            "diskBytes": vm.disk_bytes,
        },
    })
}

/// `coracle inspect`.
pub(crate) async fn inspect(global: &Global, args: InspectArgs) -> miette::Result<u8> {
    let mut client = connect(global).await?;
    let mut found = Vec::new();
    for vm in args.vms {
        found.push(client.get_vm(pb::GetVmRequest { vm }).await.map_err(Failure::from)?.into_inner());
    }
    match (args.output, found.as_slice()) {
        (Format::Name, vms) => {
            output::write(&vms.iter().map(|vm| format!("{}\n", vm.name)).collect::<String>())?
        }
        (Format::Table, vms) => table(vms)?,
        (format, [one]) => output::document(format, &document(one))?,
        (format, vms) => output::list(format, "VM", vms.iter().map(document).collect())?,
    }
    Ok(0)
}

/// `coracle start`.
pub(crate) async fn start(global: &Global, args: NamesArgs) -> miette::Result<u8> {
    let mut client = connect(global).await?;
    for vm in args.vms {
        let vm = client.start_vm(pb::StartVmRequest { vm }).await.map_err(Failure::from)?.into_inner();
        output::write(&format!("{}\n", vm.name))?;
    }
    Ok(0)
}

/// `coracle stop`.
pub(crate) async fn stop(global: &Global, args: StopArgs) -> miette::Result<u8> {
    let mut client = connect(global).await?;
    let grace = Duration::try_from(args.timeout).map_err(|_| Failure::usage("a timeout is not negative"))?;
    let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
    for vm in args.vms {
        let request = pb::StopVmRequest { vm, grace_ms: Some(grace_ms) };
        let vm = client.stop_vm(request).await.map_err(Failure::from)?.into_inner();
        output::write(&format!("{}\n", vm.name))?;
    }
    Ok(0)
}

/// `coracle rm`. Goes on after a failure and reports the first.
pub(crate) async fn rm(global: &Global, args: RmArgs) -> miette::Result<u8> {
    let mut client = connect(global).await?;
    let mut failure = None;
    for vm in args.vms {
        let request = pb::DeleteVmRequest { vm: vm.clone(), force: args.force };
        match client.delete_vm(request).await {
            Ok(_) => output::write(&format!("{vm}\n"))?,
            Err(status) => {
                let _later_ones_are_like_it = failure.get_or_insert(Failure::from(status));
            }
        }
    }
    match failure {
        None => Ok(0),
        Some(failure) => Err(failure.into()),
    }
}

/// `coracle wait`.
pub(crate) async fn wait(global: &Global, args: NamesArgs) -> miette::Result<u8> {
    let mut client = connect(global).await?;
    for vm in args.vms {
        let vm = client.wait_vm(pb::WaitVmRequest { vm }).await.map_err(Failure::from)?.into_inner();
        output::write(&format!("{}\n", exit_of(&vm)))?;
    }
    Ok(0)
}

/// The guest's own exit code; ours when it had none.
pub(crate) fn exit_of(vm: &pb::Vm) -> u8 {
    match &vm.exit {
        Some(exit) => u8::try_from(exit.code).unwrap_or(u8::MAX),
        None if vm.state() == pb::VmState::Failed => crate::error::exit::OURS,
        None => 0,
    }
}

fn now_ms() -> i64 {
    #[expect(clippy::disallowed_methods, reason = "an age is shown to a person at this moment")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// The same clock, for `--since`.
pub(crate) fn before_now_ms(span: jiff::SignedDuration) -> i64 {
    now_ms().saturating_sub(i64::try_from(span.as_millis()).unwrap_or(i64::MAX))
}

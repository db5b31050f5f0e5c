//! The VM of a disk pod as a container. Pure.

use std::path::Path;

use coracle_host::{
    COMMIT_ANNOTATION, ContainerId, ContainerRecord, ContainerSpec, ContainerState, Exit, Record,
};
use coracle_proto::cri::PodSandboxConfig;
use coracle_types::VmState;

use crate::facts::ContainerFacts;

/// Exit code that the agent reports for a command that never ran, as shells do.
const NOT_RUN: i32 = 127;
/// Exit of a killed VM.
const KILLED: Exit = Exit { code: 137, signal: 9, error: String::new() };

/// Returns the record of the container that is the VM `vm`. `copying`: its output is still being written to the log.
pub(crate) fn container_record(
    vm: &Record,
    facts: &ContainerFacts,
    sandbox: &PodSandboxConfig,
    copying: bool,
) -> Option<ContainerRecord> {
    let id: ContainerId = vm.name.as_str().parse().ok()?;
    let config = &facts.config;
    let has_log = [&sandbox.log_directory, &config.log_path].iter().all(|part| !part.is_empty());
    let spec = ContainerSpec {
        image: facts.image_ref.clone(),
        process: vm.workload.clone(),
        attempt: config.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
        log_path: has_log.then(|| Path::new(&sandbox.log_directory).join(&config.log_path)),
        metadata: vm.metadata.clone(),
        ..ContainerSpec::default()
    };
    let state = state(vm.state, copying);
    let has_run = state != ContainerState::Created;
    let mut record = ContainerRecord::new(id, spec, vm.image_digest.clone(), vm.created_at);
    record.state = state;
    record.started_at = vm.started_at.or(Some(vm.created_at)).filter(|_| has_run);
    if state == ContainerState::Exited {
        record.finished_at = vm.finished_at.or(record.started_at);
        record.exit = Some(exit(vm));
        record.oom_killed = vm.oom_killed;
    }
    Some(record)
}

fn state(vm: VmState, copying: bool) -> ContainerState {
    match vm {
        VmState::Creating | VmState::Created => ContainerState::Created,
        VmState::Stopped | VmState::Failed | VmState::Deleting if !copying => ContainerState::Exited,
        VmState::Starting
        | VmState::Running
        | VmState::Paused
        | VmState::Hibernating
        | VmState::Hibernated
        | VmState::Stopping
        | VmState::Stopped
        | VmState::Failed
        | VmState::Deleting => ContainerState::Running,
    }
}

/// Returns the exit of a VM that is off.
fn exit(vm: &Record) -> Exit {
    let wanted_image = vm.metadata.contains_key(COMMIT_ANNOTATION);
    match &vm.exit {
        // The command succeeded, but its resulting image is missing.
        Some(exit) if exit.success() && wanted_image && vm.committed.is_none() => {
            Exit { code: 1, signal: 0, error: vm.message.clone() }
        }
        Some(exit) => exit.clone(),
        None if vm.state == VmState::Failed => {
            let code = if vm.started_at.is_none() { NOT_RUN } else { 255 };
            Exit { code, signal: 0, error: vm.message.clone() }
        }
        // Without a command, the guest itself is the container, and it was powered off.
        None if vm.workload.argv.is_empty() && !vm.message.starts_with("killed") => Exit::default(),
        None => KILLED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(state: VmState, command: &[&str], exit: Option<i32>) -> Record {
        let mut vm = coracle_host::Record::new(
            coracle_types::VmId::of_name(&"ab".parse().unwrap()),
            "ab".parse().unwrap(),
            (1.try_into().unwrap(), 128.try_into().unwrap()),
            coracle_host::Workload::default(),
            coracle_types::UnixMillis(5),
        );
        vm.state = state;
        vm.workload.argv = command.iter().map(|word| (*word).to_owned()).collect();
        vm.exit = exit.map(|code| Exit { code, signal: 0, error: String::new() });
        vm
    }

    fn of(vm: &Record, copying: bool) -> ContainerRecord {
        container_record(vm, &ContainerFacts::default(), &PodSandboxConfig::default(), copying).unwrap()
    }

    #[test]
    fn states_table() {
        use ContainerState::{Created, Exited, Running};
        for (state, copying, want) in [
            (VmState::Created, false, Created),
            (VmState::Starting, true, Running),
            (VmState::Running, true, Running),
            (VmState::Stopping, true, Running),
            (VmState::Stopped, true, Running),
            (VmState::Stopped, false, Exited),
            (VmState::Failed, false, Exited),
        ] {
            let record = of(&vm(state, &["sh"], None), copying);
            assert_eq!(record.state, want, "{state} {copying}");
            assert_eq!(record.started_at.is_some(), want != Created, "{state}");
            assert_eq!(
                (record.exit.is_some(), record.finished_at.is_some()),
                (want == Exited, want == Exited)
            );
        }
    }

    #[test]
    fn exits_table() {
        let named = |mut vm: Record, committed: Option<&str>| {
            vm.metadata.insert(COMMIT_ANNOTATION.to_owned(), "a.example/b:1".to_owned());
            vm.committed = committed.map(str::to_owned);
            vm
        };
        let killed = |mut vm: Record| {
            vm.message = "killed: the guest did not power off in time".to_owned();
            vm
        };
        let ran = |mut vm: Record| {
            vm.started_at = Some(coracle_types::UnixMillis(6));
            vm
        };
        let sh = &["sh"][..];
        for (why, vm, want) in [
            ("its command", vm(VmState::Stopped, sh, Some(3)), (3, 0)),
            ("a system without a command", vm(VmState::Stopped, &[], None), (0, 0)),
            ("one that was killed", killed(vm(VmState::Stopped, &[], None)), (137, 9)),
            ("off before the command ended", vm(VmState::Stopped, sh, None), (137, 9)),
            ("no VMM", vm(VmState::Failed, sh, None), (127, 0)),
            ("the VMM died", ran(vm(VmState::Failed, sh, None)), (255, 0)),
            ("an image was pushed", named(vm(VmState::Stopped, sh, Some(0)), Some("sha256:1")), (0, 0)),
            ("no image was pushed", named(vm(VmState::Stopped, sh, Some(0)), None), (1, 0)),
            ("none was to be pushed", named(vm(VmState::Stopped, sh, Some(4)), None), (4, 0)),
        ] {
            let exit = of(&vm, false).exit.unwrap();
            assert_eq!((exit.code, exit.signal), want, "{why}");
        }
    }
}

//! Converts records of the host core into CRI messages. Pure.

use std::path::Path;

use coracle_host::{ContainerRecord, ContainerState as Recorded, Exit, Record};
use coracle_proto::cri::{
    Container, ContainerResources, ContainerState, ContainerStatus, ContainerUser, ImageSpec,
    LinuxContainerUser, LinuxPodSandboxStatus, Namespace, NamespaceMode, PodIp, PodSandbox, PodSandboxConfig,
    PodSandboxNetworkStatus, PodSandboxState, PodSandboxStatus,
};
use coracle_types::{UnixMillis, VmState};

use crate::facts::{ContainerFacts, SandboxFacts};
use crate::translate::{resources, signals};

/// Exit code of a process that never ran, as in the OCI runtimes.
const START_FAILED: i32 = 128;
/// Exit codes that the guest agent reports for such a process, as shells do.
const NOT_RUN: [i32; 2] = [126, 127];

/// Converts a time to nanoseconds since 1970.
pub(crate) fn nanoseconds(time: UnixMillis) -> i64 {
    time.0.saturating_mul(1_000_000)
}

/// Returns whether the creation of this sandbox was acknowledged, which implies that its VM was started.
pub(crate) fn is_acknowledged(record: &Record, facts: &SandboxFacts) -> bool {
    let was_started = record.started_at.is_some() || facts.disk;
    was_started && !matches!(record.state, VmState::Creating | VmState::Deleting)
}

/// Returns the state of a sandbox. A paused or hibernated VM counts as ready, because the node resumes it. The VM of a disk
/// pod's sandbox never runs: it is ready until it is stopped.
pub(crate) fn sandbox_state(state: VmState, disk: bool) -> PodSandboxState {
    match state {
        VmState::Created if disk => PodSandboxState::SandboxReady,
        VmState::Running | VmState::Paused | VmState::Hibernating | VmState::Hibernated => {
            PodSandboxState::SandboxReady
        }
        VmState::Creating
        | VmState::Created
        | VmState::Starting
        | VmState::Stopping
        | VmState::Stopped
        | VmState::Failed
        | VmState::Deleting => PodSandboxState::SandboxNotready,
    }
}

/// Returns the list entry of a sandbox.
pub(crate) fn pod_sandbox(record: &Record, facts: &SandboxFacts) -> PodSandbox {
    PodSandbox {
        id: record.name.to_string(),
        metadata: Some(facts.config.metadata.clone().unwrap_or_default()),
        state: sandbox_state(record.state, facts.disk).into(),
        created_at: nanoseconds(record.created_at),
        labels: facts.config.labels.clone(),
        annotations: facts.config.annotations.clone(),
        runtime_handler: facts.handler.clone(),
    }
}

/// Returns the whole status of a sandbox.
pub(crate) fn pod_sandbox_status(record: &Record, facts: &SandboxFacts) -> PodSandboxStatus {
    let PodSandbox { id, metadata, state, created_at, labels, annotations, runtime_handler } =
        pod_sandbox(record, facts);
    let security = facts.config.linux.clone().unwrap_or_default().security_context.unwrap_or_default();
    let namespaces = security.namespace_options.unwrap_or_default();
    let has_own_network = namespaces.network() != NamespaceMode::Node;
    let ready = sandbox_state(record.state, facts.disk) == PodSandboxState::SandboxReady;
    let addresses = if facts.disk { record.addresses() } else { record.reachable_addresses() };
    let mut ips = addresses.iter().filter(|_| ready && has_own_network).map(ToString::to_string);
    PodSandboxStatus {
        id,
        metadata,
        state,
        created_at,
        // The kubelet would replace a sandbox whose status contains a network without an address.
        network: ips
            .next()
            .map(|ip| PodSandboxNetworkStatus { ip, additional_ips: ips.map(|ip| PodIp { ip }).collect() }),
        linux: Some(LinuxPodSandboxStatus { namespaces: Some(Namespace { options: Some(namespaces) }) }),
        labels,
        annotations,
        runtime_handler,
    }
}

pub(crate) fn container_state(state: Recorded) -> ContainerState {
    match state {
        Recorded::Created => ContainerState::ContainerCreated,
        Recorded::Running => ContainerState::ContainerRunning,
        Recorded::Exited => ContainerState::ContainerExited,
    }
}

/// Returns the image of a container: the reference that the user wrote, if the kubelet provides it.
fn image(facts: &ContainerFacts) -> ImageSpec {
    let mut image = facts.config.image.clone().unwrap_or_default();
    let is_id = image.image.is_empty() || image.image.starts_with("sha256:");
    if is_id && !image.user_specified_image.is_empty() {
        image.image.clone_from(&image.user_specified_image);
    } else if image.image.is_empty() {
        image.image.clone_from(&facts.image_id);
    }
    image
}

/// Returns the list entry of a container.
pub(crate) fn container(sandbox: &str, record: &ContainerRecord, facts: &ContainerFacts) -> Container {
    Container {
        id: record.id.to_string(),
        pod_sandbox_id: sandbox.to_owned(),
        metadata: Some(facts.config.metadata.clone().unwrap_or_default()),
        image: Some(image(facts)),
        image_ref: facts.image_ref.clone(),
        state: container_state(record.state).into(),
        created_at: nanoseconds(record.created_at),
        labels: facts.config.labels.clone(),
        annotations: facts.config.annotations.clone(),
        image_id: facts.image_id.clone(),
    }
}

/// Returns the whole status of a container.
pub(crate) fn container_status(
    record: &ContainerRecord,
    facts: &ContainerFacts,
    sandbox: &PodSandboxConfig,
) -> ContainerStatus {
    let Container {
        id, metadata, image, image_ref, state, created_at, labels, annotations, image_id, ..
    } = container("", record, facts);
    let end = end(record.exit.as_ref(), record.oom_killed);
    let limits = facts.config.linux.clone().unwrap_or_default().resources.unwrap_or_default();
    let log_path = [&sandbox.log_directory, &facts.config.log_path];
    let has_log = log_path.iter().all(|part| !part.is_empty());
    let log_path = Path::new(&sandbox.log_directory).join(&facts.config.log_path);
    let user = record.user.as_ref().map(|user| LinuxContainerUser {
        uid: user.uid.into(),
        gid: user.gid.into(),
        supplemental_groups: user.groups.iter().copied().map(i64::from).collect(),
    });
    let stop_signal = if record.spec.stop_signal == 0 { 15 } else { record.spec.stop_signal };
    ContainerStatus {
        id,
        metadata,
        state,
        created_at,
        started_at: record.started_at.map_or(0, nanoseconds),
        finished_at: record.finished_at.map_or(0, nanoseconds),
        exit_code: end.code,
        image,
        image_ref,
        reason: end.reason.to_owned(),
        message: end.message,
        labels,
        annotations,
        mounts: facts.config.mounts.clone(),
        log_path: if has_log { log_path.display().to_string() } else { String::new() },
        resources: Some(ContainerResources { linux: Some(resources::effective(&limits)) }),
        image_id,
        user: Some(ContainerUser { linux: user }),
        stop_signal: signals::signal(stop_signal).into(),
    }
}

/// End of a container, in the terms of the kubelet.
#[derive(Debug, Default, PartialEq, Eq)]
struct End {
    code: i32,
    reason: &'static str,
    message: String,
}

fn end(exit: Option<&Exit>, oom_killed: bool) -> End {
    let Some(exit) = exit else { return End::default() };
    let (code, reason) = match exit {
        _ if start_failure(exit).is_some() => (START_FAILED, "StartError"),
        _ if oom_killed => (exit.code, "OOMKilled"),
        Exit { code: 0, signal: 0, .. } if exit.error.is_empty() => (0, "Completed"),
        _ => (exit.code, "Error"),
    };
    End { code, reason, message: exit.error.clone() }
}

/// Returns the reason why a process never ran.
pub(crate) fn start_failure(exit: &Exit) -> Option<&str> {
    (!exit.error.is_empty() && NOT_RUN.contains(&exit.code)).then_some(exit.error.as_str())
}

#[cfg(test)]
mod tests {
    use coracle_host::{ContainerSpec, ProcessUser};
    use coracle_proto::cri::{ContainerConfig, Mount};

    use super::*;

    #[test]
    fn ends_table() {
        let exit = |code, signal, error: &str| Exit { code, signal, error: error.into() };
        for (why, exit, oom, want) in [
            ("well", exit(0, 0, ""), false, (0, "Completed")),
            ("badly", exit(3, 0, ""), false, (3, "Error")),
            ("its own 127", exit(127, 0, ""), false, (127, "Error")),
            ("killed", exit(137, 9, ""), false, (137, "Error")),
            ("for want of memory", exit(137, 9, ""), true, (137, "OOMKilled")),
            ("it could not start", exit(127, 0, "x: not found"), false, (128, "StartError")),
            ("with its VM", exit(255, 0, "its VM ended"), false, (255, "Error")),
        ] {
            let end = end(Some(&exit), oom);
            assert_eq!((end.code, end.reason), want, "{why}");
            assert_eq!(end.message, exit.error, "{why}");
        }
    }

    #[test]
    fn sandbox_states_table() {
        for (state, ready) in [
            (VmState::Created, false),
            (VmState::Starting, false),
            (VmState::Running, true),
            (VmState::Hibernated, true),
            (VmState::Stopped, false),
            (VmState::Failed, false),
        ] {
            assert_eq!(sandbox_state(state, false) == PodSandboxState::SandboxReady, ready, "{state}");
        }
        for (state, ready) in [(VmState::Created, true), (VmState::Stopped, false)] {
            assert_eq!(
                sandbox_state(state, true) == PodSandboxState::SandboxReady,
                ready,
                "of disks: {state}"
            );
        }
    }

    #[test]
    fn container_status_reflects_the_creation_config() {
        let mounts = vec![Mount { host_path: "/h".into(), container_path: "/c".into(), ..Mount::default() }];
        let image = ImageSpec {
            image: "sha256:1".into(),
            user_specified_image: "busybox".into(),
            ..ImageSpec::default()
        };
        let config = ContainerConfig {
            mounts: mounts.clone(),
            image: Some(image),
            log_path: "web/0.log".into(),
            ..ContainerConfig::default()
        };
        let facts = ContainerFacts { config, image_id: "sha256:1".into(), image_ref: "a@sha256:2".into() };
        let mut record = ContainerRecord::new(
            "c".parse().unwrap(),
            ContainerSpec::default(),
            String::new(),
            UnixMillis(5),
        );
        record.user = Some(ProcessUser { uid: 1, gid: 2, groups: vec![2, 3] });
        let sandbox = PodSandboxConfig { log_directory: "/logs".into(), ..PodSandboxConfig::default() };
        let status = container_status(&record, &facts, &sandbox);
        assert_eq!((status.created_at, status.started_at), (5_000_000, 0));
        assert_eq!((status.mounts, status.log_path.as_str()), (mounts, "/logs/web/0.log"));
        assert_eq!(status.image.unwrap().image, "busybox");
        assert_eq!(status.user.unwrap().linux.unwrap().supplemental_groups, [2, 3]);
        assert_eq!(status.stop_signal, 23, "SIGTERM");
    }
}

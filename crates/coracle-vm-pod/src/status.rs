//! Status of a pod. Pure. Timestamps in the status are kept as long as their subject does not change.

use std::net::IpAddr;

use coracle_host::Exit;
use coracle_types::UnixMillis;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::vm_pod_state::VmPodState;

/// Input of the status, besides the situation.
#[derive(Clone, Debug)]
pub struct StatusInput<'a> {
    /// Pod object.
    pub pod: &'a Pod,
    /// Last reported status.
    pub reported: &'a PodStatus,
    /// Id of the VM; empty: the pod has none.
    pub vm: &'a str,
    /// Number of starts of the VM, minus one.
    pub restarts: u32,
    /// Addresses of the node.
    pub node: &'a [IpAddr],
    /// Wall-clock time.
    pub now: UnixMillis,
}

/// Returns the status of a pod in `vm_pod_state`; `None`: the reported one stays.
#[must_use]
pub fn status(input: &StatusInput<'_>, vm_pod_state: &VmPodState) -> Option<PodStatus> {
    let phase = match vm_pod_state {
        VmPodState::Invalid(_) | VmPodState::Waiting(_) => "Pending",
        VmPodState::Running { .. } | VmPodState::Hibernated | VmPodState::Waking => "Running",
        VmPodState::Exited { succeeded: true, .. } => "Succeeded",
        VmPodState::Exited { .. } | VmPodState::Lost(_) | VmPodState::Refused(..) => "Failed",
        VmPodState::Ending | VmPodState::Ended => return None,
    };
    // A pod that ran does not return to the phase Pending; its container waits instead.
    let ran = input.reported.phase.as_deref() == Some("Running");
    let phase = if phase == "Pending" && ran { "Running" } else { phase };
    let ips = match vm_pod_state {
        VmPodState::Running { ips, .. } => ips.as_slice(),
        _ => &[],
    };
    let pod_ips: Vec<_> = ips.iter().map(|ip| PodIP { ip: ip.to_string() }).collect();
    let host_ips: Vec<_> = input.node.iter().map(|ip| HostIP { ip: ip.to_string() }).collect();
    let (reason, message) = match vm_pod_state {
        VmPodState::Lost(message) => (Some("VMGone".to_owned()), Some(message.clone())),
        VmPodState::Refused(reason, message) => (Some(reason.clone()), Some(message.clone())),
        _ => (None, None),
    };
    let containers = input.pod.spec.iter().flat_map(|spec| &spec.containers);
    Some(PodStatus {
        phase: Some(phase.to_owned()),
        reason,
        message,
        conditions: Some(conditions(input, vm_pod_state)),
        host_ip: host_ips.first().map(|ip| ip.ip.clone()),
        host_ips: Some(host_ips).filter(|all| !all.is_empty()),
        pod_ip: pod_ips.first().map(|first| first.ip.clone()),
        pod_ips: Some(pod_ips).filter(|all| !all.is_empty()),
        start_time: Some(input.reported.start_time.clone().unwrap_or_else(|| time(input.now))),
        container_statuses: Some(containers.map(|one| container(input, vm_pod_state, one)).collect()),
        qos_class: input.reported.qos_class.clone(),
        ..PodStatus::default()
    })
}

fn time(millis: UnixMillis) -> Time {
    let seconds = millis.0.div_euclid(1000);
    Time(Timestamp::from_second(seconds).unwrap_or_default())
}

fn is_ready(vm_pod_state: &VmPodState) -> bool {
    matches!(vm_pod_state, VmPodState::Running { is_ready: true, .. })
}

/// Returns reason and message for a pod that is not ready.
fn unready_reason(vm_pod_state: &VmPodState) -> (&'static str, String) {
    match vm_pod_state {
        VmPodState::Invalid(message) => ("InvalidAnnotations", message.clone()),
        VmPodState::Waiting(waits) => (waits.reason, waits.message.clone()),
        VmPodState::Running { .. } => ("NotAnswering", "the VM runs and does not answer yet".to_owned()),
        VmPodState::Hibernated => ("Hibernated", "the VM is hibernated".to_owned()),
        VmPodState::Waking => ("Waking", "the VM is being woken".to_owned()),
        VmPodState::Exited { succeeded: true, .. } => ("PodCompleted", String::new()),
        VmPodState::Exited { .. } | VmPodState::Lost(_) | VmPodState::Refused(..) => {
            ("PodFailed", String::new())
        }
        VmPodState::Ending | VmPodState::Ended => ("PodEnds", String::new()),
    }
}

fn conditions(input: &StatusInput<'_>, vm_pod_state: &VmPodState) -> Vec<PodCondition> {
    let ready = is_ready(vm_pod_state);
    let (reason, message) = unready_reason(vm_pod_state);
    let has_begun = !matches!(vm_pod_state, VmPodState::Invalid(_) | VmPodState::Waiting(_))
        || input.reported.phase.as_deref() == Some("Running");
    let own =
        [("PodScheduled", true), ("Initialized", has_begun), ("ContainersReady", ready), ("Ready", ready)];
    let own = own.map(|(kind, is_true)| {
        let explains = !is_true && matches!(kind, "ContainersReady" | "Ready");
        let status = if is_true { "True" } else { "False" };
        let before = input.reported.conditions.iter().flatten().find(|one| one.type_ == kind);
        let since =
            before.filter(|one| one.status == status).and_then(|one| one.last_transition_time.clone());
        PodCondition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: explains.then(|| reason.to_owned()),
            message: explains.then(|| message.clone()).filter(|text| !text.is_empty()),
            last_transition_time: Some(since.unwrap_or_else(|| time(input.now))),
            observed_generation: input.pod.metadata.generation,
            last_probe_time: None,
        }
    });
    let foreign = input.pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let foreign = foreign.filter(|one| own.iter().all(|own| own.type_ != one.type_)).cloned();
    own.iter().cloned().chain(foreign).collect()
}

/// Returns the status of a container: the first one is the VM, and the others have the same state.
fn container(input: &StatusInput<'_>, vm_pod_state: &VmPodState, container: &Container) -> ContainerStatus {
    let id = match vm_pod_state {
        VmPodState::Running { .. } | VmPodState::Exited { .. } if !input.vm.is_empty() => {
            Some(format!("coracle://{}", input.vm))
        }
        _ => None,
    };
    let before = input.reported.container_statuses.iter().flatten().find(|one| one.name == container.name);
    let ready = is_ready(vm_pod_state);
    ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        image_id: String::new(),
        container_id: id.clone(),
        ready,
        started: Some(matches!(vm_pod_state, VmPodState::Running { .. })),
        restart_count: i32::try_from(input.restarts).unwrap_or(i32::MAX),
        state: Some(state(input, vm_pod_state, before, id)),
        ..ContainerStatus::default()
    }
}

fn state(
    input: &StatusInput<'_>,
    vm_pod_state: &VmPodState,
    before: Option<&ContainerStatus>,
    id: Option<String>,
) -> ContainerState {
    let since = |at: &Option<UnixMillis>| {
        let reported = before.and_then(|one| one.state.as_ref()?.running.as_ref()?.started_at.clone());
        at.map(time).or(reported).unwrap_or_else(|| time(input.now))
    };
    match vm_pod_state {
        VmPodState::Running { since: at, .. } => ContainerState {
            running: Some(ContainerStateRunning { started_at: Some(since(at)) }),
            ..ContainerState::default()
        },
        VmPodState::Exited { exit, oom_killed, since: at, ended, message, .. } => {
            let Exit { code, signal, .. } = exit.clone().unwrap_or(Exit { code: 255, ..Exit::default() });
            let reason = match code {
                _ if *oom_killed => "OOMKilled",
                0 => "Completed",
                _ => "Error",
            };
            ContainerState {
                terminated: Some(ContainerStateTerminated {
                    exit_code: code,
                    signal: Some(signal).filter(|signal| *signal != 0),
                    reason: Some(reason.to_owned()),
                    message: Some(message.clone()).filter(|text| !text.is_empty()),
                    started_at: Some(since(at)),
                    finished_at: Some(ended.map_or_else(|| time(input.now), time)),
                    container_id: id,
                }),
                ..ContainerState::default()
            }
        }
        other => {
            let (reason, message) = unready_reason(other);
            let message = Some(message).filter(|text| !text.is_empty());
            let waiting = ContainerStateWaiting { reason: Some(reason.to_owned()), message };
            ContainerState { waiting: Some(waiting), ..ContainerState::default() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input<'a>(pod: &'a Pod, reported: &'a PodStatus) -> StatusInput<'a> {
        StatusInput { pod, reported, vm: "id", restarts: 0, node: &[], now: UnixMillis(0) }
    }

    #[test]
    fn end_of_a_vm_has_the_reasons_of_a_kubelet() {
        let (pod, reported) = (Pod::default(), PodStatus::default());
        for (code, oom_killed, want) in
            [(0, false, "Completed"), (3, false, "Error"), (137, false, "Error"), (137, true, "OOMKilled")]
        {
            let exited = VmPodState::Exited {
                succeeded: code == 0,
                exit: Some(Exit { code, ..Exit::default() }),
                oom_killed,
                since: None,
                ended: None,
                message: String::new(),
            };
            let ended = state(&input(&pod, &reported), &exited, None, None).terminated.unwrap();
            assert_eq!((ended.exit_code, ended.reason.as_deref()), (code, Some(want)), "{code} {oom_killed}");
        }
    }

    #[test]
    fn running_pod_has_every_address_of_its_vm() {
        let (pod, reported) = (Pod::default(), PodStatus::default());
        let input = input(&pod, &reported);
        for (ips, first) in [
            (vec![], None),
            (vec!["10.0.0.5"], Some("10.0.0.5")),
            (vec!["10.0.0.5", "fd00::5"], Some("10.0.0.5")),
        ] {
            let own = ips.iter().map(|ip| ip.parse().unwrap()).collect();
            let status =
                status(&input, &VmPodState::Running { is_ready: true, since: None, ips: own }).unwrap();
            assert_eq!(status.pod_ip.as_deref(), first);
            let all: Vec<_> = status.pod_ips.into_iter().flatten().map(|one| one.ip).collect();
            assert_eq!(all, ips);
        }
        let asleep = status(&input, &VmPodState::Hibernated).unwrap();
        assert_eq!((asleep.pod_ip, asleep.pod_ips), (None, None));
    }
}

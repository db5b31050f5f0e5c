//! Status of a pod. Pure: derives the whole status from the observed state and the plan.

mod conditions;
mod container;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, HostIP, PodIP, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::declared::ContainerKind;
use crate::members::{ContainerHistory, is_initialized, reported_status};
use crate::observed::Observed;
use crate::plan_builder::{Intent, PlanBuilder};
use crate::resources::qos_class;

pub(crate) use container::container_status;

/// Returns the whole status.
pub(crate) fn derive(pass: &PlanBuilder<'_>, intent: &Intent) -> PodStatus {
    let o = &pass.o;
    let end = end(pass, intent);
    let phase = end.as_ref().map_or_else(|| phase(pass), |end| end.phase);
    let list = |kinds: &[ContainerKind]| -> Option<Vec<ContainerStatus>> {
        let members = pass.members.iter().filter(|m| kinds.contains(&m.kind()));
        let mut list: Vec<_> = members.map(|m| container_status(pass, m, intent)).collect();
        list.shrink_to_fit(); // collected, it has capacity for four
        Some(list).filter(|list| !list.is_empty())
    };
    let sandbox = o.runtime.sandbox.as_ref().map(|sandbox| sandbox.addresses.as_slice()).unwrap_or_default();
    let pod_ips = match sandbox {
        [] => o.reported.pod_ips.clone(),
        addresses => Some(addresses.iter().map(|ip| PodIP { ip: ip.to_string() }).collect()),
    };
    let host_ips: Vec<_> = o.node.addresses.iter().map(|ip| HostIP { ip: ip.to_string() }).collect();
    let qos_class = o.reported.qos_class.clone().unwrap_or_else(|| qos_class(o.pod).as_str().to_owned());
    PodStatus {
        phase: Some(phase.to_owned()),
        reason: end.as_ref().and_then(|end| end.reason.clone()),
        message: end.and_then(|end| end.message),
        conditions: Some(conditions::derive(pass, intent, phase)),
        container_statuses: list(&[ContainerKind::App]),
        init_container_statuses: list(&[ContainerKind::Init, ContainerKind::Sidecar]),
        ephemeral_container_statuses: list(&[ContainerKind::Ephemeral]),
        host_ip: host_ips.first().map(|host| host.ip.clone()),
        host_ips: Some(host_ips).filter(|ips| !ips.is_empty()),
        pod_ip: pod_ips.as_ref().and_then(|ips| ips.first()).map(|pod| pod.ip.clone()),
        pod_ips,
        qos_class: Some(qos_class),
        start_time: Some(o.reported.start_time.clone().unwrap_or_else(|| time(o.now))),
        observed_generation: o.pod.metadata.generation,
        // Fields that other components write.
        nominated_node_name: o.pod.status.as_ref().and_then(|status| status.nominated_node_name.clone()),
        resource_claim_statuses: o
            .pod
            .status
            .as_ref()
            .and_then(|status| status.resource_claim_statuses.clone()),
        ..PodStatus::default()
    }
}

/// Returns a time in whole seconds, as the API server stores it: the stored value equals the written one.
fn time(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

/// Terminal phase of a pod, with reason and message.
struct End {
    phase: &'static str,
    reason: Option<String>,
    message: Option<String>,
}

/// Returns the terminal phase; `None` while a container of the pod runs or is going to run.
fn end(pass: &PlanBuilder<'_>, intent: &Intent) -> Option<End> {
    let Intent::End(ending) = intent else { return None };
    if pass.members.iter().any(|m| m.running().is_some()) {
        return None;
    }
    if let Some(outcome) = &ending.outcome {
        let (reason, message) = (outcome.reason.clone(), outcome.message.clone());
        return Some(End { phase: outcome.phase, reason, message });
    }
    let code = |m: &ContainerHistory<'_>| {
        let reported = || {
            let state = reported_status(pass.o.reported, m.name())?.state.as_ref()?;
            state.terminated.as_ref().map(|terminated| terminated.exit_code)
        };
        m.exited().map(|exited| exited.code).or_else(reported)
    };
    let mut apps = pass.members.iter().filter(|m| m.kind() == ContainerKind::App);
    let phase = if apps.all(|m| code(m) == Some(0)) { "Succeeded" } else { "Failed" };
    Some(End { phase, reason: None, message: None })
}

/// Returns the phase of a pod that has not ended.
fn phase(pass: &PlanBuilder<'_>) -> &'static str {
    let o = &pass.o;
    let began = |m: &ContainerHistory<'_>| has_begun(o, m);
    let all_began = pass.members.iter().filter(|m| m.kind() == ContainerKind::App).all(began);
    if is_initialized(o, &pass.members) && all_began { "Running" } else { "Pending" }
}

/// Returns whether a container runs or ran, in this or in an earlier attempt.
fn has_begun(o: &Observed<'_>, m: &ContainerHistory<'_>) -> bool {
    let exists = m
        .latest
        .is_some_and(|view| view.is_running() && m.has_run_post_start(o, view) || view.exited().is_some());
    let reported = reported_status(o.reported, m.name());
    let before =
        reported.and_then(|status| status.last_state.as_ref()).is_some_and(|last| last.terminated.is_some());
    exists || m.previous.is_some() || before
}

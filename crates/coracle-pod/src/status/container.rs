//! Status of one container.

use std::collections::BTreeMap;

use coracle_record::TERMINATION_MESSAGE_MAX;
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting, ContainerStatus,
    ContainerUser, LinuxContainerUser, VolumeMountStatus,
};

use super::time;
use crate::declared::ContainerKind;
use crate::members::{ContainerHistory, is_initialized, reported_status, status_id};
use crate::observed::{ContainerPhase, ContainerView, Exited};
use crate::plan_builder::{Intent, PlanBuilder};

pub(crate) fn container_status(
    pass: &PlanBuilder<'_>,
    m: &ContainerHistory<'_>,
    intent: &Intent,
) -> ContainerStatus {
    let o = &pass.o;
    let container = &m.declared.container;
    let reported = reported_status(o.reported, m.name());
    let (state, last_state) = states(pass, m, intent, reported);
    let latest = m.latest;
    let is_app = matches!(m.kind(), ContainerKind::App | ContainerKind::Sidecar);
    let ready = match m.kind() {
        ContainerKind::Init => state.terminated.as_ref().is_some_and(|end| end.exit_code == 0),
        ContainerKind::Ephemeral => false,
        ContainerKind::App | ContainerKind::Sidecar => m.is_ready(o),
    };
    let count = latest.map(|view| i32::try_from(view.attempt).unwrap_or(i32::MAX));
    let kept = |pick: fn(&ContainerStatus) -> &String| reported.map(|status| pick(status).clone());
    let requests = container.resources.as_ref().and_then(|resources| resources.requests.clone());
    ContainerStatus {
        name: m.name().to_owned(),
        container_id: latest
            .map(|view| status_id(&view.id))
            .or_else(|| reported.and_then(|r| r.container_id.clone())),
        image: latest
            .map(|view| view.image.clone())
            .or_else(|| kept(|status| &status.image))
            .or_else(|| container.image.clone())
            .unwrap_or_default(),
        image_id: latest
            .map(|view| view.image_id.clone())
            .or_else(|| kept(|status| &status.image_id))
            .unwrap_or_default(),
        ready,
        restart_count: count.or_else(|| reported.map(|status| status.restart_count)).unwrap_or(0),
        started: Some(if is_app { m.is_started(o) } else { state.running.is_some() }),
        allocated_resources: requests.filter(|requests| !requests.is_empty()),
        resources: container.resources.clone().filter(|r| r.limits.is_some() || r.requests.is_some()),
        user: latest.and_then(user),
        volume_mounts: volume_mounts(m),
        state: Some(state),
        last_state,
        ..ContainerStatus::default()
    }
}

/// Returns the state and the last state.
fn states(
    pass: &PlanBuilder<'_>,
    m: &ContainerHistory<'_>,
    intent: &Intent,
    reported: Option<&ContainerStatus>,
) -> (ContainerState, Option<ContainerState>) {
    let before = || {
        let previous = m.previous.and_then(|view| Some(terminated_state(view, view.exited()?)));
        previous.or_else(|| reported.and_then(|status| status.last_state.clone()))
    };
    let waits = || waiting_state(default_reason(pass, m), None);
    let told = pass.waiting.get(m.name()).map(|told| waiting_state(told.reason, told.message.clone()));
    match m.latest {
        None => state_without_attempt(pass, m, intent, reported),
        Some(view) => match &view.phase {
            ContainerPhase::Created => (told.unwrap_or_else(waits), before()),
            ContainerPhase::Running if !m.has_run_post_start(&pass.o, view) => (waits(), before()),
            ContainerPhase::Running => {
                let started_at = Some(time(view.started_at.unwrap_or(view.created_at)));
                let running = Some(ContainerStateRunning { started_at });
                (ContainerState { running, ..ContainerState::default() }, before())
            }
            ContainerPhase::Exited(exited) => match (told, intent) {
                (Some(told), Intent::Run) => (told, Some(terminated_state(view, exited))),
                _ => (terminated_state(view, exited), before()),
            },
        },
    }
}

/// Returns the state of a container without attempts: it waits for its first start, or its reported state is kept.
fn state_without_attempt(
    pass: &PlanBuilder<'_>,
    m: &ContainerHistory<'_>,
    intent: &Intent,
    reported: Option<&ContainerStatus>,
) -> (ContainerState, Option<ContainerState>) {
    let told = pass.waiting.get(m.name()).map(|told| waiting_state(told.reason, told.message.clone()));
    let waits = || waiting_state(default_reason(pass, m), None);
    let state = reported.and_then(|status| status.state.clone()).unwrap_or_default();
    let last = reported.and_then(|status| status.last_state.clone());
    let lost = ContainerState {
        terminated: Some(ContainerStateTerminated {
            exit_code: 137,
            reason: Some("ContainerStatusUnknown".to_owned()),
            message: Some("the container disappeared with the VM of the pod".to_owned()),
            container_id: reported.and_then(|status| status.container_id.clone()),
            ..ContainerStateTerminated::default()
        }),
        ..ContainerState::default()
    };
    match (intent, state.terminated.is_some(), state.running.is_some()) {
        (Intent::Run, true, _) => (told.unwrap_or_else(waits), Some(state)),
        (Intent::Run, false, true) => (told.unwrap_or_else(waits), Some(lost)),
        (Intent::Run, false, false) => (told.unwrap_or_else(waits), last),
        (Intent::End(_), true, _) => (state, last),
        (Intent::End(_), false, true) => (lost, last),
        (Intent::End(_), false, false) if state.waiting.is_some() => (state, last),
        (Intent::End(_), false, false) => (waits(), last),
    }
}

fn waiting_state(reason: &str, message: Option<String>) -> ContainerState {
    let waiting = Some(ContainerStateWaiting { reason: Some(reason.to_owned()), message });
    ContainerState { waiting, ..ContainerState::default() }
}

/// Returns the reason why a container waits. App containers wait for init containers, all others for their own creation.
fn default_reason(pass: &PlanBuilder<'_>, m: &ContainerHistory<'_>) -> &'static str {
    let has_init =
        pass.members.iter().any(|m| matches!(m.kind(), ContainerKind::Init | ContainerKind::Sidecar));
    let waits_for_init = match m.kind() {
        ContainerKind::App => has_init,
        ContainerKind::Init | ContainerKind::Sidecar => {
            let before = pass.members.iter().take_while(|other| other.name() != m.name());
            before.into_iter().any(|other| !other.is_done(&pass.o))
        }
        ContainerKind::Ephemeral => false,
    };
    match waits_for_init && !is_initialized(&pass.o, &pass.members) {
        true => "PodInitializing",
        false => "ContainerCreating",
    }
}

fn terminated_state(view: &ContainerView, exited: &Exited) -> ContainerState {
    // As in shells: 126 for a program that cannot be run, 127 for one that was not found.
    let never_ran = !exited.error.is_empty() && matches!(exited.code, 126 | 127);
    let (exit_code, reason) = match exited.code {
        code if exited.oom_killed => (code, "OOMKilled"),
        _ if never_ran => (128, "StartError"),
        0 => (0, "Completed"),
        code => (code, "Error"),
    };
    let message = if exited.error.is_empty() { &exited.message } else { &exited.error };
    let mut end = message.len().min(TERMINATION_MESSAGE_MAX);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    let terminated = ContainerStateTerminated {
        container_id: Some(status_id(&view.id)),
        exit_code,
        signal: (exited.signal != 0).then_some(exited.signal),
        reason: Some(reason.to_owned()),
        message: Some(message[..end].to_owned()).filter(|message| !message.is_empty()),
        started_at: view.started_at.map(time),
        finished_at: Some(time(exited.at)),
    };
    ContainerState { terminated: Some(terminated), ..ContainerState::default() }
}

fn user(view: &ContainerView) -> Option<ContainerUser> {
    let user = view.user.as_ref()?;
    let linux = LinuxContainerUser {
        uid: user.uid.into(),
        gid: user.gid.into(),
        supplemental_groups: Some(user.groups.iter().map(|group| i64::from(*group)).collect()),
    };
    Some(ContainerUser { linux: Some(linux) })
}

fn volume_mounts(m: &ContainerHistory<'_>) -> Option<Vec<VolumeMountStatus>> {
    let mounts = m.declared.container.volume_mounts.iter().flatten().map(|mount| VolumeMountStatus {
        name: mount.name.clone(),
        mount_path: mount.mount_path.clone(),
        read_only: mount.read_only,
        recursive_read_only: (mount.read_only == Some(true)).then(|| "Disabled".to_owned()),
        ..VolumeMountStatus::default()
    });
    // A path has one entry: the last mount.
    let by_path: BTreeMap<_, _> = mounts.map(|mount| (mount.mount_path.clone(), mount)).collect();
    Some(by_path.into_values().collect::<Vec<_>>()).filter(|mounts| !mounts.is_empty())
}

//! Declared containers of a pod, matched with their existing attempts. Pure.

use std::time::Duration;

use coracle_record::ContainerId;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};

use crate::container_spec::container_id;
use crate::declared::{AfterExit, ContainerKind, DeclaredContainer, declared, pod_policy};
use crate::observed::{ContainerView, Exited, Observed, SandboxPhase};
use crate::probe::{ProbeKind, ProbeVerdict};
use crate::step::HookKind;
use crate::time::{add, backoff, until};

/// A container that ran this long counts as healthy: its next restart is not delayed.
const HEALTHY_AFTER: Duration = Duration::from_secs(600);
/// Scheme of container ids in the pod status.
const SCHEME: &str = "coracle://";

/// Declared container and its attempts.
#[derive(Debug)]
pub(crate) struct ContainerHistory<'a> {
    pub(crate) declared: DeclaredContainer<'a>,
    /// Latest existing attempt.
    pub(crate) latest: Option<&'a ContainerView>,
    /// The attempt before it.
    pub(crate) previous: Option<&'a ContainerView>,
    /// Attempts before the previous one.
    pub(crate) older: Vec<&'a ContainerView>,
}

/// Returns all declared containers, in starting order.
pub(crate) fn members<'a>(o: &Observed<'a>) -> Vec<ContainerHistory<'a>> {
    let attempts_of = |name: &str| {
        let mut attempts: Vec<_> = o.runtime.containers.iter().filter(|view| view.name == name).collect();
        attempts.sort_by_key(|view| std::cmp::Reverse(view.attempt));
        attempts
    };
    let member = |declared: DeclaredContainer<'a>| {
        let mut attempts = attempts_of(declared.name()).into_iter();
        let (latest, previous) = (attempts.next(), attempts.next());
        ContainerHistory { declared, latest, previous, older: attempts.collect() }
    };
    declared(o.pod).into_iter().map(member).collect()
}

/// Returns the last reported status of a container.
pub(crate) fn reported_status<'a>(status: &'a PodStatus, name: &str) -> Option<&'a ContainerStatus> {
    let lists =
        [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    lists.into_iter().flatten().flatten().find(|one| one.name == name)
}

/// Returns the id of a container as the pod status has it.
pub(crate) fn status_id(id: &ContainerId) -> String {
    format!("{SCHEME}{id}")
}

/// Restart of an ended container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Restart {
    /// Time of the restart.
    pub(crate) at: Timestamp,
    /// Delay after the end of the container.
    pub(crate) delay: Duration,
    /// Number of quick restarts in a row, including this one.
    pub(crate) streak: u32,
}

impl<'a> ContainerHistory<'a> {
    pub(crate) fn name(&self) -> &str {
        self.declared.name()
    }

    pub(crate) fn kind(&self) -> ContainerKind {
        self.declared.kind
    }

    pub(crate) fn running(&self) -> Option<&'a ContainerView> {
        self.latest.filter(|view| view.is_running())
    }

    pub(crate) fn exited(&self) -> Option<&'a Exited> {
        self.latest.and_then(ContainerView::exited)
    }

    /// Returns whether the latest attempt belongs to the current run of the VM.
    pub(crate) fn is_current(&self, o: &Observed<'_>) -> bool {
        let began = o.runtime.sandbox.as_ref().and_then(|sandbox| sandbox.started_at);
        let of_this_run =
            |view: &ContainerView| view.is_running() || began.is_some_and(|began| view.created_at >= began);
        self.latest.is_some_and(of_this_run)
    }

    /// Returns what follows the exit of the latest attempt; `None` when it has not ended.
    pub(crate) fn after_exit(&self, o: &Observed<'_>) -> Option<AfterExit> {
        let code = self.exited()?.code;
        Some(self.declared.after_exit(pod_policy(o.pod.spec.as_ref()), code))
    }

    /// Returns when an ended container may start again.
    pub(crate) fn restart(&self) -> Option<Restart> {
        let (view, exited) = (self.latest?, self.exited()?);
        let ran = view.started_at.map(|began| until(began, exited.at)).unwrap_or_default();
        let streak = if ran >= HEALTHY_AFTER { 0 } else { view.streak };
        let delay = backoff(streak);
        Some(Restart { at: add(exited.at, delay), delay, streak: streak.saturating_add(1) })
    }

    /// Returns the number of the next attempt. Attempts that were reported and no longer exist count as well.
    pub(crate) fn next_attempt(&self, o: &Observed<'_>) -> u32 {
        let existing = self.latest.map(|view| view.attempt.saturating_add(1));
        let reported =
            reported_status(o.reported, self.name()).filter(|status| status.container_id.is_some());
        let reported =
            reported.map(|status| u32::try_from(status.restart_count).unwrap_or(0).saturating_add(1));
        existing.or(reported).unwrap_or(0)
    }

    /// Returns the id of an attempt.
    pub(crate) fn id(&self, o: &Observed<'_>, attempt: u32) -> ContainerId {
        container_id(o.pod.metadata.uid.as_deref().unwrap_or_default(), self.name(), attempt)
    }

    /// Returns the reported status of this attempt.
    fn reported<'r>(&self, o: &Observed<'r>, view: &ContainerView) -> Option<&'r ContainerStatus> {
        let id = status_id(&view.id);
        reported_status(o.reported, self.name())
            .filter(|status| status.container_id.as_deref() == Some(id.as_str()))
    }

    /// Returns whether the postStart hook ran, or the container has none. A container is reported as running only after its
    /// hook. So the reported status tells whether the hook ran when the memory of the task is lost.
    pub(crate) fn has_run_post_start(&self, o: &Observed<'_>, view: &ContainerView) -> bool {
        let hook =
            self.declared.container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.post_start.as_ref());
        let was_running = || {
            let state = self.reported(o, view).and_then(|status| status.state.as_ref());
            state.is_some_and(|state| state.running.is_some() || state.terminated.is_some())
        };
        hook.is_none() || o.memory.hooks.contains(&(view.id.clone(), HookKind::PostStart)) || was_running()
    }

    /// Returns the verdict of a probe of the running attempt.
    pub(crate) fn verdict(&self, o: &Observed<'_>, kind: ProbeKind, view: &ContainerView) -> ProbeVerdict {
        let state = o.memory.probes.get(&(view.id.clone(), kind));
        state.map_or(ProbeVerdict::Pending, |state| state.verdict)
    }

    /// Returns whether the container runs and its startup is complete.
    pub(crate) fn is_started(&self, o: &Observed<'_>) -> bool {
        let Some(view) = self.running().filter(|view| self.has_run_post_start(o, view)) else { return false };
        let was_started = || self.reported(o, view).is_some_and(|status| status.started == Some(true));
        match (ProbeKind::Startup.of(&self.declared.container), self.verdict(o, ProbeKind::Startup, view)) {
            (None, _) | (Some(_), ProbeVerdict::Passed) => true,
            (Some(_), ProbeVerdict::Failed) => false,
            (Some(_), ProbeVerdict::Pending) => was_started(),
        }
    }

    /// Returns whether the container takes requests. Until its probe has a result, the reported status counts.
    pub(crate) fn is_ready(&self, o: &Observed<'_>) -> bool {
        let up = o.runtime.sandbox.as_ref().is_some_and(|sandbox| sandbox.phase == SandboxPhase::Ready);
        let Some(view) = self.running().filter(|_| up && self.is_started(o)) else { return false };
        let was_ready = || self.reported(o, view).is_some_and(|status| status.ready);
        match (ProbeKind::Readiness.of(&self.declared.container), self.verdict(o, ProbeKind::Readiness, view))
        {
            (None, _) | (Some(_), ProbeVerdict::Passed) => true,
            (Some(_), ProbeVerdict::Failed) => false,
            (Some(_), ProbeVerdict::Pending) => was_ready(),
        }
    }

    /// Returns whether the containers after this one may start in the current run of the VM.
    pub(crate) fn is_done(&self, o: &Observed<'_>) -> bool {
        match self.kind() {
            ContainerKind::Init => self.is_current(o) && self.exited().is_some_and(|exited| exited.code == 0),
            ContainerKind::Sidecar => self.is_started(o),
            ContainerKind::App | ContainerKind::Ephemeral => true,
        }
    }
}

/// Returns whether initialization is complete: all init containers are done, or an app container was created after them.
pub(crate) fn is_initialized(o: &Observed<'_>, members: &[ContainerHistory<'_>]) -> bool {
    let app_is_there = members.iter().any(|m| m.kind() == ContainerKind::App && m.is_current(o));
    app_is_there || members.iter().all(|m| m.is_done(o))
}

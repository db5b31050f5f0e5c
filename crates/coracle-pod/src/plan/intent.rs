//! Decides whether a pod runs or ends.

use std::time::Duration;

use jiff::Timestamp;

use crate::declared::{AfterExit, ContainerKind};
use crate::fields;
use crate::members::is_initialized;
use crate::plan_builder::{Ending, Intent, PlanBuilder, TerminalStatus};
use crate::reason;
use crate::time::{add, seconds};

/// Grace period of pods whose spec sets none (API reference of PodSpec), in seconds.
const GRACE: i64 = 30;

impl PlanBuilder<'_> {
    pub(crate) fn intent(&mut self) -> Intent {
        if self.o.forced {
            let why = "the pod was removed".to_owned();
            let deadline = self.o.now;
            return Intent::End(Ending { deadline, forced: true, remove: true, why, outcome: None });
        }
        let outcome = self.outcome();
        if let Some(deleted) = &self.o.pod.metadata.deletion_timestamp {
            let outcome = outcome.map(|(outcome, _, _)| outcome);
            let forced = self.o.pod.metadata.deletion_grace_period_seconds == Some(0);
            let why = "the pod is deleted".to_owned();
            return Intent::End(Ending { deadline: deleted.0, forced, remove: true, why, outcome });
        }
        match outcome {
            Some((outcome, deadline, why)) => {
                let (forced, remove, outcome) = (false, false, Some(outcome));
                Intent::End(Ending { deadline, forced, remove, why, outcome })
            }
            None => Intent::Run,
        }
    }

    /// Returns the terminal status of a pod that ends without a deletion, the time at which its containers are killed, and the
    /// reason.
    fn outcome(&mut self) -> Option<(TerminalStatus, Timestamp, String)> {
        let (o, grace) = (self.o, self.grace());
        let ended = |phase| {
            let outcome = TerminalStatus {
                phase,
                reason: o.reported.reason.clone(),
                message: o.reported.message.clone(),
            };
            Some((outcome, o.now, "the pod has ended".to_owned()))
        };
        match o.reported.phase.as_deref() {
            Some("Succeeded") => return ended("Succeeded"),
            Some("Failed") => return ended("Failed"),
            _ => {}
        }
        if let Some(failure) = self.failure() {
            let outcome = TerminalStatus::failed(&failure.reason, failure.message.clone());
            return Some((outcome, failure.deadline, failure.message));
        }
        if let Some(rejection) = self.rejection() {
            let why = rejection.message.clone().unwrap_or_default();
            return Some((rejection, o.now, why));
        }
        let limit = o.pod.spec.as_ref().and_then(|spec| spec.active_deadline_seconds);
        let began = o.reported.start_time.as_ref().map_or(o.now, |time| time.0);
        if let Some(limit) = limit {
            let end = add(began, seconds(limit));
            if end <= o.now {
                let message = "Pod was active on the node longer than the specified deadline".to_owned();
                let outcome = TerminalStatus::failed(reason::DEADLINE_EXCEEDED, message.clone());
                return Some((outcome, add(end, grace), message));
            }
            self.wake_at(end);
        }
        let (phase, end) = self.completion()?;
        let outcome = TerminalStatus { phase, reason: None, message: None };
        Some((outcome, add(end, grace), "the pod has ended".to_owned()))
    }

    /// Rejects a pod with unsupported fields, unless its sandbox exists.
    fn rejection(&self) -> Option<TerminalStatus> {
        if self.o.runtime.sandbox.is_some() {
            return None;
        }
        let rejected = fields::review(self.o.pod).rejected;
        let first = rejected.first()?;
        let list: Vec<_> = rejected.iter().map(|field| format!("{}: {}", field.path, field.note)).collect();
        Some(TerminalStatus::failed(
            first.reason,
            format!("this node cannot run the pod: {}", list.join("; ")),
        ))
    }

    /// Returns the terminal phase that follows from the containers, and when it was reached.
    fn completion(&self) -> Option<(&'static str, Timestamp)> {
        let o = &self.o;
        let stays = |m: &&crate::members::ContainerHistory<'_>| m.after_exit(o) == Some(AfterExit::Stay);
        if !is_initialized(o, &self.members) {
            let init = self.members.iter().filter(|m| m.kind() == ContainerKind::Init);
            let failed = init.filter(stays).filter_map(|m| m.exited()).find(|exited| exited.code != 0);
            if let Some(failed) = failed {
                return Some(("Failed", failed.at));
            }
        }
        let apps: Vec<_> = self.members.iter().filter(|m| m.kind() == ContainerKind::App).collect();
        let ends: Vec<_> = apps.iter().copied().filter(stays).filter_map(|m| m.exited()).collect();
        if apps.is_empty() || ends.len() < apps.len() {
            return None;
        }
        let phase = if ends.iter().all(|exited| exited.code == 0) { "Succeeded" } else { "Failed" };
        ends.iter().map(|exited| exited.at).max().map(|at| (phase, at))
    }

    /// Returns the grace period between the request to end a container and its kill.
    pub(super) fn grace(&self) -> Duration {
        let spec = self.o.pod.spec.as_ref();
        seconds(spec.and_then(|spec| spec.termination_grace_period_seconds).unwrap_or(GRACE))
    }
}

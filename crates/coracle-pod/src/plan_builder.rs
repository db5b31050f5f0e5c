//! Plan under construction: the observed state, and the decisions so far.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use crate::events::PodEvent;
use crate::members::{ContainerHistory, members};
use crate::observed::Observed;
use crate::step::{Step, Target};
use crate::time::add;

/// Intent for a pod: run it or end it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Intent {
    /// The containers of the pod run.
    Run,
    /// The pod ends; none of its containers runs.
    End(Ending),
}

/// How a pod is ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ending {
    /// Time at which running containers are killed.
    pub(crate) deadline: Timestamp,
    /// Whether the pod ends at once, without hooks and without a status report.
    pub(crate) forced: bool,
    /// Whether the object is removed afterwards.
    pub(crate) remove: bool,
    /// Reason in the text of events.
    pub(crate) why: String,
    /// Terminal status; `None`: derived from the containers.
    pub(crate) outcome: Option<TerminalStatus>,
}

/// Terminal status of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TerminalStatus {
    /// `Succeeded` or `Failed`.
    pub(crate) phase: &'static str,
    /// Reason of the status.
    pub(crate) reason: Option<String>,
    /// Message of the status.
    pub(crate) message: Option<String>,
}

impl TerminalStatus {
    pub(crate) fn failed(reason: &str, message: String) -> Self {
        Self { phase: "Failed", reason: Some(reason.to_owned()), message: Some(message) }
    }
}

/// Reason why a container does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) reason: &'static str,
    pub(crate) message: Option<String>,
}

/// Plan under construction.
pub(crate) struct PlanBuilder<'a> {
    pub(crate) o: Observed<'a>,
    pub(crate) members: Vec<ContainerHistory<'a>>,
    pub(crate) steps: Vec<Step>,
    pub(crate) events: Vec<PodEvent>,
    pub(crate) waiting: BTreeMap<String, Waiting>,
    /// Latest time of the next plan.
    pub(crate) wake: Option<Timestamp>,
}

impl<'a> PlanBuilder<'a> {
    pub(crate) fn new(o: Observed<'a>) -> Self {
        let members = members(&o);
        Self { o, members, steps: vec![], events: vec![], waiting: BTreeMap::new(), wake: None }
    }

    pub(crate) fn step(&mut self, step: Step) {
        self.steps.push(step);
    }

    pub(crate) fn event(&mut self, event: PodEvent) {
        self.events.push(event);
    }

    /// Makes the next plan at `at` at the latest.
    pub(crate) fn wake_at(&mut self, at: Timestamp) {
        self.wake = Some(self.wake.map_or(at, |earlier| earlier.min(at)));
    }

    pub(crate) fn wake_after(&mut self, time: Duration) {
        self.wake_at(add(self.o.now, time));
    }

    pub(crate) fn step_in_progress(&self, target: &Target) -> Option<&'a Step> {
        self.o.memory.busy.get(target).map(|step| &**step)
    }

    pub(crate) fn is_free(&self, target: &Target) -> bool {
        !self.o.memory.busy.contains_key(target)
    }

    /// Adds a step, unless its backoff after a failure is not over.
    pub(crate) fn retry(&mut self, target: Target, step: Step) {
        match self.o.memory.failures.get(&target) {
            Some(failure) if failure.retry_at() > self.o.now => self.wake_at(failure.retry_at()),
            _ => self.step(step),
        }
    }

    pub(crate) fn wait(&mut self, name: &str, reason: &'static str, message: Option<String>) {
        self.waiting.insert(name.to_owned(), Waiting { reason, message });
    }
}

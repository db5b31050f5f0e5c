//! Decides what to do about one pod. Pure: a snapshot comes in, data goes out.
//!
//! ```text
//! volumes ─▶ StartSandbox ─▶ init containers, one by one ─▶ containers ─▶ probes
//! end: preStop ─▶ StopContainer (sidecars last, in reverse) ─▶ StopSandbox ─▶ (reported) ─▶ RemoveSandbox ─▶ finished
//! ```
//! Level, not edge: a plan may start from any state and without its memory. A target that is being worked on gets no step,
//! unless that step replaces the one under way.

mod containers;
mod end;
mod intent;
mod probes;
mod run;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodStatus;

pub use intent::Outcome;
pub(crate) use intent::{Ending, Intent};

use crate::events::PodEvent;
use crate::members::{Member, members};
use crate::observed::{Observed, add, until};
use crate::status;
use crate::step::{Step, Target};

/// What to do, what the status shall say, and when to come back.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Effects. Those of different targets may be carried out side by side.
    pub steps: Vec<Step>,
    /// What is worth an event, for as long as it lasts.
    pub events: Vec<PodEvent>,
    /// The whole status.
    pub status: PodStatus,
    /// Time until the next plan; `None`: until something changes.
    pub requeue: Option<Duration>,
    /// Nothing is left of the pod: its object may be removed.
    pub finished: bool,
}

/// Why a container does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) reason: &'static str,
    pub(crate) message: Option<String>,
}

/// A plan in the making.
pub(crate) struct Pass<'a> {
    pub(crate) o: Observed<'a>,
    pub(crate) members: Vec<Member<'a>>,
    steps: Vec<Step>,
    events: Vec<PodEvent>,
    pub(crate) waiting: BTreeMap<String, Waiting>,
    wake: Option<Timestamp>,
}

/// Decides.
#[must_use]
pub fn plan(o: &Observed<'_>) -> Plan {
    let mut pass = Pass {
        o: *o,
        members: members(o),
        steps: vec![],
        events: vec![],
        waiting: BTreeMap::new(),
        wake: None,
    };
    let intent = pass.intent();
    let mut at_rest = false;
    match &intent {
        Intent::Run => pass.run(),
        Intent::End(ending) => at_rest = pass.end(ending),
    }
    let status = status::derive(&pass, &intent);
    let mut finished = false;
    if let Intent::End(ending) = &intent {
        // What is removed cannot be reported again, so that it is reported first.
        let known = ending.forced || status == *o.reported;
        if ending.remove && at_rest && known {
            finished = o.memory.removed && o.runtime.sandbox.is_none();
            if !finished && pass.is_free(&Target::Sandbox) {
                pass.retry(Target::Sandbox, Step::RemoveSandbox);
            }
        }
    }
    let requeue = pass.wake.map(|at| until(o.now, at));
    Plan { steps: pass.steps, events: pass.events, status, requeue, finished }
}

impl<'a> Pass<'a> {
    fn step(&mut self, step: Step) {
        self.steps.push(step);
    }

    fn event(&mut self, event: PodEvent) {
        self.events.push(event);
    }

    /// Comes back then at the latest.
    fn wake_at(&mut self, at: Timestamp) {
        self.wake = Some(self.wake.map_or(at, |earlier| earlier.min(at)));
    }

    fn wake_after(&mut self, time: Duration) {
        self.wake_at(add(self.o.now, time));
    }

    fn busy(&self, target: &Target) -> Option<&'a Step> {
        self.o.memory.busy.get(target)
    }

    fn is_free(&self, target: &Target) -> bool {
        !self.o.memory.busy.contains_key(target)
    }

    /// Adds a step, unless its last failure is too recent.
    fn retry(&mut self, target: Target, step: Step) {
        match self.o.memory.failures.get(&target) {
            Some(failure) if failure.retry_at() > self.o.now => self.wake_at(failure.retry_at()),
            _ => self.step(step),
        }
    }

    fn wait(&mut self, name: &str, reason: &'static str, message: Option<String>) {
        self.waiting.insert(name.to_owned(), Waiting { reason, message });
    }
}

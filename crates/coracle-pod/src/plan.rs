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
mod eviction;
mod intent;
mod probes;
mod run;

use std::time::Duration;

use k8s_openapi::api::core::v1::PodStatus;

use crate::events::PodEvent;
use crate::observed::Observed;
use crate::pass::{Intent, Pass};
use crate::status;
use crate::step::{Step, Target};
use crate::time::until;

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

/// Decides.
#[must_use]
pub fn plan(o: &Observed<'_>) -> Plan {
    let mut pass = Pass::new(*o);
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

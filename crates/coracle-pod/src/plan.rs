//! Plans the next steps for one pod. Pure: from a snapshot to data.
//!
//! ```text
//! volumes ─▶ StartSandbox ─▶ init containers, one by one ─▶ containers ─▶ probes
//! end: preStop ─▶ StopContainer (sidecars last, in reverse) ─▶ StopSandbox ─▶ (reported) ─▶ RemoveSandbox ─▶ finished
//! ```
//! Level-triggered: a plan may start from any state and without the memory of earlier plans. A target with a step under way
//! gets no further step, unless that step replaces the one under way.

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
use crate::plan_builder::{Intent, PlanBuilder};
use crate::status;
use crate::step::{Step, Target};
use crate::time::until;

/// Steps, status, and time of the next plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Effects. Steps with different targets may be executed concurrently.
    pub steps: Vec<Step>,
    /// Events that apply as long as the state lasts.
    pub events: Vec<PodEvent>,
    /// Complete status.
    pub status: PodStatus,
    /// Time until the next plan; `None`: until something changes.
    pub requeue: Option<Duration>,
    /// The pod has no VM, containers or files left: its object may be removed.
    pub finished: bool,
}

/// Plans the next steps for a pod.
#[must_use]
pub fn plan(o: &Observed<'_>) -> Plan {
    let mut pass = PlanBuilder::new(*o);
    let intent = pass.intent();
    let mut at_rest = false;
    match &intent {
        Intent::Run => pass.run(),
        Intent::End(ending) => at_rest = pass.end(ending),
    }
    let status = status::derive(&pass, &intent);
    let mut finished = false;
    if let Intent::End(ending) = &intent {
        // The final status is reported before the removal, after which it cannot be derived again.
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

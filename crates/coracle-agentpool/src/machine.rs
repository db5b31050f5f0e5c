//! AgentMachines: each AgentMachine that waits for an Agent gets a VsphereAgent.

mod execute;
mod observe;
pub mod plan;
pub mod reuse;

use std::{sync::Arc, time::Duration};

use coracle_api::agentpool::foreign::AgentMachine;
use coracle_reconcile::{Action, WorkQueue};
use tokio_util::sync::CancellationToken;

use crate::{Context, Error, controller};

pub(crate) use execute::pin_selector;

/// Delay after an Agent changed while it was being selected; the cache is up to date by then.
const RACED: Duration = Duration::from_millis(500);

/// Reconciles AgentMachines until `stop`.
pub(crate) async fn run(cx: &Arc<Context>, queue: WorkQueue<AgentMachine>, stop: &CancellationToken) {
    let store = cx.caches.agent_machines.clone();
    let workers = cx.config.workers[1];
    controller::run(cx, "agentmachine", store, queue, workers, stop, |am, cx| Box::pin(reconcile(am, cx)))
        .await;
}

async fn reconcile(am: Arc<AgentMachine>, cx: Arc<Context>) -> Result<Action, Error> {
    let observed = observe::observe(&cx, &am);
    let plan = plan::plan(&observed.snapshot(&am));
    let raced = execute::execute(&cx, &plan.steps).await?;
    Ok(match plan.again {
        // The creation of a pool triggers a reconcile.
        plan::Again::OnChange => Action::await_change(),
        plan::Again::Poll => Action::requeue(if raced { RACED } else { cx.config.times.machine }),
    })
}

//! VsphereAgents: each gets one VM, which is destroyed with the object.

mod bring_up;
pub mod eject;
mod ejection;
mod execute;
mod fence;
mod observe;
pub mod plan;
mod status;
mod take_down;

use std::{sync::Arc, time::Duration};

use coracle_api::agentpool::VsphereAgent;
use coracle_reconcile::{Action, WorkQueue};
use kube::{Api, ResourceExt as _};
use tokio_util::sync::CancellationToken;

pub(crate) use fence::{FenceTarget, Fenced, fence};
pub(crate) use observe::{Folder, follow, infra_env_url};

use crate::{Context, Error, controller, error::RequestFailure};

/// Interval between steps of an ejection.
const EJECTING: Duration = Duration::from_secs(1);

/// Reconciles VsphereAgents until `stop`.
pub(crate) async fn run(cx: &Arc<Context>, queue: WorkQueue<VsphereAgent>, stop: &CancellationToken) {
    let store = cx.caches.requests.clone();
    let workers = cx.config.workers[2];
    controller::run(cx, "vsphereagent", store, queue, workers, stop, |r, cx| Box::pin(reconcile(r, cx)))
        .await;
}

/// API of the VsphereAgents in a namespace, without the caches.
fn requests(cx: &Context, namespace: &str) -> Api<VsphereAgent> {
    Api::namespaced(cx.client.clone(), namespace)
}

/// Result of an execution.
#[derive(Debug)]
enum Done {
    /// There is nothing more to do now.
    Settled(Duration),
    /// Another event must happen first.
    Waits(Duration),
    /// A failure, to be reported in the condition Ready.
    Failed(RequestFailure),
    /// The object is gone or its finalizer is removed.
    Gone,
}

async fn reconcile(cached: Arc<VsphereAgent>, cx: Arc<Context>) -> Result<Action, Error> {
    let Some(observed) = observe::observe(&cx, &cached).await? else {
        cx.backoffs.reset(&cached.uid().unwrap_or_default());
        return Ok(Action::await_change());
    };
    let steps = plan::plan(&observed.snapshot());
    let done = execute::execute(&cx, &observed, &steps).await?;
    status::settle(&cx, &observed.request, done).await
}

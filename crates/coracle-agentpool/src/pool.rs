//! Pools: recognise Agents, prepare them, delete VMs that are no longer used, and report status.

pub mod adopt;
mod execute;
mod observe;
pub mod plan;
pub mod rows;
mod status;

use std::{sync::Arc, time::Duration};

use coracle_api::agentpool::VsphereAgentPool;
use coracle_reconcile::{Action, WorkQueue};
use kube::{Api, ResourceExt as _};
use tokio_util::sync::CancellationToken;

use crate::{Context, Error, controller, error::api, status::report_pool};

/// Longest interval between reconciles of a pool that waits for the deletion of its VsphereAgents.
const DELETION_POLL: Duration = Duration::from_secs(10);

/// Reconciles pools until `stop`.
pub(crate) async fn run(cx: &Arc<Context>, queue: WorkQueue<VsphereAgentPool>, stop: &CancellationToken) {
    let (store, workers) = (cx.caches.pools.clone(), cx.config.workers[0]);
    controller::run(cx, "vsphereagentpool", store, queue, workers, stop, |p, cx| Box::pin(reconcile(p, cx)))
        .await;
}

async fn reconcile(cached: Arc<VsphereAgentPool>, cx: Arc<Context>) -> Result<Action, Error> {
    let (ns, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let pools: Api<VsphereAgentPool> = Api::namespaced(cx.client.clone(), &ns);
    let Some(pool) = pools.get_opt(&name).await.map_err(api("read VsphereAgentPool", &name))? else {
        cx.config.pool_metrics.forget(&ns, &name);
        return Ok(Action::await_change());
    };
    if pool.metadata.deletion_timestamp.is_some() {
        return end(&cx, &pool).await;
    }
    let observed = observe::observe(&cx, &pool).await?;
    let plan = plan::plan(&observed.snapshot(&pool));
    let applied = execute::execute(&cx, &pool, &plan.steps).await;
    if applied.gone {
        return Ok(Action::await_change());
    }
    let requests = cx.caches.requests_of(&pool);
    status::count_stages(&cx, &pool, &observed);
    status::gauge(&cx, &pool, &observed, &plan);
    let siblings = cx.caches.siblings(&pool);
    let desired = status::conditions(&observed, &plan, &applied, &requests, &siblings);
    let rows = applied.rows(observed.rows.clone());
    report_pool(&cx, &pool, status::derive(&pool, &observed, &plan, rows), &desired).await?;
    if let Some(error) = applied.error {
        return Err(error);
    }
    if let Some(url) = &plan.check_iso {
        execute::check_iso(&cx, &pool, url).await;
    }
    execute::count_unowned(&cx, &pool).await;
    let waits = !applied.failed.is_empty() || !applied.blocked.is_empty();
    Ok(Action::requeue(if waits { cx.config.times.blocked } else { cx.config.times.pool }))
}

/// Reconciles a pool that is being deleted.
async fn end(cx: &Context, pool: &VsphereAgentPool) -> Result<Action, Error> {
    let requests = observe::observe_deletion(cx, pool).await?;
    let applied = execute::execute(cx, pool, &plan::plan_deletion(pool, &requests)).await;
    if let Some(error) = applied.error {
        return Err(error);
    }
    if applied.gone {
        cx.config.pool_metrics.forget(&pool.namespace().unwrap_or_default(), &pool.name_any());
        return Ok(Action::await_change());
    }
    let blocked = cx.config.times.blocked;
    // The end of each VsphereAgent also triggers a reconcile.
    Ok(Action::requeue(if requests.is_empty() { blocked } else { blocked.min(DELETION_POLL) }))
}

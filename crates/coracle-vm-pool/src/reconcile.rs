//! Reconcile of one pool: observe, plan, execute, status.

use std::{sync::Arc, time::Duration};

use coracle_api::{MikromVMPool, keys};
use coracle_reconcile::{Action, ApiError, ApplyError, Reconciler, WallTime as _, apply_status, object};
use kube::ResourceExt as _;

use crate::{
    execute::execute,
    observe::Context,
    plan::{Observed, plan},
    status,
};

/// Time until the next reconcile after one with steps: a large change is made in batches.
const NEXT_BATCH: Duration = Duration::from_millis(200);

/// Reason why a reconcile failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call to the API server failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A write to the API server failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
}

/// Controller of pools.
pub(crate) struct Pools(pub(crate) Arc<Context>);

impl Reconciler for Pools {
    type Object = MikromVMPool;
    type Error = Error;

    async fn reconcile(&self, cached: Arc<MikromVMPool>) -> Result<Action, Error> {
        reconcile(&self.0, &cached).await
    }

    fn is_expected(&self, error: &Error) -> bool {
        match error {
            Error::Api(error) => error.is_conflict(),
            Error::Apply(error) => error.is_conflict(),
        }
    }
}

async fn reconcile(cx: &Context, cached: &MikromVMPool) -> Result<Action, Error> {
    let (namespace, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let found = object::read::<MikromVMPool>(&cx.client, &namespace, &name).await?;
    let Some(pool) = found.filter(|found| found.uid() == cached.uid()) else {
        return Ok(Action::await_change());
    };
    let members = cx.members(&namespace, &name).await?;
    let observed = Observed { pool: &pool, vms: &members };
    let steps = plan(&observed);
    for step in &steps {
        execute(&cx.client, &pool, step).await?;
    }
    if pool.metadata.deletion_timestamp.is_none() {
        let wanted = status::derive(&observed, cx.clock.timestamp());
        let pools = object::scoped(&cx.client, Some(&namespace));
        apply_status(&pools, &pool, pool.status.as_ref(), &wanted, keys::POOL_MANAGER).await?;
    }
    // Each change of a VM triggers a reconcile, too.
    Ok(if steps.is_empty() { Action::await_change() } else { Action::requeue(NEXT_BATCH) })
}

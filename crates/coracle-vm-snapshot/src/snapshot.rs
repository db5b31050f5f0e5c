//! Reconcile of one VMSnapshot: observe, plan, execute, status.

mod plan;

use std::{sync::Arc, time::Duration};

use coracle_api::{VMSnapshot, VMSnapshotStatus, keys};
use coracle_reconcile::{
    Action, Reconciler, WallTime as _, add_finalizer, apply_status, object, remove_finalizer,
};
use kube::ResourceExt as _;
use tracing::info;

use crate::context::{Context, Error};
use plan::{Observed, Plan, Saved, Step, binding, needs, plan};

/// Time between observations of a VM that is missing or down.
const TRY_AGAIN: Duration = Duration::from_secs(10);

/// Controller of VMSnapshots.
pub(crate) struct Snapshots(pub(crate) Arc<Context>);

impl Reconciler for Snapshots {
    type Object = VMSnapshot;
    type Error = Error;

    async fn reconcile(&self, cached: Arc<VMSnapshot>) -> Result<Action, Error> {
        reconcile(&self.0, &cached).await
    }

    fn is_expected(&self, error: &Error) -> bool {
        error.is_expected()
    }
}

/// Returns the name of an object's snapshot on its node.
pub(crate) fn node_name_of(snapshot: &VMSnapshot) -> String {
    format!("vmsnap-{}", snapshot.uid().unwrap_or_default())
}

async fn reconcile(cx: &Context, cached: &VMSnapshot) -> Result<Action, Error> {
    let (namespace, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let fresh = cx.read::<VMSnapshot>(&namespace, &name).await?.filter(|fresh| fresh.uid() == cached.uid());
    let Some(object) = fresh else { return Ok(Action::await_change()) };
    let vm = match needs(&object).vm {
        true => cx.vm(&namespace, &object.spec.vm_name).await?,
        false => None,
    };
    let saved = match (needs(&object).saved, binding(&object)) {
        (true, Some(node)) => match cx.config.nodes.get(node, &node_name_of(&object)).await {
            Ok(found) => Saved::Answered(found),
            Err(error) => Saved::Failed(error),
        },
        _ => Saved::NotAsked,
    };
    let siblings: Vec<_> = cx
        .snapshots
        .state()
        .into_iter()
        .filter(|other| other.namespace() == object.namespace() && other.uid() != object.uid())
        .collect();
    let observed = Observed {
        object: &object,
        vm: vm.as_ref(),
        saved,
        siblings: &siblings,
        now: cx.config.common.clock.timestamp(),
    };
    let Plan { step, status } = plan(&observed);
    if let Some(status) = &status {
        report(cx, &object, status).await?;
    }
    let Some(step) = step else {
        let is_final = status.is_none_or(|status| status.phase == Some(coracle_api::SnapshotPhase::Ready));
        return Ok(if is_final { Action::await_change() } else { Action::requeue(TRY_AGAIN) });
    };
    info!(ns = namespace, name, step = step.name(), "step of a VMSnapshot");
    let ends = matches!(step, Step::RemoveFinalizer);
    let outcome = execute(cx, &object, &step).await;
    if let Err(Error::Node(error)) = &outcome
        && let Some(status) = plan::failed_status(&observed, error)
    {
        report(cx, &object, &status).await?;
    }
    outcome?;
    Ok(if ends { Action::await_change() } else { Action::requeue(Duration::ZERO) })
}

async fn report(cx: &Context, object: &VMSnapshot, status: &VMSnapshotStatus) -> Result<(), Error> {
    let all = cx.api::<VMSnapshot>(&object.namespace().unwrap_or_default());
    apply_status(&all, object, object.status.as_ref(), status, keys::SNAPSHOT_MANAGER).await?;
    Ok(())
}

async fn execute(cx: &Context, object: &VMSnapshot, step: &Step) -> Result<(), Error> {
    let namespace = object.namespace().unwrap_or_default();
    let all = cx.api::<VMSnapshot>(&namespace);
    match step {
        Step::AddFinalizer => {
            add_finalizer(&all, object, keys::SNAPSHOT_FINALIZER, keys::SNAPSHOT_MANAGER).await?;
        }
        // The status of the plan contains the binding.
        Step::Bind => {}
        Step::Save(vm) => cx.config.nodes.save(vm, &node_name_of(object)).await?,
        Step::DeleteSaved(node) => cx.config.nodes.delete(node, &node_name_of(object)).await?,
        Step::DeleteObject { name, uid } => {
            object::delete::<VMSnapshot>(&cx.client, &namespace, name, uid).await?;
        }
        Step::RemoveFinalizer => {
            remove_finalizer(&all, object, keys::SNAPSHOT_FINALIZER, keys::SNAPSHOT_MANAGER).await?;
        }
    }
    Ok(())
}

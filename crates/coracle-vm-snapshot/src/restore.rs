//! Reconcile of one VMRestore: observe, plan, execute, status.

mod plan;

use std::{sync::Arc, time::Duration};

use coracle_api::{MikromVM, VMRestore, VMRestoreStatus, VMSnapshot, keys};
use coracle_reconcile::{Action, ApiError, Reconciler, WallTime as _, apply_status, object};
use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams, Preconditions},
};
use serde_json::json;
use tracing::info;

use crate::context::{Context, Error};
use plan::{Observed, Plan, Step, failed_status, is_final, plan};

/// Time between observations of a VM that is being created.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Controller of VMRestores.
pub(crate) struct Restores(pub(crate) Arc<Context>);

impl Reconciler for Restores {
    type Object = VMRestore;
    type Error = Error;

    async fn reconcile(&self, cached: Arc<VMRestore>) -> Result<Action, Error> {
        reconcile(&self.0, &cached).await
    }

    fn is_expected(&self, error: &Error) -> bool {
        error.is_expected()
    }
}

async fn reconcile(cx: &Context, cached: &VMRestore) -> Result<Action, Error> {
    if is_final(cached) {
        return Ok(Action::await_change());
    }
    let (namespace, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let fresh = cx.read::<VMRestore>(&namespace, &name).await?.filter(|fresh| fresh.uid() == cached.uid());
    let Some(object) = fresh.filter(|fresh| fresh.metadata.deletion_timestamp.is_none()) else {
        return Ok(Action::await_change());
    };
    let snapshot = cx.read::<VMSnapshot>(&namespace, &object.spec.snapshot_name).await?;
    let vm = cx.vm(&namespace, &object.spec.vm_name).await?;
    let now = cx.config.common.clock.timestamp();
    let mut observed =
        Observed { object: &object, snapshot: snapshot.as_ref(), vm: vm.as_ref(), is_copied: false, now };
    if let Some(node) = plan::copy_node(&observed) {
        match cx.config.nodes.get(node, &plan::copy_name(&object)).await {
            Ok(copy) => observed.is_copied = copy.is_some(),
            Err(error) => {
                report(cx, &object, &failed_status(&observed, &error)).await?;
                return Err(error.into());
            }
        }
    }
    let Plan { steps, status } = plan(&observed);
    if let Some(status) = &status {
        report(cx, &object, status).await?;
    }
    for step in &steps {
        info!(ns = namespace, name, step = step.name(), "step of a VMRestore");
        let outcome = execute(cx, &namespace, step).await;
        if let Err(Error::Node(error)) = &outcome {
            report(cx, &object, &failed_status(&observed, error)).await?;
        }
        outcome?;
    }
    let ends = status.is_some_and(|status| plan::is_final_status(&status));
    Ok(if ends { Action::await_change() } else { Action::requeue(TRY_AGAIN) })
}

async fn report(cx: &Context, object: &VMRestore, status: &VMRestoreStatus) -> Result<(), Error> {
    let all = cx.api::<VMRestore>(&object.namespace().unwrap_or_default());
    apply_status(&all, object, object.status.as_ref(), status, keys::SNAPSHOT_MANAGER).await?;
    Ok(())
}

async fn execute(cx: &Context, namespace: &str, step: &Step) -> Result<(), Error> {
    let vms = cx.api::<MikromVM>(namespace);
    match step {
        Step::CreateVm(vm) => Ok(object::create(&cx.client, vm.as_ref(), keys::SNAPSHOT_MANAGER).await?),
        Step::CopySaved { node, name, copy } => {
            Ok(cx.config.nodes.copy(node, (name, copy), namespace).await?)
        }
        // The patch has UID and version: a VM that has changed is observed again.
        Step::RestoreInPlace { name, uid, version, migration } => {
            let exactly = Preconditions { uid: Some(uid.clone()), resource_version: version.clone() };
            let patch = json!({
                "metadata": {"uid": exactly.uid, "resourceVersion": exactly.resource_version},
                "status": {"migration": migration},
            });
            let params =
                PatchParams { field_manager: Some(keys::SNAPSHOT_MANAGER.into()), ..Default::default() };
            let patched = vms.patch_status(name, &params, &Patch::Merge(patch)).await;
            patched.map_err(ApiError::of::<MikromVM>("patch status of", namespace, name))?;
            Ok(())
        }
    }
}

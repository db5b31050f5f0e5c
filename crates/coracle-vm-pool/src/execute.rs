//! Carries out one step.

use coracle_api::{MikromVM, MikromVMPool, keys};
use coracle_reconcile::{ApiError, add_finalizer, object, remove_finalizer};
use kube::{
    Client, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tracing::info;

use crate::{plan::Step, reconcile::Error};

pub(crate) async fn execute(client: &Client, pool: &MikromVMPool, step: &Step) -> Result<(), Error> {
    let namespace = pool.namespace().unwrap_or_default();
    let pools = object::scoped::<MikromVMPool>(client, Some(&namespace));
    match step {
        Step::AddFinalizer => {
            add_finalizer(&pools, pool, keys::POOL_FINALIZER, keys::POOL_MANAGER).await?;
        }
        Step::RemoveFinalizer => {
            remove_finalizer(&pools, pool, keys::POOL_FINALIZER, keys::POOL_MANAGER).await?;
        }
        Step::Create(vm) => {
            info!(ns = namespace, name = vm.name_any(), "VM of a pool created");
            match object::create(client, vm.as_ref(), keys::POOL_MANAGER).await {
                // The VM was created by an interrupted reconcile, or by another writer: the next list shows it.
                Err(error) if error.is_conflict() => {}
                created => created?,
            }
        }
        Step::Delete { name, uid } => {
            info!(ns = namespace, name, "VM of a pool deleted");
            object::delete::<MikromVM>(client, &namespace, name, uid).await?;
        }
        Step::Annotate { name, uid, max_unavailable } => {
            annotate(client, &namespace, (name, uid), max_unavailable).await?;
        }
    }
    Ok(())
}

/// Sets the annotation of a VM. Returns `Ok` when the VM is gone or another VM has its name: the next reconcile plans again.
async fn annotate(
    client: &Client,
    namespace: &str,
    (name, uid): (&str, &str),
    max_unavailable: &str,
) -> Result<(), ApiError> {
    let annotations = json!({keys::vm::MAX_UNAVAILABLE: max_unavailable});
    let patch = Patch::Merge(json!({"metadata": {"uid": uid, "annotations": annotations}}));
    let params = PatchParams { field_manager: Some(keys::POOL_MANAGER.into()), ..Default::default() };
    let vms = object::scoped::<MikromVM>(client, Some(namespace));
    match vms.patch(name, &params, &patch).await {
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        patched => patched.map(drop).map_err(ApiError::of::<MikromVM>("annotate", namespace, name)),
    }
}

//! Removes Services and EndpointSlices of deleted VMs: a garbage collector, which would do the same, does not run everywhere.

use std::{collections::HashSet, fmt::Debug};

use coracle_api::MikromVM;
use coracle_reconcile::{ApiError, object};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{core::v1::Service, discovery::v1::EndpointSlice},
};
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    observe::{Context, GoneVm},
    plan::VM_LABEL,
};

impl Context {
    /// Removes the objects of VMs that were deleted earlier, then those of each VM that is deleted, until `stop`.
    pub(crate) async fn remove_orphans(&self, stop: &CancellationToken) {
        self.remove_earlier_orphans().await;
        let mut gone = self.gone.lock().await;
        while let Some(Some(vm)) = stop.run_until_cancelled(gone.recv()).await {
            self.remove_orphan(&vm).await;
        }
    }

    /// Removes the objects of VMs that were deleted while no process ran this controller.
    async fn remove_earlier_orphans(&self) {
        let living: HashSet<_> = self.vms.state().iter().filter_map(|vm| vm.uid()).collect();
        let services = self.services.state();
        let slices = self.slices.state();
        let metas = services.iter().map(|s| &s.metadata).chain(slices.iter().map(|s| &s.metadata));
        for meta in metas {
            let owner =
                meta.owner_references.iter().flatten().find(|owner| owner.kind == MikromVM::kind(&()));
            let name = meta.labels.as_ref().and_then(|labels| labels.get(VM_LABEL));
            if let (Some(owner), Some(name)) = (owner, name)
                && !living.contains(&owner.uid)
            {
                let namespace = meta.namespace.clone().unwrap_or_default();
                self.remove_orphan(&GoneVm { namespace, name: name.clone(), uid: owner.uid.clone() }).await;
            }
        }
    }

    async fn remove_orphan(&self, vm: &GoneVm) {
        let removed = match self.remove_owned::<EndpointSlice>(vm).await {
            Ok(()) => self.remove_owned::<Service>(vm).await,
            failed => failed,
        };
        if let Err(error) = removed {
            let error: &dyn std::error::Error = &error;
            warn!(ns = vm.namespace, name = vm.name, error, "remove the Service of a VM that is gone failed");
        }
    }

    /// Removes the object with the name of the VM, if the VM owns it.
    async fn remove_owned<K>(&self, vm: &GoneVm) -> Result<(), ApiError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        let found = object::read::<K>(&self.client, &vm.namespace, &vm.name).await?;
        let owned = found.filter(|found| found.owner_references().iter().any(|owner| owner.uid == vm.uid));
        match owned.and_then(|owned| owned.uid()) {
            Some(uid) => object::delete::<K>(&self.client, &vm.namespace, &vm.name, &uid).await,
            None => Ok(()),
        }
    }
}

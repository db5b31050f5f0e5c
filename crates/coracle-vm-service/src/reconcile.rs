//! One pass over one VM: observe, plan, execute.

use std::{collections::HashSet, fmt::Debug, sync::Arc, time::Duration};

use coracle_api::{MikromVM, keys};
use coracle_reconcile::{Event, Kind, Reconciler};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{core::v1::Service, discovery::v1::EndpointSlice},
};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    runtime::controller::Action,
};
use serde::{Serialize, de::DeserializeOwned};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    observe::{Context, Error, GoneVm},
    plan::{Observed, Step, VM_LABEL, plan},
};

/// Reason of the Event for a name that is taken.
const CONFLICT: &str = "ServiceConflict";
/// Time until a name that is taken is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(60);

/// The controller.
pub(crate) struct Services(pub(crate) Arc<Context>);

impl Reconciler for Services {
    type Object = MikromVM;
    type Error = Error;

    async fn reconcile(&self, vm: Arc<MikromVM>) -> Result<Action, Error> {
        let cx = &self.0;
        let (service, slice) = cx.cached(&vm);
        let cached = Observed { vm: &vm, service: service.as_deref(), slice: slice.as_deref() };
        if plan(&cached).is_empty() {
            return Ok(Action::await_change());
        }
        // Names without our label are in no cache, and what is written is decided on a fresh read.
        let (namespace, name) = (vm.namespace().unwrap_or_default(), vm.name_any());
        let Some(fresh) =
            cx.read::<MikromVM>(&namespace, &name).await?.filter(|fresh| fresh.uid() == vm.uid())
        else {
            return Ok(Action::await_change());
        };
        let service = cx.read::<Service>(&namespace, &name).await?;
        let slice = cx.read::<EndpointSlice>(&namespace, &name).await?;
        let observed = Observed { vm: &fresh, service: service.as_ref(), slice: slice.as_ref() };
        let steps = plan(&observed);
        for step in &steps {
            execute(cx, &fresh, step).await?;
        }
        let taken = steps.iter().any(|step| matches!(step, Step::ReportConflict(_)));
        Ok(if taken { Action::requeue(TRY_AGAIN) } else { Action::await_change() })
    }

    fn is_expected(&self, error: &Error) -> bool {
        error.is_conflict()
    }
}

async fn execute(cx: &Context, vm: &MikromVM, step: &Step) -> Result<(), Error> {
    let (namespace, name) = (vm.namespace().unwrap_or_default(), vm.name_any());
    info!(ns = namespace, name, step = step.name(), "step of a VM's Service");
    match step {
        Step::CreateService(service) => create(cx, &namespace, service.as_ref()).await,
        Step::UpdateService(service) => apply(cx, &namespace, service.as_ref()).await,
        Step::CreateSlice(slice) => create(cx, &namespace, slice.as_ref()).await,
        Step::UpdateSlice(slice) => apply(cx, &namespace, slice.as_ref()).await,
        Step::DeleteService(uid) => delete::<Service>(cx, &namespace, &name, uid).await,
        Step::DeleteSlice(uid) => delete::<EndpointSlice>(cx, &namespace, &name, uid).await,
        Step::ReportConflict(kind) => {
            let note = format!("{kind} {name} exists and is not the VM's: delete it, or rename the VM");
            let event = Event { kind: Kind::Warning, reason: CONFLICT, action: "Service", note };
            cx.events.publish(&event, &vm.object_ref(&())).await;
            Ok(())
        }
    }
}

fn failed<K: Resource<DynamicType = ()>>(
    operation: &'static str,
    namespace: &str,
    name: &str,
) -> impl FnOnce(kube::Error) -> Error + use<K> {
    let object = format!("{} {namespace}/{name}", K::kind(&()));
    move |source| Error { operation, object, source: Box::new(source) }
}

/// A name that was taken since it was read is a conflict: it is read again.
async fn create<K>(cx: &Context, namespace: &str, object: &K) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(cx.client.clone(), namespace);
    let params =
        PostParams { field_manager: Some(keys::VM_SERVICE_MANAGER.to_owned()), ..PostParams::default() };
    let failed = failed::<K>("create", namespace, &object.name_any());
    api.create(&params, object).await.map(drop).map_err(failed)
}

/// With the UID that was read, so that an object which is gone is not made anew.
async fn apply<K>(cx: &Context, namespace: &str, object: &K) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(cx.client.clone(), namespace);
    let params = PatchParams::apply(keys::VM_SERVICE_MANAGER).force();
    let name = object.name_any();
    let failed = failed::<K>("apply", namespace, &name);
    api.patch(&name, &params, &Patch::Apply(object)).await.map(drop).map_err(failed)
}

/// Deletes exactly that object; one that is gone, or another of its name, is `Ok`.
async fn delete<K>(cx: &Context, namespace: &str, name: &str, uid: &str) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(cx.client.clone(), namespace);
    let exactly = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
    let params = DeleteParams { preconditions: Some(exactly), ..DeleteParams::background() };
    match api.delete(name, &params).await {
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        deleted => deleted.map(drop).map_err(failed::<K>("delete", namespace, name)),
    }
}

impl Context {
    /// Removes what VMs left that went before a pass saw them go: a garbage collector, which does the same, does not run
    /// everywhere. Until `stop`.
    pub(crate) async fn remove_orphans(&self, stop: &CancellationToken) {
        self.remove_earlier_orphans().await;
        let mut gone = self.gone.lock().await;
        while let Some(Some(vm)) = stop.run_until_cancelled(gone.recv()).await {
            self.remove_orphan(&vm).await;
        }
    }

    /// Of VMs that went while no process ran this controller.
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
        let (namespace, name) = (vm.namespace.as_str(), vm.name.as_str());
        let owned = |meta: &kube::core::ObjectMeta| {
            meta.owner_references.iter().flatten().any(|owner| owner.uid == vm.uid)
        };
        let remove = async {
            if let Some(uid) = self
                .read::<EndpointSlice>(namespace, name)
                .await?
                .filter(|s| owned(&s.metadata))
                .and_then(|s| s.uid())
            {
                delete::<EndpointSlice>(self, namespace, name, &uid).await?;
            }
            if let Some(uid) = self
                .read::<Service>(namespace, name)
                .await?
                .filter(|s| owned(&s.metadata))
                .and_then(|s| s.uid())
            {
                delete::<Service>(self, namespace, name, &uid).await?;
            }
            Ok::<_, Error>(())
        };
        if let Err(error) = remove.await {
            let error: &dyn std::error::Error = &error;
            warn!(ns = namespace, name, error, "remove the Service of a VM that is gone failed");
        }
    }
}

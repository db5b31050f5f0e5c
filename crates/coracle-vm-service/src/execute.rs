//! Carries out one step.

use coracle_api::{MikromVM, keys};
use coracle_reconcile::{ApiError, Event, Kind, object};
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::{Resource as _, ResourceExt as _};
use tracing::info;

use crate::{observe::Context, plan::Step};

/// Field manager of created and applied objects.
const MANAGER: &str = keys::VM_SERVICE_MANAGER;
/// Reason of the Event for a name that is taken.
const CONFLICT: &str = "ServiceConflict";

pub(crate) async fn execute(cx: &Context, vm: &MikromVM, step: &Step) -> Result<(), ApiError> {
    let (namespace, name) = (vm.namespace().unwrap_or_default(), vm.name_any());
    let client = &cx.client;
    info!(ns = namespace, name, step = step.name(), "step of a VM's Service");
    match step {
        // A name that was taken after the read is a conflict, and the objects are read again.
        Step::CreateService(service) => object::create(client, service.as_ref(), MANAGER).await,
        Step::UpdateService(service) => object::apply(client, service.as_ref(), MANAGER).await,
        Step::CreateSlice(slice) => object::create(client, slice.as_ref(), MANAGER).await,
        Step::UpdateSlice(slice) => object::apply(client, slice.as_ref(), MANAGER).await,
        Step::DeleteService(uid) => object::delete::<Service>(client, &namespace, &name, uid).await,
        Step::DeleteSlice(uid) => object::delete::<EndpointSlice>(client, &namespace, &name, uid).await,
        Step::ReportConflict(kind) => {
            let note = format!("{kind} {name} exists and is not the VM's: delete it, or rename the VM");
            let event = Event { kind: Kind::Warning, reason: CONFLICT, action: "Service", note };
            cx.events.publish(&event, &vm.object_ref(&())).await;
            Ok(())
        }
    }
}

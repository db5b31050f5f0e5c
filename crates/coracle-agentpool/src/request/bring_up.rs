//! Creation of a VM until it runs and is recorded. The process may end after any call: the next one queries vCenter and
//! continues from the state that it finds.

use std::{sync::Arc, time::Duration};

use coracle_api::agentpool::{VsphereAgent, names};
use coracle_reconcile::{Kind, WallTime as _};
use coracle_vsphere::{FaultClass, Object, TaskId, Vm, VmConfigSpec, VsphereError, Wanted};
use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::time::timeout;
use tracing::info;

use super::{Done, plan::CreateVm, requests};
use crate::{
    Context, Error, REQUEST_MANAGER,
    error::{Trouble, api},
    identity::vm_name,
    status::{report_request, request_event, say, seconds},
    vcenters::Provider,
    vm::{self as machine, Next, VmIdentity},
};

/// Most rounds of query and action in one reconcile; two are normal.
const ROUNDS_MAX: usize = 10;
/// Longest wait for the watch to show a VM that was powered on; then it is queried.
const SHOWN: Duration = Duration::from_secs(3);

const FAILED: &str = "VMCreateFailed";

/// Creates the VM of `request`, or continues with an existing one.
pub(super) async fn bring_up(
    cx: &Context,
    request: &VsphereAgent,
    vm: &CreateVm,
    provider: &Provider,
    iso: &str,
) -> Result<Result<Vm, Trouble>, Error> {
    let vcenter = &provider.vcenter;
    let id = VmIdentity::of(request);
    let _place = match vcenter.creates.acquire().await {
        Ok(place) => place,
        Err(_) => return Ok(Err(Trouble::new(FAILED, "the session was closed", FaultClass::Session))),
    };
    if let Err(trouble) = pending(request, provider).await {
        return Ok(Err(trouble));
    }
    let mut spec = VmConfigSpec { iso: iso.to_owned(), ..vm.spec.clone() };
    for _ in 0..ROUNDS_MAX {
        let found = match vcenter.api.find(&provider.site, &id.wanted()).await {
            Ok(found) => found,
            Err(error) => return Ok(Err(failed(provider, &error))),
        };
        let step = match machine::next(&id, &found, iso) {
            Next::Mismatch(why) => {
                return Ok(Err(Trouble::new("VMOwnershipMismatch", why, FaultClass::Other)));
            }
            Next::Done(found) => {
                let tagged = vcenter.api.attach_tags(&found.object, &vm.tags).await;
                return Ok(tagged.map(|()| *found).map_err(|e| failed(provider, &e)));
            }
            Next::Create => create(cx, request, provider, &spec).await?,
            Next::Change(object, change) => match vcenter.api.reconfigure(&object, &change).await {
                Ok(task) => vcenter.api.ended(&task).await.map(|_| None),
                Err(error) => Err(error),
            },
            Next::PowerOn(object) => Ok(Some(object)),
        };
        let object = match step {
            Ok(Some(object)) => object,
            Ok(None) => continue,
            // Another process was faster, perhaps this controller before a restart: query again.
            Err(error) if error.class() == FaultClass::Race => {
                if error.fault() == Some("FileAlreadyExists") {
                    spec.directory = format!("{}-{:04x}", spec.name, rand::random::<u16>());
                }
                continue;
            }
            Err(error) => return Ok(Err(failed(provider, &error))),
        };
        if let Err(error) = vcenter.api.attach_tags(&object, &vm.tags).await {
            return Ok(Err(failed(provider, &error)));
        }
        if let Err(trouble) = power_on(provider, &object).await {
            return Ok(Err(trouble));
        }
        cx.reached(request, "powered");
        if let Some(vm) = shown(provider, &object, &id).await {
            return Ok(Ok(vm));
        }
    }
    Ok(Err(Trouble::new(FAILED, format!("VM {} did not settle", spec.name), FaultClass::Race)))
}

/// A failed call. After "gone" the cached names are wrong and are resolved again.
fn failed(provider: &Provider, error: &VsphereError) -> Trouble {
    if error.class() == FaultClass::Gone {
        provider.vcenter.api.forget();
    }
    Trouble::vsphere(FAILED, error)
}

/// Waits for the task of a former process, so that it is not started twice.
async fn pending(request: &VsphereAgent, provider: &Provider) -> Result<(), Trouble> {
    let Some(note) = request.annotations().get(names::PENDING_TASK) else { return Ok(()) };
    let mut parts = note.splitn(3, '/');
    let (instance, task) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    if instance != provider.vcenter.api.instance() || task.is_empty() {
        return Ok(());
    }
    info!(task, "waiting for the task of a former process");
    match provider.vcenter.api.ended(&TaskId(task.to_owned())).await {
        Ok(_) => Ok(()),
        // The fault belongs to that former attempt; the next query shows the present state.
        Err(error) if error.fault().is_some() => Ok(()),
        Err(error) => Err(failed(provider, &error)),
    }
}

/// Creates the VM. Its UUIDs are derived from the UID of the request, so they identify the operation before the call; the
/// task is stored as soon as it is known.
async fn create(
    cx: &Context,
    request: &VsphereAgent,
    provider: &Provider,
    spec: &VmConfigSpec,
) -> Result<Result<Option<Object>, VsphereError>, Error> {
    let vcenter = &provider.vcenter;
    let store = match vcenter.api.place(&provider.site, spec).await {
        Ok(store) => store,
        Err(error) => return Ok(Err(error)),
    };
    cx.reached(request, "placed");
    let task = match vcenter.api.create(&provider.site, &store, spec).await {
        Ok(task) => task,
        Err(error) => return Ok(Err(error)),
    };
    let now = seconds(cx.config.clock.timestamp()).0;
    remember(cx, request, Some(format!("{}/{}/{now}", vcenter.api.instance(), task.0))).await?;
    let ended = vcenter.api.ended(&task).await;
    if ended.is_ok() {
        cx.reached(request, "created");
    }
    Ok(ended)
}

async fn remember(cx: &Context, request: &VsphereAgent, note: Option<String>) -> Result<(), Error> {
    let api_of = requests(cx, &request.namespace().unwrap_or_default());
    let patch = json!({"metadata": {"uid": request.uid(), "annotations": {names::PENDING_TASK: note}}});
    let params = PatchParams { field_manager: Some(REQUEST_MANAGER.into()), ..PatchParams::default() };
    match api_of.patch(&request.name_any(), &params, &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(api("store the task of VsphereAgent", request.name_any())(error)),
    }
}

/// Powers on. Idempotent.
pub(super) async fn power_on(provider: &Provider, object: &Object) -> Result<(), Trouble> {
    let api = &provider.vcenter.api;
    let ended = match api.power_on(object).await {
        Ok(task) => api.ended(&task).await.map(drop),
        Err(error) => Err(error),
    };
    match ended {
        Err(error) if error.fault() == Some("InvalidPowerState") => Ok(()),
        other => other.map_err(|error| failed(provider, &error)),
    }
}

/// The running VM: from the watch, which costs no call, else by a query.
async fn shown(provider: &Provider, object: &Object, id: &VmIdentity) -> Option<Vm> {
    let api = &provider.vcenter.api;
    let mut watch = api.machines(&provider.site);
    let is_whole = |vm: &Arc<Vm>| vm.powered_on && !vm.uuid.is_empty() && !vm.mac.is_empty();
    let whole = watch.wait_for(|m| m.is_current && m.vms.get(&object.id).is_some_and(is_whole));
    if let Ok(Ok(machines)) = timeout(SHOWN, whole).await {
        return machines.vms.get(&object.id).map(|vm| vm.as_ref().clone());
    }
    let wanted = Wanted { instance_uuid: id.wanted().instance_uuid, ..Wanted::default() };
    let found = api.find(&provider.site, &wanted).await.ok()?;
    found.into_iter().find(|vm| vm.object == *object && vm.powered_on)
}

/// Records the VM, then removes the task: an older operator must never see a name without a VM.
pub(super) async fn record(cx: &Context, request: &VsphereAgent, vm: &Vm) -> Result<Done, Error> {
    let mut row = machine::record(request, vm);
    row.last_transition_time = Some(seconds(cx.config.clock.timestamp()));
    report_request(cx, request, Some(row), say("Ready", true, "VMCreated", "")).await?;
    let note = format!("VM {} ({}) runs", vm.name, vm.uuid);
    request_event(cx, request, Kind::Normal, "VMCreated", note).await;
    let api_of = requests(cx, &request.namespace().unwrap_or_default());
    let fresh =
        api_of.get_opt(&request.name_any()).await.map_err(api("read VsphereAgent", request.name_any()))?;
    if fresh.is_some_and(|r| r.annotations().contains_key(names::PENDING_TASK)) {
        remember(cx, request, None).await?;
    }
    Ok(Done::Settled(cx.config.times.steady))
}

/// Records an existing VM, found by its name.
pub(super) async fn adopt(cx: &Context, request: &VsphereAgent, provider: &Provider) -> Result<Done, Error> {
    let wanted = Wanted { name: vm_name(request), ..Wanted::default() };
    let found = match provider.vcenter.api.find(&provider.site, &wanted).await {
        Ok(found) => found,
        Err(error) => return Ok(Done::Failed(Trouble::vsphere("AdoptedVMUnavailable", &error))),
    };
    let Some(vm) = found.first() else {
        let why = format!("no VM {} in {}", wanted.name, provider.site.folder_path);
        return Ok(Done::Failed(Trouble::new("AdoptedVMUnavailable", why, FaultClass::Other)));
    };
    let mut row = machine::record(request, vm);
    row.reason = names::why::VM_ADOPTED.into();
    row.last_transition_time = Some(seconds(cx.config.clock.timestamp()));
    report_request(cx, request, Some(row), say("Ready", true, "VMAdopted", "")).await?;
    Ok(Done::Settled(cx.config.times.steady))
}

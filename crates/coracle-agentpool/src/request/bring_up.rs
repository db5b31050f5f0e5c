//! Creation of a VM until it runs and is recorded. The process may end after any call: the next process queries vCenter and
//! continues from the state that it finds.

use std::{sync::Arc, time::Duration};

use coracle_api::agentpool::{VsphereAgent, names};
use coracle_reconcile::{Kind, WallTime as _};
use coracle_vsphere::{FaultClass, Object, Question, TaskId, Vm, VmConfigSpec, VsphereError, Wanted};
use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::time::{sleep, timeout};
use tracing::info;

use super::{
    Done,
    plan::{ANSWERS, CreateVm},
    requests,
    status::was_lost,
};
use crate::{
    Context, Error, REQUEST_MANAGER,
    error::{RequestFailure, api},
    identity::vm_name,
    status::{new_condition, report_request, request_event, seconds},
    vcenters::Provider,
    vm::{self as machine, Next, VmIdentity, choice},
};

/// Most rounds of query and action in one reconcile; two are normal.
const ROUNDS_MAX: usize = 10;
/// Longest wait until the watch shows a VM that was powered on; afterwards the VM is queried.
const SHOWN: Duration = Duration::from_secs(3);

/// Pause before another query after a conflict with another client, multiplied by the number of the round.
const RACED: Duration = Duration::from_millis(200);

const FAILED: &str = "VMCreateFailed";

/// Creates the VM of `request`, or continues with an existing one.
pub(super) async fn bring_up(
    cx: &Context,
    request: &VsphereAgent,
    vm: &CreateVm,
    provider: &Provider,
    iso: &str,
) -> Result<Result<Vm, RequestFailure>, Error> {
    let vcenter = &provider.vcenter;
    let id = VmIdentity::of(request);
    let _place = match vcenter.creates.acquire().await {
        Ok(place) => place,
        Err(_) => return Ok(Err(RequestFailure::new(FAILED, "the session was closed", FaultClass::Session))),
    };
    if let Err(trouble) = wait_pending_creation(cx, request, provider).await {
        return Ok(Err(trouble));
    }
    let folder = &provider.site.folder;
    let mut starting = None;
    let mut spec = VmConfigSpec { iso: iso.to_owned(), ..vm.spec.clone() };
    for round in 0..ROUNDS_MAX {
        let found = match vcenter.api.find(&provider.site, &id.wanted()).await {
            Ok(found) => found,
            Err(error) => return Ok(Err(call_failure(provider, &error))),
        };
        let step = match machine::next(&id, &found, folder, iso) {
            Next::Unreadable(why) => {
                return Ok(Err(RequestFailure::new("VMStatusFailed", why, FaultClass::Other)));
            }
            Next::Ask(object, question) => {
                let Some(choice) = choice(&question, &vm.answers) else {
                    return Ok(Err(question_failure(&spec.name, &question)));
                };
                info!(vm = spec.name, question = question.text, choice, "question of vCenter answered");
                match (vcenter.api.answer(&object, &question.id, &choice).await, starting.take()) {
                    (Ok(()), Some(task)) => vcenter.api.wait_task(&task).await.map(|_| None),
                    (answered, _) => answered.map(|()| None),
                }
            }
            Next::Mismatch(why) => {
                return Ok(Err(RequestFailure::new("VMOwnershipMismatch", why, FaultClass::Other)));
            }
            Next::Done(found) => {
                let tagged = vcenter.api.attach_tags(&found.object, &vm.tags).await;
                return Ok(tagged.map(|()| *found).map_err(|e| call_failure(provider, &e)));
            }
            Next::Create => {
                match inconclusive_reason(cx, request, provider).await {
                    Ok(None) => {}
                    Ok(Some(why)) => return Ok(Err(RequestFailure::new(FAILED, why, FaultClass::Session))),
                    Err(error) => return Ok(Err(call_failure(provider, &error))),
                }
                create(cx, request, provider, &spec).await?
            }
            Next::Change(object, change) => match vcenter.api.reconfigure(&object, &change).await {
                Ok(task) => vcenter.api.wait_task(&task).await.map(|_| None),
                Err(error) => Err(error),
            },
            Next::PowerOn(object) => Ok(Some(object)),
        };
        let object = match step {
            Ok(Some(object)) => object,
            Ok(None) => continue,
            Err(VsphereError::Fault { fault, .. }) if fault.asks_for_host() && !spec.names_host => {
                spec.names_host = true;
                continue;
            }
            // Another process was faster, perhaps this operator before a restart: query again.
            Err(error) if error.class() == FaultClass::Race => {
                sleep(RACED * u32::try_from(round).unwrap_or(0)).await;
                if error.fault() == Some("FileAlreadyExists") {
                    spec.directory = format!("{}-{:04x}", spec.name, rand::random::<u16>());
                }
                continue;
            }
            Err(error) => return Ok(Err(call_failure(provider, &error))),
        };
        if let Err(error) = vcenter.api.attach_tags(&object, &vm.tags).await {
            return Ok(Err(call_failure(provider, &error)));
        }
        match power_on(provider, &object).await {
            Ok(Started::Yes) => cx.record_stage(request, "powered"),
            Ok(Started::Asks(task)) => {
                starting = Some(task);
                continue;
            }
            Err(trouble) => return Ok(Err(trouble)),
        }
        if let Some(vm) = find_running_vm(provider, &object, &id).await {
            return Ok(Ok(vm));
        }
    }
    Ok(Err(RequestFailure::new(FAILED, format!("VM {} did not settle", spec.name), FaultClass::Race)))
}

/// Converts a failed call. After "gone" the cached names are wrong and must be resolved again.
fn call_failure(provider: &Provider, error: &VsphereError) -> RequestFailure {
    provider.observe(error);
    RequestFailure::vsphere(FAILED, error)
}

/// Waits for a creation that this process or a former one has started, so that the VM is not created twice.
async fn wait_pending_creation(
    cx: &Context,
    request: &VsphereAgent,
    provider: &Provider,
) -> Result<(), RequestFailure> {
    let Some(task) = creation(cx, request, provider) else { return Ok(()) };
    info!(task = task.0, "waiting for a creation that was started before");
    match wait_creation(cx, request, provider, &task).await {
        Ok(_) => Ok(()),
        // The fault belongs to the former attempt; the next query shows the present state.
        Err(error) if error.fault().is_some() => Ok(()),
        Err(error) => Err(call_failure(provider, &error)),
    }
}

/// Task of a creation that was started for an object and whose end was not seen: from this process, or else from the
/// annotation.
pub(super) fn creation(cx: &Context, request: &VsphereAgent, provider: &Provider) -> Option<TaskId> {
    let uid = request.uid().unwrap_or_default();
    let known = cx.creations.lock().get(&uid).cloned();
    let stored = || noted_task(request).map(|(instance, task)| (instance.to_owned(), task));
    let (instance, task) = known.or_else(stored)?;
    (instance == provider.vcenter.api.instance() && !task.0.is_empty()).then_some(task)
}

/// Waits for a creation, and forgets it once it has ended.
async fn wait_creation(
    cx: &Context,
    request: &VsphereAgent,
    provider: &Provider,
    task: &TaskId,
) -> Result<Option<Object>, VsphereError> {
    let ended = provider.vcenter.api.wait_task(task).await;
    if ended.is_ok() || ended.as_ref().is_err_and(|error| error.fault().is_some()) {
        cx.creations.lock().remove(&request.uid().unwrap_or_default());
    }
    ended
}

/// Returns why a search that found no VM is inconclusive: another process may have started to create the VM, and ended before
/// it stored the task. This is checked only for objects that are older than this process.
pub(super) async fn inconclusive_reason(
    cx: &Context,
    request: &VsphereAgent,
    provider: &Provider,
) -> Result<Option<String>, VsphereError> {
    let is_older = request.metadata.creation_timestamp.as_ref().is_none_or(|made| made.0 <= cx.started);
    if !is_older {
        return Ok(None);
    }
    let running = provider.vcenter.api.creations(&provider.site).await?;
    let others = cx.caches.requests.state();
    let is_known = |task: &TaskId| {
        cx.creations.lock().values().any(|(_, known)| known == task)
            || others.iter().any(|r| noted_task(r).is_some_and(|(_, noted)| noted == *task))
    };
    let unknown: Vec<_> = running.into_iter().filter(|t| !is_known(t)).map(|t| t.0).collect();
    Ok((!unknown.is_empty()).then(|| {
        format!("{} of an earlier process may create the VM, waiting for its end", unknown.join(", "))
    }))
}

/// Task in the annotation of an object, with the id of its vCenter.
fn noted_task(request: &VsphereAgent) -> Option<(&str, TaskId)> {
    let (instance, rest) = request.annotations().get(names::PENDING_TASK)?.split_once('/')?;
    Some((instance, TaskId(rest.split('/').next().unwrap_or_default().to_owned())))
}

/// Creates the VM. Its UUIDs are derived from the UID of the request, so they identify the operation before the call. The task
/// is stored as soon as it is known.
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
    cx.record_stage(request, "placed");
    let task = match vcenter.api.create(&provider.site, &store, spec).await {
        Ok(task) => task,
        Err(error) => return Ok(Err(error)),
    };
    let uid = request.uid().unwrap_or_default();
    cx.creations.lock().insert(uid, (vcenter.api.instance(), task.clone()));
    let now = seconds(cx.config.clock.timestamp()).0;
    remember(cx, request, Some(format!("{}/{}/{now}", vcenter.api.instance(), task.0))).await?;
    let ended = wait_creation(cx, request, provider, &task).await;
    if ended.is_ok() {
        cx.record_stage(request, "created");
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

/// Failure for a question that only a user can answer.
pub(super) fn question_failure(vm: &str, question: &Question) -> RequestFailure {
    let choices: Vec<_> = question.choices.iter().map(|(key, label)| format!("{key} ({label})")).collect();
    let message = format!(
        "VM {vm} waits for an answer to {}: \"{}\" with one of {}; answer it in vSphere, or annotate the pool with {ANSWERS}",
        question.message_ids.join(", "),
        question.text,
        choices.join(", ")
    );
    RequestFailure::new(FAILED, message, FaultClass::Other)
}

/// Result of a power-on.
#[derive(Debug)]
pub(super) enum Started {
    /// The VM runs.
    Yes,
    /// The task waits for an answer to the VM's question.
    Asks(TaskId),
}

/// Powers on a VM. Idempotent.
pub(super) async fn power_on(provider: &Provider, object: &Object) -> Result<Started, RequestFailure> {
    let api = &provider.vcenter.api;
    let mut machines = api.machines(&provider.site);
    let task = match api.power_on(object).await {
        Ok(task) => task,
        Err(error) if error.fault() == Some("InvalidPowerState") => return Ok(Started::Yes),
        Err(error) => return Err(call_failure(provider, &error)),
    };
    let asks = machines.wait_for(|m| m.vms.get(&object.id).is_some_and(|vm| vm.question.is_some()));
    let ended = tokio::select! {
        ended = api.wait_task(&task) => ended,
        Ok(_) = asks => return Ok(Started::Asks(task)),
    };
    match ended {
        Err(error) if error.fault() == Some("InvalidPowerState") => Ok(Started::Yes),
        other => other.map(|_| Started::Yes).map_err(|error| call_failure(provider, &error)),
    }
}

/// Returns the running VM: from the watch, which costs no call, otherwise by a query.
async fn find_running_vm(provider: &Provider, object: &Object, id: &VmIdentity) -> Option<Vm> {
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

/// Records the VM, then removes the stored task: an older operator must never see a name without a VM.
pub(super) async fn record(cx: &Context, request: &VsphereAgent, vm: &Vm) -> Result<Done, Error> {
    let mut row = machine::record(request, vm);
    row.last_transition_time = Some(seconds(cx.config.clock.timestamp()));
    report_request(cx, request, Some(row), new_condition("Ready", true, "VMCreated", "")).await?;
    let note = format!("VM {} ({}) runs", vm.name, vm.uuid);
    request_event(cx, request, Kind::Normal, "VMCreated", note).await;
    if was_lost(request) {
        let note = format!("VM {} ({}) takes the place of the one that was gone", vm.name, vm.uuid);
        request_event(cx, request, Kind::Normal, "VMRecovered", note).await;
    }
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
        Err(error) => return Ok(Done::Failed(RequestFailure::vsphere("AdoptedVMUnavailable", &error))),
    };
    let in_folder = |vm: &&Vm| vm.folder.as_ref() == Some(&provider.site.folder) && vm.unreadable.is_empty();
    let Some(vm) = found.iter().find(in_folder) else {
        let why = format!("no VM {} in {}", wanted.name, provider.site.folder_path);
        return Ok(Done::Failed(RequestFailure::new("AdoptedVMUnavailable", why, FaultClass::Other)));
    };
    let mut row = machine::record(request, vm);
    row.reason = names::phase_reason::VM_ADOPTED.into();
    row.last_transition_time = Some(seconds(cx.config.clock.timestamp()));
    report_request(cx, request, Some(row), new_condition("Ready", true, "VMAdopted", "")).await?;
    Ok(Done::Settled(cx.config.times.steady))
}

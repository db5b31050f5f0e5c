//! VsphereAgents: one object, one VM.

mod bring_up;
mod ejection;
mod fence;
mod take_down;

use std::{collections::HashSet, sync::Arc, time::Duration};

use coracle_api::agentpool::{OwnedVm, VsphereAgent, VsphereAgentPool, foreign::InfraEnv, names};
use coracle_reconcile::{Kind, add_finalizer, remove_finalizer};
use coracle_vsphere::{FaultClass, Machines};
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use kube::{
    Api, ResourceExt as _,
    runtime::{controller::Action, reflector::ObjectRef},
};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_util::sync::CancellationToken;

pub(crate) use fence::{Fenced, fence};

use crate::{
    Context, Error, REQUEST_MANAGER, act,
    error::{Trouble, api},
    identity::owner_note,
    iso,
    status::{report_request, request_event, say, seconds},
    vcenters::Provider,
    vm::{Identity, iso_url, undo},
    watches::{Triggers, pool_of},
};

/// An ejection that is under way is looked at again after so long.
const EJECTING: Duration = Duration::from_secs(1);

/// Reconciles until `stop`.
pub(crate) async fn control(
    cx: &Arc<Context>,
    queue: UnboundedReceiver<ObjectRef<VsphereAgent>>,
    stop: &CancellationToken,
) {
    let store = cx.caches.requests.clone();
    let workers = cx.config.workers[2];
    act::control(cx, "vsphereagent", store, queue, workers, stop, |r, cx| Box::pin(reconcile(r, cx))).await;
}

/// Sends the owners of VMs that went, or went off, into the queue, for as long as the sessions live.
pub(crate) async fn follow(cx: &Context, mut folders: UnboundedReceiver<Folder>, triggers: &Triggers) {
    let mut all = FuturesUnordered::new();
    loop {
        tokio::select! {
            Some(folder) = folders.recv() => all.push(follow_one(cx, folder, triggers)),
            Some(()) = all.next() => {}
            else => return,
        }
    }
}

/// Machines of one folder.
pub(crate) type Folder = tokio::sync::watch::Receiver<Arc<Machines>>;

async fn follow_one(cx: &Context, mut machines: Folder, triggers: &Triggers) {
    let mut before = machines.borrow_and_update().clone();
    while machines.changed().await.is_ok() {
        let now = machines.borrow_and_update().clone();
        if !now.is_current {
            continue;
        }
        let is_on = |machines: &Machines, id: &str| machines.vms.get(id).is_some_and(|vm| vm.powered_on);
        let lost = before.vms.iter().filter(|(id, vm)| vm.powered_on && !is_on(&now, id));
        let uuids: Vec<_> = lost.map(|(_, vm)| vm.uuid.clone()).collect();
        if !uuids.is_empty() {
            for request in cx.caches.requests.state() {
                if request.vm().is_some_and(|vm| uuids.contains(&vm.bios_uuid)) {
                    let _ = triggers.requests.send(ObjectRef::from_obj(request.as_ref()));
                }
            }
        }
        before = now;
    }
}

/// Objects read past the caches.
pub(crate) fn requests(cx: &Context, namespace: &str) -> Api<VsphereAgent> {
    Api::namespaced(cx.client.clone(), namespace)
}

async fn reconcile(cached: Arc<VsphereAgent>, cx: Arc<Context>) -> Result<Action, Error> {
    let (ns, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let uid = cached.uid().unwrap_or_default();
    let read = requests(&cx, &ns).get_opt(&name).await.map_err(api("read VsphereAgent", &name))?;
    let Some(request) = read.filter(|r| r.uid().as_deref() == Some(&uid)) else {
        cx.backoffs.reset(&uid);
        return Ok(Action::await_change());
    };
    let pools: Api<VsphereAgentPool> = Api::namespaced(cx.client.clone(), &ns);
    let pool_name = pool_of(&request);
    let pool = pools.get_opt(&pool_name).await.map_err(api("read VsphereAgentPool", &pool_name))?;
    let deleting = request.metadata.deletion_timestamp.is_some();
    let Some(pool) = pool else { return without_pool(&cx, &request, deleting).await };
    let ejects = request.status.as_ref().is_some_and(|s| s.iso_ejection.is_some());
    if deleting && ejects && !finish_ejection(&cx, &request, &pool).await? {
        return Ok(Action::requeue(EJECTING));
    }
    if deleting {
        return outcome(&cx, &request, take_down::remove(&cx, &request, &pool).await?).await;
    }
    let mut request = request;
    if !request.finalizers().iter().any(|f| f == names::AGENT_FINALIZER) {
        let api = requests(&cx, &ns);
        let Some(held) = add_finalizer(&api, &request, names::AGENT_FINALIZER, REQUEST_MANAGER).await? else {
            return Ok(Action::await_change());
        };
        request = held;
    }
    let done = if request.vm().is_some() {
        steady(&cx, &request, &pool).await?
    } else {
        create(&cx, &request, &pool).await?
    };
    outcome(&cx, &request, done).await
}

/// An ejection that was begun is finished before the VM goes: a question that waits would hold it up. `true`: nothing is
/// left to do, or nothing can be done.
async fn finish_ejection(
    cx: &Context,
    request: &VsphereAgent,
    pool: &VsphereAgentPool,
) -> Result<bool, Error> {
    match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => ejection::eject(cx, request, pool, &provider).await,
        // What follows needs vCenter too, and tells.
        Err(_) => Ok(true),
    }
}

/// How a pass ended.
#[derive(Debug)]
pub(crate) enum Done {
    /// Nothing more to do now.
    Well(Duration),
    /// Something else must happen first.
    Waits(Duration),
    /// It did not work.
    Trouble(Trouble),
}

async fn outcome(cx: &Context, request: &VsphereAgent, done: Done) -> Result<Action, Error> {
    let uid = request.uid().unwrap_or_default();
    match done {
        Done::Well(again) => {
            cx.backoffs.reset(&uid);
            cx.capacity.reset(&uid);
            Ok(Action::requeue(again))
        }
        Done::Waits(again) => Ok(Action::requeue(again)),
        Done::Trouble(trouble) => {
            let wait = trouble.retry(cx, &uid);
            let ready = say("Ready", false, trouble.reason, trouble.message);
            report_request(cx, request, request.status.as_ref().and_then(|s| s.vm.clone()), ready).await?;
            Ok(Action::requeue(wait))
        }
    }
}

async fn without_pool(cx: &Context, request: &VsphereAgent, deleting: bool) -> Result<Action, Error> {
    let note = format!("no VsphereAgentPool {}", pool_of(request));
    if deleting {
        request_event(cx, request, Kind::Warning, "PoolNotFound", format!("{note}; its VM stays")).await;
        let api = requests(cx, &request.namespace().unwrap_or_default());
        remove_finalizer(&api, request, names::AGENT_FINALIZER, REQUEST_MANAGER).await?;
        return Ok(Action::await_change());
    }
    let vm = request.status.as_ref().and_then(|s| s.vm.clone());
    report_request(cx, request, vm, say("Ready", false, "PoolNotFound", note)).await?;
    Ok(Action::requeue(cx.config.times.pool))
}

/// The InfraEnv's ISO, read now.
pub(crate) async fn infra_env_url(
    cx: &Context,
    pool: &VsphereAgentPool,
) -> Result<Result<String, String>, Error> {
    let ns = pool.namespace().unwrap_or_default();
    let name = &pool.spec.infra_env_ref.name;
    let envs: Api<InfraEnv> = Api::namespaced_with(cx.client.clone(), &ns, &cx.caches.kinds.infra_env);
    let found = envs.get_opt(name).await.map_err(api("read InfraEnv", name))?;
    Ok(iso_url(found.as_ref()).map_err(|why| format!("InfraEnv {name}: {why}")))
}

/// There is no VM in the record: find or make it.
async fn create(cx: &Arc<Context>, request: &VsphereAgent, pool: &VsphereAgentPool) -> Result<Done, Error> {
    let adopted = request.labels().get(names::CREATED_FOR).is_some_and(|v| v == names::FOR_ADOPTED);
    let url = match infra_env_url(cx, pool).await? {
        Ok(url) => url,
        Err(why) if !adopted => {
            let vm = request.status.as_ref().and_then(|s| s.vm.clone());
            report_request(cx, request, vm, say("Ready", false, "InfraEnvUnavailable", why)).await?;
            return Ok(Done::Waits(cx.config.times.blocked));
        }
        Err(_) => String::new(),
    };
    let provider = match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => provider,
        Err(error) => return Ok(Done::Trouble(Trouble::provider(&error))),
    };
    let machines = provider.vcenter.api.machines(&provider.site);
    if adopted {
        return bring_up::adopt(cx, request, &provider).await;
    }
    let seen = machines.borrow().clone();
    let iso = match iso::ensure(cx, pool, &provider, &url, &seen).await {
        Ok(path) => format!("[{}] {path}", provider.site.iso.name),
        Err(error) => {
            let class = match &error {
                iso::IsoError::Vsphere(error) => error.class(),
                iso::IsoError::Download { .. } | iso::IsoError::Refused { .. } => FaultClass::Other,
            };
            return Ok(Done::Trouble(Trouble::new("ISORefreshFailed", crate::error::chain(&error), class)));
        }
    };
    match bring_up::bring_up(cx, request, pool, &provider, &iso).await? {
        Ok(vm) => {
            cx.config.pool_metrics.vm("create", true);
            Ok(bring_up::record(cx, request, &vm).await?)
        }
        Err(trouble) => {
            cx.config.pool_metrics.vm("create", false);
            Ok(Done::Trouble(trouble))
        }
    }
}

/// The row of the pool's status for this VM.
fn row_of<'a>(pool: &'a VsphereAgentPool, vm: &OwnedVm, uid: &str) -> Option<&'a OwnedVm> {
    let rows = pool.status.as_ref().map(|s| s.owned_vms.as_slice()).unwrap_or_default();
    let fits = |r: &&OwnedVm| r.name == vm.name && (r.owner_uid.is_empty() || r.owner_uid == uid);
    rows.iter().find(fits)
}

/// A reason alone, on the way to a node, changes several times and is the pool's to tell: it is copied with the next phase,
/// or once it has lasted.
fn is_worth_a_write(row: &OwnedVm, vm: &OwnedVm, cx: &Context) -> bool {
    let under_way = matches!(row.phase.as_str(), names::phase::PROVISIONING | names::phase::AVAILABLE);
    let since = row.last_transition_time.as_ref().map(|t| cx.config.clock.now().duration_since(t.0));
    let lasts = since
        .is_none_or(|since| since.try_into().is_ok_and(|since: Duration| since >= cx.config.times.steady));
    !under_way || row.phase != vm.phase || lasts
}

/// There is a VM in the record: see that it is still there, and take over what the pool found out.
async fn steady(cx: &Arc<Context>, request: &VsphereAgent, pool: &VsphereAgentPool) -> Result<Done, Error> {
    let uid = request.uid().unwrap_or_default();
    let mut vm = request.vm().cloned().unwrap_or_default();
    if let Some(row) = row_of(pool, &vm, &uid) {
        let row = row.clone();
        (vm.agent_ref, vm.machine_ref) = (row.agent_ref.clone(), row.machine_ref.clone());
        // A row from before the VM was made knows less than the record, and would be copied back from it for ever.
        if row.reason != names::why::VM_CREATE_PENDING && is_worth_a_write(&row, &vm, cx) {
            (vm.phase, vm.reason, vm.last_transition_time) =
                (row.phase, row.reason, row.last_transition_time);
        } else if vm.reason == names::why::VM_CREATE_PENDING {
            vm.reason = names::why::CREATE_REQUESTED.into();
            vm.last_transition_time = Some(seconds(cx.config.clock.now()));
        }
    }
    let provider = match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => provider,
        Err(error) => return Ok(Done::Trouble(Trouble::provider(&error))),
    };
    let machines = provider.vcenter.api.machines(&provider.site);
    let seen = machines.borrow().clone();
    cx.follow(&provider, machines);
    if seen.is_current {
        let notes: HashSet<_> =
            cx.caches.requests.state().iter().filter_map(|r| r.uid()).map(|uid| owner_note(&uid)).collect();
        let count = unowned(&seen, &notes);
        cx.config.pool_metrics.unowned(&pool.namespace().unwrap_or_default(), &pool.name_any(), count);
    }
    if seen.is_current
        && let Some(done) = compare(cx, request, &vm, &provider, &seen).await?
    {
        return Ok(done);
    }
    let reason = if request.labels().get(names::CREATED_FOR).is_some_and(|v| v == names::FOR_ADOPTED) {
        "VMAdopted"
    } else {
        "VMCreated"
    };
    report_request(cx, request, Some(vm), say("Ready", true, reason, "")).await?;
    if !ejection::eject(cx, request, pool, &provider).await? {
        return Ok(Done::Waits(EJECTING));
    }
    let again = if seen.is_current { cx.config.times.steady } else { cx.config.times.machine };
    Ok(Done::Well(again))
}

/// VMs that carry our notes and that no VsphereAgent stands for.
fn unowned(seen: &Machines, owners: &HashSet<String>) -> usize {
    let ours = seen.vms.values().filter(|vm| vm.annotation.starts_with(names::OWNER_NOTE));
    ours.filter(|vm| !owners.contains(&vm.annotation)).count()
}

/// What vSphere shows against the record; `None`: they agree.
async fn compare(
    cx: &Context,
    request: &VsphereAgent,
    vm: &OwnedVm,
    provider: &Provider,
    seen: &Machines,
) -> Result<Option<Done>, Error> {
    use names::phase::{BOUND, PROVISIONING, RELEASED};
    let id = Identity::of(request);
    let shown = seen
        .by_uuid(&id.recorded)
        .filter(|shown| !matches!(undo(&id, &[shown.as_ref().clone()]), crate::vm::Undo::Gone));
    if let Some(shown) = shown {
        if let crate::vm::Undo::Mismatch(why) = undo(&id, &[shown.as_ref().clone()]) {
            return Ok(Some(Done::Trouble(Trouble::new("VMOwnershipMismatch", why, FaultClass::Other))));
        }
        if !shown.powered_on && vm.phase == PROVISIONING {
            let started = bring_up::power_on(provider, &shown.object).await;
            return Ok(started.err().map(Done::Trouble));
        }
        return Ok(None);
    }
    // The watch may be late: what leads to a second VM is decided on a look.
    let found = match provider.vcenter.api.find(&provider.site, &id.wanted()).await {
        Ok(found) => found,
        Err(error) => return Ok(Some(Done::Trouble(Trouble::vsphere("VMStatusFailed", &error)))),
    };
    match undo(&id, &found) {
        crate::vm::Undo::Gone => {}
        crate::vm::Undo::Mismatch(why) => {
            return Ok(Some(Done::Trouble(Trouble::new("VMOwnershipMismatch", why, FaultClass::Other))));
        }
        crate::vm::Undo::PowerOff(_) | crate::vm::Undo::Destroy(_) => return Ok(None),
    }
    let adopted = request.labels().get(names::CREATED_FOR).is_some_and(|v| v == names::FOR_ADOPTED);
    let note = format!("VM {} ({}) is gone from vSphere", vm.name, vm.bios_uuid);
    let ready = say("Ready", false, "VMNotFound", note);
    // A new VM would be a new Agent, which the Machine of the old one cannot use.
    if adopted || matches!(vm.phase.as_str(), BOUND | RELEASED) {
        report_request(cx, request, Some(vm.clone()), ready).await?;
        return Ok(Some(Done::Waits(cx.config.times.pool)));
    }
    report_request(cx, request, None, ready).await?;
    Ok(Some(Done::Waits(Duration::ZERO)))
}

//! Observation of a VsphereAgent: the object and its pool, read from the API server; and changes in vCenter.

use std::sync::Arc;

use coracle_api::agentpool::{VsphereAgent, VsphereAgentPool, foreign::InfraEnv};
use coracle_reconcile::WallTime as _;
use coracle_vsphere::SiteVms;
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use kube::{Api, ResourceExt as _, runtime::reflector::ObjectRef};
use tokio::sync::mpsc::UnboundedReceiver;

use super::{plan::Snapshot, requests};
use crate::{
    Context, Error,
    error::api,
    identity::HardwareId,
    vm::iso_url,
    watches::{Triggers, pool_of},
};

/// VsphereAgent and all inputs of its plan.
pub(super) struct Observed {
    pub(super) request: VsphereAgent,
    pub(super) pool: Option<VsphereAgentPool>,
    /// Whether another live VsphereAgent manages the same VM.
    is_shared: bool,
    now: jiff::Timestamp,
    steady: std::time::Duration,
}

impl Observed {
    /// Input of the planner.
    pub(super) fn snapshot(&self) -> Snapshot<'_> {
        Snapshot {
            request: &self.request,
            pool: self.pool.as_ref(),
            is_shared: self.is_shared,
            now: self.now,
            steady: self.steady,
        }
    }
}

/// Reads the object and its pool. `None`: the object is gone.
pub(super) async fn observe(cx: &Context, cached: &VsphereAgent) -> Result<Option<Observed>, Error> {
    let (ns, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let read = requests(cx, &ns).get_opt(&name).await.map_err(api("read VsphereAgent", &name))?;
    let Some(request) = read.filter(|r| r.uid() == cached.uid()) else { return Ok(None) };
    let pools: Api<VsphereAgentPool> = Api::namespaced(cx.client.clone(), &ns);
    let pool_name = pool_of(&request);
    let pool = pools.get_opt(&pool_name).await.map_err(api("read VsphereAgentPool", &pool_name))?;
    Ok(Some(Observed {
        is_shared: pool.as_ref().is_some_and(|pool| is_shared(cx, &request, pool)),
        now: cx.config.clock.timestamp(),
        steady: cx.config.times.steady,
        request,
        pool,
    }))
}

/// Whether another live VsphereAgent manages the same VM.
fn is_shared(cx: &Context, request: &VsphereAgent, pool: &VsphereAgentPool) -> bool {
    let Some(vm) = request.vm() else { return false };
    let others = cx.caches.requests_of(pool);
    others.iter().any(|other| {
        other.uid() != request.uid()
            && other.metadata.deletion_timestamp.is_none()
            && other.vm().is_some_and(|o| {
                HardwareId::of_row(o).uuid == HardwareId::of_row(vm).uuid && o.name == vm.name
            })
    })
}

/// URL of the InfraEnv's ISO, or why there is none; read from the API server.
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

/// Triggers reconciles for the owners of VMs that were removed or powered off, as long as the sessions live.
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

/// VMs of one folder.
pub(crate) type Folder = tokio::sync::watch::Receiver<Arc<SiteVms>>;

async fn follow_one(cx: &Context, mut machines: Folder, triggers: &Triggers) {
    let mut before = machines.borrow_and_update().clone();
    while machines.changed().await.is_ok() {
        let now = machines.borrow_and_update().clone();
        if !now.is_current {
            continue;
        }
        let is_on = |machines: &SiteVms, id: &str| machines.vms.get(id).is_some_and(|vm| vm.powered_on);
        let lost = before.vms.iter().filter(|(id, vm)| vm.powered_on && !is_on(&now, id));
        let uuids: Vec<_> = lost.map(|(_, vm)| vm.uuid.clone()).collect();
        if !uuids.is_empty() {
            for request in cx.caches.requests.state() {
                if request.vm().is_some_and(|vm| uuids.contains(&vm.bios_uuid)) {
                    triggers.requests.add(ObjectRef::from_obj(request.as_ref()));
                }
            }
        }
        before = now;
    }
}

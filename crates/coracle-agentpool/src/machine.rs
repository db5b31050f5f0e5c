//! AgentMachines: who waits gets a VsphereAgent.

use std::sync::Arc;

use coracle_api::agentpool::{VsphereAgent, VsphereAgentPool, foreign::AgentMachine, names};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
    runtime::{controller::Action, reflector::ObjectRef},
};
use serde_json::json;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_util::sync::CancellationToken;

use crate::{
    Context, Error, act,
    demand::{Demand, is_of, plan, request},
    error::api,
};

/// Reconciles until `stop`.
pub(crate) async fn control(
    cx: &Arc<Context>,
    queue: UnboundedReceiver<ObjectRef<AgentMachine>>,
    stop: &CancellationToken,
) {
    let store = cx.caches.agent_machines.clone();
    let workers = cx.config.workers[1];
    act::control(cx, "agentmachine", store, queue, workers, stop, |am, cx| Box::pin(reconcile(am, cx))).await;
}

async fn reconcile(cached: Arc<AgentMachine>, cx: Arc<Context>) -> Result<Action, Error> {
    let again = Ok(Action::requeue(cx.config.times.machine));
    let pools: Vec<_> = cx.caches.pools.state();
    let pools: Vec<&VsphereAgentPool> = pools
        .iter()
        .map(AsRef::as_ref)
        .filter(|p| p.metadata.deletion_timestamp.is_none() && is_of(&cached, p))
        .collect();
    let requests: Vec<_> = pools.iter().flat_map(|p| cx.caches.requests_of(p)).collect();
    let Demand { pin, vm, create, note } = plan(&cached, &pools, requests.iter().map(AsRef::as_ref));
    if let Some(note) = note {
        tracing::debug!(name = cached.name_any(), note, "no VM is made");
        return if pools.is_empty() { Ok(Action::await_change()) } else { again };
    }
    let Some(pool) = pools.first() else { return again };
    if let Some(wanted) = pin {
        pin_selector(&cx, &cached, &wanted).await?;
    }
    let api_of: Api<VsphereAgent> = Api::namespaced(cx.client.clone(), &pool.namespace().unwrap_or_default());
    for name in create {
        let wanted = request(&name, &vm, &cached, pool);
        match api_of
            .create(
                &PostParams { field_manager: Some(crate::REQUEST_MANAGER.into()), ..PostParams::default() },
                &wanted,
            )
            .await
        {
            Ok(_) => break,
            Err(kube::Error::Api(status)) if status.code == 409 => {
                // The cache may be late: an object that serves this AgentMachine already is as good as a new one.
                let there = api_of.get_opt(&name).await.map_err(api("read VsphereAgent", &name))?;
                let is_ours = |a: &VsphereAgent| {
                    a.spec.pool_ref == wanted.spec.pool_ref && crate::demand::serves(a, &cached)
                };
                if there.as_ref().is_some_and(is_ours) {
                    break;
                }
            }
            Err(error) => return Err(api("create VsphereAgent", &name)(error)),
        }
    }
    again
}

/// Pins an AgentMachine's selector to the name of a VM; its other terms stay.
pub(crate) async fn pin_selector(cx: &Context, am: &AgentMachine, wanted: &str) -> Result<(), Error> {
    let (ns, name) = (am.namespace().unwrap_or_default(), am.name_any());
    let api_of: Api<AgentMachine> =
        Api::namespaced_with(cx.client.clone(), &ns, &cx.caches.kinds.agent_machine);
    let patch = json!({
        "metadata": {"resourceVersion": am.resource_version()},
        "spec": {"agentLabelSelector": {"matchLabels": {names::AGENT_MACHINE: wanted}}},
    });
    match api_of.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        // It changed or went meanwhile: that change triggers the next pass.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(api("pin AgentMachine", format!("{ns}/{name}"))(error)),
    }
}

//! Execution of an AgentMachine's steps.

use coracle_api::agentpool::{
    VsphereAgent,
    foreign::{Agent, AgentMachine},
    names,
};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::plan::Step;
use crate::{
    Context, Error, REQUEST_MANAGER, demand::serves, error::api, identity::AgentFacts, pool::plan::Pin,
};

/// Executes the steps in order. Returns true when an Agent changed while it was being selected.
pub(super) async fn execute(cx: &Context, steps: &[Step]) -> Result<bool, Error> {
    let mut raced = false;
    for step in steps {
        match step {
            Step::PinSelector(pin) => pin_selector(cx, pin).await?,
            Step::SelectAgent { namespace, agent, vm } => {
                raced = !select_agent(cx, namespace, agent, vm).await?;
            }
            Step::CreateRequest { candidates, machine } => create_request(cx, candidates, machine).await?,
        }
    }
    Ok(raced)
}

async fn create_request(
    cx: &Context,
    candidates: &[VsphereAgent],
    machine: &AgentMachine,
) -> Result<(), Error> {
    let params = PostParams { field_manager: Some(REQUEST_MANAGER.into()), ..PostParams::default() };
    for wanted in candidates {
        let (ns, name) = (wanted.namespace().unwrap_or_default(), wanted.name_any());
        let requests: Api<VsphereAgent> = Api::namespaced(cx.client.clone(), &ns);
        match requests.create(&params, wanted).await {
            Ok(_) => break,
            Err(kube::Error::Api(status)) if status.code == 409 => {
                // The cache may be out of date: an existing object that serves this AgentMachine is as good as a new one.
                let found = requests.get_opt(&name).await.map_err(api("read VsphereAgent", &name))?;
                let is_same =
                    |a: &VsphereAgent| a.spec.pool_ref == wanted.spec.pool_ref && serves(a, machine);
                if found.as_ref().is_some_and(is_same) {
                    break;
                }
            }
            Err(error) => return Err(api("create VsphereAgent", &name)(error)),
        }
    }
    Ok(())
}

/// Labels the Agent for selection. Returns false if the Agent changed meanwhile.
async fn select_agent(cx: &Context, ns: &str, agent: &AgentFacts, vm: &str) -> Result<bool, Error> {
    let agents: Api<Agent> = Api::namespaced_with(cx.client.clone(), ns, &cx.caches.kinds.agent);
    let patch = json!({"metadata": {"resourceVersion": agent.resource_version, "labels": {names::AGENT_MACHINE: vm}}});
    match agents.patch(&agent.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => {
            tracing::info!(agent = agent.name, vm, "free Agent selected");
            Ok(true)
        }
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
        Err(error) => Err(api("select Agent", &agent.name)(error)),
    }
}

/// Pins an AgentMachine's selector to the name of a VM and keeps its other terms.
pub(crate) async fn pin_selector(cx: &Context, pin: &Pin) -> Result<(), Error> {
    let machines: Api<AgentMachine> =
        Api::namespaced_with(cx.client.clone(), &pin.namespace, &cx.caches.kinds.agent_machine);
    let patch = json!({
        "metadata": {"resourceVersion": pin.resource_version},
        "spec": {"agentLabelSelector": {"matchLabels": {names::AGENT_MACHINE: pin.vm}}},
    });
    match machines.patch(&pin.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        // The AgentMachine changed or was deleted meanwhile; that change triggers a reconcile.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(api("pin AgentMachine", format!("{}/{}", pin.namespace, pin.name))(error)),
    }
}

//! Simulations of the rest of the cluster: the Agent provider of Cluster API, and guests.

use std::{collections::BTreeMap, time::Duration};

use coracle_api::agentpool::{
    foreign::{self, Agent, AgentMachine, Machine},
    names,
};
use coracle_testkit::elapse;
use coracle_vsphere::Vm;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

pub(crate) const HOOK: &str = "test.coracle.dev/hook";

pub(crate) fn apis(client: &Client, ns: &str) -> (Api<Machine>, Api<AgentMachine>, Api<Agent>) {
    (
        Api::namespaced_with(client.clone(), ns, &foreign::MACHINE.resource("v1beta2")),
        Api::namespaced_with(client.clone(), ns, &foreign::AGENT_MACHINE.resource("v1beta1")),
        Api::namespaced_with(client.clone(), ns, &foreign::AGENT.resource("v1beta1")),
    )
}

/// Conditions by which the provider reports that it found no Agent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Style {
    /// On `Ready`, as before June 2026.
    Old,
    /// On `AgentReserved`, with a generic reason on `Ready`.
    New,
}

/// Simulated Agent provider: claims usable Agents for AgentMachines, and releases them when Machines are deleted.
pub(crate) async fn provider(client: Client, ns: String, style: Style, tick: Duration) {
    loop {
        // A change that fails because of a conflict is made in the next turn.
        let _ = step_provider(&client, &ns, style).await;
        elapse(tick).await;
    }
}

async fn step_provider(client: &Client, ns: &str, style: Style) -> kube::Result<()> {
    let (machines, agent_machines, agents) = apis(client, ns);
    let all = agents.list(&ListParams::default()).await?.items;
    let mut free: Vec<_> = all.iter().filter(|a| is_usable(a)).collect();
    for am in agent_machines.list(&ListParams::default()).await? {
        let name = am.name_any();
        if am.metadata.deletion_timestamp.is_some() || am.view.status.agent_ref.is_some() {
            continue;
        }
        let wanted =
            am.view.spec.agent_label_selector.clone().unwrap_or_default().match_labels.unwrap_or_default();
        let fits = |a: &&&Agent| wanted.iter().all(|(k, v)| a.labels().get(k) == Some(v));
        let Some(agent) = free.iter().find(fits).map(|a| (**a).clone()) else {
            let says = |kind: &str, reason: &str| json!({"type": kind, "status": "False", "reason": reason, "lastTransitionTime": "2026-06-01T00:00:00Z"});
            let conditions = match style {
                Style::Old => vec![says("Ready", "NoSuitableAgents")],
                Style::New => {
                    vec![says("Ready", "IssuesReported"), says("AgentReserved", "NoSuitableAgents")]
                }
            };
            if am.conditions().is_empty() {
                set(&agent_machines, &name, json!({"status": {"conditions": conditions}}), true).await?;
            }
            continue;
        };
        free.retain(|a| a.name_any() != agent.name_any());
        let claim = json!({
            "metadata": {"resourceVersion": agent.resource_version(), "labels": {names::AGENT_MACHINE_REF: name}},
            "spec": {"clusterDeploymentName": {"name": "demo", "namespace": ns}},
        });
        if set(&agents, &agent.name_any(), claim, false).await.is_err() {
            continue;
        }
        set(
            &agent_machines,
            &name,
            json!({"spec": {"providerID": format!("agent://{}", agent.name_any())}}),
            false,
        )
        .await?;
        let ready = json!([{"type": "Ready", "status": "True", "reason": "AgentBound", "lastTransitionTime": "2026-06-01T00:00:00Z"}]);
        let status =
            json!({"status": {"agentRef": {"name": agent.name_any(), "namespace": ns}, "conditions": ready}});
        set(&agent_machines, &name, status, true).await?;
    }
    let going = machines.list(&ListParams::default()).await?;
    // Read after the Machines, so that an Agent which was claimed above is found too.
    let all = agents.list(&ListParams::default()).await?.items;
    for machine in going {
        if machine.metadata.deletion_timestamp.is_none() {
            continue;
        }
        let name = machine.name_any();
        for agent in all.iter().filter(|a| a.labels().get(names::AGENT_MACHINE_REF) == Some(&name)) {
            let free = json!({
                "metadata": {"labels": {names::AGENT_MACHINE_REF: null}}, "spec": {"clusterDeploymentName": null},
            });
            set(&agents, &agent.name_any(), free, false).await?;
        }
        let _gone = agent_machines.delete(&name, &DeleteParams::default()).await;
        set(&machines, &name, json!({"metadata": {"finalizers": null}}), false).await?;
    }
    Ok(())
}

fn is_usable(agent: &Agent) -> bool {
    agent.view.spec.approved
        && agent.metadata.deletion_timestamp.is_none()
        && !agent.labels().contains_key(names::AGENT_MACHINE_REF)
}

/// Creates a complete object of another project; the typed views have only some of its fields.
pub(crate) async fn create(
    client: &Client,
    ns: &str,
    kind: &foreign::ForeignKind,
    mut object: Value,
) -> kube::Result<()> {
    let resource = kind.resource(kind.versions[0]);
    object["apiVersion"] = resource.api_version.as_str().into();
    object["kind"] = resource.kind.as_str().into();
    let object: DynamicObject = serde_json::from_value(object).unwrap();
    Api::<DynamicObject>::namespaced_with(client.clone(), ns, &resource)
        .create(&PostParams::default(), &object)
        .await
        .map(drop)
}

pub(crate) async fn set<K>(api: &Api<K>, name: &str, patch: Value, status: bool) -> kube::Result<()>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let params = PatchParams::default();
    if status {
        api.patch_status(name, &params, &Patch::Merge(patch)).await.map(drop)
    } else {
        api.patch(name, &params, &Patch::Merge(patch)).await.map(drop)
    }
}

/// Simulated guests: a running VM registers an Agent, and again when its Agent is deleted.
pub(crate) async fn guests(client: Client, ns: String, tick: Duration, vms: impl AsyncFn() -> Vec<Vm>) {
    let (_, _, agents) = apis(&client, &ns);
    loop {
        let running: BTreeMap<_, _> = vms()
            .await
            .into_iter()
            .filter(|vm| vm.powered_on && !vm.mac.is_empty())
            .map(|vm| (vm.uuid.clone(), vm))
            .collect();
        if let Ok(there) = agents.list(&ListParams::default()).await {
            for (uuid, vm) in &running {
                if there.iter().all(|a| a.name_any() != *uuid) {
                    let _ = register(&client, &ns, vm).await;
                }
            }
            // VMs are polled, so the state is late: a VM that is gone by now has not registered an Agent.
            let is_stray =
                |a: &&Agent| a.view.spec.hostname.is_none() && !running.contains_key(&a.name_any());
            for stray in there.iter().filter(is_stray) {
                let _ = agents.delete(&stray.name_any(), &DeleteParams::default()).await;
            }
        }
        elapse(tick).await;
    }
}

async fn register(client: &Client, ns: &str, vm: &Vm) -> kube::Result<()> {
    let agents = apis(client, ns).2;
    let agent = json!({
        "metadata": {"name": vm.uuid, "labels": {names::INFRAENV_LABEL: "demo", "customer": "example"}},
        "spec": {"approved": false, "role": ""},
    });
    create(client, ns, &foreign::AGENT, agent).await?;
    let serial = format!("VMware-{}", vm.uuid.replace('-', " "));
    let status = json!({"status": {
        "inventory": {
            "hostname": "localhost", "systemVendor": {"serialNumber": serial},
            "interfaces": [{"macAddress": vm.mac.replace('-', ":")}],
        },
        "conditions": [
            {"type": "Connected", "status": "True", "reason": "x"}, {"type": "Validated", "status": "True", "reason": "x"},
        ],
    }});
    set(&agents, &vm.uuid, status, true).await
}

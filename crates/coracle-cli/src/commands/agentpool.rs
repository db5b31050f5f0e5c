//! `coracle agentpool …`: a pool of vSphere VMs, read from its cluster.

mod explain;

use coracle_api::agentpool::foreign::{AGENT_MACHINE, AgentMachine};
use coracle_api::{VsphereAgent, VsphereAgentPool};
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};

use crate::api_failure::request_failure;
use crate::cli::{AgentPoolCommand, Format, Global, PoolArgs};
use crate::client::with_hint;
use crate::cluster::Cluster;
use crate::error::{Failure, exit};
use crate::output::{self, Columns};
use crate::{suggest, view};

/// A pool and the objects that belong to it.
struct Facts {
    pool: VsphereAgentPool,
    requests: Vec<VsphereAgent>,
    /// `None`: the user may not read AgentMachines, or the cluster does not have the kind.
    agent_machines: Option<Vec<AgentMachine>>,
}

pub async fn run(global: &Global, command: AgentPoolCommand) -> miette::Result<u8> {
    let now = jiff::Timestamp::from_millisecond(super::vm::now_ms()).unwrap_or_default();
    match command {
        AgentPoolCommand::Status(args) => status(&observe(global, &args).await?, &args.output, now)?,
        AgentPoolCommand::Plan(args) => plan(&observe(global, &args).await?, &args.output)?,
        AgentPoolCommand::Explain(args) => explain::run(&observe(global, &args).await?, &args.output, now)?,
    }
    Ok(0)
}

async fn observe(global: &Global, args: &PoolArgs) -> Result<Facts, Failure> {
    if global.all_namespaces {
        let failure = Failure::usage("a pool is named with its namespace, not with -A");
        return Err(failure.help(format!("coracle agentpool status -n NAMESPACE {}", args.pool)));
    }
    let cluster = Cluster::open(global).await?;
    let pools: Api<VsphereAgentPool> = cluster.api();
    let all = pools.list(&ListParams::default()).await.map_err(|e| match &e {
        kube::Error::Api(status) if status.code == 404 => {
            Failure::new("COR-API-002", "this cluster has no VsphereAgentPools")
                .help("apply deploy/kustomize/crds")
                .exit(exit::NOT_FOUND)
        }
        _ => request_failure("list VsphereAgentPools", &e),
    })?;
    let names: Vec<_> = all.iter().map(ResourceExt::name_any).collect();
    let Some(pool) = all.into_iter().find(|p| p.name_any() == args.pool) else {
        let message =
            format!("VsphereAgentPool {} not found in namespace {}", args.pool, cluster.namespace());
        let failure = Failure::new("COR-API-002", message)
            .help("list what there is: kubectl get vap -A")
            .exit(exit::NOT_FOUND);
        return Err(with_hint(failure, suggest::hint(&args.pool, names.iter().map(String::as_str))));
    };
    let requests: Api<VsphereAgent> = cluster.api();
    let requests =
        requests.list(&ListParams::default()).await.map_err(|e| request_failure("list VsphereAgents", &e))?;
    let mut requests: Vec<_> =
        requests.into_iter().filter(|r| r.spec.pool_ref.name == pool.name_any()).collect();
    requests.sort_by_key(ResourceExt::name_any);
    let agent_machines = agent_machines(&cluster, &pool).await;
    Ok(Facts { pool, requests, agent_machines })
}

/// Lists the AgentMachines of the pool, in a version that the cluster serves.
async fn agent_machines(cluster: &Cluster, pool: &VsphereAgentPool) -> Option<Vec<AgentMachine>> {
    for version in AGENT_MACHINE.versions {
        let kind = AGENT_MACHINE.resource(version);
        let ns = &pool.spec.control_plane_namespace;
        let api: Api<AgentMachine> = Api::namespaced_with(cluster.client.clone(), ns, &kind);
        if let Ok(all) = api.list(&ListParams::default()).await {
            let mut ours: Vec<_> =
                all.into_iter().filter(|am| coracle_agentpool::demand::is_of(am, pool)).collect();
            ours.sort_by_key(ResourceExt::name_any);
            return Some(ours);
        }
    }
    None
}

/// Returns a document of a pool with the additional fields `parts`.
fn document(pool: &VsphereAgentPool, kind: &str, parts: Value) -> Value {
    let mut document = json!({
        "apiVersion": output::API_VERSION, "kind": kind,
        "metadata": {"name": pool.name_any(), "namespace": pool.namespace(), "uid": pool.uid()},
    });
    if let (Some(whole), Value::Object(parts)) = (document.as_object_mut(), parts) {
        whole.extend(parts);
    }
    document
}

fn status(facts: &Facts, format: &Format, now: jiff::Timestamp) -> Result<(), Failure> {
    let status = facts.pool.status.clone().unwrap_or_default();
    match format {
        Format::Table | Format::Wide => output::write(&status_text(facts, *format == Format::Wide, now)),
        Format::Name => {
            output::write(&status.owned_vms.iter().map(|vm| format!("{}\n", vm.name)).collect::<String>())
        }
        Format::Json | Format::Yaml | Format::JsonPath(_) => {
            let parts = json!({"spec": facts.pool.spec, "status": status});
            output::document(format, &document(&facts.pool, "AgentPoolStatus", parts))
        }
    }
}

/// Renders the status of a pool. Pure.
fn status_text(facts: &Facts, wide: bool, now: jiff::Timestamp) -> String {
    let (pool, spec) = (&facts.pool, &facts.pool.spec);
    let status = pool.status.clone().unwrap_or_default();
    let place = |ns: Option<String>| ns.unwrap_or_default();
    let mut head = Columns::new(&[]);
    let mut line = |label: &str, words: String| head.row(&[label.to_owned(), words]);
    line("Pool", format!("{}/{}", place(pool.namespace()), pool.name_any()));
    line("NodePool", format!("{}, cleanup {:?}", spec.node_pool_ref.name, spec.cleanup_policy));
    line(
        "Demand",
        format!(
            "{} AgentMachines: {} waiting, {} not Ready, {} without Agent",
            status.agent_machines,
            status.waiting_agent_machines,
            status.unready_agent_machines,
            status.agent_machines_without_agent
        ),
    );
    line(
        "Agents",
        format!(
            "{}: {} bound, {} available",
            status.matching_agents, status.bound_agents, status.available_agents
        ),
    );
    let iso = status.iso.clone().unwrap_or_default();
    match iso.path.as_str() {
        "" => line("ISO", "none yet".to_owned()),
        path => {
            let checked = iso.checked_at.as_ref().map(|t| t.0.to_string());
            line("ISO", format!("{path}, checked {} ago", view::age(checked.as_deref(), now)));
        }
    }
    let mut conditions = Columns::new(&["CONDITION", "STATUS", "REASON", "AGE", "MESSAGE"]);
    for c in &status.conditions {
        let since = c.last_transition_time.0.to_string();
        let age = view::age(Some(&since), now);
        conditions.row(&[c.type_.clone(), c.status.clone(), c.reason.clone(), age, c.message.clone()]);
    }
    let mut header = vec!["VM", "PHASE", "REASON", "AGENT", "MACHINE", "AGE"];
    header.extend(wide.then_some(["BIOS UUID", "MAC", "SOURCE"]).into_iter().flatten());
    let mut vms = Columns::new(&header);
    for vm in &status.owned_vms {
        let since = vm.last_transition_time.as_ref().map(|t| t.0.to_string());
        let or_dash = |text: Option<&str>| text.filter(|t| !t.is_empty()).unwrap_or("-").to_owned();
        let mut row = vec![vm.name.clone(), vm.phase.clone(), vm.reason.clone()];
        row.push(or_dash(vm.agent_ref.as_ref().and_then(|r| r.name.as_deref())));
        row.push(or_dash(vm.machine_ref.as_ref().and_then(|r| r.name.as_deref())));
        row.push(view::age(since.as_deref(), now));
        if wide {
            row.extend([&vm.bios_uuid, &vm.mac_address, &vm.source].map(|text| or_dash(Some(text))));
        }
        vms.row(&row);
    }
    let vms = if status.owned_vms.is_empty() { "no VMs\n".to_owned() } else { vms.text() };
    let conditions = match status.conditions.is_empty() {
        true => "no pass was made over this pool yet: does the operator run?\n".to_owned(),
        false => conditions.text(),
    };
    format!("{}\n{conditions}\n{vms}", head.text())
}

fn plan(facts: &Facts, format: &Format) -> Result<(), Failure> {
    let status = facts.pool.status.clone().unwrap_or_default();
    match format {
        Format::Table | Format::Wide => {
            if status.observed_generation != facts.pool.metadata.generation {
                eprintln!("the pool changed since: the plan below is of the specification before");
            }
            plan_table(&facts.pool).print()
        }
        Format::Name => {
            let names = status.planned_actions.iter().filter(|a| !a.name.is_empty());
            output::write(&names.map(|a| format!("{}\n", a.name)).collect::<String>())
        }
        Format::Json | Format::Yaml | Format::JsonPath(_) => {
            let parts = json!({
                "generation": facts.pool.metadata.generation,
                "observedGeneration": status.observed_generation,
                "actions": status.planned_actions,
            });
            output::document(format, &document(&facts.pool, "AgentPoolPlan", parts))
        }
    }
}

fn plan_table(pool: &VsphereAgentPool) -> Columns {
    let mut columns = Columns::new(&["ACTION", "REASON", "NAME"]);
    for action in pool.status.iter().flat_map(|s| &s.planned_actions) {
        let name = if action.name.is_empty() { "-" } else { &action.name };
        columns.row(&[action.kind.clone(), action.reason.clone(), name.to_owned()]);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a pool in trouble: one VM bound, one that cannot be created, one Agent that vanished, one Machine without a
    /// request.
    pub(super) fn facts() -> Facts {
        let time = "2026-06-01T10:00:00Z";
        let condition = |kind: &str, status: &str, reason: &str, message: &str| json!({"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": time});
        let pool = json!({
            "apiVersion": "agent-forge.containeroo.ch/v1alpha1", "kind": "VsphereAgentPool",
            "metadata": {"name": "demo-worker", "namespace": "demo", "uid": "u", "generation": 2},
            "spec": {
                "hostedClusterRef": {"name": "demo"}, "nodePoolRef": {"name": "demo-worker"},
                "infraEnvRef": {"name": "demo"}, "controlPlaneNamespace": "demo-demo", "template": {},
                "agent": {"labels": {"a": "b"}},
                "vsphere": {
                    "credentialsSecretRef": {"name": "s"}, "datastoreCluster": "d", "isoDatastore": "i",
                    "resourcePool": "c/Resources", "network": "VM Network",
                },
            },
            "status": {
                "observedGeneration": 2, "agentMachines": 3, "waitingAgentMachines": 2, "unreadyAgentMachines": 2,
                "agentMachinesWithoutAgent": 2, "matchingAgents": 1, "boundAgents": 1,
                "iso": {"path": "agent-forge/demo/demo-worker/0f.iso", "checkedAt": time},
                "ownedVMs": [
                    {"name": "w-0", "phase": "Bound", "reason": "AgentBound", "biosUUID": "4213", "macAddress": "00-50",
                     "agentRef": {"name": "agent-0"}, "machineRef": {"name": "w-0"}, "lastTransitionTime": time,
                     "source": "VsphereAgent"},
                    {"name": "w-1", "phase": "Provisioning", "reason": "VMCreatePending", "lastTransitionTime": time},
                    {"name": "w-9", "phase": "Orphaned", "reason": "AgentMissing", "lastTransitionTime": time},
                ],
                "plannedActions": [
                    {"type": "DemandDeficit", "reason": "WaitingAgentMachines"},
                    {"type": "DeleteVM", "reason": "AgentMissing", "name": "w-9"},
                ],
                "conditions": [
                    condition("Ready", "True", "Reconciled", ""),
                    condition("VsphereReady", "False", "Error", "VMCreateFailed: NoDiskSpace"),
                ],
            },
        });
        let request = |name: &str, status: &str, reason: &str, message: &str| {
            let conditions = [condition("Ready", status, reason, message)];
            serde_json::from_value(json!({
                "apiVersion": "agent-forge.containeroo.ch/v1alpha1", "kind": "VsphereAgent",
                "metadata": {"name": name, "labels": {"agent-forge.containeroo.ch/agent-machine": name}},
                "spec": {"poolRef": {"name": "demo-worker"}}, "status": {"conditions": conditions},
            }))
            .unwrap()
        };
        let waits = |name: &str| {
            let condition = json!({"type": "Ready", "status": "False", "reason": "NoSuitableAgents"});
            serde_json::from_value(json!({
                "metadata": {"name": name}, "spec": {}, "status": {"conditions": [condition]},
            }))
            .unwrap()
        };
        Facts {
            pool: serde_json::from_value(pool).unwrap(),
            requests: vec![
                request("w-0", "True", "VMCreated", ""),
                request("w-1", "False", "VMCreateFailed", "create VM w-1: NoDiskSpace"),
                request("w-9", "True", "VMCreated", ""),
            ],
            agent_machines: Some(vec![waits("w-1"), waits("w-2")]),
        }
    }

    pub(super) fn now() -> jiff::Timestamp {
        "2026-06-01T10:05:00Z".parse().unwrap()
    }

    #[test]
    fn golden_status_of_a_pool() {
        insta::assert_snapshot!("status", status_text(&facts(), false, now()));
        insta::assert_snapshot!("status_wide", status_text(&facts(), true, now()));
    }

    #[test]
    fn golden_plan_of_a_pool() {
        insta::assert_snapshot!("plan", plan_table(&facts().pool).text());
    }
}

//! Demand: AgentMachines that need a VM, and the VsphereAgents that are created for them (pure).

use coracle_api::agentpool::{
    VsphereAgent, VsphereAgentPool,
    foreign::{AgentMachine, condition},
    names,
};
use kube::ResourceExt as _;

use crate::identity::{label_value, second_name, vm_name};

/// Reason that the Agent provider sets when no Agent fits.
const NO_SUITABLE_AGENTS: &str = "NoSuitableAgents";

/// Whether an AgentMachine waits for an Agent, by condition `Ready` of older providers or `AgentReserved` of newer ones.
#[must_use]
pub fn is_waiting(am: &AgentMachine) -> bool {
    let says = |kind| condition(am.conditions(), kind) == Some(("False", NO_SUITABLE_AGENTS));
    am.metadata.deletion_timestamp.is_none() && (says("Ready") || says("AgentReserved"))
}

/// Whether an object belongs to the pool's NodePool.
#[must_use]
pub fn belongs(namespace: Option<&str>, annotation: Option<&String>, pool: &VsphereAgentPool) -> bool {
    let want = format!("{}/{}", pool.namespace().unwrap_or_default(), pool.spec.node_pool_ref.name);
    namespace == Some(&pool.spec.control_plane_namespace) && annotation == Some(&want)
}

/// Like [`belongs`], for an AgentMachine.
#[must_use]
pub fn is_of(am: &AgentMachine, pool: &VsphereAgentPool) -> bool {
    belongs(am.namespace().as_deref(), am.annotations().get(names::NODEPOOL_ANNOTATION), pool)
}

/// Counts of AgentMachines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// All AgentMachines.
    pub all: i32,
    /// AgentMachines that wait for an Agent.
    pub waiting: i32,
    /// AgentMachines that are not Ready.
    pub unready: i32,
    /// AgentMachines without an Agent.
    pub without_agent: i32,
}

/// Counts AgentMachines that are not being deleted.
#[must_use]
pub fn count<'a>(machines: impl IntoIterator<Item = &'a AgentMachine>) -> Counters {
    let mut counters = Counters::default();
    for am in machines.into_iter().filter(|am| am.metadata.deletion_timestamp.is_none()) {
        let unready = condition(am.conditions(), "Ready").is_none_or(|(status, _)| status != "True");
        let named = am.view.status.agent_ref.as_ref().is_some_and(|r| !r.name.is_empty());
        let provided = am.view.spec.provider_id.as_deref().is_some_and(|p| p.starts_with("agent://"));
        counters.all += 1;
        counters.waiting += i32::from(is_waiting(am));
        counters.unready += i32::from(unready);
        counters.without_agent += i32::from(unready && !named && !provided);
    }
    counters
}

/// Name of a VsphereAgent's pool, from its reference, or from its label if the oldest operators made it.
#[must_use]
pub fn pool_of(request: &VsphereAgent) -> String {
    let name = &request.spec.pool_ref.name;
    let label = || request.labels().get(names::POOL_LABEL).cloned().unwrap_or_default();
    if name.is_empty() { label() } else { name.clone() }
}

/// Whether a VsphereAgent serves an AgentMachine.
#[must_use]
pub fn serves(agent: &VsphereAgent, am: &AgentMachine) -> bool {
    let name = am.name_any();
    let label = |key| agent.labels().get(key).map(String::as_str);
    agent.metadata.deletion_timestamp.is_none()
        && (label(names::AGENT_MACHINE) == Some(&label_value(&name))
            || agent
                .annotations()
                .get(names::VM_NAME)
                .is_some_and(|n| *n == name || *n == label_value(&name))
            || (label(names::CREATED_FOR) == Some(names::FOR_AGENT_MACHINE) && agent.name_any() == name)
            || (am.uid().is_some() && label(names::AGENT_MACHINE_UID) == am.uid().as_deref()))
}

/// Name of the VM whose Agent an AgentMachine gets; its selector is pinned to that name. This is the AgentMachine's own name,
/// or a second one if another Machine has taken the VM of that name, which can happen until the selector is pinned.
#[must_use]
pub fn place<'a>(
    am: &AgentMachine,
    pool: &VsphereAgentPool,
    agents: impl IntoIterator<Item = &'a VsphereAgent>,
) -> String {
    let (name, ns) = (am.name_any(), am.namespace().unwrap_or_default());
    let own = label_value(&name);
    let machine = am.machine().unwrap_or(&name);
    if !agents.into_iter().any(|a| vm_name(a) == own && is_taken(a, machine)) {
        return own;
    }
    let pool_ns = pool.namespace().unwrap_or_default();
    label_value(&second_name(&pool_ns, &pool.name_any(), &ns, &name))
}

/// Whether the VM of `agent` is the node of another Machine than `machine`.
fn is_taken(agent: &VsphereAgent, machine: &str) -> bool {
    let bound = agent.vm().filter(|vm| vm.phase == names::phase::BOUND);
    let to = bound.and_then(|vm| vm.machine_ref.as_ref()?.name.as_deref());
    to.is_some_and(|to| to != machine)
}

/// Terms of an AgentMachine's selector that no Agent prepared for the pool matches, as `key=value`. The pinned term is set by
/// this controller and always matches.
#[must_use]
pub fn unmet_terms(am: &AgentMachine, pool: &VsphereAgentPool) -> Vec<String> {
    let agent = &pool.spec.agent;
    let gives = |key: &str, value: &str| match key {
        names::AGENT_MACHINE => true,
        names::ROLE_LABEL => value == agent.role,
        _ => agent.labels.get(key).is_some_and(|v| v == value),
    };
    let selector = am.view.spec.agent_label_selector.as_ref().and_then(|s| s.match_labels.as_ref());
    let terms = selector.into_iter().flatten();
    terms.filter(|(key, value)| !gives(key, value)).map(|(key, value)| format!("{key}={value}")).collect()
}

/// Demand of one AgentMachine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Value that the selector must be pinned to; `None`: the selector is pinned already.
    pub pin: Option<String>,
    /// Name of the VM.
    pub vm: String,
    /// Names to try for a new VsphereAgent, in order; empty: none is created.
    pub create: Vec<String>,
    /// Why there is no demand.
    pub note: Option<&'static str>,
}

/// Computes the demand of an AgentMachine from its pools and their VsphereAgents.
#[must_use]
pub fn plan<'a>(
    am: &AgentMachine,
    pools: &[&VsphereAgentPool],
    agents: impl IntoIterator<Item = &'a VsphereAgent>,
) -> Demand {
    let note = |note| Demand { note: Some(note), ..Demand::default() };
    if !is_waiting(am) {
        return note("it does not wait for an Agent");
    }
    let pool = match pools {
        [] => return note("no pool serves its NodePool"),
        [pool] => pool,
        _ => return note("several pools serve its NodePool: remove all but one"),
    };
    let (name, ns) = (am.name_any(), am.namespace().unwrap_or_default());
    let agents: Vec<_> = agents.into_iter().filter(|a| pool_of(a) == pool.name_any()).collect();
    let wanted = place(am, pool, agents.iter().copied());
    let is_served = agents.iter().any(|a| serves(a, am) && vm_name(a) == wanted);
    let second = second_name(&pool.namespace().unwrap_or_default(), &pool.name_any(), &ns, &name);
    let create = match is_served {
        true => Vec::new(),
        false if wanted == label_value(&name) => vec![name, second],
        false => vec![second],
    };
    let is_pinned = am.selected(names::AGENT_MACHINE) == Some(&wanted);
    Demand { pin: (!is_pinned).then(|| wanted.clone()), vm: wanted, create, note: None }
}

/// Creates the VsphereAgent object for an AgentMachine, with `vm` as the name of its VM.
#[must_use]
pub fn request(name: &str, vm: &str, am: &AgentMachine, pool: &VsphereAgentPool) -> VsphereAgent {
    let mut agent = VsphereAgent::new(
        name,
        coracle_api::agentpool::VsphereAgentSpec {
            pool_ref: coracle_api::agentpool::NameRef { name: pool.name_any() },
        },
    );
    agent.metadata.namespace = pool.namespace();
    // The object has the finalizer from its creation, so that a VM never exists for an object without one.
    agent.metadata.finalizers = Some(vec![names::AGENT_FINALIZER.to_owned()]);
    agent.metadata.labels = Some(
        [
            (names::POOL_LABEL, label_value(&pool.name_any())),
            (names::CREATED_FOR, names::FOR_AGENT_MACHINE.to_owned()),
            (names::AGENT_MACHINE, label_value(&am.name_any())),
        ]
        .map(|(k, v)| (k.to_owned(), v))
        .into(),
    );
    agent.metadata.annotations = Some([(names::VM_NAME.to_owned(), vm.to_owned())].into());
    agent.metadata.owner_references =
        kube::Resource::controller_owner_ref(pool, &()).map(|owner| vec![owner]);
    agent
}

#[cfg(test)]
mod tests {
    use coracle_api::agentpool::NameRef;
    use serde_json::json;

    use super::*;

    const SECOND: &str = "w-0-pool-";

    fn pool() -> VsphereAgentPool {
        let mut pool = VsphereAgentPool::default();
        (pool.metadata.name, pool.metadata.namespace) = (Some("pool".into()), Some("ns".into()));
        pool.spec.control_plane_namespace = "cp".into();
        pool.spec.node_pool_ref = NameRef { name: "np".into() };
        pool
    }

    fn waiting_machine(name: &str, pinned: Option<&str>) -> AgentMachine {
        let mut am = json!({
            "metadata": {"name": name, "namespace": "cp", "uid": format!("uid-{name}"),
                "annotations": {"hypershift.openshift.io/nodePool": "ns/np"}},
            "spec": {},
            "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NoSuitableAgents"}]},
        });
        if let Some(pin) = pinned {
            am["spec"]["agentLabelSelector"] = json!({"matchLabels": {names::AGENT_MACHINE: pin}});
        }
        serde_json::from_value(am).unwrap()
    }

    /// VsphereAgent of the pool: name, VM, and the Machine that the VM is bound to.
    fn agent(name: &str, vm: &str, bound_to: Option<&str>) -> VsphereAgent {
        let status = bound_to
            .map(|machine| json!({"vm": {"name": vm, "phase": "Bound", "machineRef": {"name": machine}}}));
        serde_json::from_value(json!({
            "apiVersion": "agent-forge.containeroo.ch/v1alpha1", "kind": "VsphereAgent",
            "metadata": {"name": name, "annotations": {names::VM_NAME: vm},
                "labels": {names::CREATED_FOR: "agent-machine", names::AGENT_MACHINE: "w-0"}},
            "spec": {"poolRef": {"name": "pool"}}, "status": status.unwrap_or(json!({})),
        }))
        .unwrap()
    }

    #[test]
    fn machine_gets_second_vm_name_if_its_vm_is_taken() {
        let long = "x".repeat(80);
        let cut = label_value(&long);
        for (why, name, there, want) in [
            ("nothing is there", "w-0", vec![], "w-0"),
            ("its VM is being made", "w-0", vec![agent("w-0", "w-0", None)], "w-0"),
            ("its VM is its own node", "w-0", vec![agent("w-0", "w-0", Some("w-0"))], "w-0"),
            ("another took its VM", "w-0", vec![agent("w-0", "w-0", Some("w-1"))], SECOND),
            ("another has another's VM", "w-0", vec![agent("w-1", "w-1", Some("w-2"))], "w-0"),
            (
                "another took its VM, and a second one is there",
                "w-0",
                vec![agent("w-0", "w-0", Some("w-1")), agent("w-0-pool-x", "w-0-pool-x", None)],
                SECOND,
            ),
            ("a name too long for a label is cut", long.as_str(), vec![], cut.as_str()),
        ] {
            let got = place(&waiting_machine(name, None), &pool(), there.iter());
            let fits = if want == SECOND { got.starts_with(SECOND) && got.len() == 19 } else { got == want };
            assert!(fits, "{why}: {got}");
        }
    }

    #[test]
    fn unmet_selector_terms_are_listed() {
        let mut pool = pool();
        pool.spec.agent.labels = [("customer".to_owned(), "example".to_owned())].into();
        pool.spec.agent.role = "worker".into();
        for (selector, want) in [
            (json!({}), ""),
            (json!({"customer": "example", names::AGENT_MACHINE: "w-0", names::ROLE_LABEL: "worker"}), ""),
            (json!({"customer": "other"}), "customer=other"),
            (json!({"customer": "example", "rack": "7"}), "rack=7"),
            (json!({names::ROLE_LABEL: "infra"}), "hypershift.openshift.io/nodepool-role=infra"),
        ] {
            let mut am = waiting_machine("w-0", None);
            am.view.spec.agent_label_selector =
                serde_json::from_value(json!({"matchLabels": selector})).unwrap();
            assert_eq!(unmet_terms(&am, &pool).join(", "), want, "{selector}");
        }
    }

    #[test]
    fn waiting_agent_machine_gets_exactly_one_vsphere_agent() {
        let pools = [pool(), pool()];
        let one = [&pools[0]];
        let two = [&pools[0], &pools[1]];
        let mut ready = waiting_machine("w-0", None);
        ready.view.status.conditions = None;
        let taken = agent("w-0", "w-0", Some("w-1"));
        for (why, am, pools, there, pin, create) in [
            ("it does not wait", ready, &one[..], vec![], None, 0),
            ("no pool is its", waiting_machine("w-0", None), &[][..], vec![], None, 0),
            ("two pools are its: never guess", waiting_machine("w-0", None), &two[..], vec![], None, 0),
            (
                "it waits: pinned, and one is made",
                waiting_machine("w-0", None),
                &one[..],
                vec![],
                Some("w-0"),
                2,
            ),
            ("pinned already", waiting_machine("w-0", Some("w-0")), &one[..], vec![], None, 2),
            (
                "served",
                waiting_machine("w-0", Some("w-0")),
                &one[..],
                vec![agent("w-0", "w-0", None)],
                None,
                0,
            ),
            (
                "served under a second name of its object",
                waiting_machine("w-0", Some("w-0")),
                &one[..],
                vec![agent("w-0-pool-x", "w-0", None)],
                None,
                0,
            ),
            ("its VM was taken", waiting_machine("w-0", Some("w-0")), &one[..], vec![taken], Some(SECOND), 1),
        ] {
            let demand = plan(&am, pools, there.iter());
            assert_eq!(demand.create.len(), create, "{why}: {demand:?}");
            match (demand.pin, pin) {
                (Some(got), Some(want)) => assert!(got.starts_with(want), "{why}: {got}"),
                (got, want) => assert_eq!(got.as_deref(), want, "{why}"),
            }
        }
    }
}

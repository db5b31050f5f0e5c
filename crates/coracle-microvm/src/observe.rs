//! Reads: the agent's word on one VM, and where it would go. Nothing here changes anything outside this process.

use coracle_api::{MikromVM, keys};
use kube::ResourceExt as _;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    Context,
    agent::{Agent, AgentAddress, AgentError},
    discovery::{Fleet, Standing},
    plan::{Look, Memo, Observed, Place, Progress},
};

/// The one connection of a reconcile. It closes when this is dropped, on every path.
#[derive(Debug, Default)]
pub(crate) struct Wire(Option<(AgentAddress, Agent, OwnedSemaphorePermit)>);

impl Wire {
    /// The agent at `to`: the open connection, or a new one in its place. Waits while too many are open to it.
    pub(crate) async fn to(&mut self, cx: &Context, to: &AgentAddress) -> Result<&mut Agent, AgentError> {
        if self.0.as_ref().is_none_or(|(at, ..)| at != to) {
            self.hang_up();
            let line = cx.lines.of(&to.address).await?;
            self.0 = Some((to.clone(), cx.dialer.dial(to).await?, line));
        }
        Ok(&mut self.0.as_mut().expect("it was set a line above").1)
    }

    /// Closes the connection; the next use opens another.
    pub(crate) fn hang_up(&mut self) {
        self.0 = None;
    }
}

/// Looks at the object's VM and at where it could go.
pub(crate) async fn observe<'a>(
    cx: &'a Context,
    vm: &'a MikromVM,
    wire: &mut Wire,
    memo: Memo,
    progress: Progress,
) -> Observed<'a> {
    let at = agent_of(&cx.fleet, vm);
    let look = match &at {
        None => Look::Nowhere,
        Some((_, agent)) => look(cx, vm, wire, agent).await,
    };
    let now = cx.clock.now();
    let at = at.map(|(node, agent)| Place { node, address: agent.address }).unwrap_or_default();
    let place = place(&cx.fleet, vm, &look);
    Observed { vm, look, at, place, memo, progress, now, policy: &cx.policy }
}

/// The agent to ask: the one that the VM is bound to, found by its node since addresses change when a node is set up
/// anew; an address that the user wrote is kept as written. An unbound object that is being deleted may have been left
/// by another operator: then the address in its spec.
pub(crate) fn agent_of(fleet: &Fleet, vm: &MikromVM) -> Option<(String, AgentAddress)> {
    let status = vm.status.clone().unwrap_or_default();
    let spoken = |address: &str| {
        let announced =
            fleet.node_at(address).and_then(|node| fleet.resolve(&node)).filter(|a| a.address == address);
        announced.unwrap_or_else(|| AgentAddress { address: address.to_owned(), server_name: None })
    };
    if status.agent_address.is_empty() {
        let deleted = vm.metadata.deletion_timestamp.is_some() && !vm.spec.agent_address.is_empty();
        return deleted.then(|| (vm.spec.node_name.clone(), spoken(&vm.spec.agent_address)));
    }
    let as_written = vm.spec.agent_address == status.agent_address;
    let by_node =
        (!as_written && !status.node_name.is_empty()).then(|| fleet.resolve(&status.node_name)).flatten();
    let agent = by_node.unwrap_or_else(|| spoken(&status.agent_address));
    Some((status.node_name, agent))
}

async fn look(cx: &Context, vm: &MikromVM, wire: &mut Wire, agent: &AgentAddress) -> Look {
    let asked = match wire.to(cx, agent).await {
        Ok(connection) => connection.get(&vm.vm_id()).await,
        Err(error) => Err(error),
    };
    match asked {
        Ok(machine) => Look::Seen(machine),
        Err(error) if !error.is_transient() => Look::Refused(error),
        Err(error) => {
            let announced = cx.fleet.node_at(&agent.address).is_some();
            Look::Silent { gone_since: gone_since(&cx.fleet, vm, agent, announced), error, announced }
        }
    }
}

/// Since when the node is gone. An address of which no node is known counts as gone only while no VM was ever confirmed
/// there: it may be an agent outside the cluster that is merely down.
fn gone_since(
    fleet: &Fleet,
    vm: &MikromVM,
    agent: &AgentAddress,
    announced: bool,
) -> Option<jiff::Timestamp> {
    let node = vm.status.as_ref().map_or("", |s| s.node_name.as_str());
    let standing = match (node, announced) {
        ("", false) if !vm.is_provisioned() => fleet.standing(&agent.address),
        ("", _) => return None,
        (node, _) => fleet.standing(node),
    };
    match standing {
        Standing::Alive => None,
        Standing::Gone { since } => Some(since),
    }
}

/// Where the VM would go. Asked only where the plan may need it, since a choice is counted until it is stored.
fn place(fleet: &Fleet, vm: &MikromVM, look: &Look) -> Result<Place, String> {
    let spec = &vm.spec;
    if !spec.agent_address.is_empty() {
        let node = if spec.node_name.is_empty() {
            fleet.node_at(&spec.agent_address).unwrap_or_default()
        } else {
            spec.node_name.clone()
        };
        return Ok(Place { node, address: spec.agent_address.clone() });
    }
    let held = vm.finalizers().iter().any(|f| f == keys::MIKROMVM_FINALIZER);
    let needed = held && vm.metadata.deletion_timestamp.is_none();
    match look {
        Look::Nowhere | Look::Silent { gone_since: Some(_), .. } if needed => {}
        _ => return Err("not asked for".into()),
    }
    if !spec.node_name.is_empty() {
        let found = fleet
            .resolve(&spec.node_name)
            .map(|agent| Place { node: spec.node_name.clone(), address: agent.address });
        return found.ok_or_else(|| format!("node {} has announced no agent", spec.node_name));
    }
    let chosen = fleet.choose(vm).map_err(|refusal| refusal.to_string())?;
    Ok(Place { node: chosen.node, address: chosen.agent.address })
}

//! Reads the agent's answer about one VM, and chooses the node that the VM could be bound to. Changes nothing outside this
//! process.

use std::sync::Arc;

use coracle_api::{MigrationNode, MikromVM, NodeSelectorTerm, OnDrain, keys};
use coracle_reconcile::WallTime as _;
use coracle_vm_inputs::{Inputs, Objects, ReadError, References, node_terms, read, references, resolve};
use jiff::Timestamp;
use kube::ResourceExt as _;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    agent::{AgentAddress, AgentError, Fence, NodeClient},
    context::Context,
    discovery::{Fleet, NodePresence},
    error::Error,
    observed::{AgentView, AppliedSteps, BindingError, Drain, Memo, Observed},
    plan::{is_refused, may_create},
    step::{MigrationEnds, NodeBinding},
};

/// Connection of a reconcile to its agent, with the permit for it.
#[derive(Debug, Default)]
pub(crate) struct AgentConnection(Option<(AgentAddress, Arc<dyn NodeClient>, OwnedSemaphorePermit)>);

impl AgentConnection {
    /// Returns the connection to `agent`. Waits while too many reconciles use it.
    pub(crate) async fn open(
        &mut self,
        cx: &Context,
        agent: &AgentAddress,
    ) -> Result<&dyn NodeClient, AgentError> {
        if self.0.as_ref().is_none_or(|(open_to, ..)| open_to != agent) {
            self.release();
            let permit = cx.reconcile_permits.acquire(&agent.address).await?;
            self.0 = Some((agent.clone(), cx.connections.get(agent).await?, permit));
        }
        Ok(self.0.as_ref().expect("it was set a line above").1.as_ref())
    }

    /// Returns the permit; the next use acquires another.
    pub(crate) fn release(&mut self) {
        self.0 = None;
    }
}

/// Observes the object's VM and where it could be bound.
pub(crate) async fn observe<'a>(
    cx: &'a Context,
    vm: &'a MikromVM,
    connection: &mut AgentConnection,
    memo: Memo,
    progress: AppliedSteps,
) -> Result<Observed<'a>, Error> {
    let found = agent_of(&cx.fleet, vm);
    let view = match &found {
        None => AgentView::Unbound,
        Some((_, agent)) => get_vm(cx, vm, connection, agent).await,
    };
    let (node, agent) = found.unwrap_or_default();
    let now = cx.clock.timestamp();
    let inputs = inputs(cx, vm, &node, &view, &memo).await?;
    let claims = claims(cx, vm, &view, &memo, now).await?;
    let candidate = candidate(cx, vm, &claims, &view, &memo, now);
    let bound_to = NodeBinding { node, address: agent.address.clone() };
    let cluster = cx.known_cluster();
    let drain = drain(&cx.fleet, vm, &view, &memo, now);
    let migration_ends = migration_ends(&cx.fleet, vm);
    let policy = &cx.policy;
    Ok(Observed {
        vm,
        view,
        agent,
        bound_to,
        candidate,
        inputs,
        drain,
        migration_ends,
        cluster,
        memo,
        progress,
        now,
        policy,
    })
}

/// Reads the guest's inputs when the plan may create the VM. The inner error is one that the user must correct.
async fn inputs(
    cx: &Context,
    vm: &MikromVM,
    node: &str,
    view: &AgentView,
    memo: &Memo,
) -> Result<Result<Arc<Inputs>, String>, Error> {
    if !may_create(vm, view, memo) {
        return Ok(Err("not needed".into()));
    }
    let read = objects(cx, vm, &references(&vm.spec)).await?;
    let resolved = read.and_then(|objects| resolve(vm, node, &objects).map_err(|error| error.to_string()));
    let image_keys = cx.fleet.image_keys(&vm.namespace().unwrap_or_default());
    Ok(resolved.map(|inputs| Arc::new(Inputs { image_keys, ..inputs })))
}

/// Reads the node selector terms of the VM's claims when a node is being chosen.
async fn claims(
    cx: &Context,
    vm: &MikromVM,
    view: &AgentView,
    memo: &Memo,
    now: Timestamp,
) -> Result<Claims, Error> {
    let wanted = references(&vm.spec).of_claims();
    if wanted.is_empty() || !is_placed(cx, vm, view, memo, now) {
        return Ok(Ok(vec![]));
    }
    let read = objects(cx, vm, &wanted).await?;
    Ok(read.and_then(|objects| node_terms(vm, &objects).map_err(|error| error.to_string())))
}

/// Reads objects of the VM's namespace. A missing RBAC permission of the operator is an inner error, which the user sees.
async fn objects(cx: &Context, vm: &MikromVM, wanted: &References) -> Result<Result<Objects, String>, Error> {
    match read(&cx.client, &vm.namespace().unwrap_or_default(), wanted).await {
        Ok(objects) => Ok(Ok(objects)),
        Err(ReadError { kind, name, source }) => match source.as_ref() {
            kube::Error::Api(status) if status.code == 403 => {
                Ok(Err(format!("the operator may not read {kind} {name:?}")))
            }
            _ => Err(Error::Inputs(ReadError { kind, name, source })),
        },
    }
}

/// Returns what the cordon of the VM's node requires. A target is chosen only for a VM that would begin to move now.
fn drain(fleet: &Fleet, vm: &MikromVM, view: &AgentView, memo: &Memo, now: Timestamp) -> Option<Drain> {
    let policy = OnDrain::parse(vm.annotations().get(keys::vm::ON_DRAIN)?)?;
    let status = vm.status.as_ref()?;
    let moves = status.migration.is_some();
    let leaves = status.migration.as_ref().map_or(&status.node_name, |m| &m.source.node_name);
    if !fleet.is_cordoned(leaves) || !(moves || fleet.may_disrupt(vm)) {
        return None;
    }
    let blocked = memo.unmovable_until.is_some_and(|until| now < until);
    let needed =
        policy == OnDrain::Move && !moves && !blocked && matches!(view, AgentView::Answered(Some(_)));
    let target = match needed {
        _ if !vm.spec.agent_address.is_empty() || !vm.spec.node_name.is_empty() => {
            Err("its spec names the node".to_owned())
        }
        // A snapshot does not contain volumes and SSH keys, and the target could not create the VM again.
        _ if vm.spec.has_volumes() => Err("it has volumes or SSH keys".to_owned()),
        true => {
            let chosen = fleet.choose(vm, &[], &memo.avoided(vm, now)).map_err(|refusal| refusal.to_string());
            chosen.map(|chosen| NodeBinding { node: chosen.node, address: chosen.agent.address })
        }
        false => Err("not needed".to_owned()),
    };
    Some(Drain { policy, target })
}

fn migration_ends(fleet: &Fleet, vm: &MikromVM) -> Option<MigrationEnds> {
    let migration = vm.status.as_ref()?.migration.as_ref()?;
    let agent = |end: &MigrationNode| {
        let address = end.agent_address.clone();
        let as_written = || AgentAddress { address, ..AgentAddress::default() };
        fleet.resolve(&end.node_name).unwrap_or_else(as_written)
    };
    Some(MigrationEnds { source: agent(&migration.source), target: agent(&migration.target) })
}

/// Returns node and agent of a VM. The agent is looked up by its node, since addresses change when a node is set up again; an
/// address that the user wrote is used as written. An unbound object that is being deleted may have been created by another
/// operator: then the address in its spec is used.
fn agent_of(fleet: &Fleet, vm: &MikromVM) -> Option<(String, AgentAddress)> {
    let status = vm.status.clone().unwrap_or_default();
    let at_address = |address: &str| {
        let announced =
            fleet.node_at(address).and_then(|node| fleet.resolve(&node)).filter(|a| a.address == address);
        announced.unwrap_or_else(|| AgentAddress { address: address.to_owned(), ..AgentAddress::default() })
    };
    if status.agent_address.is_empty() {
        let deleted = vm.metadata.deletion_timestamp.is_some() && fleet.may_dial(&vm.spec.agent_address);
        return deleted.then(|| (vm.spec.node_name.clone(), at_address(&vm.spec.agent_address)));
    }
    let as_written = vm.spec.agent_address == status.agent_address;
    let by_node =
        (!as_written && !status.node_name.is_empty()).then(|| fleet.resolve(&status.node_name)).flatten();
    let agent = by_node.unwrap_or_else(|| at_address(&status.agent_address));
    Some((status.node_name, agent))
}

async fn get_vm(
    cx: &Context,
    vm: &MikromVM,
    connection: &mut AgentConnection,
    agent: &AgentAddress,
) -> AgentView {
    let answer = match connection.open(cx, agent).await {
        Ok(open) => open.get(&vm.vm_id(), &Fence::of(vm)).await,
        Err(error) => Err(error),
    };
    match answer {
        Ok(info) => AgentView::Answered(info),
        Err(error) if !error.is_transient() => AgentView::Refused(error),
        Err(error) => {
            let announced = cx.fleet.node_at(&agent.address).is_some();
            let gone_since = gone_since(&cx.fleet, vm, agent, announced);
            AgentView::Unreachable { gone_since, error, announced }
        }
    }
}

/// Returns the time since which the node is gone. An address of an unknown node counts as gone only while no VM was ever
/// confirmed there: it may be an agent outside the cluster that is down for a moment.
fn gone_since(fleet: &Fleet, vm: &MikromVM, agent: &AgentAddress, announced: bool) -> Option<Timestamp> {
    let node = vm.status.as_ref().map_or("", |s| s.node_name.as_str());
    let node_presence = match (node, announced) {
        ("", false) if !vm.is_provisioned() => fleet.node_presence(&agent.address),
        ("", _) => return None,
        (node, _) => fleet.node_presence(node),
    };
    match node_presence {
        NodePresence::Alive => None,
        NodePresence::Gone { since } => Some(since),
    }
}

/// Node selector terms of each claim of a VM, or the reason why the VM cannot be placed.
type Claims = Result<Vec<Vec<NodeSelectorTerm>>, String>;

/// True when a node must be chosen for the VM.
fn is_placed(cx: &Context, vm: &MikromVM, view: &AgentView, memo: &Memo, now: Timestamp) -> bool {
    let has_finalizer = vm.finalizers().iter().any(|f| f == keys::MIKROMVM_FINALIZER);
    let needed = has_finalizer && vm.metadata.deletion_timestamp.is_none();
    let named = !vm.spec.agent_address.is_empty() || !vm.spec.node_name.is_empty();
    needed
        && !named
        && match view {
            AgentView::Unbound => true,
            AgentView::Unreachable { gone_since: Some(since), .. } => cx.policy.is_lost(*since, now),
            AgentView::Answered(None) => is_refused(vm, memo, &cx.policy),
            _ => false,
        }
}

/// Returns the node that the VM would be bound to. A node is chosen only when the plan may need it, since a choice reserves
/// memory on the node until it is stored.
fn candidate(
    cx: &Context,
    vm: &MikromVM,
    claims: &Claims,
    view: &AgentView,
    memo: &Memo,
    now: Timestamp,
) -> Result<NodeBinding, BindingError> {
    let (fleet, spec) = (&cx.fleet, &vm.spec);
    if matches!(view, AgentView::Unbound) {
        fleet.admit(vm).map_err(BindingError::Unschedulable)?;
    }
    if !spec.agent_address.is_empty() {
        if !fleet.may_dial(&spec.agent_address) {
            return Err(BindingError::NotAllowed(spec.agent_address.clone()));
        }
        let node = if spec.node_name.is_empty() {
            fleet.node_of(&spec.agent_address).unwrap_or_default()
        } else {
            spec.node_name.clone()
        };
        return Ok(NodeBinding { node, address: spec.agent_address.clone() });
    }
    if !spec.node_name.is_empty() {
        let found = fleet
            .resolve(&spec.node_name)
            .map(|agent| NodeBinding { node: spec.node_name.clone(), address: agent.address });
        let unknown =
            || BindingError::Unschedulable(format!("node {} has announced no agent", spec.node_name));
        return found.ok_or_else(unknown);
    }
    if !is_placed(cx, vm, view, memo, now) {
        return Err(BindingError::Unschedulable("not needed".into()));
    }
    let claims = claims.as_ref().map_err(|why| BindingError::Unschedulable(why.clone()))?;
    let chosen = fleet
        .choose(vm, claims, &memo.avoided(vm, now))
        .map_err(|refusal| BindingError::Unschedulable(refusal.to_string()))?;
    Ok(NodeBinding { node: chosen.node, address: chosen.agent.address })
}

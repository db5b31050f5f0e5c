//! Event streams of agents, one each: changes of VMs trigger reconciles at once, and the periodic resync is a fallback. The
//! task of a stream keeps the connection to the agent open, which reconciles share.

use std::{collections::HashMap, sync::Arc, time::Duration};

use coracle_api::MikromVM;
use coracle_reconcile::Backoff;
use futures_util::StreamExt as _;
use kube::{Api, ResourceExt as _, runtime::reflector::ObjectRef};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    agent::{AgentAddress, AgentError, Fence, NodeClient, VmInfo},
    context::Context,
    step::VmRef,
};

/// Delays between attempts to open a stream.
const RECONNECT: Backoff = Backoff { base: Duration::from_millis(500), max: Duration::from_secs(30) };

/// Duration of a stream after which the next one is opened with the first delay.
const STABLE: Duration = Duration::from_secs(30);

/// Keeps a stream open to each agent that is announced or named by an object, until `stop`.
pub(crate) async fn watch_agents(cx: &Context, stop: &CancellationToken) {
    let mut tasks = JoinSet::new();
    let mut open = HashMap::new();
    loop {
        let wanted = cx.fleet.agents();
        open.retain(|agent, task: &mut tokio::task::AbortHandle| {
            let keep = wanted.contains(agent) && !task.is_finished();
            if !keep {
                task.abort();
            }
            keep
        });
        for agent in wanted {
            open.entry(agent).or_insert_with_key(|agent| tasks.spawn(follow(cx.clone(), agent.clone())));
        }
        tokio::select! {
            () = stop.cancelled() => break,
            () = cx.fleet.agents_changed() => {}
            Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
        }
    }
    tasks.shutdown().await;
}

/// Follows one agent, with backoff, until the task is dropped.
async fn follow(cx: Context, at: AgentAddress) {
    let (mut failures, mut connection) = (0, None);
    loop {
        let mut opened = None;
        match session(&cx, &at, failures > 0, &mut connection, &mut opened).await {
            Ok(()) => debug!(address = at.address, "event stream ended"),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                debug!(address = at.address, error, "open event stream failed");
            }
        }
        failures = failures_before_retry(failures, opened.map(|at: Instant| at.elapsed()));
        sleep(RECONNECT.jittered(failures, rand::random())).await;
        failures = failures.saturating_add(1);
    }
}

/// Returns the number of failures for the next delay after a stream of that duration; `None`: the stream was not opened. An
/// agent that ends each stream at once keeps its backoff, since every stream begins with a list.
fn failures_before_retry(failures: u32, lived: Option<Duration>) -> u32 {
    if lived.is_some_and(|lived| lived >= STABLE) { 0 } else { failures }
}

/// Runs one stream: lists the VMs to find missed changes, then queues objects by events. `connection` stays open until the next
/// session, also when the agent ends its stream at once.
async fn session(
    cx: &Context,
    at: &AgentAddress,
    reconnected: bool,
    connection: &mut Option<Arc<dyn NodeClient>>,
    opened: &mut Option<Instant>,
) -> Result<(), AgentError> {
    let agent = connection.insert(cx.connections.get(at).await?).clone();
    let mut events = agent.watch().await?;
    *opened = Some(Instant::now());
    if !cx.fleet.has_capacity(&at.address) {
        learn_capacity(cx, agent.as_ref(), at).await;
    }
    catch_up(cx, agent.as_ref(), at, reconnected).await?;
    while let Some(event) = events.next().await {
        let Ok(id) = event else { break };
        trigger(cx, &id);
    }
    Ok(())
}

async fn learn_capacity(cx: &Context, agent: &dyn NodeClient, at: &AgentAddress) {
    match agent.capacity().await {
        Ok(capacity) => cx.fleet.set_reported_capacity(&at.address, capacity),
        Err(error) => debug!(address = at.address, %error, "read capacity of the host failed"),
    }
}

/// Queues all objects of this agent, and removes VMs of deleted objects and VMs that were moved to another
/// node.
async fn catch_up(
    cx: &Context,
    agent: &dyn NodeClient,
    at: &AgentAddress,
    reconnected: bool,
) -> Result<(), AgentError> {
    if reconnected {
        for vm in cx.fleet.vms().state() {
            if vm.status.as_ref().is_some_and(|s| s.agent_address == at.address) {
                cx.fleet.enqueue(ObjectRef::from_obj(vm.as_ref()));
            }
        }
    }
    let cluster = cx.cluster().await;
    for (id, machine) in agent.list().await? {
        if let Some(uid) = deleted_object_uid(cx, cluster.as_deref(), &id, &machine).await {
            info!(vm = id, uid, address = at.address, "removing a VM whose object was deleted");
            // No later generation of the object exists, because it was deleted.
            let object = machine.object.map(|(ns, name)| format!("{ns}/{name}")).unwrap_or_default();
            let fence = Fence { uid, object, generation: i64::MAX };
            remove(agent, &VmRef { agent: at.clone(), id, fence, grace: None }).await?;
        } else if let Some(vm) = find_moved_object(cx, at, &id, &machine).await {
            info!(vm = id, address = at.address, "removing a VM that was moved to another node");
            remove(agent, &VmRef { agent: at.clone(), id: id.clone(), fence: Fence::of(&vm), grace: None })
                .await?;
            let note = format!("VM {id} was still on {}, from before it was moved; removed", at.address);
            cx.warn(&vm, "OrphanFound", "Delete", note).await;
        }
    }
    Ok(())
}

async fn remove(agent: &dyn NodeClient, vm: &VmRef) -> Result<(), AgentError> {
    agent.stop(vm).await?;
    agent.delete(vm).await
}

/// Returns the UID of a VM's deleted object, by a read from the API server. The finalizer of such an object was removed while
/// the node was unreachable.
async fn deleted_object_uid(
    cx: &Context,
    cluster: Option<&str>,
    id: &str,
    machine: &VmInfo,
) -> Option<String> {
    let uid = machine.uid.as_ref().filter(|uid| cx.fleet.object(uid).is_none())?;
    let (namespace, name) = object_here(machine, cluster, cx.namespace.as_deref())?;
    let objects: Api<MikromVM> = Api::namespaced(cx.client.clone(), namespace);
    // Only metadata is read: an object that this version cannot parse exists nevertheless.
    match objects.get_metadata_opt(name).await {
        Ok(found) if found.as_ref().and_then(kube::ResourceExt::uid).as_ref() == Some(uid) => None,
        Ok(_) => Some(uid.clone()),
        Err(error) => {
            warn!(vm = id, %error, "read object of an unknown VM failed");
            None
        }
    }
}

/// Returns namespace and name of a VM's object, when the object belongs to this cluster and to the watched namespace.
fn object_here<'a>(
    machine: &'a VmInfo,
    cluster: Option<&str>,
    scope: Option<&str>,
) -> Option<(&'a str, &'a str)> {
    let (namespace, name) = machine.object.as_ref()?;
    let ours = cluster.is_some() && machine.cluster.as_deref() == cluster;
    let in_scope = scope.is_none_or(|scope| scope == namespace);
    (ours && in_scope).then_some((namespace.as_str(), name.as_str()))
}

/// Returns the object of a VM that was moved: by a read from the API server, the object with the same UID runs on another node.
async fn find_moved_object(cx: &Context, at: &AgentAddress, id: &str, machine: &VmInfo) -> Option<MikromVM> {
    let elsewhere = |vm: &MikromVM| {
        let status = vm.status.as_ref()?;
        let here = status.agent_address == at.address
            || cx.fleet.node_at(&at.address).is_some_and(|n| n == status.node_name);
        (vm.uid() == machine.uid && vm.vm_id() == id && vm.is_provisioned() && !here).then_some(())
    };
    let cached = cx.fleet.object(machine.uid.as_ref()?)?;
    elsewhere(&cached)?;
    match cx.api(&cached).get_opt(&cached.name_any()).await {
        Ok(fresh) => fresh.filter(|vm| elsewhere(vm).is_some()),
        Err(error) => {
            warn!(vm = id, %error, "read object of a moved VM failed");
            None
        }
    }
}

/// Queues all objects with that id, which is not unique.
fn trigger(cx: &Context, id: &str) {
    for object in cx.fleet.objects_of(id) {
        cx.fleet.enqueue(object);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_belongs_to_the_operator_by_cluster_and_namespace() {
        let object = Some(("team".to_owned(), "web".to_owned()));
        let machine = |cluster: Option<&str>| VmInfo {
            object: object.clone(),
            cluster: cluster.map(str::to_owned),
            ..VmInfo::default()
        };
        for (why, machine, cluster, scope, want) in [
            ("of this cluster", machine(Some("c1")), Some("c1"), None, true),
            ("of another cluster", machine(Some("c2")), Some("c1"), None, false),
            ("of an operator that did not say", machine(None), Some("c1"), None, false),
            ("we do not know which we are", machine(None), None, None, false),
            ("in our namespace", machine(Some("c1")), Some("c1"), Some("team"), true),
            ("in another's namespace", machine(Some("c1")), Some("c1"), Some("else"), false),
            ("of no object", VmInfo { object: None, ..machine(Some("c1")) }, Some("c1"), None, false),
        ] {
            let found = object_here(&machine, cluster, scope);
            assert_eq!(found, want.then_some(("team", "web")), "{why}");
        }
    }

    #[test]
    fn stream_that_ends_at_once_keeps_its_backoff() {
        let seconds = Duration::from_secs;
        for (why, lived, want) in [
            ("not opened", None, 7),
            ("ended at once", Some(seconds(0)), 7),
            ("ended early", Some(seconds(29)), 7),
            ("a good one", Some(seconds(30)), 0),
        ] {
            assert_eq!(failures_before_retry(7, lived), want, "{why}");
        }
        let delay = RECONNECT.delay(failures_before_retry(7, Some(seconds(0))));
        assert!(delay >= seconds(30), "an agent that ends each stream is asked twice a minute: {delay:?}");
    }
}

//! One event stream to each agent: what happens to a VM is known at once, and the periodic look is only a backstop.

use std::{collections::HashMap, time::Duration};

use coracle_api::MikromVM;
use coracle_reconcile::Backoff;
use futures_util::StreamExt as _;
use kube::{ResourceExt as _, runtime::reflector::ObjectRef};
use tokio::{task::JoinSet, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    Context,
    agent::{Agent, AgentAddress, AgentError, Fence, Machine},
    placement::Capacity,
};

/// Between two tries to open a stream.
const RECONNECT: Backoff = Backoff { base: Duration::from_millis(500), max: Duration::from_secs(30) };

/// Keeps a stream open to each agent that is announced or written on an object, until `stop`.
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

/// Follows one agent for ever, with backoff.
async fn follow(cx: Context, at: AgentAddress) {
    let mut failures = 0;
    loop {
        match session(&cx, &at, &mut failures).await {
            Ok(()) => debug!(address = at.address, "event stream ended"),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                debug!(address = at.address, error, "event stream not open");
            }
        }
        sleep(RECONNECT.jittered(failures, rand::random())).await;
        failures = failures.saturating_add(1);
    }
}

/// One connection: what was missed is looked at anew, then events trigger.
async fn session(cx: &Context, at: &AgentAddress, failures: &mut u32) -> Result<(), AgentError> {
    let mut agent = cx.dialer.dial(at).await?;
    let mut events = agent.watch().await?;
    if !cx.fleet.has_capacity(&at.address) {
        learn_capacity(cx, &mut agent, at).await;
    }
    let reconnected = std::mem::take(failures) > 0;
    catch_up(cx, &mut agent, at, reconnected).await?;
    while let Some(event) = events.next().await {
        let Ok(event) = event else { break };
        trigger(cx, &event.vm_id);
    }
    Ok(())
}

async fn learn_capacity(cx: &Context, agent: &mut Agent, at: &AgentAddress) {
    match agent.host_info().await {
        Ok(info) => {
            let vcpus = u32::try_from(info.total_cpus).unwrap_or(0);
            let capacity = Capacity { vcpus, memory_mib: u64::try_from(info.total_memory_mb).unwrap_or(0) };
            cx.fleet.tell_capacity(&at.address, capacity);
        }
        Err(error) => debug!(address = at.address, %error, "size of the host not known"),
    }
}

/// Looks at everything of this agent that may have changed unseen, and removes what has moved elsewhere meanwhile.
async fn catch_up(
    cx: &Context,
    agent: &mut Agent,
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
    for (id, machine) in agent.list().await? {
        if let Some(vm) = moved_away(cx, at, &id, &machine).await {
            info!(vm = id, address = at.address, "removing a VM that was moved to another node");
            let fence =
                Fence { uid: vm.uid().unwrap_or_default(), generation: vm.metadata.generation.unwrap_or(0) };
            agent.stop(&id, &fence).await?;
            agent.delete(&id, &fence).await?;
            let note = format!("VM {id} was still on {}, from before it was moved; removed", at.address);
            cx.warn(&vm, "OrphanFound", "Delete", note).await;
        }
    }
    Ok(())
}

/// The object of a machine that is certain to be a left-over: the same object, by UID and freshly read, runs elsewhere.
async fn moved_away(cx: &Context, at: &AgentAddress, id: &str, machine: &Machine) -> Option<MikromVM> {
    let uid = machine.uid.as_ref()?;
    let elsewhere = |vm: &MikromVM| {
        let status = vm.status.clone().unwrap_or_default();
        let here = status.agent_address == at.address
            || cx.fleet.node_at(&at.address).is_some_and(|n| n == status.node_name);
        vm.uid().as_ref() == Some(uid) && vm.vm_id() == id && vm.is_provisioned() && !here
    };
    let cached = cx.fleet.vms().find(|vm| elsewhere(vm))?;
    match cx.api(&cached).get_opt(&cached.name_any()).await {
        Ok(fresh) => fresh.filter(|vm| elsewhere(vm)),
        Err(error) => {
            warn!(vm = id, %error, "left-over VM not looked at");
            None
        }
    }
}

/// An id may stand for more than one object (`a-b` of `c`, `b-c` of `a`): all of them are looked at.
fn trigger(cx: &Context, id: &str) {
    for vm in cx.fleet.vms().state_filter(|vm| vm.vm_id() == id) {
        cx.fleet.enqueue(ObjectRef::from_obj(vm.as_ref()));
    }
}

//! Carries out steps without decisions: each step contains everything that it needs.

use std::sync::Arc;

use coracle_api::{
    MikromVM, MikromVMStatus, event,
    keys::{MIKROMVM_FINALIZER, MIKROMVM_MANAGER},
};
use coracle_reconcile::{WallTime as _, add_finalizer_if_unchanged, remove_finalizer, replace_status};
use kube::Resource as _;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    agent::{AgentAddress, AgentError, NodeClient, SnapshotClient, copy_snapshot},
    context::{AgentLimits, Context},
    error::Error,
    observe::AgentConnection,
    observed::AppliedSteps,
    status,
    step::{MigrationEnds, Step},
};

/// State of the object after a step.
#[derive(Debug)]
pub(crate) enum After {
    /// The object was not written.
    Same,
    /// The object was written; contains its new content.
    Written(Box<MikromVM>),
    /// The object was deleted, or is no longer managed by this controller.
    Gone,
}

/// Carries out one step. May be dropped at any point and repeated.
pub(crate) async fn execute(
    cx: &Context,
    vm: &MikromVM,
    connection: &mut AgentConnection,
    step: &Step,
) -> Result<After, Error> {
    match step {
        Step::AddFinalizer => {
            let added =
                add_finalizer_if_unchanged(&cx.api(vm), vm, MIKROMVM_FINALIZER, MIKROMVM_MANAGER).await?;
            return Ok(record_write(cx, added));
        }
        Step::Bind(binding) => {
            let status = status::bound_status(vm, binding, cx.clock.timestamp());
            return write_status(cx, vm, &status, AppliedSteps::default()).await;
        }
        Step::RemoveFinalizer { unconfirmed } => {
            remove_finalizer(&cx.api(vm), vm, MIKROMVM_FINALIZER, MIKROMVM_MANAGER).await?;
            if let Some(why) = unconfirmed {
                let note =
                    format!("finalizer removed without confirmation that VM {} is gone: {why}", vm.vm_id());
                cx.warn(vm, event::RELEASED, "Delete", note).await;
            }
            return Ok(After::Gone);
        }
        Step::CreateVm(to, spec) => {
            let _permit = permit(&cx.create_permits, connection, &to.agent).await?;
            connection.open(cx, &to.agent).await?.create(to, spec).await?;
        }
        Step::CreateStopped(to, spec) => {
            connection.open(cx, &to.agent).await?.create_stopped(to, spec).await?
        }
        Step::StartVm(to) => {
            let _permit = permit(&cx.boot_permits, connection, &to.agent).await?;
            connection.open(cx, &to.agent).await?.start(to).await?;
        }
        Step::SetPowerState(to, state) => {
            let _permit = permit(&cx.boot_permits, connection, &to.agent).await?;
            connection.open(cx, &to.agent).await?.set_power_state(to, *state).await?;
        }
        Step::Migrate(migration) => {
            let status = status::migration_status(vm, migration.as_ref(), cx.clock.timestamp());
            return write_status(cx, vm, &status, AppliedSteps::default()).await;
        }
        Step::SaveSnapshot(..)
        | Step::CopySnapshot(..)
        | Step::RestoreVm(..)
        | Step::DeleteSnapshot(..)
        | Step::DiscardSnapshots(..) => {
            connection.release(); // copies take long and must not block calls about other VMs
            snapshot(cx, step).await?;
        }
        Step::StopVm(to) => connection.open(cx, &to.agent).await?.stop(to).await?,
        Step::DeleteVm(to) => connection.open(cx, &to.agent).await?.delete(to).await?,
    }
    Ok(After::Same)
}

/// Carries out a snapshot step.
async fn snapshot(cx: &Context, step: &Step) -> Result<(), AgentError> {
    let node = async |agent: &AgentAddress| cx.connections.get(agent).await;
    match step {
        Step::SaveSnapshot(vm, name) => snapshots(&node(&vm.agent).await?, &vm.agent)?.save(vm, name).await,
        Step::CopySnapshot(MigrationEnds { source, target }, snapshot) => {
            let (from, to) = (node(source).await?, node(target).await?);
            let (from, to) = (snapshots(&from, source)?, snapshots(&to, target)?);
            copy_snapshot(from, to, &snapshot.name, snapshot).await
        }
        Step::RestoreVm(vm, snapshot) => {
            snapshots(&node(&vm.agent).await?, &vm.agent)?.restore(snapshot).await
        }
        Step::DeleteSnapshot(agent, name) => {
            snapshots(&node(agent).await?, agent)?.delete_snapshot(name).await
        }
        Step::DiscardSnapshots(MigrationEnds { source, target }, name) => {
            for agent in [source, target] {
                snapshots(&node(agent).await?, agent)?.delete_snapshot(name).await?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn snapshots<'a>(
    node: &'a Arc<dyn NodeClient>,
    agent: &AgentAddress,
) -> Result<&'a dyn SnapshotClient, AgentError> {
    node.snapshots().ok_or_else(|| AgentError::unsupported(&agent.address, "SaveSnapshot"))
}

/// Waits for a permit for a slow call to that agent. Creations and boots have separate permits, so that slow pulls do not delay
/// starts. The permit of the reconcile is returned during the wait: GetVM calls and deletions of other objects are not blocked
/// by boots that hang.
async fn permit(
    limits: &AgentLimits,
    connection: &mut AgentConnection,
    agent: &AgentAddress,
) -> Result<OwnedSemaphorePermit, AgentError> {
    match limits.try_acquire(&agent.address) {
        Some(permit) => Ok(permit),
        None => {
            connection.release();
            limits.acquire(&agent.address).await
        }
    }
}

/// Writes `status` when it differs, and publishes Events about the changes.
pub(crate) async fn write_status(
    cx: &Context,
    vm: &MikromVM,
    status: &MikromVMStatus,
    progress: AppliedSteps,
) -> Result<After, Error> {
    if vm.status.as_ref() == Some(status) {
        return Ok(After::Same);
    }
    // A status is valid only for the spec that it was derived from: an edited object is planned again.
    let after = replace_status(&cx.api(vm), vm, status, MIKROMVM_MANAGER).await?;
    for event in status::events(vm.status.as_ref(), status, progress) {
        cx.events.publish(&event, &vm.object_ref(&())).await;
    }
    Ok(record_write(cx, after))
}

fn record_write(cx: &Context, object: Option<MikromVM>) -> After {
    let Some(vm) = object else { return After::Gone };
    cx.own_writes.remember(vm.clone());
    After::Written(Box::new(vm))
}

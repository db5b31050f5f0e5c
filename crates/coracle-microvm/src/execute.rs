//! Writes: one function a step, without choices.

use std::collections::BTreeMap;

use coracle_api::{
    MikromVM, MikromVMStatus, event,
    keys::{MIKROMVM_FINALIZER, MIKROMVM_MANAGER, vm as meta},
};
use coracle_proto::firecracker::CreateVmRequest;
use coracle_reconcile::{add_finalizer, apply_status, remove_finalizer};
use kube::{Resource as _, ResourceExt as _};
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    Context, Error,
    agent::{AgentAddress, AgentError, Fence},
    observe::Wire,
    plan::{Progress, Step},
    status,
};

/// What a step left of the object.
#[derive(Debug)]
pub(crate) enum After {
    /// It is as it was.
    Same,
    /// It was written and is now this.
    Written(Box<MikromVM>),
    /// It is gone, or no longer ours.
    Gone,
}

/// Does one step. Safe to repeat; safe to be cut off at any point.
pub(crate) async fn execute(
    cx: &Context,
    vm: &MikromVM,
    wire: &mut Wire,
    agent: Option<&AgentAddress>,
    step: &Step,
) -> Result<After, Error> {
    match step {
        Step::Hold => {
            Ok(written(add_finalizer(&cx.api(vm), vm, MIKROMVM_FINALIZER, MIKROMVM_MANAGER).await?))
        }
        Step::Bind(place) => {
            let status = status::bound(vm, place, cx.clock.now());
            report(cx, vm, &status, Progress::default()).await
        }
        Step::Release(why) => {
            remove_finalizer(&cx.api(vm), vm, MIKROMVM_FINALIZER, MIKROMVM_MANAGER).await?;
            if let Some(why) = why {
                let note = format!("let go without seeing that VM {} is gone: {why}", vm.vm_id());
                cx.warn(vm, event::RELEASED, "Delete", note).await;
            }
            Ok(After::Gone)
        }
        Step::Create | Step::Lay | Step::Start | Step::Power(_) | Step::Stop | Step::Delete => {
            let Some(agent) = agent else { return Ok(After::Same) };
            call(cx, vm, wire, agent, step).await?;
            Ok(After::Same)
        }
    }
}

async fn call(
    cx: &Context,
    vm: &MikromVM,
    wire: &mut Wire,
    to: &AgentAddress,
    step: &Step,
) -> Result<(), Error> {
    let (id, fence) = (vm.vm_id(), fence(vm));
    let _slot = match step {
        Step::Create | Step::Start | Step::Power(_) => Some(boot_slot(cx, wire, to).await?),
        Step::Lay | Step::Stop | Step::Delete | Step::Hold | Step::Bind(_) | Step::Release(_) => None,
    };
    let agent = wire.to(cx, to).await?;
    match step {
        Step::Create => agent.create(create_request(vm), &fence).await?,
        Step::Lay => agent.lay(create_request(vm), &fence).await?,
        Step::Start => agent.start(&id, &fence).await?,
        Step::Power(state) => agent.power(&id, &fence, *state).await?,
        Step::Stop => agent.stop(&id, &fence).await?,
        Step::Delete => agent.delete(&id, &fence).await?,
        Step::Hold | Step::Bind(_) | Step::Release(_) => {}
    }
    Ok(())
}

/// A place among the boots of that agent. While it is waited for the connection is closed: looks and deletions of
/// other objects go on behind boots that hang.
async fn boot_slot(
    cx: &Context,
    wire: &mut Wire,
    to: &AgentAddress,
) -> Result<OwnedSemaphorePermit, AgentError> {
    match cx.boots.try_of(&to.address) {
        Some(slot) => Ok(slot),
        None => {
            wire.hang_up();
            cx.boots.of(&to.address).await
        }
    }
}

/// Writes `status` when it differs, and tells people what changed.
pub(crate) async fn report(
    cx: &Context,
    vm: &MikromVM,
    status: &MikromVMStatus,
    progress: Progress,
) -> Result<After, Error> {
    if vm.status.as_ref() == Some(status) {
        return Ok(After::Same);
    }
    let after = apply_status(&cx.api(vm), vm, vm.status.as_ref(), status, MIKROMVM_MANAGER).await?;
    for event in status::events(vm.status.as_ref(), status, progress) {
        cx.events.publish(&event, &vm.object_ref(&())).await;
    }
    Ok(written(after))
}

fn written(object: Option<MikromVM>) -> After {
    object.map_or(After::Gone, |vm| After::Written(Box::new(vm)))
}

pub(crate) fn fence(vm: &MikromVM) -> Fence {
    Fence { uid: vm.uid().unwrap_or_default(), generation: vm.metadata.generation.unwrap_or(0) }
}

fn create_request(vm: &MikromVM) -> CreateVmRequest {
    let mut metadata = BTreeMap::from([
        (meta::UID.to_owned(), vm.uid().unwrap_or_default()),
        (meta::IDEMPOTENT.to_owned(), "true".to_owned()),
        (meta::NAMESPACE.to_owned(), vm.namespace().unwrap_or_default()),
        (meta::NAME.to_owned(), vm.name_any()),
    ]);
    if let Some(policy) = vm.spec.image_pull_policy {
        metadata.insert(meta::IMAGE_PULL_POLICY.to_owned(), policy.as_str().to_owned());
    }
    if !vm.spec.clone_from.is_empty() {
        metadata.insert(meta::CLONE_FROM.to_owned(), vm.spec.clone_from.clone());
    }
    for key in [meta::COLD_START, meta::DRIVER] {
        if let Some(value) = vm.annotations().get(key) {
            metadata.insert(key.to_owned(), value.clone());
        }
    }
    CreateVmRequest {
        vm_id: vm.vm_id(),
        vcpu_count: vm.spec.vcpu_count,
        memory_mb: vm.spec.memory_mib,
        kernel_path: vm.spec.kernel_path.clone(),
        image_ref: vm.spec.image.clone(),
        metadata,
        ..CreateVmRequest::default()
    }
}

//! Task that makes and ends pooled clones, one at a time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use coracle_guest_client::{GuestSession, NewSession};
use coracle_hypervisor::{Cloned, Disk, Driver as _, Nic, Template, VmmConfig};
use coracle_types::{InstanceId, MacAddr};
use tokio::time::{Instant, sleep, sleep_until};

use super::plan::Step;
use super::warm_up::CONTAINER_SLOT;
use super::{ANSWER_LIMIT, Claim, Making, PooledVmm, WarmPool, warm_up};
use crate::instances::InstanceOwner;
use crate::node::Node;
use crate::vmm_config::{backend, warm_up_slot};
use crate::{HostError, TemplateKey, disks, files, templates};

/// Interval between checks of a node with many starts.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Serves the pool until the daemon stops.
pub async fn run(warm_pool: Arc<WarmPool>) {
    warm_pool.node.stop.run_until_cancelled(serve(&warm_pool)).await;
}

async fn serve(warm_pool: &Arc<WarmPool>) {
    loop {
        let spent = std::mem::take(&mut warm_pool.state().spent);
        for id in spent {
            end_quietly(&warm_pool.node, &id).await;
        }
        match warm_pool.next(Instant::now()) {
            Step::End(key) => {
                if let Some(PooledVmm { vmm_config, .. }) = warm_pool.take(&key) {
                    end_quietly(&warm_pool.node, &vmm_config.id).await;
                }
            }
            Step::Make(key) => make_clone(warm_pool, &key).await,
            Step::Wait(None) => warm_pool.changed.notified().await,
            Step::Wait(Some(until)) => tokio::select! {
                () = warm_pool.changed.notified() => {}
                () = sleep_until(until) => {}
            },
        }
    }
}

/// Makes a clone, for the start that waits for it or for the pool. After a failure, the shape has no clones until its next
/// start.
async fn make_clone(warm_pool: &Arc<WarmPool>, key: &TemplateKey) {
    // Requested VMs come first. A clone is made in the background and delays none of them.
    while !is_calm(warm_pool) {
        sleep(LOOK_AGAIN).await;
    }
    let Some(shape) = wanted_shape(warm_pool, key) else { return };
    let vmm_config = match warm_pool.node.instances.create(InstanceOwner::Pool(key.clone()), shape).await {
        Ok(vmm_config) => vmm_config,
        Err(error) => {
            tracing::warn!(template = %key, error = error.chain(), "make pooled clone failed");
            return warm_pool.forget(key);
        }
    };
    warm_pool.node.instances.to_background(&vmm_config).await;
    // From here on, until its warm-up begins, a start may wait for this clone.
    warm_pool.state().making = Some(Making { key: key.clone(), id: vmm_config.id.clone(), first: None });
    let began = Instant::now();
    let started = start(warm_pool, key, &vmm_config).await;
    let first = warm_pool.state().making.take().and_then(|making| making.first);
    let made = match (started, first) {
        (Ok(pooled), Some(first)) => match first.send(Claim::of(warm_pool, pooled)) {
            Ok(()) => return,
            // The start no longer waits: the clone is pooled for the next one.
            Err(late) => match late.into_pooled() {
                Some(pooled) => warm_and_pause(warm_pool, pooled).await,
                None => return,
            },
        },
        (Ok(pooled), None) => warm_and_pause(warm_pool, pooled).await,
        (Err(error), _) => Err(error),
    };
    match made {
        Ok(pooled) => {
            let mut state = warm_pool.state();
            state.took = Some(began.elapsed());
            state.ready.push(pooled);
        }
        Err(error) => {
            tracing::warn!(template = %key, error = error.chain(), "make pooled clone failed");
            warm_pool.forget(key);
            end_quietly(&warm_pool.node, &vmm_config.id).await;
        }
    }
}

/// Returns whether at least half of the boot permits are free.
fn is_calm(WarmPool { node, .. }: &WarmPool) -> bool {
    node.boots.available_permits() >= (node.config.boots_at_once / 2).max(1)
}

/// Returns the shape, if it is still wanted.
fn wanted_shape(warm_pool: &WarmPool, key: &TemplateKey) -> Option<VmmConfig> {
    let state = warm_pool.state();
    let shape = state.shapes.iter().find(|shape| shape.key == *key)?.vmm_config.clone();
    Some(VmmConfig { disks: vec![], ..shape })
}

/// Starts a clone with a session to its guest agent.
async fn start(
    warm_pool: &Arc<WarmPool>,
    key: &TemplateKey,
    vmm_config: &VmmConfig,
) -> Result<PooledVmm, HostError> {
    let driver = |source| HostError::Driver { name: vmm_config.id.to_string(), source };
    let network = |source| HostError::Network { name: vmm_config.id.to_string(), source };
    let failed = |why: &str| HostError::Template { why: why.to_owned() };
    let templates =
        warm_pool.node.driver.templates(vmm_config).ok_or_else(|| failed("its driver has none"))?;
    let template = warm_pool.templates.get(key).await.ok_or_else(|| failed("it is gone"))?;
    let mut vmm_config = vmm_config.clone();
    if template.disk.is_some() {
        let disk = Disk::raw(vmm_config.slots.premounted(), vmm_config.state_dir.join("disk"), false);
        vmm_config.disks.push(disk);
    }
    let io = |source| HostError::State { operation: format!("make the files of {}", vmm_config.id), source };
    let (config, copied) = (vmm_config.clone(), template.clone());
    let made = files::blocking(move || copy_disk(&config, &copied)).await;
    let disk_mib = made.map_err(io)?;
    let attachment = warm_pool.node.network.create_interface(&vmm_config.id).await.map_err(network)?;
    vmm_config.nic = Some(Nic {
        mac: MacAddr::of(&vmm_config.id),
        backend: backend(&warm_pool.node.config, &attachment, &[]),
    });
    let Cloned { process, channel } = templates.start_clone(&vmm_config, &template).await.map_err(driver)?;
    let session =
        templates::open_session(&warm_pool.node, &vmm_config, process, channel, ANSWER_LIMIT).await?;
    let (key, guest) = (key.clone(), GuestSession::New(session));
    Ok(PooledVmm { key, vmm_config, vmm: process, guest, attachment, disk_mib, paused: false })
}

/// Warms a clone up, unless it is, and pauses it.
async fn warm_and_pause(warm_pool: &WarmPool, mut pooled: PooledVmm) -> Result<PooledVmm, HostError> {
    let vmm_config = &pooled.vmm_config;
    let driver = |source| HostError::Driver { name: vmm_config.id.to_string(), source };
    pooled.guest = match pooled.guest {
        GuestSession::New(session) => warm_up(warm_pool, &pooled.key, vmm_config, session).await?,
        warm => warm,
    };
    warm_pool.node.driver.pause(vmm_config).await.map_err(driver)?;
    Ok(PooledVmm { paused: true, ..pooled })
}

/// Warms the guest up, with a stand-in for the VM's image.
async fn warm_up(
    warm_pool: &WarmPool,
    key: &TemplateKey,
    vmm_config: &VmmConfig,
    session: NewSession,
) -> Result<GuestSession, HostError> {
    let overlay = vmm_config.slots.premounted();
    let image = match warm_pool.templates.warmup_image().await {
        Ok(image) if vmm_config.disk_in(overlay).is_some() => image,
        Ok(_) => return Ok(GuestSession::New(session)),
        Err(error) => {
            tracing::warn!(%error, "make image of the warm-up failed: VMs start a little later");
            return Ok(GuestSession::New(session));
        }
    };
    let driver = |source| HostError::Driver { name: vmm_config.id.to_string(), source };
    let refused = |source| HostError::Guest { name: vmm_config.id.to_string(), operation: "warm up", source };
    let starts = warm_pool.warm_ups(key);
    let slots = [(warm_up_slot(), starts.workload), (CONTAINER_SLOT, starts.sandbox)];
    let slots = slots.into_iter().filter_map(|(slot, is_used)| is_used.then_some(slot));
    for slot in slots.clone() {
        warm_pool.node.driver.attach_disk(vmm_config, &Disk::image(slot, image)).await.map_err(driver)?;
    }
    let now = warm_pool.node.clock.now();
    let session = warm_up::run(session, overlay, now, starts).await.map_err(refused)?;
    for slot in slots {
        warm_pool.node.driver.detach_disk(vmm_config, slot).await.map_err(driver)?;
    }
    Ok(session)
}

/// Copies the template's disk for the clone; returns its size in MiB. Blocking.
fn copy_disk(vmm_config: &VmmConfig, template: &Template) -> io::Result<u64> {
    match (&template.disk, vmm_config.disk_in(vmm_config.slots.premounted())) {
        (Some(disk), Some(copy)) => {
            disks::copy(&disk.path(), &copy.path).and_then(|()| Ok(disk.length()? >> 20))
        }
        _ => Ok(0),
    }
}

async fn end_quietly(node: &Node, id: &InstanceId) {
    if let Err(error) = node.instances.end(id, None).await {
        tracing::warn!(pooled = %id, error = error.chain(), "end pooled clone failed");
    }
}

//! The task that makes and ends the clones that stand by, one at a time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::{Cloned, Disk, Driver as _, Nic, Template, VmRecipe};
use coracle_proto::guest as pb;
use coracle_types::{MacAddr, MemoryMib, VmId};
use tokio::time::{Instant, sleep_until};

use super::plan::Step;
use super::{Claim, Making, Standby};
use crate::guest::within;
use crate::host::capacity::memory_available_mib;
use crate::recipe::{IMAGE_SLOT, backend, device, of_shape};
use crate::vm::Shared;
use crate::{HostError, TemplateKey, disks, files, templates};

/// The clone of a template answers at once.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Serves the host until it stops. What then stands by is for [`sweep`], when no start can take one any more.
pub(crate) async fn run(shared: Arc<Shared>) {
    shared.stop.run_until_cancelled(serve(&shared)).await;
}

/// Ends whatever stands by, as its folders tell, and removes them.
pub(crate) async fn sweep(shared: &Shared) {
    let dirs = std::fs::read_dir(&shared.standbys.dir).into_iter().flatten().flatten();
    for dir in dirs.map(|entry| entry.path()) {
        let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        match VmId::try_from(name.to_owned()) {
            Ok(id) => end_quietly(shared, &places(shared, id)).await,
            Err(error) => tracing::warn!(dir = %dir.display(), %error, "no clone of ours, left alone"),
        }
    }
}

async fn serve(shared: &Arc<Shared>) {
    let standbys = &shared.standbys;
    loop {
        let spent = std::mem::take(&mut standbys.state().spent);
        for recipe in spent {
            end_quietly(shared, &recipe).await;
        }
        match standbys.next(Instant::now()) {
            Step::End(key) => {
                if let Some(Standby { recipe, .. }) = standbys.take(&key) {
                    end_quietly(shared, &recipe).await;
                }
            }
            Step::Make(key) => make(shared, &key).await,
            Step::Wait(None) => standbys.changed.notified().await,
            Step::Wait(Some(until)) => tokio::select! {
                () = standbys.changed.notified() => {}
                () = sleep_until(until) => {}
            },
        }
    }
}

/// Makes one, for the start that waits for it or for later. When that fails, the shape has none until its next start.
async fn make(shared: &Arc<Shared>, key: &TemplateKey) {
    // It waits its turn behind the VMs that were asked for.
    let Ok(_permit) = shared.boots.acquire().await else { return };
    let Some(recipe) = begin(shared, key) else { return };
    let started = start(shared, key, &recipe).await;
    let first = shared.standbys.state().making.take().and_then(|making| making.first);
    let made = match (started, first) {
        (Ok(standby), Some(first)) => {
            // Who does not wait any more leaves it to be ended: another is made when it is wanted.
            let _not_waiting = first.send(Claim::of(shared, standby));
            return;
        }
        (Ok(standby), None) => rehearse(shared, &standby).await.map(|()| standby),
        (Err(error), _) => Err(error),
    };
    match made {
        Ok(standby) => shared.standbys.state().ready.push(standby),
        Err(error) => {
            tracing::warn!(template = %key, error = error.chain(), "no clone stands by");
            shared.standbys.forget(key);
            end_quietly(shared, &recipe).await;
        }
    }
}

/// Says that one is being made, if it is wanted still: a start may wait for it until it is there. One that has begun to
/// rehearse is not waited for; a clone of the start's own is there as soon.
fn begin(shared: &Shared, key: &TemplateKey) -> Option<VmRecipe> {
    let mut state = shared.standbys.state();
    let shape = state.shapes.iter().find(|shape| shape.key == *key)?.recipe.clone();
    state.making = Some(Making { key: key.clone(), first: None });
    Some(own(shared, shape))
}

/// A clone whose guest has been met.
async fn start(shared: &Arc<Shared>, key: &TemplateKey, recipe: &VmRecipe) -> Result<Standby, HostError> {
    let driver = |source| HostError::Driver { name: recipe.id.to_string(), source };
    let network = |source| HostError::Network { name: recipe.id.to_string(), source };
    let failed = |why: &str| HostError::Template { why: why.to_owned() };
    let templates = shared.driver.templates(recipe).ok_or_else(|| failed("its driver has none"))?;
    let template = shared.templates.get(shared, key).await.ok_or_else(|| failed("it is gone"))?;
    if !has_room(memory_available_mib(), recipe.memory) {
        return Err(failed("the host has no memory to spare"));
    }
    let mut recipe = recipe.clone();
    if template.disk.is_some() {
        let disk = Disk::raw(recipe.slots.prepared(), recipe.state_dir.join("disk"), false);
        recipe.disks.push(disk);
    }
    let io = |source| HostError::State { operation: format!("make the files of {}", recipe.id), source };
    let (folders, copied) = (recipe.clone(), template.clone());
    let made = files::blocking(move || make_files(&folders, &copied)).await;
    let disk_mib = made.map_err(io)?;
    let plug = shared.network.plug(&recipe.id).await.map_err(network)?;
    recipe.nic = Some(Nic { mac: MacAddr::of(&recipe.id), backend: backend(&plug, &[]) });
    let Cloned { process, channel } = templates.start_clone(&recipe, &template).await.map_err(driver)?;
    let guest = templates::meet(shared, &recipe, process, channel, ANSWER_LIMIT).await?;
    Ok(Standby { key: key.clone(), recipe, vmm: process, guest, plug, disk_mib })
}

/// Has the guest do once what it will do as a VM, with an image that stands in for the VM's.
async fn rehearse(shared: &Shared, Standby { recipe, guest, .. }: &Standby) -> Result<(), HostError> {
    let overlay = recipe.slots.prepared();
    let image = match shared.standbys.stand_in(&shared.config).await {
        Ok(image) if recipe.disk_in(overlay).is_some() => image,
        Ok(_) => return Ok(()),
        Err(error) => {
            tracing::warn!(%error, "no image to rehearse with: VMs will start a little later");
            return Ok(());
        }
    };
    let driver = |source| HostError::Driver { name: recipe.id.to_string(), source };
    let refused = |status: tonic::Status| HostError::Guest {
        name: recipe.id.to_string(),
        operation: "rehearse",
        source: Box::new(status),
    };
    shared.driver.insert_disk(recipe, &Disk::raw(IMAGE_SLOT, image, true)).await.map_err(driver)?;
    let request = pb::PrepareRequest { overlay_device: device(overlay), image_device: device(IMAGE_SLOT) };
    within(ANSWER_LIMIT, guest.rpc().prepare(request)).await.map_err(refused)?;
    shared.driver.eject_disk(recipe, IMAGE_SLOT).await.map_err(driver)
}

/// Its folders, and its copy of the template's disk, whose size in MiB is returned. Blocking.
fn make_files(recipe: &VmRecipe, template: &Template) -> io::Result<u64> {
    for dir in [&recipe.state_dir, &recipe.run_dir] {
        std::fs::create_dir_all(dir)?;
    }
    match (&template.disk, recipe.disk_in(recipe.slots.prepared())) {
        (Some(disk), Some(copy)) => {
            disks::copy(&disk.path(), &copy.path).and_then(|()| Ok(disk.length()? >> 20))
        }
        _ => Ok(0),
    }
}

/// A guest that stands by has touched little of its memory, and its VM will want all.
fn has_room(available_mib: u64, guest: MemoryMib) -> bool {
    available_mib >= 2 * u64::from(guest)
}

/// A machine like that, under a name and in folders of its own, without disks.
fn own(shared: &Shared, shape: VmRecipe) -> VmRecipe {
    let name = format!("standby-{:08x}", rand::random::<u32>());
    let VmRecipe { id, state_dir, run_dir, .. } =
        places(shared, VmId::of_name(&name.parse().expect("a name")));
    VmRecipe { id, state_dir, run_dir, disks: vec![], ..shape }
}

/// What finds one by its id.
fn places(shared: &Shared, id: VmId) -> VmRecipe {
    VmRecipe {
        state_dir: shared.standbys.dir.join(id.as_str()),
        run_dir: shared.config.run_dir.join(id.short()),
        id,
        ..of_shape(&shared.config, shared.accelerator(""))
    }
}

async fn end_quietly(shared: &Shared, recipe: &VmRecipe) {
    if let Err(error) = end(shared, recipe).await {
        tracing::warn!(standby = %recipe.id, error = error.chain(), "clone that stood by is not ended");
    }
}

/// No VMM, no tap, no folder. Idempotent; the folder by which it would be found again goes last.
async fn end(shared: &Shared, recipe: &VmRecipe) -> Result<(), HostError> {
    let driver = |source| HostError::Driver { name: recipe.id.to_string(), source };
    let network = |source| HostError::Network { name: recipe.id.to_string(), source };
    let io = |source| HostError::State { operation: format!("remove {}", recipe.id), source };
    for one in shared.driver.all() {
        while let Some(vmm) = one.find(recipe).await.map_err(driver)? {
            one.kill(vmm).await.map_err(driver)?;
        }
    }
    shared.network.detach(&recipe.id).await.map_err(network)?;
    let (run, state) = (recipe.run_dir.clone(), recipe.state_dir.clone());
    let removed = files::blocking(move || files::remove_tree(&run).and_then(|()| files::remove_tree(&state)));
    removed.await.map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_may_stand_by_where_its_memory_is_there_twice() {
        let guest = MemoryMib::try_from(256).unwrap();
        assert!(has_room(512, guest));
        assert!(!has_room(511, guest));
    }
}

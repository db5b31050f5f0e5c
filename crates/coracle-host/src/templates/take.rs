//! Taking templates: one at a time, in the background.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::{Disk, Driver as _, MemoryFile, ProcessId, SealedFile, Template, VmRecipe};
use coracle_proto::guest as pb;
use coracle_types::{MacAddr, VmId};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::{TemplateInfo, TemplateKey, Wish, manifest};
use crate::guest::{GuestClient, within};
use crate::recipe::device;
use crate::record::millis;
use crate::vm::Shared;
use crate::{HostError, disks, files, standby};

/// What the folder of a template is called while it is taken: this and the key.
const PART: &str = ".taking-";

/// Is this the folder of a template that was not finished?
pub(super) fn is_part(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PART))
}

/// Ends the VMMs of templates that a crash cut off, and removes their folders.
pub(crate) async fn sweep(shared: &Shared) {
    let parts = std::fs::read_dir(&shared.templates.dir).into_iter().flatten().flatten().map(|e| e.path());
    for part in parts.filter(|path| is_part(path)) {
        if let Err(error) = end(shared, &part).await {
            tracing::warn!(dir = %part.display(), %error, "template that was cut off is not swept");
        }
    }
}

async fn end(shared: &Shared, part: &Path) -> Result<(), HostError> {
    let name = part.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(PART));
    let failed = |source| HostError::State { operation: format!("remove {}", part.display()), source };
    if let Some(key) = name.and_then(TemplateKey::parse) {
        let nothing = crate::recipe::of_shape(&shared.config, shared.accelerator(""));
        let recipe = template_recipe(shared, &key, nothing, part);
        let driver = |source| HostError::Driver { name: recipe.id.to_string(), source };
        while let Some(vmm) = shared.driver.find(&recipe).await.map_err(driver)? {
            shared.driver.kill(vmm).await.map_err(driver)?;
        }
        files::remove_tree(&recipe.run_dir).map_err(failed)?;
    }
    files::remove_tree(part).map_err(failed)
}

/// Serves wishes until the daemon stops. A wish that is cut off leaves a VMM, which [`sweep`] ends.
pub(crate) async fn run(shared: Arc<Shared>, mut wishes: mpsc::Receiver<Wish>) {
    let templates = &shared.templates;
    loop {
        let wish = tokio::select! {
            () = shared.stop.cancelled() => return,
            wish = wishes.recv() => wish,
        };
        let Some(wish) = wish else { return };
        let found = templates.list().into_iter().find(|info| info.key == wish.key);
        let outcome = match found {
            Some(info) => Ok(info),
            None => tokio::select! {
                () = shared.stop.cancelled() => return sweep(&shared).await,
                outcome = take(&shared, &wish) => outcome.map_err(|error| error.chain()),
            },
        };
        match &outcome {
            Ok(info) => {
                tracing::info!(template = info.key.as_str(), took_ms = info.took_ms, "template ready")
            }
            Err(error) => tracing::warn!(template = wish.key.as_str(), error, "template not taken"),
        }
        if outcome.is_ok() {
            standby::want(&shared, wish.key.clone(), &wish.recipe);
        }
        if let Some(reply) = wish.reply {
            let _caller_gone = reply.send(outcome);
        }
    }
}

async fn take(shared: &Arc<Shared>, wish: &Wish) -> Result<TemplateInfo, HostError> {
    let templates = &shared.templates;
    let place = templates.dir.join(wish.key.as_str());
    let part = templates.dir.join(format!("{PART}{}", wish.key));
    let recipe = template_recipe(shared, &wish.key, wish.recipe.clone(), &part);
    let io = |operation: &str| {
        let operation = format!("{operation} of template {}", wish.key);
        move |source| HostError::State { operation, source }
    };
    for dir in [&recipe.state_dir, &recipe.run_dir] {
        std::fs::create_dir_all(dir).map_err(io("make the folder"))?;
    }
    let disk = recipe.disk_in(recipe.slots.prepared()).map(|disk| disk.path.clone());
    if let Some(disk) = disk.clone() {
        let (cache, size) = (shared.config.state_dir.join("cache"), wish.disk_mib);
        let made = files::blocking(move || disks::ensure_overlay(&cache, &disk, size)).await;
        made.map_err(io("make the disk"))?;
    }
    // It is a boot like any other, and waits its turn.
    let _permit = shared.boots.acquire().await.map_err(|_| HostError::Stopping)?;
    let began = Instant::now();
    let taken = save(shared, &recipe).await;
    let _gone_with_its_vmm = files::remove_tree(&recipe.run_dir);
    let (template, save) = match taken {
        Ok(taken) => taken,
        Err(error) => {
            let _leave_nothing = files::remove_tree(&part);
            return Err(error);
        }
    };
    let info = TemplateInfo {
        key: wish.key.clone(),
        vcpus: recipe.vcpus,
        memory: recipe.memory,
        taken_at: shared.clock.now(),
        took_ms: millis(began.elapsed()),
        save_ms: millis(save),
        ram_bytes: template.ram.resident().map_err(io("measure the memory"))?,
        disk_mib: disk.map_or(0, |_| wish.disk_mib),
    };
    let template = Arc::new(template);
    templates.insert(info.clone(), template.clone());
    // On disk it is for the next daemon; this one has it.
    let stored = {
        let (part, info) = (part.clone(), info.clone());
        files::blocking(move || manifest::store(&part, &place, &info, &template)).await
    };
    if let Err(error) = stored {
        tracing::warn!(template = wish.key.as_str(), %error, "template is kept in memory only");
        let _leave_nothing = files::remove_tree(&part);
    }
    Ok(info)
}

/// The shape without what is the VM's own, and with a disk for its guest to prepare.
fn template_recipe(shared: &Shared, key: &TemplateKey, mut recipe: VmRecipe, part: &Path) -> VmRecipe {
    recipe.id = VmId::of_name(&key.vm_name());
    let prepares = shared.driver.templates(&recipe).is_some_and(|templates| templates.prepares_disk());
    let slot = recipe.slots.prepared();
    recipe.disks = prepares.then(|| Disk::raw(slot, part.join("disk"), false)).into_iter().collect();
    if let Some(nic) = &mut recipe.nic {
        nic.mac = MacAddr::of(&recipe.id);
    }
    recipe.state_dir = part.to_owned();
    recipe.run_dir = shared.config.run_dir.join(recipe.id.short());
    recipe
}

/// Boots to the agent's waiting point and saves there; the time is that of saving.
async fn save(shared: &Arc<Shared>, recipe: &VmRecipe) -> Result<(Template, Duration), HostError> {
    let name = || recipe.id.to_string();
    let driver = |source| HostError::Driver { name: name(), source };
    let io = |source| HostError::State { operation: "make memory for a template".to_owned(), source };
    let templates = shared.driver.templates(recipe).ok_or(HostError::Stopping)?;
    let ram = MemoryFile::new("template-ram", u64::from(recipe.memory.get()) << 20).map_err(io)?;
    let state = MemoryFile::new("template-state", 0).map_err(io)?;
    let process = templates.boot_template(recipe, &ram).await.map_err(driver)?;
    match meet(shared, recipe, process, None, shared.config.boot_limit).await {
        // The guest sees that the session is over before it is saved.
        Ok(session) => drop(session),
        Err(error) => {
            shared.driver.kill(process).await.map_err(driver)?;
            return Err(error);
        }
    }
    let took = templates.save_template(recipe, process, &ram, &state).await.map_err(driver)?;
    let disk = recipe.disk_in(recipe.slots.prepared()).map(|disk| disk.path.clone());
    let sealed = files::blocking(move || {
        let disk = disk.map(|path| SealedFile::load("template-disk", &path, |_, _| {})).transpose()?;
        Ok(Template { ram: ram.seal()?, state: state.seal()?, disk })
    })
    .await;
    let failed = |source| HostError::State { operation: "seal a template".to_owned(), source };
    Ok((sealed.map_err(failed)?, took))
}

/// The agent of a machine that is nobody's yet says hello, answers, and prepares the disk, all within `limit`.
pub(crate) async fn meet(
    shared: &Shared,
    recipe: &VmRecipe,
    process: ProcessId,
    channel: Option<UnixStream>,
    limit: Duration,
) -> Result<GuestClient, HostError> {
    let boot = |why: &str| HostError::Boot { name: recipe.id.to_string(), why: why.to_owned() };
    let ready = async {
        let guest = GuestClient::open(&shared.driver, recipe, limit, channel).await;
        let guest = guest.map_err(|e| boot(&e.to_string()))?;
        guest.status().await.map_err(|e| boot(e.message()))?;
        let slot = recipe.slots.prepared();
        if recipe.disk_in(slot).is_some() {
            let request = pb::PrepareRequest { overlay_device: device(slot), image_device: String::new() };
            within(limit, guest.rpc().prepare(request)).await.map_err(|e| boot(e.message()))?;
        }
        Ok(guest)
    };
    tokio::select! {
        done = timeout(limit, ready) => done.map_err(|_| boot("the agent did not answer in time"))?,
        _ = shared.driver.exited(process) => Err(boot("the VMM exited")),
    }
}

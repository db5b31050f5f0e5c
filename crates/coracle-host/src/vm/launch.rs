//! From a record to a VMM: one that is there, one that stood by, a clone, or one that boots. Safe to run again after being
//! cut anywhere.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::{Cloned, Driver as _, ProcessId, Saved, Template, VmRecipe};
use coracle_net::Plug;
use tokio::net::UnixStream;

use super::{Shared, StartedFrom};
use crate::recipe::{VmPaths, configuration, recipe};
use crate::record::SavedMemory;
use crate::standby::{self, Claim, Standby};
use crate::{GuestClient, HostError, Record, TemplateKey, Volume, disks, files};

/// A VMM that is there.
pub(super) struct Launched {
    pub(super) recipe: VmRecipe,
    pub(super) vmm: ProcessId,
    pub(super) origin: Origin,
    pub(super) from: StartedFrom,
}

/// Where its guest comes from.
pub(super) enum Origin {
    /// It was there, as the record says.
    Found,
    /// It boots; `missing` is the template that it might have been cloned from, had there been one.
    Booted { missing: Option<TemplateKey> },
    /// It runs.
    Cloned(Talk),
    /// Its memory is loaded, and its CPUs are held.
    Restored(Talk),
}

/// What leads to its agent.
#[derive(Default)]
pub(super) enum Talk {
    /// Nothing yet.
    #[default]
    None,
    /// The agent speaks first on it.
    Channel(UnixStream),
    /// They have met.
    Session(GuestClient),
}

impl Talk {
    fn on(channel: Option<UnixStream>) -> Self {
        channel.map_or(Self::None, Self::Channel)
    }

    /// A session, within `limit`.
    pub(super) async fn client(
        self,
        shared: &Shared,
        recipe: &VmRecipe,
        limit: Duration,
    ) -> io::Result<GuestClient> {
        let channel = match self {
            Self::Session(client) => return Ok(client),
            Self::Channel(channel) => Some(channel),
            Self::None => None,
        };
        GuestClient::open(&shared.driver, recipe, limit, channel).await
    }
}

/// What a machine of a VM's shape can be started from; nothing: it boots.
#[derive(Default)]
struct Source {
    key: Option<TemplateKey>,
    template: Option<Arc<Template>>,
    standby: Option<Claim>,
}

/// Network, disk, VMM: each is kept when it is already there. A VMM starts while the network is still made, which leads
/// nowhere until its filters are in place.
pub(super) async fn launch(shared: &Arc<Shared>, record: &Record) -> Result<Launched, HostError> {
    let name = || record.name.to_string();
    let network = |source| HostError::Network { name: name(), source };
    let driver = |source| HostError::Driver { name: name(), source };
    let lease = shared.network.lease(&record.id, record.address).map_err(network)?;
    let attach = async { shared.network.attach(&record.id, record.mac, lease).await.map_err(network) };
    let known = recipe(&shared.config, record, shared.accelerator(&record.driver), None);
    match shared.driver.find(&known).await.map_err(driver)? {
        Some(vmm) if record.process == Some(vmm) => {
            let plug = attach.await?;
            // Cut off between the end of loading and the first step, it stands still.
            shared.driver.resume(&known).await.map_err(driver)?;
            return Ok(found(shared, record, vmm, &plug));
        }
        // Cut off before it was anybody's: nothing is known of what is in it.
        Some(vmm) => shared.driver.kill(vmm).await.map_err(driver)?,
        None => {}
    }
    let (mut source, mut plugged) = (source(shared, record).await, None);
    if let Some(standby) = source.standby.take() {
        let claimed = claim(shared, record, &known, &standby).await;
        source.standby = keep_or_end(shared, record, standby, &claimed).await?;
        plugged = claimed.ok();
    }
    let plug = match plugged {
        Some(plug) => plug,
        None => shared.network.plug(&record.id).await.map_err(network)?,
    };
    tokio::try_join!(attach, start(shared, record, &plug, source)).map(|(_, launched)| launched)
}

/// The VMM that the record names.
fn found(shared: &Shared, record: &Record, vmm: ProcessId, plug: &Plug) -> Launched {
    let recipe = recipe(&shared.config, record, shared.accelerator(&record.driver), Some(plug));
    let (prepared, standby) = (record.prepared, record.standby);
    let from = StartedFrom { template: record.template.clone(), prepared, standby };
    Launched { recipe, vmm, origin: Origin::Found, from }
}

/// What there is. A VM with memory of its own needs nothing.
async fn source(shared: &Arc<Shared>, record: &Record) -> Source {
    if record.cold || record.saved.is_some() {
        return Source::default();
    }
    // Where its NIC leads is no part of a machine's shape.
    let shape = recipe(&shared.config, record, shared.accelerator(&record.driver), Some(&Plug::User));
    let Some(key) = shared.templates.key(shared, &shape).await else { return Source::default() };
    let template = shared.templates.get(shared, &key).await;
    let standby = match &template {
        Some(_) => standby::claim(shared, &key, |standby| fits(record, standby)).await,
        None => None,
    };
    Source { key: Some(key), template, standby }
}

/// Can a VM be what that clone becomes? It wants no ports that its VMM would have to be started with.
fn fits(record: &Record, standby: &Standby) -> bool {
    standby.plug != Plug::User || record.ports.is_empty()
}

/// The disk that is mounted in that clone, if the VM begins with one like it.
fn mounted(record: &Record, paths: &VmPaths, standby: &Standby) -> Fresh {
    match standby.disk() {
        Some(disk) if standby.disk_mib == record.disk_mib && !paths.own_disk(record).exists() => {
            Fresh::Mounted(disk.to_owned())
        }
        _ => Fresh::Blank,
    }
}

/// A VMM from there; where that fails and the VM has no memory to lose, from the next best.
async fn start(
    shared: &Arc<Shared>,
    record: &Record,
    plug: &Plug,
    Source { key, template, standby }: Source,
) -> Result<Launched, HostError> {
    if let Some(saved) = &record.saved {
        return restore(shared, record, plug, saved).await;
    }
    if let (Some(standby), Some(key)) = (standby, &key) {
        let fresh = mounted(record, &VmPaths::of(&shared.config, &record.id), &standby);
        let given = matches!(fresh, Fresh::Mounted(_));
        let handed = hand_over(shared, record, plug, &standby, fresh).await;
        if let Some(standby) = keep_or_end(shared, record, standby, &handed).await? {
            let (recipe, prepared) = handed?;
            let (vmm, origin) = (standby.vmm, Origin::Cloned(Talk::Session(standby.keep())));
            let from = StartedFrom { template: Some(key.clone()), prepared, standby: true };
            return Ok(Launched { recipe, vmm, origin, from });
        }
        if given {
            let own = VmPaths::of(&shared.config, &record.id).own_disk(record);
            let _may_not_have_been_moved = std::fs::remove_file(own);
        }
    }
    if let (Some(key), Some(template)) = (&key, &template)
        && let Some(launched) = clone(shared, record, plug, key, template).await?
    {
        return Ok(launched);
    }
    prepare_files(shared, record, Fresh::Blank).await?;
    let recipe = recipe_of(shared, record, plug, false);
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    let vmm = shared.driver.start(&recipe).await.map_err(driver)?;
    Ok(Launched { recipe, vmm, origin: Origin::Booted { missing: key }, from: StartedFrom::default() })
}

fn recipe_of(shared: &Shared, record: &Record, plug: &Plug, prepared: bool) -> VmRecipe {
    let record = Record { prepared, ..record.clone() };
    recipe(&shared.config, &record, shared.accelerator(&record.driver), Some(plug))
}

/// First of all, the clone is found as the VM's, so that whatever comes, it ends with it; then its tap is the VM's.
async fn claim(
    shared: &Shared,
    record: &Record,
    known: &VmRecipe,
    standby: &Standby,
) -> Result<Plug, HostError> {
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    let network = |source| HostError::Network { name: record.name.to_string(), source };
    let templates = shared.driver.templates(known).ok_or(HostError::Stopping)?;
    templates.claim(&standby.recipe, known).await.map_err(driver)?;
    shared.network.hand_over(&standby.recipe.id, &record.id).await.map_err(network)
}

/// Its files and sockets are the VM's, and the VM's disks are in it. True: also its disk is the VM's.
async fn hand_over(
    shared: &Arc<Shared>,
    record: &Record,
    plug: &Plug,
    standby: &Standby,
    fresh: Fresh,
) -> Result<(VmRecipe, bool), HostError> {
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    let prepared = prepare_files(shared, record, fresh).await?;
    let recipe = recipe_of(shared, record, plug, prepared);
    let templates = shared.driver.templates(&recipe).ok_or(HostError::Stopping)?;
    templates.hand_over(&standby.recipe, &recipe).await.map_err(driver)?;
    let left = standby.recipe.clone();
    let empty = move || files::remove_tree(&left.run_dir).and_then(|()| files::remove_tree(&left.state_dir));
    let (operation, id) = ("empty the folders that it stood by in", record.id.clone());
    files::blocking(empty).await.map_err(|source| HostError::Files { operation, id, source })?;
    Ok((recipe, prepared))
}

/// Ends a clone with which something has failed: another takes its place, which plugs in where it is plugged in.
async fn keep_or_end<T>(
    shared: &Shared,
    record: &Record,
    standby: Claim,
    step: &Result<T, HostError>,
) -> Result<Option<Claim>, HostError> {
    let Err(error) = step else { return Ok(Some(standby)) };
    let error = error.chain();
    tracing::warn!(vm = %record.id, error, "clone that stood by is of no use, starting another");
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    shared.driver.kill(standby.vmm).await.map_err(driver)?;
    Ok(None)
}

/// A clone of the shape's template. `None`: it has to boot.
async fn clone(
    shared: &Arc<Shared>,
    record: &Record,
    plug: &Plug,
    key: &TemplateKey,
    template: &Arc<Template>,
) -> Result<Option<Launched>, HostError> {
    let prepared = prepare_files(shared, record, Fresh::Template(template.clone())).await?;
    let recipe = recipe_of(shared, record, plug, prepared);
    let Some(templates) = shared.driver.templates(&recipe) else { return Ok(None) };
    match templates.start_clone(&recipe, template).await {
        Ok(Cloned { process: vmm, channel }) => {
            let from = StartedFrom { template: Some(key.clone()), prepared, standby: false };
            Ok(Some(Launched { recipe, vmm, origin: Origin::Cloned(Talk::on(channel)), from }))
        }
        Err(error) => {
            // The boot that follows has a new one taken.
            shared.templates.remove(key);
            let error = HostError::Driver { name: recipe.id.to_string(), source: error }.chain();
            tracing::warn!(vm = %recipe.id, template = %key, error, "clone failed, booting instead");
            Ok(None)
        }
    }
}

/// A VMM with the memory of a VM that was hibernated, if this is a machine like the one that it was saved on.
async fn restore(
    shared: &Arc<Shared>,
    record: &Record,
    plug: &Plug,
    saved: &SavedMemory,
) -> Result<Launched, HostError> {
    prepare_files(shared, record, Fresh::Blank).await?;
    let recipe = recipe_of(shared, record, plug, record.prepared);
    let Cloned { process: vmm, channel } = load(shared, record, &recipe, saved).await?;
    let from = StartedFrom { template: record.template.clone(), prepared: record.prepared, standby: false };
    Ok(Launched { recipe, vmm, origin: Origin::Restored(Talk::on(channel)), from })
}

async fn load(
    shared: &Arc<Shared>,
    record: &Record,
    recipe: &VmRecipe,
    saved: &SavedMemory,
) -> Result<Cloned, HostError> {
    let name = || record.name.to_string();
    let driver = shared.driver_name(&record.driver);
    let unsupported =
        || HostError::Unsupported { name: name(), driver, what: "load the memory of a saved VM" };
    let snapshots = shared.driver.snapshots(recipe).ok_or_else(unsupported)?;
    let here = snapshots.compatibility(&VmRecipe { nic: None, ..recipe.clone() }).await;
    if let Some((field, was, is)) = saved.machine.difference(&here) {
        return Err(HostError::Incompatible { name: name(), field, saved: was.into(), here: is.into() });
    }
    let path = VmPaths::of(&shared.config, &record.id).saved_memory();
    let open = || -> io::Result<File> {
        let file = File::open(&path)?;
        let length = file.metadata()?.len();
        if length == saved.bytes {
            return Ok(file);
        }
        let why = format!("{} has {length} bytes instead of {}", path.display(), saved.bytes);
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    };
    let driver = |source| HostError::Driver { name: name(), source };
    if let Some(unfolded) = saved.of.as_ref().and_then(|snapshot| shared.unfolded.get(snapshot)) {
        return snapshots.restore(recipe, Saved::Unfolded(&unfolded)).await.map_err(driver);
    }
    let id = record.id.clone();
    let file = open().map_err(|source| HostError::Files { operation: "open the memory", id, source })?;
    snapshots.restore(recipe, Saved::File(&file)).await.map_err(driver)
}

/// What a VM's own disk is made from, where it has none yet.
enum Fresh {
    /// An empty one.
    Blank,
    /// As a blank one, unless the template's is as large: then a copy of that.
    Template(Arc<Template>),
    /// This file, which the guest has mounted.
    Mounted(PathBuf),
}

/// The VM's folders, and its own disk. True when the guest of the template has it mounted.
async fn prepare_files(shared: &Arc<Shared>, record: &Record, fresh: Fresh) -> Result<bool, HostError> {
    let paths = VmPaths::of(&shared.config, &record.id);
    let cache = shared.config.state_dir.join("cache");
    let id = record.id.clone();
    let network =
        configuration(&shared.config, record, shared.network.subnet(), vec![], shared.clock.now()).network;
    let (record, agent) = (record.clone(), shared.config.agent.clone());
    let make = move || -> io::Result<bool> {
        for Volume { source, .. } in &record.volumes {
            let told = |e: io::Error| io::Error::new(e.kind(), format!("volume {}: {e}", source.display()));
            source.metadata().map_err(told)?;
        }
        std::fs::create_dir_all(&paths.run)?;
        let own = paths.own_disk(&record);
        if let Some(dir) = own.parent() {
            std::fs::create_dir_all(dir)?;
        }
        if let Some(system) = &record.system {
            system.prepare(&paths, &record, network.as_ref(), &agent)?;
            return Ok(false);
        }
        let disk = match &fresh {
            Fresh::Mounted(disk) => {
                return std::fs::rename(disk, &own).and_then(|()| files::sync_parent(&own)).map(|()| true);
            }
            Fresh::Template(template) => template.disk.as_ref(),
            Fresh::Blank => None,
        };
        match disk {
            Some(disk) if !own.exists() && disk.length()? == record.disk_mib << 20 => {
                disks::copy(&disk.path(), &own).map(|()| true)
            }
            _ => disks::ensure_overlay(&cache, &own, record.disk_mib).map(|()| false),
        }
    };
    let made = files::blocking(make).await;
    made.map_err(|source| HostError::Files { operation: "make the disk", id, source })
}

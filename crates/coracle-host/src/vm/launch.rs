//! Launches the VMM of a VM from its record: a running VMM, a pooled one, a clone, or a cold boot. May be repeated after an
//! interruption at any point.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_guest_client::{GuestSession, NewSession};
use coracle_hypervisor::{Cloned, Driver as _, ProcessId, Saved, Template, VmmConfig};
use coracle_net::{Attachment, Lease, NetworkRequest};
use tokio::net::UnixStream;
use tracing::Instrument as _;

use super::Shared;
use super::guest_configuration::guest_configuration;
use crate::instances::InstanceOwner;
use crate::vmm_config::{VmPaths, vmm_config};
use crate::warm_pool::{Claim, PooledVmm};
use crate::{HostError, Record, TemplateKey, Volume, VolumeKind, disk_image_vm, disks, files};
use coracle_lifecycle::{Facts, Source, StartedFrom, plan_start};
use coracle_record::SavedMemory;

/// VMM that was launched or found.
pub(super) struct Launched {
    pub(super) vmm_config: VmmConfig,
    pub(super) vmm: ProcessId,
    pub(super) origin: Origin,
    pub(super) from: StartedFrom,
}

/// Origin of the guest.
pub(super) enum Origin {
    /// The VMM was running, as the record says.
    Found,
    /// The guest boots; `missing` is the key of the template that it would have been cloned from.
    Booted { missing: Option<TemplateKey> },
    /// The guest runs as a clone.
    Cloned(GuestConnection),
    /// The memory is loaded, and the vCPUs are paused.
    Restored(GuestConnection),
}

/// Connection to the guest agent.
#[derive(Default)]
pub(super) enum GuestConnection {
    /// No connection yet.
    #[default]
    None,
    /// Open channel, on which the agent speaks first.
    Channel(UnixStream),
    /// Open session.
    Session(GuestSession),
}

impl GuestConnection {
    fn from_channel(channel: Option<UnixStream>) -> Self {
        channel.map_or(Self::None, Self::Channel)
    }

    /// Returns a session within `limit`.
    pub(super) async fn session(
        self,
        shared: &Shared,
        vmm_config: &VmmConfig,
        limit: Duration,
    ) -> io::Result<GuestSession> {
        let channel = match self {
            Self::Session(session) => return Ok(session),
            Self::Channel(channel) => Some(channel),
            Self::None => None,
        };
        NewSession::open(&shared.node.driver, vmm_config, limit, channel).await.map(GuestSession::New)
    }
}

/// Template and pooled instance of a VM's shape, which a clone can be made from.
#[derive(Default)]
struct Clonable {
    key: Option<TemplateKey>,
    template: Option<Arc<Template>>,
    pooled: Option<Claim>,
}

/// Way to start a new instance of a VM.
#[derive(Clone, Copy)]
enum Start<'a> {
    /// Cold boot; the key is that of the missing template.
    Boot(Option<&'a TemplateKey>),
    Clone(&'a TemplateKey, &'a Arc<Template>),
    Restore(&'a SavedMemory),
}

/// Returns the VMM that the record names, or starts one from the sources in [`plan_start`]. The VMM starts while its network is
/// being made, which passes no packets until its filters are loaded.
pub(super) async fn launch(shared: &Arc<Shared>, record: &Record) -> Result<Launched, HostError> {
    let network = |source| HostError::Network { name: record.name.to_string(), source };
    let request = NetworkRequest {
        address: record.address,
        address6: record.address6,
        ports: record.ports.clone(),
        ..NetworkRequest::of(record.mac)
    };
    shared.node.network.setup(&record.id, &request).await.map_err(network)?;
    let lease = shared.node.network.lease(&record.id, record.address).map_err(network)?;
    let running = running(shared, record).await?;
    let mut facts = Facts {
        is_running: running.is_some(),
        is_saved: record.saved.is_some(),
        is_cold: record.cold,
        ..Facts::default()
    };
    let mut clonable = Clonable::default();
    if !facts.is_running {
        // An earlier start was interrupted before it was recorded, so the state of its instance is unknown.
        let owner = InstanceOwner::Vm(record.id.clone());
        shared.node.instances.end_of(&owner, None).await?;
    }
    if !facts.is_running && !facts.is_saved && !facts.is_cold {
        clonable = find_clone_sources(shared, record).await;
        facts.has_template = clonable.template.is_some();
        facts.has_pooled = clonable.pooled.is_some();
    }
    let mut failure = HostError::Stopping;
    for source in plan_start(facts) {
        let span = tracing::info_span!("start_from", otel.name = source.word());
        let started =
            start_from(shared, record, lease, source, &mut clonable, running).instrument(span).await;
        match started {
            Err(error) if source.is_passed_over(&error) => {
                let reason = error.chain();
                tracing::warn!(vm = %record.id, ?source, error = reason, "start from source failed, trying the next");
                if let (Source::Template, Some(key)) = (source, &clonable.key) {
                    // A new template is taken after the boot that follows.
                    shared.templates.remove(key);
                }
                failure = error;
            }
            outcome => return outcome,
        }
    }
    Err(failure)
}

/// Returns the VMM that the record names, if it runs.
async fn running(shared: &Shared, record: &Record) -> Result<Option<ProcessId>, HostError> {
    if record.instance.is_none() {
        return Ok(None);
    }
    let known = vmm_config(&shared.node.config, record, shared.node.accelerator(&record.driver), None);
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    let vmm = shared.node.driver.find(&known).await.map_err(driver)?;
    Ok(vmm.filter(|vmm| record.process == Some(*vmm)))
}

async fn start_from(
    shared: &Arc<Shared>,
    record: &Record,
    lease: Option<Lease>,
    source: Source,
    clonable: &mut Clonable,
    running: Option<ProcessId>,
) -> Result<Launched, HostError> {
    let (key, template) = (clonable.key.clone(), clonable.template.clone());
    let how = match (source, &key, &template) {
        (Source::Running, ..) => return adopt_running(shared, record, lease, running).await,
        (Source::Pool, Some(key), _) => match clonable.pooled.take() {
            Some(claim) => return start_pooled(shared, record, lease, key, claim).await,
            None => return Err(HostError::Stopping),
        },
        (Source::Saved, ..) => match &record.saved {
            Some(saved) => Start::Restore(saved),
            None => return Err(HostError::Stopping),
        },
        (Source::Template, Some(key), Some(template)) => Start::Clone(key, template),
        (Source::Pool | Source::Template | Source::Boot, ..) => Start::Boot(key.as_ref()),
    };
    start_new(shared, record, lease, how).await
}

/// Connects the network of the VMM that the record names.
async fn adopt_running(
    shared: &Shared,
    record: &Record,
    lease: Option<Lease>,
    running: Option<ProcessId>,
) -> Result<Launched, HostError> {
    let network = |source| HostError::Network { name: record.name.to_string(), source };
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    let (Some(instance), Some(vmm)) = (&record.instance, running) else { return Err(HostError::Stopping) };
    let attachment = shared.node.network.attach(instance, &record.endpoint(lease)).await.map_err(network)?;
    let accelerator = shared.node.accelerator(&record.driver);
    let known = vmm_config(&shared.node.config, record, accelerator, None);
    // An interruption between loading the memory and the first step leaves the vCPUs paused.
    shared.node.driver.resume(&known).await.map_err(driver)?;
    let vmm_config = vmm_config(&shared.node.config, record, accelerator, Some(&attachment));
    let (premounted, pooled) = (record.premounted, record.pooled);
    let from = StartedFrom { template: record.template.clone(), premounted, pooled };
    Ok(Launched { vmm_config, vmm, origin: Origin::Found, from })
}

/// Looks up the template and a pooled instance for the VM's shape.
async fn find_clone_sources(shared: &Arc<Shared>, record: &Record) -> Clonable {
    // The host side of the NIC does not belong to the VM shape.
    let shape = vmm_config(
        &shared.node.config,
        record,
        shared.node.accelerator(&record.driver),
        Some(&Attachment::User),
    );
    let Some(key) = shared.templates.key(&shape).await else { return Clonable::default() };
    let template = shared.templates.get(&key).await;
    let pooled = match &template {
        Some(_) => shared.warm_pool.claim(&key, |pooled| fits(record, pooled)).await,
        None => None,
    };
    Clonable { key: Some(key), template, pooled }
}

/// Whether a pooled instance can become this VM: a VMM with a network of its own cannot get ports after its start.
fn fits(record: &Record, pooled: &PooledVmm) -> bool {
    pooled.attachment != Attachment::User || record.ports.is_empty()
}

/// Disk that is mounted in the pooled instance, if the VM begins with a disk of that size.
fn premounted_disk(record: &Record, paths: &VmPaths, pooled: &PooledVmm) -> DiskSource {
    match pooled.disk() {
        Some(disk) if pooled.disk_mib == record.disk_mib && !paths.own_disk(record).exists() => {
            DiskSource::Mounted(disk.to_owned())
        }
        _ => DiskSource::Blank,
    }
}

/// Starts a new instance for the VM. After a failure nothing is left of it.
async fn start_new(
    shared: &Arc<Shared>,
    record: &Record,
    lease: Option<Lease>,
    how: Start<'_>,
) -> Result<Launched, HostError> {
    let network = |source| HostError::Network { name: record.name.to_string(), source };
    let shape = vmm_config(&shared.node.config, record, shared.node.accelerator(&record.driver), None);
    let owner = InstanceOwner::Vm(record.id.clone());
    let VmmConfig { id, .. } = shared.node.instances.create(owner, shape).await?;
    let record = &Record { instance: Some(id.clone()), ..record.clone() };
    let started = async {
        let attachment = shared.node.network.create_interface(&id).await.map_err(network)?;
        let endpoint = record.endpoint(lease);
        let attach = async { shared.node.network.attach(&id, &endpoint).await.map_err(network) };
        tokio::try_join!(attach, start(shared, record, &attachment, how)).map(|(_, launched)| launched)
    };
    let started = started.await;
    if started.is_err() {
        shared.node.instances.end(&id, Some(&VmPaths::of(&shared.node.config, &record.id).vmm_log())).await?;
    }
    started
}

async fn start(
    shared: &Arc<Shared>,
    record: &Record,
    attachment: &Attachment,
    how: Start<'_>,
) -> Result<Launched, HostError> {
    match how {
        Start::Restore(saved) => restore(shared, record, attachment, saved).await,
        Start::Clone(key, template) => clone(shared, record, attachment, key, template).await,
        Start::Boot(key) => boot(shared, record, attachment, key).await,
    }
}

async fn boot(
    shared: &Arc<Shared>,
    record: &Record,
    attachment: &Attachment,
    key: Option<&TemplateKey>,
) -> Result<Launched, HostError> {
    prepare_files(shared, record, DiskSource::Blank).await?;
    let vmm_config = vmm_config_of(shared, record, attachment, false);
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    let vmm = shared.node.driver.start(&vmm_config).await.map_err(driver)?;
    let origin = Origin::Booted { missing: key.cloned() };
    Ok(Launched { vmm_config, vmm, origin, from: StartedFrom::default() })
}

fn vmm_config_of(shared: &Shared, record: &Record, attachment: &Attachment, premounted: bool) -> VmmConfig {
    let record = Record { premounted, ..record.clone() };
    vmm_config(&shared.node.config, &record, shared.node.accelerator(&record.driver), Some(attachment))
}

/// Starts the VM from a pooled instance. The instance is assigned to the VM first, so that it ends with the VM; then it gets
/// the VM's disks, and its tap the VM's filters. After a failure nothing is left of it.
async fn start_pooled(
    shared: &Arc<Shared>,
    record: &Record,
    lease: Option<Lease>,
    key: &TemplateKey,
    claim: Claim,
) -> Result<Launched, HostError> {
    let pooled = claim.assign(&record.id).await?;
    let paths = VmPaths::of(&shared.node.config, &record.id);
    let disk_source = premounted_disk(record, &paths, &pooled);
    let given = matches!(disk_source, DiskSource::Mounted(_));
    let id = pooled.vmm_config.id.clone();
    match fill(shared, record, lease, &pooled, disk_source).await {
        Ok((vmm_config, premounted)) => {
            let from = StartedFrom { template: Some(key.clone()), premounted, pooled: true };
            let (vmm, origin) = (pooled.vmm, Origin::Cloned(GuestConnection::Session(pooled.guest)));
            Ok(Launched { vmm_config, vmm, origin, from })
        }
        Err(error) => {
            shared.node.instances.end(&id, None).await?;
            if given {
                let _may_not_have_been_moved = std::fs::remove_file(paths.own_disk(record));
            }
            Err(error)
        }
    }
}

/// Attaches the VM's disks and network to a pooled instance. Returns true if the mounted disk of the instance became the VM's
/// disk.
async fn fill(
    shared: &Arc<Shared>,
    record: &Record,
    lease: Option<Lease>,
    pooled: &PooledVmm,
    disk_source: DiskSource,
) -> Result<(VmmConfig, bool), HostError> {
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    let network = |source| HostError::Network { name: record.name.to_string(), source };
    let id = &pooled.vmm_config.id;
    let record = &Record { instance: Some(id.clone()), ..record.clone() };
    let endpoint = record.endpoint(lease);
    let attach = async { shared.node.network.attach(id, &endpoint).await.map_err(network) };
    let fill = async {
        let premounted = prepare_files(shared, record, disk_source).await?;
        let vmm_config = vmm_config_of(shared, record, &pooled.attachment, premounted);
        let templates = shared.node.driver.templates(&vmm_config).ok_or(HostError::Stopping)?;
        templates.fill(&vmm_config, pooled.paused).await.map_err(driver)?;
        Ok((vmm_config, premounted))
    };
    tokio::try_join!(attach, fill).map(|(_, filled)| filled)
}

/// Starts a clone of the template.
async fn clone(
    shared: &Arc<Shared>,
    record: &Record,
    attachment: &Attachment,
    key: &TemplateKey,
    template: &Arc<Template>,
) -> Result<Launched, HostError> {
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    let premounted = prepare_files(shared, record, DiskSource::Template(template.clone())).await?;
    let vmm_config = vmm_config_of(shared, record, attachment, premounted);
    let templates = shared.node.driver.templates(&vmm_config).ok_or(HostError::Stopping)?;
    let Cloned { process: vmm, channel } =
        templates.start_clone(&vmm_config, template).await.map_err(driver)?;
    let from = StartedFrom { template: Some(key.clone()), premounted, pooled: false };
    Ok(Launched { vmm_config, vmm, origin: Origin::Cloned(GuestConnection::from_channel(channel)), from })
}

/// Starts a VMM with the memory of a hibernated VM, if this host is compatible with the one that saved it.
async fn restore(
    shared: &Arc<Shared>,
    record: &Record,
    attachment: &Attachment,
    saved: &SavedMemory,
) -> Result<Launched, HostError> {
    prepare_files(shared, record, DiskSource::Blank).await?;
    let accelerator = shared.node.accelerator_for(&record.driver, &saved.machine);
    let vmm_config =
        VmmConfig { accelerator, ..vmm_config_of(shared, record, attachment, record.premounted) };
    let Cloned { process: vmm, channel } = load(shared, record, &vmm_config, saved).await?;
    let from =
        StartedFrom { template: record.template.clone(), premounted: record.premounted, pooled: false };
    Ok(Launched { vmm_config, vmm, origin: Origin::Restored(GuestConnection::from_channel(channel)), from })
}

async fn load(
    shared: &Arc<Shared>,
    record: &Record,
    vmm_config: &VmmConfig,
    saved: &SavedMemory,
) -> Result<Cloned, HostError> {
    let name = || record.name.to_string();
    let driver = shared.node.driver_name(&record.driver);
    let unsupported =
        || HostError::Unsupported { name: name(), driver, what: "load the memory of a saved VM" };
    let snapshots = shared.node.driver.snapshots(vmm_config).ok_or_else(unsupported)?;
    let here = snapshots.compatibility(&VmmConfig { nic: None, ..vmm_config.clone() }).await;
    if let Some((field, was, is)) = saved.machine.difference(&here) {
        return Err(HostError::Incompatible { name: name(), field, saved: was, here: is });
    }
    let path = VmPaths::of(&shared.node.config, &record.id).saved_memory();
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
    if let Some(memory_images) = saved.of.as_ref().and_then(|snapshot| shared.memory_images.get(snapshot)) {
        return snapshots.restore(vmm_config, Saved::MemoryImages(&memory_images)).await.map_err(driver);
    }
    let id = record.id.clone();
    let file = open().map_err(|source| HostError::Files { operation: "open the memory", id, source })?;
    snapshots.restore(vmm_config, Saved::File(&file)).await.map_err(driver)
}

/// Source of a VM's own disk, if the VM has none yet.
enum DiskSource {
    /// Empty disk.
    Blank,
    /// Copy of the template's disk if it has the right size, else an empty disk.
    Template(Arc<Template>),
    /// Existing file, which the guest has mounted.
    Mounted(PathBuf),
}

/// Makes the VM's directories and its own disk. Returns true if the guest of the template has the disk mounted.
async fn prepare_files(
    shared: &Arc<Shared>,
    record: &Record,
    disk_source: DiskSource,
) -> Result<bool, HostError> {
    let paths = VmPaths::of(&shared.node.config, &record.id);
    let cache = shared.node.config.state_dir.join("cache");
    let id = record.id.clone();
    let network = guest_configuration(&shared.node, record, vec![]).network;
    let (record, agent) = (record.clone(), shared.node.config.agent.clone());
    let make = move || -> io::Result<bool> {
        let on_node = |volume: &&Volume| !matches!(volume.kind, VolumeKind::Tmpfs(_));
        for Volume { source, .. } in record.volumes.iter().filter(on_node) {
            let named = |e: io::Error| io::Error::new(e.kind(), format!("volume {}: {e}", source.display()));
            source.metadata().map_err(named)?;
        }
        let own = paths.own_disk(&record);
        if let Some(dir) = own.parent() {
            std::fs::create_dir_all(dir)?;
        }
        if let Some(settings) = &record.disk_image_vm {
            disk_image_vm::prepare(settings, &paths, &record, network.as_ref(), &agent)?;
            return Ok(false);
        }
        let disk = match &disk_source {
            DiskSource::Mounted(disk) => {
                return std::fs::rename(disk, &own).and_then(|()| files::sync_parent(&own)).map(|()| true);
            }
            DiskSource::Template(template) => template.disk.as_ref(),
            DiskSource::Blank => None,
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

//! Host core of a node: creates VMs, looks them up, and passes requests to their tasks.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use coracle_hypervisor::{Accelerator, Drivers, Probe, VmmConfig, jail_parts};
use coracle_image::Store;
use coracle_net::Network;
use coracle_types::{Clock, InstanceId, Op, VmId, VmState};
use tokio::sync::{Semaphore, broadcast, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use self::capacity::Capacity;
pub use self::commit::CommittedImage;
pub use self::create::VmSpec;
use self::directory::Directory;
pub use self::registries::chunk_progress;
pub use self::resolve::Access;
pub use self::resolve_image::NodeImage;
pub use self::snapshots::{RestoreSpec, RestoredIdentity};
use crate::addresses::SharedAddresses;
use crate::instances::{InstanceOwner, Instances};
use crate::node::Node;
use crate::own_volumes;
use crate::private_images::PrivateImages;
use crate::signed_images::SignedImages;
use crate::templates::Templates;
use crate::temporary::{self, RemoveWhen, Temporary};
use crate::vm::{self, Call, Handle, ReplyTo, Request, Shared};
use crate::vmm_config::VmPaths;
use crate::volumes::Claims;
use crate::warm_pool::WarmPool;
use crate::{
    ConsoleHandle, Fence, HostConfig, HostError, HostEvent, LogEntry, Record, TemplateKey, View, files,
};
use coracle_disk::DiskImages;
use coracle_instance::directories::{ensure_run_dir, ensure_state_dir};
use coracle_logs::LogReader;
use coracle_record::{Owner, SCHEMA};
use coracle_snapshot::SnapshotStore;

mod capacity;
mod command;
mod commit;
mod commit_disk;
mod containers;
mod create;
mod directory;
mod display;
mod registries;
mod released;
mod resolve;
mod resolve_image;
mod snapshots;
mod templates;
mod verify_image;
mod volumes;

/// Probes the jail of VMMs. Returns whether VMMs run in jails (otherwise they have the rights of the daemon), and the parts of
/// the jail that cannot be made on this host, with reasons, which are logged as well.
async fn probe_jail(config: &HostConfig) -> (bool, Vec<String>) {
    if !config.jail {
        let reason = "jail: VMMs have the rights of the node, which is not root of the host";
        return (false, vec![reason.to_owned()]);
    }
    let root = config.state_dir.join("jail-probe");
    let probed = files::blocking(move || Ok::<_, std::io::Error>(jail_parts(&root))).await;
    let parts = probed.unwrap_or_default();
    let mut missing = Vec::new();
    for part in &parts {
        if let Some(reason) = &part.missing {
            tracing::warn!(part = part.name, reason, "part of the jail of VMMs cannot be made");
            missing.push(format!("{}: {reason}", part.name));
        }
    }
    (parts.first().is_some_and(|jail| jail.missing.is_none()), missing)
}

/// Number of events that a watcher may lag before it must list again.
const EVENTS: usize = 1024;

/// Host core of a node. Clones share it.
#[derive(Clone, Debug)]
pub struct Host(Arc<Inner>);

/// Weak reference to a host core.
#[derive(Clone, Debug)]
pub(crate) struct WeakHost(Weak<Inner>);

impl WeakHost {
    pub(crate) fn upgrade(&self) -> Option<Host> {
        self.0.upgrade().map(Host)
    }
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    images: Arc<Store>,
    disk_images: DiskImages,
    private_images: Arc<PrivateImages>,
    signed_images: Arc<SignedImages>,
    snapshots: SnapshotStore,
    /// Addresses that VMs borrow from other VMs.
    addresses: Arc<SharedAddresses>,
    /// Probe result of each driver, the default driver first.
    probes: Vec<(&'static str, Probe)>,
    /// Parts of the jail of VMMs that cannot be made on this host.
    jail_missing: Vec<String>,
    directory: Mutex<Directory>,
    temporary: Arc<Temporary>,
    tasks: Mutex<JoinSet<()>>,
    /// Lock of the state directory, held until the host core is dropped: only one daemon uses the directory.
    lock: File,
}

/// Moves the guests to the subnet that the cluster assigned, once no VM has an address.
pub(crate) async fn settle(shared: &Shared) {
    match shared.node.network.settle().await {
        Ok(None) => {}
        Ok(Some(subnet)) => tracing::info!(%subnet, "took the assigned subnet of guests"),
        Err(error) => tracing::error!(%error, "take the assigned subnet of guests failed"),
    }
}

impl Host {
    /// Opens the state directory and adopts every VM in it: running VMs keep running, interrupted operations are completed, and
    /// leftovers without an owner are removed.
    ///
    /// # Errors
    /// [`HostError::State`] if another daemon uses the directory, or it cannot be read; [`HostError::Driver`] if the driver is
    /// not available.
    pub async fn open(
        config: HostConfig,
        drivers: impl Into<Drivers>,
        network: Arc<dyn Network>,
        images: Arc<Store>,
        clock: Clock,
    ) -> Result<Self, HostError> {
        let state = |operation: String| move |source| HostError::State { operation, source };
        let vms_dir = config.state_dir.join("vms");
        ensure_state_dir(&config.state_dir)?;
        ensure_run_dir(&config.run_dir)?;
        std::fs::create_dir_all(&vms_dir).map_err(state(format!("make {}", vms_dir.display())))?;
        let lock = lock(&config.state_dir)
            .await
            .map_err(state(format!("lock {}: is another node using it?", config.state_dir.display())))?;
        let (jail, jail_missing) = probe_jail(&config).await;
        let config = HostConfig { jail, ..config };
        let driver = drivers.into();
        let mut probes = Vec::new();
        for one in driver.all() {
            probes.push((one.name(), one.probe().await));
        }
        let known =
            |(name, probe): &(&'static str, Probe)| (*name, probe.accelerator.unwrap_or(Accelerator::Tcg));
        let accelerators = probes.iter().map(known).collect();
        let mut records = load_records(&vms_dir).map_err(state(format!("read {}", vms_dir.display())))?;
        let swept = own_volumes::sweep(&config, |id| vms_dir.join(id).exists());
        swept.map_err(state("remove disks of VMs that are gone".to_owned()))?;
        let addresses = Arc::new(SharedAddresses::new(network, &records));
        let network: Arc<dyn Network> = addresses.clone();
        let instances = Instances::new(config.clone(), driver.clone(), network.clone());
        adopt_legacy_vmms(&instances, &mut records);
        // Before anything slow, and in one transaction: running VMs stay filtered.
        let guests: Vec<_> = records.iter().filter_map(Record::running_guest).collect();
        network.prepare(&guests).await.map_err(|source| HostError::NodeNetwork { source })?;
        let node = Arc::new(Node {
            boots: Semaphore::new(config.boots_at_once.max(1)),
            config,
            instances,
            driver,
            accelerators,
            network,
            clock,
            stop: CancellationToken::new(),
        });
        let (templates, requests) =
            Templates::open(node.clone()).map_err(state("open the templates".to_owned()))?;
        let templates = Arc::new(templates);
        let warm_pool = Arc::new(WarmPool::new(node.clone(), templates.clone()));
        let shared = Arc::new(Shared {
            node,
            templates: templates.clone(),
            warm_pool: warm_pool.clone(),
            memory_images: Arc::default(),
            claims: Claims::of(&records),
            events: broadcast::channel(EVENTS).0,
        });
        let snapshots = SnapshotStore::open(&shared.node.config.state_dir, shared.node.clock.now());
        let snapshots = snapshots.map_err(state("open the snapshots".to_owned()))?;
        let disk_images = DiskImages::open(&shared.node.config.state_dir);
        let disk_images = disk_images.map_err(state("open the disk images".to_owned()))?;
        let private_images = PrivateImages::open(&shared.node.config.state_dir);
        let private_images = private_images.map_err(state("read which images are private".to_owned()))?;
        let signed_images = SignedImages::open(&shared.node.config.state_dir);
        let signed_images = signed_images.map_err(state("read which images are signed".to_owned()))?;
        let host = Self(Arc::new(Inner {
            shared,
            images,
            disk_images,
            private_images,
            signed_images,
            snapshots,
            addresses,
            probes,
            jail_missing,
            directory: Mutex::default(),
            temporary: Arc::default(),
            tasks: Mutex::default(),
            lock,
        }));
        crate::templates::sweep(&templates);
        let named: HashMap<_, _> = records.iter().map(|r| (&r.id, &r.instance)).collect();
        let is_named_back =
            |vm: &VmId, id: &InstanceId| named.get(vm).is_some_and(|i| i.as_ref() == Some(id));
        host.0.shared.node.instances.sweep(is_named_back).await?;
        host.adopt_records(records).await?;
        let mut tasks = host.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = warm_pool.clone();
        let on_taken =
            move |key: &TemplateKey, shape: &VmmConfig| pool.want(key.clone(), shape, Instant::now(), None);
        tasks.spawn(crate::templates::serve(templates, requests, on_taken));
        tasks.spawn(crate::warm_pool::serve(warm_pool));
        let (temporary, grace) = (host.0.temporary.clone(), host.config().released_grace);
        let weak = host.downgrade();
        let removed = temporary::serve(temporary, grace, async move |id, when| match weak.upgrade() {
            Some(host) => host.remove_unheld(id, when).await,
            None => true,
        });
        let stop = host.stopping();
        tasks.spawn(async move { stop.run_until_cancelled(removed).await.unwrap_or_default() });
        drop(tasks);
        Ok(host)
    }

    /// Takes addresses first, so that none is leased twice, then removes taps and networks without a VM, then starts the tasks.
    async fn adopt_records(&self, records: Vec<Record>) -> Result<(), HostError> {
        let shared = &self.0.shared;
        for record in records.iter().filter(|r| r.address.is_some()) {
            if let Err(error) = shared.node.network.lease(&record.id, record.address) {
                tracing::error!(vm = %record.id, %error, "address of a VM cannot be kept");
            }
            if let Err(error) = shared.node.network.claim_ports(&record.id, &record.ports) {
                tracing::error!(vm = %record.id, %error, "ports of a VM cannot be kept");
            }
        }
        match shared.node.network.sweep(&shared.node.instances.ids()).await {
            Ok(removed) if removed.is_empty() => {}
            Ok(removed) => tracing::warn!(taps = ?removed, "removed taps of no instance"),
            Err(error) => tracing::warn!(%error, "taps not swept"),
        }
        settle(shared).await;
        match shared.node.network.collect(&records.iter().map(|record| record.id.clone()).collect()).await {
            Ok(removed) if removed.is_empty() => {}
            Ok(removed) => tracing::warn!(vms = ?removed, "removed networks of no VM"),
            Err(error) => tracing::warn!(%error, "remove networks of no VM failed"),
        }
        for record in records {
            self.spawn(record)?;
        }
        Ok(())
    }

    pub(crate) fn downgrade(&self) -> WeakHost {
        WeakHost(Arc::downgrade(&self.0))
    }

    fn spawn(&self, record: Record) -> Result<Handle, HostError> {
        let (id, name) = (record.id.clone(), record.name.clone());
        let host = self.downgrade();
        let gone = {
            let (id, name) = (id.clone(), name.clone());
            move || {
                if let Some(Host(inner)) = host.upgrade() {
                    inner.directory().forget(&id, &name);
                    inner.temporary.forget(&id);
                }
            }
        };
        let mut tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        let mut directory = self.0.directory();
        // An annotation that only a newer version knows is ignored.
        let when =
            RemoveWhen::of(&record.metadata).ok().flatten().filter(|_| record.owner == Owner::default());
        let handle = vm::spawn(self.0.shared.clone(), record, &mut tasks, self.commit_job(), gone).map_err(
            |source| HostError::Files { operation: "open the console and the log", id: id.clone(), source },
        )?;
        directory.insert(name, handle.clone());
        if let Some(when) = when {
            self.0.temporary.insert(id, when);
        }
        Ok(handle)
    }

    /// Stops the daemon's tasks. Guests keep running. Without any VM the shared parts of the network are removed, because this
    /// node may never be started again; [`Host::open`] makes them again.
    pub async fn shutdown(&self) {
        self.0.shared.node.stop.cancel();
        let mut tasks = std::mem::take(&mut *self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        while tasks.join_next().await.is_some() {}
        let is_vm = |owner: &InstanceOwner| matches!(owner, InstanceOwner::Vm(_));
        if let Err(error) = self.0.shared.node.instances.end_where(|owner| !is_vm(owner)).await {
            tracing::warn!(error = error.chain(), "end instances of no VM failed");
        }
        let node = &self.0.shared.node;
        if self.list().is_empty()
            && node.instances.ids().is_empty()
            && let Err(error) = node.network.teardown().await
        {
            tracing::warn!(error = &error as &dyn std::error::Error, "remove the network failed");
        }
    }

    /// Token that is cancelled when the daemon stops, to end streaming calls.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.0.shared.node.stop.clone()
    }

    /// Probe result of each driver, by name; the default driver first.
    #[must_use]
    pub fn probes(&self) -> &[(&'static str, Probe)] {
        &self.0.probes
    }

    /// Parts of the jail of VMMs that cannot be made on this host, with reasons.
    #[must_use]
    pub fn jail_missing(&self) -> &[String] {
        &self.0.jail_missing
    }

    /// Name of the driver that runs this VM.
    #[must_use]
    pub fn driver_of(&self, record: &Record) -> &'static str {
        self.0.shared.node.driver_name(&record.driver)
    }

    /// The images of this node.
    #[must_use]
    pub fn images(&self) -> &Arc<Store> {
        &self.0.images
    }

    /// The disk images of this node.
    #[must_use]
    pub fn disk_images(&self) -> &DiskImages {
        &self.0.disk_images
    }

    /// Space that the VM's own disk takes on the host, bytes.
    #[must_use]
    pub fn disk_bytes(&self, record: &Record) -> u64 {
        files::allocated_bytes(&VmPaths::of(self.config(), &record.id).own_disk(record))
    }

    /// The network of this node.
    #[must_use]
    pub fn network(&self) -> &Arc<dyn Network> {
        &self.0.shared.node.network
    }

    /// Settings of this host.
    #[must_use]
    pub fn config(&self) -> &HostConfig {
        &self.0.shared.node.config
    }

    /// The clock of this host.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.0.shared.node.clock
    }

    /// Boots a VM and returns when its workload runs. `Ok` if it already runs.
    ///
    /// # Errors
    /// Any error that prevents the guest from running.
    pub async fn start(&self, name: &str, fence: Option<Fence>) -> Result<Record, HostError> {
        let record = self.ask(name, Call::Start { fence }).await?;
        self.start_command_of(record).await
    }

    /// Powers a VM off and returns when it is off. Kills it after `grace`; a zero `grace` kills it at once.
    ///
    /// # Errors
    /// [`HostError::NotFound`], [`HostError::Refused`], [`HostError::Fenced`].
    pub async fn stop(&self, name: &str, grace: Duration, fence: Option<Fence>) -> Result<Record, HostError> {
        self.ask(name, Call::Stop { grace, fence }).await
    }

    /// Deletes a VM and returns when nothing is left of it.
    ///
    /// # Errors
    /// Like [`Host::stop`].
    pub async fn delete(&self, name: &str, force: bool, fence: Option<Fence>) -> Result<(), HostError> {
        self.ask(name, Call::Delete { force, fence }).await.map(|_| ())
    }

    /// Pauses the vCPUs and returns when they are paused. Idempotent.
    ///
    /// # Errors
    /// Like [`Host::stop`]; [`HostError::Driver`].
    pub async fn pause(&self, name: &str, fence: Option<Fence>) -> Result<Record, HostError> {
        self.ask(name, Call::Suspend { op: Op::Pause, fence }).await
    }

    /// Resumes a paused guest, or loads the memory of a hibernated one. Returns when the guest runs.
    ///
    /// # Errors
    /// Like [`Host::start`]; [`HostError::Incompatible`].
    pub async fn resume(&self, name: &str, fence: Option<Fence>) -> Result<Record, HostError> {
        self.ask(name, Call::Suspend { op: Op::Resume, fence }).await
    }

    /// Saves the guest's memory and ends its VMM. Returns when the memory is on disk. After a failure the VM keeps running.
    ///
    /// # Errors
    /// Like [`Host::pause`]; [`HostError::Files`] if the disk is full.
    pub async fn hibernate(&self, name: &str, fence: Option<Fence>) -> Result<Record, HostError> {
        self.ask(name, Call::Suspend { op: Op::Hibernate, fence }).await
    }

    async fn ask(&self, name: &str, call: Call) -> Result<Record, HostError> {
        let handle = self.handle(name, Access::Change)?;
        let (reply, answer) = oneshot::channel();
        let gone = || match self.0.shared.node.stop.is_cancelled() {
            true => HostError::Stopping,
            false => HostError::NotFound { name: name.to_owned() },
        };
        let request = Request::new(call, ReplyTo::Record(reply));
        handle.requests.send(Box::new(request)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Returns the current view of a VM, by exact name, id or a unique prefix of one: for callers that only read. Never waits.
    ///
    /// # Errors
    /// [`HostError::NotFound`], [`HostError::Ambiguous`].
    pub fn get(&self, name: &str) -> Result<Arc<View>, HostError> {
        self.find(name, Access::Read)
    }

    /// Returns the current view of a VM, by a name that `access` permits. Never waits.
    ///
    /// # Errors
    /// Like [`Host::get`].
    pub fn find(&self, name: &str, access: Access) -> Result<Arc<View>, HostError> {
        Ok(self.handle(name, access)?.view.borrow().clone())
    }

    /// Observes a VM, by exact name or id. The receiver has the current state, which counts as seen, and then gets each change.
    ///
    /// # Errors
    /// [`HostError::NotFound`].
    pub fn observe(&self, name: &str) -> Result<watch::Receiver<Arc<View>>, HostError> {
        let mut view = self.handle(name, Access::Change)?.view;
        // The clone inherits what the receiver in the directory has seen, which is the first state.
        view.mark_unchanged();
        Ok(view)
    }

    /// Lists all VMs, by name. Never waits.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<View>> {
        self.list_where(|_| true)
    }

    /// Lists the VMs for which `is_wanted` is true, by name. Never waits. Other calls wait while `is_wanted` is called for each
    /// VM.
    #[must_use]
    pub fn list_where(&self, is_wanted: impl Fn(&View) -> bool) -> Vec<Arc<View>> {
        let wanted = |view: &Arc<View>| is_wanted(view).then(|| view.clone());
        let mut views: Vec<_> =
            self.0.directory().live().filter_map(|handle| wanted(&handle.view.borrow())).collect();
        views.sort_by(|a, b| a.record.name.cmp(&b.record.name));
        views
    }

    /// Subscribes to changes from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<HostEvent> {
        self.0.shared.events.subscribe()
    }

    /// Serial console of a VM, by exact name or id.
    ///
    /// # Errors
    /// [`HostError::NotFound`].
    pub fn console(&self, name: &str) -> Result<ConsoleHandle, HostError> {
        Ok(self.handle(name, Access::Change)?.console)
    }

    /// Output of the workload so far, and a receiver that changes with new output.
    ///
    /// # Errors
    /// Like [`Host::get`]; [`HostError::Files`].
    pub async fn logs(&self, name: &str) -> Result<(Vec<LogEntry>, watch::Receiver<u64>), HostError> {
        let mut follower = self.follow_logs(name)?;
        let entries = follower.read().await?;
        Ok((entries, follower.printed))
    }

    /// Follows the output of the workload, from the oldest entry that is kept.
    ///
    /// # Errors
    /// Like [`Host::get`].
    pub fn follow_logs(&self, name: &str) -> Result<LogFollower, HostError> {
        let handle = self.handle(name, Access::Read)?;
        let reader = LogReader::new(&VmPaths::of(self.config(), &handle.id).state);
        Ok(LogFollower { id: handle.id, reader: Some(reader), printed: handle.printed, view: handle.view })
    }

    /// Waits until the VM is off, and returns its view with the workload's exit.
    ///
    /// # Errors
    /// [`HostError::NotFound`], also if the VM is deleted meanwhile.
    pub async fn wait(&self, name: &str) -> Result<Arc<View>, HostError> {
        let mut view = self.observe(name)?;
        let off = |v: &Arc<View>| matches!(v.record.state, VmState::Stopped | VmState::Failed);
        match view.wait_for(off).await {
            Ok(view) => Ok(view.clone()),
            Err(_) => Err(HostError::NotFound { name: name.to_owned() }),
        }
    }
}

/// Reader of one VM's log that keeps its position.
#[derive(Debug)]
pub struct LogFollower {
    id: VmId,
    /// Log reader; `None` while a blocking thread reads with it.
    reader: Option<LogReader>,
    printed: watch::Receiver<u64>,
    view: watch::Receiver<Arc<View>>,
}

impl LogFollower {
    /// Returns the entries since the last call.
    ///
    /// # Errors
    /// [`HostError::Files`].
    pub async fn read(&mut self) -> Result<Vec<LogEntry>, HostError> {
        self.printed.mark_unchanged();
        let mut reader = self.reader.take().ok_or(HostError::Stopping)?;
        let read = files::blocking(move || {
            let entries = reader.read();
            Ok((reader, entries))
        });
        let failed = |source| HostError::Files { operation: "read the log", id: self.id.clone(), source };
        let (reader, entries) = read.await.map_err(failed)?;
        self.reader = Some(reader);
        entries.map_err(failed)
    }

    /// Waits for the next entries. Returns `None` when the VM is off and everything was read, or when the VM is deleted. Not
    /// cancel-safe: if the future is dropped during a read, later calls return `None`.
    pub async fn next(&mut self) -> Option<Vec<LogEntry>> {
        loop {
            // Checked before the read, so that output in between is not missed.
            let off = !self.view.borrow_and_update().record.state.has_vmm();
            let fresh = self.read().await.ok()?;
            if !fresh.is_empty() {
                return Some(fresh);
            }
            if off {
                return None;
            }
            tokio::select! {
                changed = self.printed.changed() => changed.ok()?,
                changed = self.view.changed() => changed.ok()?,
            }
        }
    }
}

impl Drop for Inner {
    /// Unlocks explicitly. A forked child holds the same open file until it calls exec, so that closing alone would leave the
    /// directory locked for a moment (flock(2)).
    fn drop(&mut self) {
        let _closing = rustix::fs::flock(&self.lock, rustix::fs::FlockOperation::Unlock);
    }
}

impl Inner {
    fn directory(&self) -> MutexGuard<'_, Directory> {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Time to wait for the lock. After a daemon was killed, its child between fork and exec still holds the same open file
/// (flock(2)).
const LOCK_LIMIT: Duration = Duration::from_secs(2);

async fn lock(state_dir: &Path) -> io::Result<File> {
    let file = File::options().create(true).write(true).truncate(false).open(state_dir.join("node.lock"))?;
    let deadline = Instant::now() + LOCK_LIMIT;
    loop {
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            outcome => return outcome.map(|()| file).map_err(io::Error::from),
        }
    }
}

/// Makes VMMs that a version without instances has started instances of their VMs.
fn adopt_legacy_vmms(instances: &Instances, records: &mut [Record]) {
    for record in records.iter_mut().filter(|record| record.is_before_instances()) {
        record.schema = SCHEMA;
        let Some(process) = record.process.filter(|_| record.state.has_vmm()) else { continue };
        match instances.adopt_legacy_vmm(&record.id, &record.driver, process) {
            Ok(instance) => record.instance = Some(instance),
            Err(error) => tracing::error!(vm = %record.id, %error, "adopt VMM of an earlier version failed"),
        }
    }
}

/// Loads all records. A directory without a record belongs to a creation that was never acknowledged and is removed. A record
/// that cannot be read is logged and left alone.
fn load_records(vms_dir: &Path) -> io::Result<Vec<Record>> {
    let mut records = Vec::new();
    for entry in std::fs::read_dir(vms_dir)? {
        let dir = entry?.path();
        match Record::load(&dir.join("record.json")) {
            Ok(record) => records.push(record),
            Err(e) if e.kind() == io::ErrorKind::NotFound => files::remove_tree(&dir)?,
            Err(error) => tracing::error!(dir = %dir.display(), %error, "record cannot be read, VM ignored"),
        }
    }
    Ok(records)
}

//! The host: creates VMs, finds them again, and passes requests to their tasks.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use coracle_hypervisor::{Accelerator, Drivers, Probe};
use coracle_image::Store;
use coracle_net::Network;
use coracle_types::{Clock, Op, VmState};
use tokio::sync::{Semaphore, broadcast, oneshot, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::capacity::Capacity;
pub use self::create::{CreateSpec, PullMode};
use self::directory::Directory;
pub(crate) use self::ground::Found;
pub use self::snapshots::RestoreSpec;
use crate::disk_images::DiskImages;
use crate::recipe::VmPaths;
use crate::snapshots::SnapshotStore;
use crate::standby::Standbys;
use crate::templates::Templates;
use crate::vm::{self, Handle, Request, Shared};
use crate::volumes::Claims;
use crate::{ConsoleHandle, HostConfig, HostError, HostEvent, LogEntry, Record, View, files, logs};

pub(crate) mod capacity;
mod create;
mod directory;
mod ground;
pub(crate) mod registries;
mod snapshots;
mod templates;
mod volumes;

/// Events that a watcher may lag behind before it must list again.
const EVENTS: usize = 1024;

/// For whom a caller speaks. Callers without one are old clients and not fenced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Uid of the object.
    pub uid: String,
    /// Generation that the caller has read.
    pub generation: i64,
}

/// A node's host core. Clones are the same host.
#[derive(Clone, Debug)]
pub struct Host(Arc<Inner>);

/// A host that may be gone.
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
    snapshots: SnapshotStore,
    /// What each driver can do here, the default first.
    probes: Vec<(&'static str, Probe)>,
    directory: Mutex<Directory>,
    tasks: Mutex<JoinSet<()>>,
    /// Held for life: one daemon per state folder.
    lock: File,
}

impl Host {
    /// Opens the state folder and takes up every VM in it: running ones go on,
    /// cut-off operations are finished, what belongs to nobody is removed.
    ///
    /// # Errors
    /// [`HostError::State`] when another daemon has the folder or it cannot be read;
    /// [`HostError::Driver`] when the driver is not available.
    pub async fn open(
        config: HostConfig,
        drivers: impl Into<Drivers>,
        network: Arc<dyn Network>,
        images: Arc<Store>,
        clock: Clock,
    ) -> Result<Self, HostError> {
        let state = |operation: String| move |source| HostError::State { operation, source };
        let vms_dir = config.state_dir.join("vms");
        for dir in [&vms_dir, &config.run_dir] {
            std::fs::create_dir_all(dir).map_err(state(format!("make {}", dir.display())))?;
        }
        let lock = lock(&config.state_dir)
            .map_err(state(format!("lock {}: is another node using it?", config.state_dir.display())))?;
        let driver = drivers.into();
        let mut probes = Vec::new();
        for one in driver.all() {
            probes.push((one.name(), one.probe().await));
        }
        let known =
            |(name, probe): &(&'static str, Probe)| (*name, probe.accelerator.unwrap_or(Accelerator::Tcg));
        let accelerators = probes.iter().map(known).collect();
        let (templates, wishes) = Templates::open(&config.state_dir, config.templates)
            .map_err(state("open the templates".to_owned()))?;
        let records = load_records(&vms_dir).map_err(state(format!("read {}", vms_dir.display())))?;
        let shared = Arc::new(Shared {
            templates,
            standbys: Standbys::new(&config.state_dir, config.standbys),
            unfolded: Arc::default(),
            claims: Claims::of(&records),
            boots: Semaphore::new(config.boots_at_once.max(1)),
            config,
            driver,
            accelerators,
            network,
            clock,
            events: broadcast::channel(EVENTS).0,
            stop: CancellationToken::new(),
        });
        let snapshots = SnapshotStore::open(&shared.config.state_dir, shared.clock.now());
        let snapshots = snapshots.map_err(state("open the snapshots".to_owned()))?;
        let disk_images = DiskImages::open(&shared.config.state_dir);
        let disk_images = disk_images.map_err(state("open the disk images".to_owned()))?;
        let host = Self(Arc::new(Inner {
            shared,
            images,
            disk_images,
            snapshots,
            probes,
            directory: Mutex::default(),
            tasks: Mutex::default(),
            lock,
        }));
        crate::templates::sweep(&host.0.shared).await;
        crate::standby::sweep(&host.0.shared).await;
        crate::snapshots::sweep(&host.0.shared).await;
        host.take_up(records).await?;
        let mut tasks = host.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.spawn(crate::templates::serve(host.0.shared.clone(), wishes));
        tasks.spawn(crate::standby::serve(host.0.shared.clone()));
        drop(tasks);
        Ok(host)
    }

    /// Addresses first, so that none is given out twice; then strays; then the tasks.
    async fn take_up(&self, records: Vec<Record>) -> Result<(), HostError> {
        let shared = &self.0.shared;
        for record in records.iter().filter(|r| r.address.is_some()) {
            if let Err(error) = shared.network.lease(&record.id, record.address) {
                tracing::error!(vm = %record.id, %error, "address of a VM cannot be kept");
            }
        }
        let known: HashSet<_> = records.iter().map(|r| r.id.clone()).collect();
        match shared.network.sweep(&known).await {
            Ok(removed) if removed.is_empty() => {}
            Ok(removed) => tracing::warn!(taps = ?removed, "removed taps of no VM"),
            Err(error) => tracing::warn!(%error, "taps not swept"),
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
                }
            }
        };
        let mut tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        let mut directory = self.0.directory();
        let handle = vm::spawn(self.0.shared.clone(), record, &mut tasks, self.commit_job(), gone).map_err(
            |source| HostError::Files { operation: "open the console and the log", id: id.clone(), source },
        )?;
        directory.insert(name, handle.clone());
        Ok(handle)
    }

    /// Stops the daemon's tasks. Guests go on.
    pub async fn shutdown(&self) {
        self.0.shared.stop.cancel();
        let mut tasks = std::mem::take(&mut *self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        while tasks.join_next().await.is_some() {}
        crate::standby::sweep(&self.0.shared).await;
    }

    /// Resolves once the daemon stops; ends long answers.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.0.shared.stop.clone()
    }

    /// What each driver can do here, by name; the default first.
    #[must_use]
    pub fn probes(&self) -> &[(&'static str, Probe)] {
        &self.0.probes
    }

    /// Name of the driver that runs this VM.
    #[must_use]
    pub fn driver_of(&self, record: &Record) -> &'static str {
        self.0.shared.driver_name(&record.driver)
    }

    /// The images of this node.
    #[must_use]
    pub fn images(&self) -> &Arc<Store> {
        &self.0.images
    }

    pub(crate) fn disk_images(&self) -> &DiskImages {
        &self.0.disk_images
    }

    /// The network of this node.
    #[must_use]
    pub fn network(&self) -> &Arc<dyn Network> {
        &self.0.shared.network
    }

    /// Settings of this host.
    #[must_use]
    pub fn config(&self) -> &HostConfig {
        &self.0.shared.config
    }

    /// The clock of this host.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.0.shared.clock
    }

    /// Boots a VM and returns when its workload runs. `Ok` when it already does.
    ///
    /// # Errors
    /// Everything that can keep a guest from running.
    pub async fn start(&self, name: &str, fence: Option<Fence>) -> Result<Record, HostError> {
        self.ask(name, |reply| Request::Start { fence, reply }).await
    }

    /// Powers a VM off and returns when it is; kills it after `grace`, at once when zero.
    ///
    /// # Errors
    /// [`HostError::NotFound`], [`HostError::Refused`], [`HostError::Fenced`].
    pub async fn stop(&self, name: &str, grace: Duration, fence: Option<Fence>) -> Result<Record, HostError> {
        self.ask(name, |reply| Request::Stop { grace, fence, reply }).await
    }

    /// Removes a VM and returns when nothing is left of it.
    ///
    /// # Errors
    /// As [`Host::stop`].
    pub async fn delete(&self, name: &str, force: bool, fence: Option<Fence>) -> Result<(), HostError> {
        self.ask(name, |reply| Request::Delete { force, fence, reply }).await.map(|_| ())
    }

    /// Holds the guest's CPUs and returns when they stand still. `Ok` when they do.
    ///
    /// # Errors
    /// As [`Host::stop`]; [`HostError::Driver`].
    pub async fn pause(&self, name: &str, fence: Option<Fence>) -> Result<Record, HostError> {
        self.ask(name, |reply| Request::Suspend { op: Op::Pause, fence, reply }).await
    }

    /// Lets a paused guest go on, or loads the memory of a hibernated one; returns when it runs.
    ///
    /// # Errors
    /// As [`Host::start`]; [`HostError::Incompatible`].
    pub async fn resume(&self, name: &str, fence: Option<Fence>) -> Result<Record, HostError> {
        self.ask(name, |reply| Request::Suspend { op: Op::Resume, fence, reply }).await
    }

    /// Saves the guest's memory and ends its VMM; returns when the memory is on disk. What fails leaves it running.
    ///
    /// # Errors
    /// As [`Host::pause`]; [`HostError::Files`] when there is no room.
    pub async fn hibernate(&self, name: &str, fence: Option<Fence>) -> Result<Record, HostError> {
        self.ask(name, |reply| Request::Suspend { op: Op::Hibernate, fence, reply }).await
    }

    async fn ask(
        &self,
        name: &str,
        request: impl FnOnce(oneshot::Sender<Result<Record, HostError>>) -> Request,
    ) -> Result<Record, HostError> {
        let handle = self.handle(name)?;
        let (reply, answer) = oneshot::channel();
        let gone = || match self.0.shared.stop.is_cancelled() {
            true => HostError::Stopping,
            false => HostError::NotFound { name: name.to_owned() },
        };
        handle.requests.send(request(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// A VM as it is now. Never waits.
    ///
    /// # Errors
    /// [`HostError::NotFound`], [`HostError::Ambiguous`].
    pub fn get(&self, name: &str) -> Result<Arc<View>, HostError> {
        Ok(self.handle(name)?.view.borrow().clone())
    }

    /// A VM from now on: the present state, then each change.
    ///
    /// # Errors
    /// As [`Host::get`].
    pub fn observe(&self, name: &str) -> Result<watch::Receiver<Arc<View>>, HostError> {
        Ok(self.handle(name)?.view)
    }

    /// All VMs, by name. Never waits.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<View>> {
        let mut views: Vec<_> = self.0.directory().live().map(|h| h.view.borrow().clone()).collect();
        views.sort_by(|a, b| a.record.name.cmp(&b.record.name));
        views
    }

    /// Changes from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<HostEvent> {
        self.0.shared.events.subscribe()
    }

    /// The serial console of a VM.
    ///
    /// # Errors
    /// As [`Host::get`].
    pub fn console(&self, name: &str) -> Result<ConsoleHandle, HostError> {
        Ok(self.handle(name)?.console)
    }

    /// What the workload printed, and a receiver that changes when there is more.
    ///
    /// # Errors
    /// As [`Host::get`]; [`HostError::Files`].
    pub async fn logs(&self, name: &str) -> Result<(Vec<LogEntry>, watch::Receiver<u64>), HostError> {
        let handle = self.handle(name)?;
        let mut printed = handle.printed.clone();
        printed.mark_unchanged();
        let dir = VmPaths::of(self.config(), &handle.id).state;
        let read = files::blocking(move || logs::read_all(&dir)).await;
        let entries = read.map_err(|source| HostError::Files {
            operation: "read the log",
            id: handle.id.clone(),
            source,
        })?;
        Ok((entries, printed))
    }

    /// Resolves with the workload's exit once the VM is off.
    ///
    /// # Errors
    /// [`HostError::NotFound`], also when it is deleted meanwhile.
    pub async fn wait(&self, name: &str) -> Result<Arc<View>, HostError> {
        let mut view = self.observe(name)?;
        let off = |v: &Arc<View>| matches!(v.record.state, VmState::Stopped | VmState::Failed);
        match view.wait_for(off).await {
            Ok(view) => Ok(view.clone()),
            Err(_) => Err(HostError::NotFound { name: name.to_owned() }),
        }
    }
}

impl Drop for Inner {
    /// A child that is being forked holds the same open file until it execs: closing alone would leave the folder
    /// locked for a moment (flock(2)).
    fn drop(&mut self) {
        let _closing = rustix::fs::flock(&self.lock, rustix::fs::FlockOperation::Unlock);
    }
}

impl Inner {
    fn directory(&self) -> MutexGuard<'_, Directory> {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock(state_dir: &Path) -> io::Result<File> {
    let file = File::options().create(true).write(true).truncate(false).open(state_dir.join("node.lock"))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// All records. A folder without one was never acknowledged and is removed; a
/// record that cannot be read is left alone and reported.
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

//! The host: creates VMs, finds them again, and passes requests to their tasks.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_hypervisor::{Accelerator, Driver, Forward, Probe};
use coracle_image::{Image, Progress, PullOptions, PullPolicy, Reference, Store};
use coracle_net::Network;
use coracle_types::{Clock, Identity, MacAddr, MemoryMib, Vcpus, VmId, VmName, VmState};
use tokio::sync::{Semaphore, broadcast, oneshot, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::recipe::{VmPaths, check_kernel};
use crate::record::SCHEMA;
use crate::vm::{self, Handle, Request, Shared};
use crate::{
    ConsoleHandle, EventKind, Exit, HostConfig, HostError, HostEvent, LogEntry, Owner, Record, View,
    Workload, files, logs,
};

/// Events that a watcher may lag behind before it must list again.
const EVENTS: usize = 1024;

/// What a caller wants.
#[derive(Clone, Debug)]
pub struct CreateSpec {
    /// Its name for the VM.
    pub name: VmName,
    /// The object that it speaks for.
    pub owner: Owner,
    /// Image reference.
    pub image: String,
    /// When to ask the registry.
    pub pull: PullMode,
    /// Number of CPUs.
    pub vcpus: Vcpus,
    /// Guest memory.
    pub memory: MemoryMib,
    /// Kernel path; empty is the default.
    pub kernel_path: String,
    /// A wanted address.
    pub address: Option<Ipv4Addr>,
    /// Host name; empty is the VM's name.
    pub hostname: String,
    /// Replaces the image's entrypoint.
    pub command: Vec<String>,
    /// Replaces the image's arguments.
    pub args: Vec<String>,
    /// Added to the image's environment.
    pub env: Vec<String>,
    /// Replaces the image's user.
    pub user: String,
    /// Replaces the image's working directory.
    pub workdir: String,
    /// Kept and given back.
    pub metadata: BTreeMap<String, String>,
    /// Ports that lead in.
    pub ports: Vec<Forward>,
    /// Size of the writable disk; `None` is the node's default.
    pub disk_mib: Option<u64>,
    /// The same VM again is no error.
    pub idempotent: bool,
}

/// When a registry is asked for an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullMode {
    /// When it is not in the store; `latest` is always resolved anew.
    #[default]
    IfNotPresent,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl PullMode {
    pub(crate) fn policy(self) -> PullPolicy {
        match self {
            Self::IfNotPresent => PullPolicy::IfNotPresent,
            Self::Always => PullPolicy::Always,
            Self::Never => PullPolicy::Never,
        }
    }
}

/// For whom a caller speaks. Callers without one are old clients and not fenced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Uid of the object.
    pub uid: String,
    /// Generation that the caller has read.
    pub generation: i64,
}

/// What the host has and what VMs have declared of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// CPUs of the host.
    pub cpus: usize,
    /// Memory of the host, MiB.
    pub memory_mib: u64,
    /// Memory that is free or can be freed, MiB.
    pub memory_available_mib: u64,
    /// What VMs may declare together, MiB.
    pub memory_allowed_mib: u64,
    /// CPUs that VMs have declared.
    pub vcpus_declared: u32,
    /// Memory that VMs have declared, MiB.
    pub memory_declared_mib: u64,
    /// VMs that exist.
    pub vms: usize,
    /// VMs that run.
    pub vms_running: usize,
}

/// A node's host core. Clones are the same host.
#[derive(Clone, Debug)]
pub struct Host(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    images: Arc<Store>,
    probe: Probe,
    directory: Mutex<Directory>,
    tasks: Mutex<JoinSet<()>>,
    /// Held for life: one daemon per state folder.
    _lock: File,
}

#[derive(Debug, Default)]
struct Directory {
    by_id: HashMap<VmId, Slot>,
    by_name: HashMap<VmName, VmId>,
}

#[derive(Debug)]
enum Slot {
    /// Being created: name, memory and CPUs are taken.
    Reserved {
        memory: MemoryMib,
        vcpus: Vcpus,
    },
    Live(Handle),
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
        driver: Arc<dyn Driver>,
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
        let probe = driver.probe().await;
        let accelerator = probe.accelerator.unwrap_or(Accelerator::Tcg);
        let shared = Arc::new(Shared {
            boots: Semaphore::new(config.boots_at_once.max(1)),
            config,
            driver,
            accelerator,
            network,
            clock,
            events: broadcast::channel(EVENTS).0,
            stop: CancellationToken::new(),
        });
        let records = load_records(&vms_dir).map_err(state(format!("read {}", vms_dir.display())))?;
        let host = Self(Arc::new(Inner {
            shared,
            images,
            probe,
            directory: Mutex::default(),
            tasks: Mutex::default(),
            _lock: lock,
        }));
        host.take_up(records).await?;
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

    fn spawn(&self, record: Record) -> Result<Handle, HostError> {
        let (id, name) = (record.id.clone(), record.name.clone());
        let inner = Arc::downgrade(&self.0);
        let gone = {
            let (id, name) = (id.clone(), name.clone());
            move || {
                if let Some(inner) = inner.upgrade() {
                    inner.directory().forget(&id, &name);
                }
            }
        };
        let mut tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        let mut directory = self.0.directory();
        let handle = vm::spawn(self.0.shared.clone(), record, &mut tasks, gone).map_err(|source| {
            HostError::Files { operation: "open the console and the log", id: id.clone(), source }
        })?;
        directory.by_name.insert(name, id.clone());
        directory.by_id.insert(id, Slot::Live(handle.clone()));
        Ok(handle)
    }

    /// Stops the daemon's tasks. Guests go on.
    pub async fn shutdown(&self) {
        self.0.shared.stop.cancel();
        let mut tasks = std::mem::take(&mut *self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        while tasks.join_next().await.is_some() {}
    }

    /// Resolves once the daemon stops; ends long answers.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.0.shared.stop.clone()
    }

    /// What the driver can do here.
    #[must_use]
    pub fn probe(&self) -> &Probe {
        &self.0.probe
    }

    /// Name of the driver.
    #[must_use]
    pub fn driver_name(&self) -> &'static str {
        self.0.shared.driver.name()
    }

    /// The images of this node.
    #[must_use]
    pub fn images(&self) -> &Arc<Store> {
        &self.0.images
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

    /// Lays out a VM. When this returns it is on disk and stays until it is deleted;
    /// when it fails nothing is left. Idempotent with [`CreateSpec::idempotent`].
    /// Cancel-safe: a caller that goes away does not cut it off.
    ///
    /// # Errors
    /// [`HostError::AlreadyExists`], [`HostError::Invalid`], [`HostError::Kernel`],
    /// [`HostError::Image`], [`HostError::NoCapacity`], [`HostError::Network`], [`HostError::Files`].
    pub async fn create(&self, spec: CreateSpec, progress: Arc<dyn Progress>) -> Result<Record, HostError> {
        let (reply, answer) = oneshot::channel();
        let host = self.clone();
        {
            let mut tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            tasks.spawn(async move {
                let _caller_gone = reply.send(host.create_whole(spec, progress).await);
            });
        }
        answer.await.unwrap_or(Err(HostError::Stopping))
    }

    async fn create_whole(&self, spec: CreateSpec, progress: Arc<dyn Progress>) -> Result<Record, HostError> {
        if let Some(existing) = self.existing(&spec)? {
            return Ok(existing);
        }
        let kernel = self.kernel(&spec.kernel_path)?;
        let (image, rootfs) = self.image(&spec, progress).await?;
        let owner = &spec.owner;
        let identity = Identity {
            cluster: &owner.cluster,
            namespace: &owner.namespace,
            name: &owner.name,
            uid: &owner.uid,
        };
        let id = VmId::of_object(&spec.name, identity);
        let reservation = self.reserve(&id, &spec)?;
        let result = self.lay_out(spec, id.clone(), image, rootfs, kernel).await;
        match result.and_then(|record| self.spawn(record.clone()).map(|_| record)) {
            Ok(record) => {
                reservation.keep();
                let event =
                    HostEvent { kind: EventKind::Created, record: record.clone(), time: self.clock().now() };
                let _nobody_watches = self.0.shared.events.send(event);
                Ok(record)
            }
            Err(error) => {
                self.0.shared.network.release(&id);
                let paths = VmPaths::of(self.config(), &id);
                let _leave_nothing = files::remove_tree(&paths.state);
                Err(error)
            }
        }
    }

    fn existing(&self, spec: &CreateSpec) -> Result<Option<Record>, HostError> {
        let Ok(view) = self.get(spec.name.as_str()) else { return Ok(None) };
        let record = &view.record;
        if record.name != spec.name {
            return Ok(None);
        }
        let same = record.owner.uid == spec.owner.uid
            && record.image == spec.image
            && record.vcpus == spec.vcpus
            && record.memory == spec.memory;
        if spec.idempotent && same {
            return Ok(Some(record.clone()));
        }
        Err(HostError::AlreadyExists { name: spec.name.to_string(), uid: record.owner.uid.clone() })
    }

    fn kernel(&self, path: &str) -> Result<Option<PathBuf>, HostError> {
        if path.is_empty() {
            return Ok(None);
        }
        check_kernel(&self.config().kernel_dirs, path)
            .map(Some)
            .map_err(|why| HostError::Kernel { path: path.to_owned(), why })
    }

    async fn image(
        &self,
        spec: &CreateSpec,
        progress: Arc<dyn Progress>,
    ) -> Result<(Image, PathBuf), HostError> {
        let failed = |source| HostError::Image { reference: spec.image.clone(), source };
        let reference: Reference = spec.image.parse().map_err(failed)?;
        let image = self.pull(&reference, spec.pull, progress).await?;
        let rootfs = self.0.images.rootfs(&image).await.map_err(failed)?;
        Ok((image, rootfs.path))
    }

    /// Brings an image into the store.
    ///
    /// # Errors
    /// [`HostError::Image`].
    pub async fn pull(
        &self,
        reference: &Reference,
        mode: PullMode,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, HostError> {
        let options = PullOptions { policy: mode.policy(), ..PullOptions::default() };
        self.0
            .images
            .pull(reference, &options, progress)
            .await
            .map_err(|source| HostError::Image { reference: reference.to_string(), source })
    }

    /// Takes the name, the memory and the CPUs, or says who has them.
    fn reserve(&self, id: &VmId, spec: &CreateSpec) -> Result<Reservation, HostError> {
        let capacity = self.capacity();
        let mut directory = self.0.directory();
        if directory.by_name.contains_key(&spec.name) || directory.by_id.contains_key(id) {
            return Err(HostError::AlreadyExists { name: spec.name.to_string(), uid: String::new() });
        }
        let wanted = u64::from(spec.memory.get());
        let (declared, total) = (directory.declared().0, capacity.memory_allowed_mib);
        if declared + wanted > total {
            return Err(HostError::NoCapacity { wanted, declared, total });
        }
        directory.by_name.insert(spec.name.clone(), id.clone());
        directory.by_id.insert(id.clone(), Slot::Reserved { memory: spec.memory, vcpus: spec.vcpus });
        Ok(Reservation { host: self.clone(), id: id.clone(), name: spec.name.clone(), kept: false })
    }

    async fn lay_out(
        &self,
        spec: CreateSpec,
        id: VmId,
        image: Image,
        rootfs: PathBuf,
        kernel: Option<PathBuf>,
    ) -> Result<Record, HostError> {
        let lease = self
            .0
            .shared
            .network
            .lease(&id, spec.address)
            .map_err(|source| HostError::Network { name: spec.name.to_string(), source })?;
        let workload = workload(&spec, &image)?;
        let hostname = if spec.hostname.is_empty() { hostname(&spec) } else { spec.hostname };
        let record = Record {
            schema: SCHEMA,
            mac: MacAddr::of(&id),
            id,
            name: spec.name,
            owner: spec.owner,
            state: VmState::Created,
            message: String::new(),
            image: spec.image,
            image_digest: image.digest.to_string(),
            rootfs,
            workload,
            vcpus: spec.vcpus,
            memory: spec.memory,
            kernel,
            disk_mib: spec.disk_mib.unwrap_or(self.config().disk_mib),
            hostname,
            address: lease.map(|l| l.address),
            address_acknowledged: false,
            ports: spec.ports,
            metadata: spec.metadata,
            accelerator: None,
            process: None,
            exit: None,
            created_at: self.clock().now(),
            started_at: None,
            finished_at: None,
            boots: 0,
            boot_ms: 0,
        };
        let paths = VmPaths::of(self.config(), &record.id);
        let id = record.id.clone();
        let saved = tokio::task::spawn_blocking(move || -> io::Result<Record> {
            std::fs::create_dir_all(&paths.state)?;
            record.save(&paths.record())?;
            files::sync_parent(&paths.state)?;
            Ok(record)
        });
        saved.await.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(|source| HostError::Files {
            operation: "write the record",
            id,
            source,
        })
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
        let read = tokio::task::spawn_blocking(move || logs::read_all(&dir)).await;
        let entries = read.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(|source| {
            HostError::Files { operation: "read the log", id: handle.id.clone(), source }
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

    /// What is there and what is declared. Never waits.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        let memory = meminfo(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default());
        let directory = self.0.directory();
        let (memory_declared_mib, vcpus_declared) = directory.declared();
        let running = directory.live().filter(|h| h.view.borrow().record.state == VmState::Running).count();
        Capacity {
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_mib: memory.0,
            memory_available_mib: memory.1,
            memory_allowed_mib: allowed(memory.0, self.config().memory_overcommit),
            vcpus_declared,
            memory_declared_mib,
            vms: directory.by_id.len(),
            vms_running: running,
        }
    }

    /// Exact name, then id, then a prefix of either that fits one VM only.
    fn handle(&self, name: &str) -> Result<Handle, HostError> {
        let directory = self.0.directory();
        let exact = |h: &&Handle| h.view.borrow().record.name.as_str() == name || h.id.as_str() == name;
        if let Some(handle) = directory.live().find(exact) {
            return Ok(handle.clone());
        }
        let fits = |h: &&Handle| {
            !name.is_empty()
                && (h.view.borrow().record.name.as_str().starts_with(name) || h.id.as_str().starts_with(name))
        };
        let found: Vec<_> = directory.live().filter(fits).collect();
        match found.as_slice() {
            [one] => Ok((*one).clone()),
            [] => Err(HostError::NotFound { name: name.to_owned() }),
            several => {
                let mut matches: Vec<_> =
                    several.iter().map(|h| h.view.borrow().record.name.to_string()).collect();
                matches.sort();
                Err(HostError::Ambiguous { name: name.to_owned(), matches })
            }
        }
    }
}

impl Inner {
    fn directory(&self) -> MutexGuard<'_, Directory> {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Directory {
    fn live(&self) -> impl Iterator<Item = &Handle> {
        self.by_id.values().filter_map(|slot| match slot {
            Slot::Live(handle) => Some(handle),
            Slot::Reserved { .. } => None,
        })
    }

    /// Memory in MiB and CPUs that VMs have declared.
    fn declared(&self) -> (u64, u32) {
        self.by_id.values().fold((0, 0), |(mib, cpus), slot| {
            let (memory, vcpus) = match slot {
                Slot::Reserved { memory, vcpus } => (*memory, *vcpus),
                Slot::Live(handle) => {
                    let view = handle.view.borrow();
                    (view.record.memory, view.record.vcpus)
                }
            };
            (mib + u64::from(memory.get()), cpus + u32::from(vcpus.get()))
        })
    }

    fn forget(&mut self, id: &VmId, name: &VmName) {
        self.by_id.remove(id);
        self.by_name.remove(name);
    }
}

/// Gives the name back when a creation fails or is dropped.
struct Reservation {
    host: Host,
    id: VmId,
    name: VmName,
    kept: bool,
}

impl Reservation {
    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.kept {
            self.host.0.directory().forget(&self.id, &self.name);
        }
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

/// Command of Kubernetes replaces the entrypoint and drops the image's arguments; args replace those.
fn workload(spec: &CreateSpec, image: &Image) -> Result<Workload, HostError> {
    let config = &image.config;
    let mut argv = if spec.command.is_empty() { config.entrypoint.clone() } else { spec.command.clone() };
    match (spec.args.is_empty(), spec.command.is_empty()) {
        (false, _) => argv.extend(spec.args.iter().cloned()),
        (true, true) => argv.extend(config.cmd.iter().cloned()),
        (true, false) => {}
    }
    if argv.is_empty() {
        let message = format!("image {} names no command; give one", spec.image);
        return Err(HostError::Invalid { message });
    }
    let pick = |wish: &String, image: &String| if wish.is_empty() { image.clone() } else { wish.clone() };
    Ok(Workload {
        argv,
        env: environment(&config.env, &spec.env),
        user: pick(&spec.user, &config.user),
        cwd: pick(&spec.workdir, &config.workdir),
    })
}

/// The image's environment, overridden by name.
fn environment(image: &[String], own: &[String]) -> Vec<String> {
    let key = |entry: &String| entry.split('=').next().unwrap_or_default().to_owned();
    let overridden: HashSet<_> = own.iter().map(key).collect();
    image.iter().filter(|e| !overridden.contains(&key(e))).chain(own).cloned().collect()
}

/// The object's name where there is one: `web`, not `default-web`.
fn hostname(spec: &CreateSpec) -> String {
    let name = if spec.owner.name.is_empty() { spec.name.as_str() } else { &spec.owner.name };
    let clean = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' });
    clean.take(63).collect::<String>().trim_matches('-').to_owned()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an overcommit factor is not exact"
)]
fn allowed(memory_mib: u64, overcommit: f64) -> u64 {
    (memory_mib as f64 * overcommit.max(0.0)) as u64
}

/// Total and available memory in MiB.
fn meminfo(text: &str) -> (u64, u64) {
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
            .map_or(0, |kib| kib / 1024)
    };
    (field("MemTotal:"), field("MemAvailable:"))
}

impl Exit {
    /// Did the workload succeed?
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == 0
    }
}

//! VMM instances: one record, one lifecycle and one clean-up rule for every VMM.
//!
//! ```text
//! <state>/instances/<id>/{instance.json, vmm.log, disk}
//! <run>/<12 hex of id>/{process, qmp.sock, guest.sock, console.sock}
//! ```
//! An instance keeps its directories, sockets and tap from launch to end. Assigning it to a VM is one atomic write of its
//! owner. After a restart of the daemon, an instance is ended unless the record of its VM names it. Every instance of a
//! template, of the warm pool and of a reader is ended as well, because the restart interrupted their work.

mod known;

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_hypervisor::launch::{LOG_FILE, note_process};
use coracle_hypervisor::{
    Accelerator, Drivers, Jail, Limits, ProcessId, VmmConfig, create_in_background, end_vmms, move_to_cgroup,
    remove_cgroup, to_foreground,
};
use coracle_net::Network;
use coracle_types::{InstanceId, VmId};
use serde::{Deserialize, Serialize};

use self::known::Known;
use crate::vmm_config::{InstancePaths, of_shape};
use crate::{HostConfig, HostError, SnapshotName, TemplateKey, files};

/// Maximum number of boots of a VM whose guest ends before its agent answers. A kernel does so if it could not calibrate its
/// timer, which happens at random on an overloaded host.
pub const BOOTS: u32 = 3;

/// Version of the record format.
const SCHEMA: u32 = 1;

/// Owner of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum InstanceOwner {
    /// Template that is being taken.
    Template(TemplateKey),
    /// The warm pool.
    Pool(TemplateKey),
    /// Reading of a snapshot's memory.
    Reader(SnapshotName),
    /// A VM.
    Vm(VmId),
}

impl InstanceOwner {
    /// Returns the purpose, which is part of the instance id for people who read it.
    fn purpose(&self) -> &str {
        match self {
            Self::Template(_) => "template",
            Self::Pool(_) => "pool",
            Self::Reader(_) => "reader",
            Self::Vm(id) => id.as_str().rsplit_once('-').map_or("vm", |(name, _)| name),
        }
    }
}

async fn set_priority(id: &InstanceId, set: impl FnOnce(&InstanceId) -> io::Result<()> + Send + 'static) {
    let instance = id.clone();
    if let Err(error) = files::blocking(move || set(&instance)).await {
        tracing::debug!(instance = %id, %error, "CPU weight not set");
    }
}

/// Record of an instance, `instances/<id>/instance.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Instance {
    schema: u32,
    owner: InstanceOwner,
    /// Name of the driver; empty: the node's default.
    #[serde(default)]
    driver: String,
    /// Cgroup of a pod below which the VMM was moved, or was about to be moved.
    #[serde(default)]
    cgroup_parent: Option<String>,
}

/// VMM instances of a node.
#[derive(Debug)]
pub struct Instances {
    config: HostConfig,
    driver: Drivers,
    network: Arc<dyn Network>,
    known: Mutex<Known>,
}

impl Instances {
    /// Starts without instances; [`Instances::sweep`] reads those of an earlier daemon.
    pub fn new(config: HostConfig, driver: Drivers, network: Arc<dyn Network>) -> Self {
        Self { config, driver, network, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates an instance of this shape: its record and its directories. The caller starts the VMM.
    ///
    /// # Errors
    /// [`HostError::State`]; no files are left.
    pub async fn create(&self, owner: InstanceOwner, shape: VmmConfig) -> Result<VmmConfig, HostError> {
        let instance = Instance { schema: SCHEMA, owner, driver: shape.driver.clone(), cgroup_parent: None };
        // Registered before there is anything that a crash at this moment could leave behind.
        let id = self.register(instance.clone());
        let InstancePaths { state: state_dir, run: run_dir } = InstancePaths::of(&self.config, &id);
        let uid = self.config.jail.then(|| Jail::uid_of(&id));
        let vmm_config = VmmConfig { id: id.clone(), state_dir, run_dir, uid, ..shape };
        let dirs = [vmm_config.state_dir.clone(), vmm_config.run_dir.clone()];
        let make = move || {
            dirs.iter().try_for_each(std::fs::create_dir_all).and_then(|()| write(&dirs[0], &instance))
        };
        match files::blocking(make).await {
            Ok(()) => Ok(vmm_config),
            Err(source) => {
                let _nothing_is_left = self.end(&id, None).await;
                Err(HostError::State { operation: format!("make the directories of instance {id}"), source })
            }
        }
    }

    /// Registers an instance under a new id, whose uid is not in use.
    fn register(&self, instance: Instance) -> InstanceId {
        let mut known = self.known();
        loop {
            let id = InstanceId::new(instance.owner.purpose(), rand::random());
            if !known.has_uid(Jail::uid_of(&id)) {
                known.insert(id.clone(), instance);
                return id;
            }
        }
    }

    /// Changes the owner of an instance. Idempotent, atomic.
    ///
    /// # Errors
    /// [`HostError::State`]; the owner is unchanged.
    pub async fn assign(&self, id: &InstanceId, owner: InstanceOwner) -> Result<(), HostError> {
        self.change(id, |instance| instance.owner = owner).await
    }

    /// Moves the VMM of an instance below the cgroup of its pod, where the kubelet accounts for it. The record is written
    /// first, so that the cgroup is removed with the instance. Idempotent.
    ///
    /// # Errors
    /// [`HostError::State`]; the VMM may have been moved in some hierarchies only.
    pub async fn move_to_cgroup(
        &self,
        vmm_config: &VmmConfig,
        vmm: ProcessId,
        parent: &str,
    ) -> Result<(), HostError> {
        let id = &vmm_config.id;
        self.change(id, |instance| instance.cgroup_parent = Some(parent.to_owned())).await?;
        let (instance, parent, shape) = (id.clone(), parent.to_owned(), vmm_config.clone());
        let moved =
            files::blocking(move || move_to_cgroup(&instance, vmm.pid, &parent, &Limits::of(&shape))).await;
        let operation = || format!("move instance {id} to the cgroup of its pod");
        moved.map_err(|source| HostError::State { operation: operation(), source })
    }

    /// Gives the VMM of this instance, not started yet, a low CPU weight: it yields the CPUs to those of VMs until
    /// [`Instances::to_foreground`]. On a host without cgroups the VMM starts like any other. Idempotent.
    pub async fn to_background(&self, vmm_config: &VmmConfig) {
        if vmm_config.uid.is_some() {
            set_priority(&vmm_config.id, create_in_background).await;
        }
    }

    /// Gives the VMM the CPU weight of VMs. Idempotent.
    pub async fn to_foreground(&self, id: &InstanceId) {
        set_priority(id, to_foreground).await;
    }

    async fn change(&self, id: &InstanceId, change: impl FnOnce(&mut Instance)) -> Result<(), HostError> {
        let failed = |source| HostError::State { operation: format!("assign instance {id}"), source };
        let Some(mut instance) = self.known().get(id).cloned() else {
            return Err(failed(io::ErrorKind::NotFound.into()));
        };
        change(&mut instance);
        let (dir, written) = (InstancePaths::of(&self.config, id).state, instance.clone());
        files::blocking(move || write(&dir, &written)).await.map_err(failed)?;
        self.known().insert(id.clone(), instance);
        Ok(())
    }

    /// Adopts the VMM of a VM whose record predates instances: it runs in directories named after the VM's id. Idempotent.
    pub fn adopt_legacy_vmm(&self, vm: &VmId, driver: &str, process: ProcessId) -> io::Result<InstanceId> {
        let id = InstanceId::from(vm.clone());
        let paths = InstancePaths::of(&self.config, &id);
        if paths.run.exists() {
            note_process(&paths.run, process)?;
        }
        let owner = InstanceOwner::Vm(vm.clone());
        let instance = Instance { schema: SCHEMA, owner, driver: driver.to_owned(), cgroup_parent: None };
        std::fs::create_dir_all(&paths.state)?;
        write(&paths.state, &instance)?;
        self.known().insert(id.clone(), instance);
        Ok(id)
    }

    /// Returns the ids of all instances. A tap of any other id has no owner.
    pub fn ids(&self) -> HashSet<InstanceId> {
        self.known().ids().cloned().collect()
    }

    /// Returns the ids of the instances of this owner.
    #[must_use]
    pub fn ids_of(&self, owner: &InstanceOwner) -> Vec<InstanceId> {
        self.known().ids_of(owner).cloned().collect()
    }

    /// Ends the instances of this owner, and moves the log of the last one to `log`. Idempotent.
    ///
    /// # Errors
    /// Same as [`Instances::end`]; the other instances are still ended.
    pub async fn end_of(&self, owner: &InstanceOwner, log: Option<&Path>) -> Result<(), HostError> {
        self.end_all(self.ids_of(owner), log).await
    }

    /// Ends the instances whose owner satisfies `of`. Idempotent.
    ///
    /// # Errors
    /// Same as [`Instances::end_of`].
    pub async fn end_where(&self, of: impl Fn(&InstanceOwner) -> bool) -> Result<(), HostError> {
        let ids = self.known().ids_where(of);
        self.end_all(ids, None).await
    }

    async fn end_all(&self, ids: Vec<InstanceId>, log: Option<&Path>) -> Result<(), HostError> {
        let mut outcome = Ok(());
        for id in ids {
            outcome = outcome.and(self.end(&id, log).await);
        }
        outcome
    }

    /// Ends an instance: its VMM, its tap and its directories; moves the VMM's log to `log`. Idempotent: the directory by which
    /// the instance is found again is removed last.
    ///
    /// # Errors
    /// [`HostError::Driver`], [`HostError::Network`], [`HostError::State`].
    pub async fn end(&self, id: &InstanceId, log: Option<&Path>) -> Result<(), HostError> {
        let driver = |source| HostError::Driver { name: id.to_string(), source };
        let paths = InstancePaths::of(&self.config, id);
        let known = self.known().get(id).cloned();
        let (name, cgroup_parent) =
            known.map(|instance| (instance.driver, instance.cgroup_parent)).unwrap_or_default();
        let name = self.driver.named(&name).map_or(String::new(), |driver| driver.name().to_owned());
        let shape = of_shape(&self.config, Accelerator::Tcg);
        let InstancePaths { state: state_dir, run: run_dir } = paths.clone();
        let vmm_config = VmmConfig { id: id.clone(), state_dir, run_dir, driver: name, ..shape };
        for one in self.driver.all() {
            end_vmms(one.as_ref(), &vmm_config).await.map_err(driver)?;
        }
        let network = |source| HostError::Network { name: id.to_string(), source };
        self.network.detach(id).await.map_err(network)?;
        let log = log.map(Path::to_owned);
        let cgroup = id.clone();
        let remove = move || {
            remove_cgroup(&cgroup, cgroup_parent.as_deref())?;
            if let Some(log) = log {
                let _has_none = std::fs::rename(paths.state.join(LOG_FILE), log);
            }
            files::remove_tree(&paths.run).and_then(|()| files::remove_tree(&paths.state))
        };
        let removed = files::blocking(remove).await;
        removed.map_err(|source| HostError::State { operation: format!("remove instance {id}"), source })?;
        self.known().remove(id);
        Ok(())
    }

    /// Reads the instances of an earlier daemon, and ends those for which `is_named_back` returns false. An instance that
    /// cannot be ended stays for the next sweep.
    ///
    /// # Errors
    /// When the directory of instances cannot be read.
    pub async fn sweep(&self, is_named_back: impl Fn(&VmId, &InstanceId) -> bool) -> Result<(), HostError> {
        let dir = self.config.state_dir.join("instances");
        let failed = |source| HostError::State { operation: format!("read {}", dir.display()), source };
        let entries = match std::fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        for entry in entries {
            let dir = entry.map_err(failed)?.path();
            let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Ok(id) = name.parse::<InstanceId>() else {
                tracing::warn!(dir = %dir.display(), "not an instance, ignored");
                continue;
            };
            let instance = match read(&dir) {
                Ok(instance) => instance,
                Err(error) => {
                    tracing::error!(instance = %id, %error, "record of an instance cannot be read, left alone");
                    continue;
                }
            };
            let kept = instance.as_ref().is_some_and(|instance| match &instance.owner {
                InstanceOwner::Vm(vm) => is_named_back(vm, &id),
                InstanceOwner::Template(_) | InstanceOwner::Pool(_) | InstanceOwner::Reader(_) => false,
            });
            if let Some(instance) = instance {
                self.known().insert(id.clone(), instance);
            }
            if kept {
                continue;
            }
            if let Err(error) = self.end(&id, None).await {
                tracing::error!(instance = %id, error = error.chain(), "end instance without an owner failed");
            }
        }
        Ok(())
    }
}

/// Replaces the record atomically, without sync: a crash of the host ends every VMM, so the record need not survive it.
fn write(dir: &Path, instance: &Instance) -> io::Result<()> {
    let part = dir.join("instance.part");
    std::fs::write(&part, serde_json::to_vec(instance)?)?;
    std::fs::rename(part, dir.join("instance.json"))
}

/// Reads the record; `None`: the daemon ended before it wrote the record, or the host crashed meanwhile.
fn read(dir: &Path) -> io::Result<Option<Instance>> {
    #[derive(Deserialize)]
    struct Version {
        schema: u32,
    }
    let bytes = match std::fs::read(dir.join("instance.json")) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let Ok(Version { schema }) = serde_json::from_slice(&bytes) else { return Ok(None) };
    if schema > SCHEMA {
        let why = format!("written by a newer version (schema {schema}, this one knows {SCHEMA})");
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    Ok(serde_json::from_slice(&bytes).ok())
}

#[cfg(test)]
mod tests {
    use coracle_hypervisor::Driver as _;
    use coracle_hypervisor_testing::AddressOnly;
    use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines};

    use super::*;

    struct Node {
        machines: Arc<FakeMachines>,
        config: HostConfig,
        _dir: tempfile::TempDir,
    }

    impl Node {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let mut config = HostConfig::new(dir.path().join("state"), "/k".into(), "/i".into());
            config.run_dir = dir.path().join("run");
            Self { machines: FakeMachines::new(), config, _dir: dir }
        }

        fn driver(&self) -> Drivers {
            Arc::new(FakeDriver::new(self.machines.clone())).into()
        }

        /// Opens the instances like a daemon that starts.
        fn open(&self) -> Instances {
            let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
            Instances::new(self.config.clone(), self.driver(), network)
        }

        async fn start(&self, instances: &Instances, owner: InstanceOwner) -> InstanceId {
            let shape = of_shape(&self.config, Accelerator::Tcg);
            let vmm_config = instances.create(owner, shape).await.unwrap();
            self.driver().start(&vmm_config).await.unwrap();
            vmm_config.id
        }

        fn dirs(&self) -> usize {
            let dirs = [self.config.state_dir.join("instances"), self.config.run_dir.clone()];
            dirs.iter().map(|dir| std::fs::read_dir(dir).unwrap().count()).sum()
        }
    }

    fn vm(name: &str) -> VmId {
        VmId::of_name(&name.parse().unwrap())
    }

    fn key() -> TemplateKey {
        TemplateKey::parse("0123456789abcdef").unwrap()
    }

    #[tokio::test]
    async fn sweep_ends_unreferenced_instances_table() {
        let snapshot: SnapshotName = "a".parse().unwrap();
        let (web, other) = (InstanceOwner::Vm(vm("web")), InstanceOwner::Vm(vm("other")));
        for (why, owner, named, kept) in [
            ("its VM names it", web.clone(), true, true),
            ("its VM names another, or none", web, false, false),
            ("its VM is gone", other, false, false),
            ("pooled", InstanceOwner::Pool(key()), true, false),
            ("a template that was cut off", InstanceOwner::Template(key()), true, false),
            ("a reader that was cut off", InstanceOwner::Reader(snapshot), true, false),
        ] {
            let node = Node::new();
            let id = node.start(&node.open(), owner).await;
            let next = node.open();
            next.sweep(|_, one| named && *one == id).await.unwrap();
            let left = if kept { (1, 2, 1) } else { (0, 0, 0) };
            assert_eq!((node.machines.running(), node.dirs(), next.ids().len()), left, "{why}");
        }
    }

    #[tokio::test]
    async fn assigned_instance_belongs_to_the_vm_after_a_restart() {
        let node = Node::new();
        let instances = node.open();
        let id = node.start(&instances, InstanceOwner::Pool(key())).await;
        for _ in 0..2 {
            instances.assign(&id, InstanceOwner::Vm(vm("web"))).await.unwrap();
        }
        let next = node.open();
        next.sweep(|owner, one| *owner == vm("web") && *one == id).await.unwrap();
        assert_eq!(node.machines.running(), 1);
        for _ in 0..2 {
            next.end_of(&InstanceOwner::Vm(vm("web")), None).await.unwrap();
            next.end(&id, None).await.unwrap();
        }
        assert_eq!((node.machines.running(), node.dirs()), (0, 0));
        next.assign(&id, InstanceOwner::Pool(key())).await.unwrap_err();
    }

    #[tokio::test]
    async fn instance_with_incomplete_record_is_removed() {
        let node = Node::new();
        let id = node.start(&node.open(), InstanceOwner::Vm(vm("web"))).await;
        let dir = node.config.state_dir.join("instances").join(id.as_str());
        for text in [None, Some(""), Some("{\"schema\":1"), Some("{\"schema\":1}")] {
            let record = dir.join("instance.json");
            match text {
                None => std::fs::remove_file(record).unwrap(),
                Some(text) => std::fs::write(record, text).unwrap(),
            }
            assert_eq!(read(&dir).unwrap(), None, "{text:?}");
        }
        node.open().sweep(|_, _| true).await.unwrap();
        assert_eq!((node.machines.running(), node.dirs()), (0, 0));
    }

    #[tokio::test]
    async fn instance_of_a_newer_version_is_left_alone() {
        let node = Node::new();
        let id = node.start(&node.open(), InstanceOwner::Pool(key())).await;
        let dir = node.config.state_dir.join("instances").join(id.as_str());
        std::fs::write(dir.join("instance.json"), "{\"schema\":99,\"owner\":{\"pool2\":1}}").unwrap();
        node.open().sweep(|_, _| false).await.unwrap();
        assert_eq!((node.machines.running(), node.dirs()), (1, 2));
    }

    #[tokio::test]
    async fn log_of_the_vmm_outlives_its_instance() {
        let node = Node::new();
        let instances = node.open();
        let id = node.start(&instances, InstanceOwner::Vm(vm("web"))).await;
        let dir = node.config.state_dir.join("instances").join(id.as_str());
        std::fs::write(dir.join(LOG_FILE), "last words").unwrap();
        let kept = node.config.state_dir.join("kept");
        instances.end(&id, Some(&kept)).await.unwrap();
        assert_eq!(std::fs::read_to_string(kept).unwrap(), "last words");
    }

    #[tokio::test]
    async fn vmm_of_an_earlier_version_becomes_an_instance() {
        let node = Node::new();
        let id = InstanceId::from(vm("web"));
        let paths = InstancePaths::of(&node.config, &id);
        std::fs::create_dir_all(&paths.run).unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = ProcessId::of_pid(child.id()).unwrap().unwrap();
        for _ in 0..2 {
            assert_eq!(node.open().adopt_legacy_vmm(&vm("web"), "", process).unwrap(), id);
        }
        assert_eq!(coracle_hypervisor::launch::find_in(&paths.run).unwrap(), Some(process));
        let next = node.open();
        next.sweep(|owner, one| *owner == vm("web") && *one == id).await.unwrap();
        assert_eq!(next.ids().len(), 1);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

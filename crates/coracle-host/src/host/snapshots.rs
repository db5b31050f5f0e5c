//! Snapshots of VMs, and VMs restored from them.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use coracle_hypervisor::{Driver as _, VmmConfig};
use coracle_image::Image;
use coracle_net::{Lease, NetworkRequest, Reach};
use coracle_oci::{NoProgress, OciError, PullOrigin, Reference};
use coracle_types::{Identity, InvalidVmName, MacAddr, MemoryMib, SizeClass, Vcpus, VmId, VmName, VmState};
use futures_util::{StreamExt, stream};
use tokio::sync::oneshot;

use super::resolve_image::exact_reference;
use super::{Access, Host};
use crate::temporary::REMOVE_ANNOTATION;
use crate::vm::{Call, ReplyTo, Request, VmCopy};
use crate::vmm_config::{VmPaths, machine_type, of_shape};
use crate::volumes::VolumeSource;
use crate::{
    COMMIT_ANNOTATION, EventKind, HostError, Owner, PullPolicy, Record, SnapshotName, Volume, VolumeKind,
    VolumeRequest, files,
};
use coracle_record::{AttachedImage, ContainerRecord, SavedMemory};
use coracle_snapshot::{Part, SnapshotImage, SnapshotInfo, SnapshotStore, archive};

/// Maximum number of forks of one request.
const FORKS_MAX: u32 = 64;
/// Maximum number of forks that get their identity at the same time, because each has a time limit for that.
const FORKS_AT_ONCE: usize = 2;
/// Maximum length of a host name label (RFC 1123).
const HOSTNAME_MAX: usize = 63;

/// Request for a VM restored from a snapshot.
#[derive(Clone, Debug, Default)]
pub struct RestoreSpec {
    /// Name of the VM; `None`: that of the snapshot's VM.
    pub name: Option<VmName>,
    /// Object on whose behalf the VM is restored.
    pub owner: Owner,
    /// Size that the caller expects; a snapshot of another size is refused.
    pub shape: Option<(Vcpus, MemoryMib)>,
    /// Metadata of the VM; empty: those of the snapshot.
    pub metadata: BTreeMap<String, String>,
    /// Origin of requests to registries for a missing image.
    pub origin: PullOrigin,
    /// Sources of the snapshot's volumes on this node, by name; their targets are those of the snapshot.
    pub volumes: Vec<VolumeRequest>,
    /// Identity of the VM.
    pub identity: RestoredIdentity,
    /// Destinations that the VM may reach in addition to those of every VM of the node.
    pub reach: Reach,
}

/// Identity of a restored VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestoredIdentity {
    /// A new identity: the guest gets new names, a new MAC and a new machine id, and the image's post-clone hook runs.
    #[default]
    New,
    /// The identity of the snapshot's VM, which moves here or is woken and must not exist anywhere any more. Name, owner, MAC
    /// and machine id are those of the snapshot, and so is the address if it is free.
    Same,
}

impl Host {
    /// Copies memory and disk of a VM at one instant; the VM continues in its state. When this returns, the snapshot is synced
    /// and stays until it is removed; after a failure nothing is left of it. Cancel-safe: the call runs to completion.
    ///
    /// # Errors
    /// [`HostError::Refused`] unless the VM runs, is paused or hibernated; [`HostError::SnapshotExists`]; [`HostError::Files`]
    /// if the disk is full.
    pub async fn save_snapshot(
        &self,
        vm: &str,
        name: Option<SnapshotName>,
    ) -> Result<SnapshotInfo, HostError> {
        let (host, vm) = (self.clone(), vm.to_owned());
        self.run_to_completion(async move {
            let name = name.unwrap_or_else(|| host.snapshot_name(&vm));
            let part = host.begin_snapshot(name)?;
            host.copy_into(&vm, part).await
        })
        .await
    }

    /// Lists the snapshots of this host, by name.
    ///
    /// # Errors
    /// [`HostError::State`].
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>, HostError> {
        let store = self.snapshot_store();
        state("list the snapshots", files::blocking(move || store.list()).await)
    }

    /// Returns one snapshot.
    ///
    /// # Errors
    /// [`HostError::NoSnapshot`], [`HostError::State`].
    pub async fn snapshot(&self, name: &str) -> Result<SnapshotInfo, HostError> {
        let missing = || HostError::NoSnapshot { name: name.to_owned() };
        let wanted: SnapshotName = name.parse().map_err(|_| missing())?;
        let store = self.snapshot_store();
        let found = files::blocking(move || store.get(&wanted)).await;
        state("read a snapshot", found)?.ok_or_else(missing)
    }

    /// Removes a snapshot. VMs that were restored from it keep running.
    ///
    /// # Errors
    /// Like [`Host::snapshot`].
    pub async fn delete_snapshot(&self, name: &str) -> Result<(), HostError> {
        let missing = || HostError::NoSnapshot { name: name.to_owned() };
        let wanted: SnapshotName = name.parse().map_err(|_| missing())?;
        let store = self.snapshot_store();
        let removed = files::blocking(move || store.remove(&wanted)).await;
        state("remove a snapshot", removed)?.then_some(()).ok_or_else(missing)
    }

    /// Permits VMs of `namespace` to be restored from a snapshot, or revokes that. Idempotent.
    ///
    /// # Errors
    /// Like [`Host::snapshot`]; [`HostError::Invalid`] for an invalid namespace.
    pub async fn share_snapshot(
        &self,
        name: &str,
        namespace: &str,
        granted: bool,
    ) -> Result<SnapshotInfo, HostError> {
        let missing = || HostError::NoSnapshot { name: name.to_owned() };
        let wanted: SnapshotName = name.parse().map_err(|_| missing())?;
        let (store, namespace) = (self.snapshot_store(), namespace.to_owned());
        match files::blocking(move || store.share(&wanted, &namespace, granted)).await {
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                Err(HostError::Invalid { message: e.to_string() })
            }
            shared => state("share a snapshot", shared)?.ok_or_else(missing),
        }
    }

    /// Writes the archive of a snapshot. Occupies a thread until `out` has taken all of it.
    ///
    /// # Errors
    /// Like [`Host::snapshot`].
    pub async fn export_snapshot(
        &self,
        name: &str,
        out: impl io::Write + Send + 'static,
    ) -> Result<(), HostError> {
        let info = self.snapshot(name).await?;
        let store = self.snapshot_store();
        let written = files::blocking(move || archive::write(&store, &info, out)).await;
        state("write the archive of a snapshot", written)
    }

    /// Imports a snapshot from an archive, under `name`, for VMs of `owner`, because an archive has no owner. After a failure
    /// nothing is left of it.
    ///
    /// # Errors
    /// [`HostError::SnapshotExists`]; [`HostError::Archive`] with the defect of the archive.
    pub async fn import_snapshot(
        &self,
        name: SnapshotName,
        owner: Owner,
        input: impl io::Read + Send + 'static,
    ) -> Result<SnapshotInfo, HostError> {
        let part = self.begin_snapshot(name)?;
        let taken = files::blocking(move || {
            let mut info = archive::read(input, &part)?;
            info.owner = owner;
            part.seal(&info)?;
            Ok(info)
        });
        taken.await.map_err(|source| HostError::Archive { source })
    }

    /// Restores a VM from the snapshot, with its own identity, and returns when it runs. After a failure no VM is left.
    /// Cancel-safe: the call runs to completion.
    ///
    /// # Errors
    /// [`HostError::SnapshotNotShared`] if the caller's namespace may not use the snapshot; [`HostError::Incompatible`] with
    /// the difference to this host; as for [`Host::create`] and [`Host::start`].
    pub async fn restore(&self, snapshot: &str, spec: RestoreSpec) -> Result<Record, HostError> {
        let info = self.snapshot(snapshot).await?;
        if !info.admits(&spec.owner) {
            let (name, namespace) = (snapshot.to_owned(), spec.owner.namespace);
            return Err(HostError::SnapshotNotShared { name, namespace });
        }
        let host = self.clone();
        self.run_to_completion(async move {
            let under = host.file_under(&info, spec.origin).await?;
            let mut found = Vec::new();
            for request in &spec.volumes {
                found.push((request.name.clone(), host.inspect_volume(request).await?));
            }
            host.restore_from(&info, &under, spec, &found).await
        })
        .await
    }

    /// Makes `count` VMs that continue from the state of a VM, each with its own identity, named by `prefix` and a number. When
    /// this returns, all of them run; after a failure none is left. Cancel-safe: the call runs to completion.
    ///
    /// # Errors
    /// As for [`Host::save_snapshot`] and [`Host::restore`].
    pub async fn fork(&self, vm: &str, count: u32, prefix: Option<VmName>) -> Result<Vec<Record>, HostError> {
        if !(1..=FORKS_MAX).contains(&count) {
            let message = format!("{count} copies: from 1 to {FORKS_MAX} are made at once");
            return Err(HostError::Invalid { message });
        }
        let record = self.find(vm, Access::Change)?.record.clone();
        let names = self.fork_names(prefix.as_ref().unwrap_or(&record.name), count)?;
        let host = self.clone();
        self.run_to_completion(async move {
            let name = host.snapshot_name(&format!("fork-{}", record.name));
            let info = host.copy_into(record.id.as_str(), host.begin_snapshot(name)?).await?;
            let forked = host.fork_from(&info, names, &record).await;
            if let Err(error) = host.delete_snapshot(info.name.as_str()).await {
                tracing::warn!(snapshot = %info.name, %error, "snapshot of a fork not removed");
            }
            forked
        })
        .await
    }

    async fn fork_from(
        &self,
        info: &SnapshotInfo,
        names: Vec<VmName>,
        Record { volumes, origin, reach, .. }: &Record,
    ) -> Result<Vec<Record>, HostError> {
        let (origin, reach, mut found) = (*origin, *reach, Vec::new());
        for volume in volumes {
            let source = VolumeSource::of(volume).map_err(|source| HostError::State {
                operation: format!("read volume {}", volume.name),
                source,
            })?;
            found.push((volume.name.clone(), source));
        }
        let found = &found;
        let under = self.file_under(info, origin).await?;
        let _shared = match names.len() {
            0 | 1 => None,
            _ => {
                let memory = self.0.snapshots.memory_of(&info.name);
                crate::memory_images::materialize(
                    &self.0.shared.node,
                    &self.0.shared.memory_images,
                    &info.name,
                    self.shape_of(info),
                    &memory,
                )
                .await
            }
        };
        let restored = names.into_iter().map(|name| {
            let spec = RestoreSpec { name: Some(name), origin, reach, ..RestoreSpec::default() };
            self.restore_from(info, &under, spec, found)
        });
        let (mut made, mut failed) = (Vec::new(), None);
        let mut outcomes = stream::iter(restored).buffered(FORKS_AT_ONCE);
        while let Some(outcome) = outcomes.next().await {
            match outcome {
                Ok(record) => made.push(record),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let Some(error) = failed else { return Ok(made) };
        for record in made {
            if let Err(error) = self.delete(record.id.as_str(), true, None).await {
                tracing::warn!(vm = %record.id, %error, "one of several copies not removed");
            }
        }
        Err(error)
    }

    async fn restore_from(
        &self,
        info: &SnapshotInfo,
        under: &Path,
        spec: RestoreSpec,
        found: &[(String, VolumeSource)],
    ) -> Result<Record, HostError> {
        let name = spec.name.clone().unwrap_or_else(|| info.vm.clone());
        if spec.identity == RestoredIdentity::Same && name != info.vm {
            let message = format!("{name} cannot have the identity of {}: leave its name out", info.vm);
            return Err(HostError::Invalid { message });
        }
        if let Some((vcpus, memory)) = spec.shape.filter(|shape| *shape != (info.vcpus, info.memory)) {
            let machine =
                |vcpus: Vcpus, memory: MemoryMib| format!("{} CPUs and {} MiB", vcpus.get(), memory.get());
            let (has, wants) = (machine(info.vcpus, info.memory), machine(vcpus, memory));
            let message =
                format!("snapshot {} is of a machine of {has}, and {name} shall have {wants}", info.name);
            return Err(HostError::Invalid { message });
        }
        self.check_machine(info, &name).await?;
        let Owner { cluster, namespace, name: object, uid, .. } = &spec.owner;
        let id = VmId::of_object(&name, Identity { cluster, namespace, name: object, uid });
        let reservation = self.reserve(&id, &name, info.vcpus, info.memory)?;
        let laid_out = self.lay_out_copy(info, under, (&name, &id), spec, found).await;
        match laid_out.and_then(|record| self.spawn(record.clone()).map(|_| record)) {
            Ok(record) => {
                reservation.keep();
                self.publish_event(EventKind::Created, &record);
            }
            Err(error) => {
                self.undo_creation(&id).await;
                return Err(error);
            }
        }
        match self.start(id.as_str(), None).await {
            Ok(record) => Ok(record),
            Err(error) => {
                if let Err(error) = self.delete(id.as_str(), true, None).await {
                    tracing::warn!(vm = %id, %error, "a copy that did not start is not removed");
                }
                Err(error)
            }
        }
    }

    /// VMM config of the shape that the snapshot was taken of, without anything specific to its VM.
    fn shape_of(&self, info: &SnapshotInfo) -> VmmConfig {
        let shared = &self.0.shared;
        let driver = &info.machine.driver;
        let mut vmm_config =
            of_shape(&shared.node.config, shared.node.accelerator_for(driver, &info.machine));
        let size = info.size_class.unwrap_or(SizeClass { vcpus: info.vcpus, memory: info.memory });
        (vmm_config.vcpus, vmm_config.memory) = (size.vcpus, size.memory);
        if let Some(disk_image_vm) = &info.disk_image_vm {
            vmm_config.machine_type =
                machine_type(disk_image_vm, &VmPaths { state: vmm_config.state_dir.clone() });
        }
        vmm_config.driver = shared.node.driver.named(driver).map(|_| driver.clone()).unwrap_or_default();
        vmm_config
    }

    /// Checks, before anything is made, that this host can load the snapshot's memory.
    async fn check_machine(&self, info: &SnapshotInfo, name: &VmName) -> Result<(), HostError> {
        let shared = &self.0.shared;
        let vmm_config = VmmConfig { nic: None, ..self.shape_of(info) };
        let (name, driver) = (name.to_string(), shared.node.driver_name(&vmm_config.driver));
        let Some(snapshots) = shared.node.driver.snapshots(&vmm_config) else {
            let what = "load the memory of a saved VM";
            return Err(HostError::Unsupported { name, driver, what });
        };
        let here = snapshots.compatibility(&vmm_config).await;
        match info.machine.difference(&here) {
            Some((field, was, is)) => Err(HostError::Incompatible { name, field, saved: was, here: is }),
            None => Ok(()),
        }
    }

    /// Returns the image below the snapshot's disk: by digest, pulled if it is missing.
    pub(super) async fn image_of(&self, info: &SnapshotInfo, origin: PullOrigin) -> Result<Image, HostError> {
        self.image_by_digest(&info.image, &info.image_digest, origin).await
    }

    async fn image_by_digest(
        &self,
        image: &str,
        wanted: &str,
        origin: PullOrigin,
    ) -> Result<Image, HostError> {
        let failed = |source| HostError::Image { reference: image.to_owned(), source };
        if let Ok(digest) = wanted.parse()
            && let Some(image) = self.images().get_by_digest(&digest).await.map_err(failed)?
        {
            return Ok(image);
        }
        let exact = exact_reference(image, wanted);
        let reference: Reference = exact.parse().map_err(|e: OciError| failed(e.into()))?;
        let pulled = self.pull(&reference, (PullPolicy::IfNotPresent, origin), Arc::new(NoProgress)).await?;
        if pulled.digest.to_string() == wanted {
            return Ok(pulled);
        }
        Err(HostError::NoSnapshotImage { image: image.to_owned(), digest: wanted.to_owned() })
    }

    async fn lay_out_copy(
        &self,
        info: &SnapshotInfo,
        under: &Path,
        (name, id): (&VmName, &VmId),
        spec: RestoreSpec,
        found: &[(String, VolumeSource)],
    ) -> Result<Record, HostError> {
        let volumes = self.restored_volumes(info, id, found)?;
        let images = self.restored_images(info, spec.origin).await?;
        let metadata =
            if spec.metadata.is_empty() { inherited_metadata(&info.metadata) } else { spec.metadata };
        let (owner, origin) = (spec.owner, spec.origin);
        // Checked again, because an imported archive may name any path, and a later boot would start that kernel.
        let kernel = match info.kernel.as_ref().and_then(|path| path.to_str()) {
            Some(path) => self.kernel(path)?,
            None => None,
        };
        let lease = self.address_for(id, name, info.address).await?;
        let saved = SavedMemory {
            machine: info.machine.clone(),
            bytes: info.memory_bytes,
            saved_at: info.taken_at,
            of: Some(info.name.clone()),
            same_identity: spec.identity == RestoredIdentity::Same,
            agent: info.agent.clone(),
        };
        let shape = (info.vcpus, info.memory);
        let record = Record {
            hostname: match spec.identity {
                RestoredIdentity::Same if !info.hostname.is_empty() => info.hostname.clone(),
                _ => super::create::hostname(name, &owner),
            },
            owner,
            state: VmState::Hibernated,
            message: format!("made from snapshot {}", info.name),
            image: info.image.clone(),
            image_digest: info.image_digest.clone(),
            rootfs: under.to_owned(),
            kernel,
            disk_mib: info.disk_mib,
            premounted: info.premounted,
            size_class: info.size_class,
            address: lease.map(|lease| lease.address),
            address6: lease.and_then(|lease| lease.address6),
            metadata,
            boots: 1,
            driver: info.machine.driver.clone(),
            saved: Some(saved),
            disk_image_vm: info.disk_image_vm.clone(),
            reach: spec.reach.or(self.config().guest_reach),
            sandbox: info.sandbox.clone(),
            images,
            volumes,
            origin,
            ..Record::new(id.clone(), name.clone(), shape, info.workload.clone(), self.clock().now())
        };
        let (paths, store, snapshot) =
            (VmPaths::of(self.config(), id), self.snapshot_store(), info.name.clone());
        let containers = info.containers.clone();
        let copy = move || copy_files(&paths, &store, &snapshot, &containers, record);
        let failed = |source| HostError::Files { operation: "copy the files", id: id.clone(), source };
        files::blocking(copy).await.map_err(failed)
    }

    /// Volumes of the snapshot on sources of this node, which are claimed for the VM.
    fn restored_volumes(
        &self,
        info: &SnapshotInfo,
        id: &VmId,
        found: &[(String, VolumeSource)],
    ) -> Result<Vec<Volume>, HostError> {
        let invalid = |message| HostError::Invalid { message };
        if let Some((unknown, _)) =
            found.iter().find(|(name, _)| info.volumes.iter().all(|v| v.name != *name))
        {
            return Err(invalid(format!("snapshot {} has no volume {unknown}", info.name)));
        }
        let mut volumes = Vec::new();
        for saved in &info.volumes {
            let missing = || {
                let name = format!("--volume {}=SOURCE", saved.name);
                invalid(format!(
                    "snapshot {} has volumes of the node that it is from: give {name}",
                    info.name
                ))
            };
            // A volume in memory is part of the snapshot.
            let in_memory = match saved.kind {
                VolumeKind::Tmpfs(tmpfs) => Some(VolumeSource::in_memory(tmpfs)),
                _ => None,
            };
            let given = found.iter().find(|(name, _)| *name == saved.name).map(|(_, source)| source);
            let source = in_memory.as_ref().or(given).ok_or_else(missing)?;
            let volume = saved.restored(source.path().to_owned());
            source.check_restored(&volume).map_err(invalid)?;
            self.0.shared.claims.claim(id, &volume, source).map_err(invalid)?;
            volumes.push(volume);
        }
        Ok(volumes)
    }

    /// Images of the snapshot's containers; missing ones are pulled.
    async fn restored_images(
        &self,
        info: &SnapshotInfo,
        origin: PullOrigin,
    ) -> Result<Vec<AttachedImage>, HostError> {
        let mut images = Vec::new();
        for SnapshotImage { reference, digest, layout, slot } in &info.images {
            let image = self.image_by_digest(reference, digest, origin).await?;
            let failed = |source| HostError::Image { reference: reference.clone(), source };
            let rootfs = self.images().rootfs_in(&image, *layout).await.map_err(failed)?.path;
            images.push(AttachedImage { digest: digest.clone(), rootfs, slot: *slot });
        }
        Ok(images)
    }

    /// Leases the address that the snapshot's VM had, if it is free here; else any.
    async fn address_for(
        &self,
        id: &VmId,
        name: &VmName,
        had: Option<Ipv4Addr>,
    ) -> Result<Option<Lease>, HostError> {
        let network = &self.0.shared.node.network;
        let failed = |source| HostError::Network { name: name.to_string(), source };
        network.setup(id, &NetworkRequest::of(MacAddr::of(id))).await.map_err(failed)?;
        let lease = network.lease(id, had).or_else(|_| network.lease(id, None));
        lease.map_err(failed)
    }

    async fn copy_into(&self, vm: &str, part: Part) -> Result<SnapshotInfo, HostError> {
        let handle = self.handle(vm, Access::Change)?;
        let (reply, answer) = oneshot::channel();
        let gone = || HostError::NotFound { name: vm.to_owned() };
        let call = Call::Snapshot { dir: part.dir().to_owned() };
        let request = Request::new(call, ReplyTo::Copy(reply));
        handle.requests.send(Box::new(request)).await.map_err(|_| gone())?;
        let VmCopy { record, containers, saved } = answer.await.map_err(|_| gone())??;
        let sealed = files::blocking(move || {
            let disk_bytes = files::allocated_bytes(&part.dir().join(coracle_snapshot::DISK_FILE));
            let info = SnapshotInfo::of(part.name().clone(), &record, &containers, saved, disk_bytes);
            part.seal(&info)?;
            Ok(info)
        });
        state("put a snapshot into its place", sealed.await)
    }

    pub(super) fn begin_snapshot(&self, name: SnapshotName) -> Result<Part, HostError> {
        let taken = || HostError::SnapshotExists { name: name.to_string() };
        self.0.snapshots.begin(name.clone()).ok_or_else(taken)
    }

    pub(super) fn snapshot_store(&self) -> SnapshotStore {
        self.0.snapshots.clone()
    }

    /// Default name of a snapshot: the VM's name and the time, so that names are unique enough and sorted.
    fn snapshot_name(&self, vm: &str) -> SnapshotName {
        let name =
            self.find(vm, Access::Change).map_or_else(|_| vm.to_owned(), |view| view.record.name.to_string());
        SnapshotName::made_of(&name, &format!("{:x}", self.clock().now().0))
    }

    /// Names for forks that no VM has.
    fn fork_names(&self, prefix: &VmName, count: u32) -> Result<Vec<VmName>, HostError> {
        let known: HashSet<VmName> = self.list().iter().map(|view| view.record.name.clone()).collect();
        let free = (1u32..).map(|n| numbered_name(prefix, n));
        let free = free.filter(|name| name.as_ref().map_or(true, |name| !known.contains(name)));
        free.take(usize::try_from(count).unwrap_or(usize::MAX)).collect()
    }
}

fn state<T>(operation: &str, result: io::Result<T>) -> Result<T, HostError> {
    result.map_err(|source| HostError::State { operation: operation.to_owned(), source })
}

/// Copies the files of a restored VM. The record is written last: a directory without one is a leftover.
fn copy_files(
    paths: &VmPaths,
    store: &SnapshotStore,
    snapshot: &SnapshotName,
    containers: &[ContainerRecord],
    record: Record,
) -> io::Result<Record> {
    let overlay = paths.own_disk(&record);
    for dir in [overlay.parent(), Some(paths.saved().as_path())].into_iter().flatten() {
        std::fs::create_dir_all(dir)?;
    }
    std::fs::hard_link(store.memory_of(snapshot), paths.saved_memory())?;
    files::copy_sparse(&store.disk_of(snapshot), &overlay)?;
    std::fs::File::open(&overlay)?.sync_all()?;
    std::fs::create_dir_all(paths.containers())?;
    for container in containers {
        container.save(&paths.containers().join(format!("{}.json", container.id)))?;
    }
    for volume in record.volumes.iter().filter(|volume| volume.kind == VolumeKind::SharedDir) {
        let table = paths.folder_table(&volume.name);
        table.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        coracle_share::begin_copied_table(&table)?;
    }
    record.save(&paths.record())?;
    files::sync_parent(&paths.state)?;
    Ok(record)
}

/// Returns `prefix-number`, with the prefix cut so that the name is a valid host name.
fn numbered_name(prefix: &VmName, number: u32) -> Result<VmName, HostError> {
    let number = number.to_string();
    let room = HOSTNAME_MAX.saturating_sub(number.len() + 1);
    let prefix: String = prefix.as_str().chars().take(room).collect();
    let invalid = |e: InvalidVmName| HostError::Invalid { message: e.to_string() };
    format!("{}-{number}", prefix.trim_end_matches('-')).parse().map_err(invalid)
}

/// Metadata that a restored VM inherits from its snapshot. The annotations that push an image or remove the VM are dropped: the
/// maker of the snapshot must not decide what this node pushes, and no command owns the copy.
fn inherited_metadata(metadata: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let own = [COMMIT_ANNOTATION, REMOVE_ANNOTATION];
    let kept = metadata.iter().filter(|(key, _)| !own.contains(&key.as_str()));
    kept.map(|(key, value)| (key.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_names_are_numbered_and_bounded() {
        let numbered = |prefix: &str, n| numbered_name(&prefix.parse().unwrap(), n).unwrap().to_string();
        assert_eq!(numbered("web", 3), "web-3");
        assert_eq!(numbered(&"a".repeat(253), 64).len(), HOSTNAME_MAX);
    }

    #[test]
    fn snapshot_drops_the_commit_annotation() {
        let words = [(COMMIT_ANNOTATION, "elsewhere.example/stolen"), ("team", "ml")];
        let words = words.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        assert_eq!(inherited_metadata(&words), [("team".to_owned(), "ml".to_owned())].into());
    }

    #[test]
    fn image_reference_is_pinned_to_its_digest() {
        for (reference, want) in [
            ("nginx:1.27", "nginx@sha256:0"),
            ("localhost:5000/a/b", "localhost:5000/a/b@sha256:0"),
            ("localhost:5000/a/b:1", "localhost:5000/a/b@sha256:0"),
            ("a@sha256:1", "a@sha256:0"),
        ] {
            assert_eq!(exact_reference(reference, "sha256:0"), want);
        }
    }
}

//! Executes steps on the host core. All decisions were made in the plan.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use coracle_api::cocoon::{Backend, fork_snapshot, hibernate_import};
use coracle_host::{
    Access, Fault, Host, HostError, Owner, PullOrigin, PullPolicy, RestoreSpec, RestoredIdentity,
    SnapshotInfo, SnapshotName, VmSpec,
};
use coracle_image::{ImageError, PublicKeys, PullOptions};
use coracle_oci::{NoProgress, OciError, Reference};
use coracle_pod::ImageKeys;
use coracle_pod::host::PodId;
use coracle_types::{MemoryMib, VmName};
use k8s_openapi::api::core::v1::Pod;

use crate::exported::{Archive, ExportedSnapshots};
use crate::facts::{Saved, Source, Wanted};
use crate::metrics::Metrics;
use crate::pod::{self, VmRequest};
use crate::saved::{Registry, local_name};
use crate::step::{Purpose, Step};

/// Metadata of a VM that was created for a pod: uid and namespace of the pod, and whether the VM was woken from a hibernation.
pub(crate) mod key {
    pub(crate) const UID: &str = "coracle.dev/vm-pod-uid";
    pub(crate) const NAMESPACE: &str = "coracle.dev/vm-pod-namespace";
    pub(crate) const WOKEN: &str = "coracle.dev/vm-pod-woken";
}

/// Error of a step: the reason and message in the pod's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StepError {
    /// Reason: one word.
    pub(crate) reason: &'static str,
    /// Message: one line.
    pub message: String,
}

impl StepError {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    fn of(reason: &'static str) -> impl Fn(HostError) -> Self {
        move |error| Self::new(reason, error.chain())
    }
}

/// Executor of the steps of one pod on the host core.
pub(crate) struct Executor {
    pub(crate) host: Host,
    pub(crate) pod: PodId,
    pub(crate) registry: Option<Registry>,
    /// File with the leases of a DHCP server of this node.
    pub(crate) leases: Option<std::path::PathBuf>,
    /// Exported snapshots that pods may name by their directory.
    pub(crate) exported: ExportedSnapshots,
    /// Memory of a VM whose pod requests none.
    pub(crate) default_memory: MemoryMib,
    /// Keys that must have signed the pod's images, and the images that its snapshots were made from.
    pub(crate) image_keys: ImageKeys,
    pub(crate) metrics: Metrics,
}

impl Executor {
    /// Executes a step on the host core or the registry. `FindSaved` returns what it found.
    pub(crate) async fn run(
        &self,
        step: &Step,
        object: &Pod,
        wanted: &Wanted,
    ) -> Result<Option<Saved>, StepError> {
        let vm = &wanted.vm;
        match step {
            Step::FindSaved => return self.find_saved(vm).await.map(Some),
            Step::PullImage => self.pull_image(object, wanted).await?,
            Step::Run => self.create(object, wanted).await?,
            Step::PullSnapshot => self.pull_snapshot(wanted).await?,
            Step::ImportExported => self.import_exported(wanted).await?,
            Step::Clone => self.copy_of(&self.clone_source(wanted).await?, wanted).await?,
            Step::SaveForkSource => self.save_fork_source(wanted).await?,
            Step::Fork => self.copy_of(&fork_source(wanted)?, wanted).await?,
            Step::Start => self.start(vm).await?,
            Step::Resume => {
                let resumed = self.host.resume(vm.as_str(), None).await;
                resumed.map(drop).map_err(StepError::of("ResumeFailed"))?;
            }
            Step::Hibernate => {
                let slept = self.host.hibernate(vm.as_str(), None).await;
                slept.map(drop).map_err(StepError::of("SaveFailed"))?;
            }
            Step::Copy(purpose) => self.copy(vm, *purpose).await?,
            Step::Push(purpose) => self.push(vm, *purpose).await?,
            Step::Import => self.import(vm).await?,
            Step::Wake => {
                self.restore(&hibernate_import(vm.as_str()), wanted, RestoredIdentity::Same).await?;
                self.remove_import(vm).await;
            }
            Step::DropSaved => {
                let reference = self.saved_reference(vm, Purpose::Hibernation)?;
                let dropped = self.host.delete_remote_snapshot(&reference).await;
                dropped.map_err(StepError::of("RegistryUnavailable"))?;
            }
            Step::RemoveVm { keep_copy } => self.remove_vm(vm, *keep_copy).await?,
            // Steps that concern the object, not the VM.
            Step::Note(_) | Step::Finish(_) => {}
        }
        Ok(None)
    }

    fn saved_reference(&self, vm: &VmName, purpose: Purpose) -> Result<Reference, StepError> {
        let registry = self.registry.as_ref();
        let registry = registry.ok_or_else(|| StepError::new("NoRegistry", "this node has no registry"))?;
        registry.saved_reference(vm, purpose).map_err(|why| StepError::new("InvalidName", why))
    }

    async fn find_saved(&self, vm: &VmName) -> Result<Saved, StepError> {
        let reference = self.saved_reference(vm, Purpose::Hibernation)?;
        match self.host.remote_snapshot(&reference).await {
            Ok(None) => Ok(Saved::Absent),
            Ok(Some(info)) => {
                let of = |name: &str| info.metadata.get(name).map(String::as_str).unwrap_or_default();
                match of(key::NAMESPACE) {
                    "" => Ok(Saved::Foreign("no pod saved it".to_owned())),
                    namespace if namespace != self.pod.namespace => {
                        Ok(Saved::Foreign(format!("it was saved in namespace {namespace}")))
                    }
                    _ => Ok(Saved::Own { same_pod: of(key::UID) == self.pod.uid }),
                }
            }
            Err(error @ HostError::Archive { .. }) => Ok(Saved::Foreign(error.chain())),
            Err(HostError::Image { source: ImageError::Oci(OciError::Unsupported { what }), .. }) => {
                Ok(Saved::Foreign(what))
            }
            Err(error) => Err(StepError::new("RegistryUnavailable", error.chain())),
        }
    }

    pub(crate) fn owner(&self) -> Owner {
        Owner {
            namespace: self.pod.namespace.clone(),
            name: self.pod.name.clone(),
            uid: self.pod.uid.clone(),
            ..Owner::default()
        }
    }

    fn metadata(&self, is_woken: bool) -> BTreeMap<String, String> {
        let own = [(key::UID, self.pod.uid.clone()), (key::NAMESPACE, self.pod.namespace.clone())];
        let woken = is_woken.then(|| (key::WOKEN, "true".to_owned()));
        own.into_iter().chain(woken).map(|(key, value)| (key.to_owned(), value)).collect()
    }

    async fn pull_image(&self, object: &Pod, wanted: &Wanted) -> Result<(), StepError> {
        let Source::Run { image } = &wanted.source else { return Ok(()) };
        let invalid = |error| StepError::new("InvalidImageName", format!("invalid image {image:?}: {error}"));
        let reference: Reference = image.parse().map_err(invalid)?;
        let request = vm_request_of(object)?;
        let policy = if request.pulls_always { PullPolicy::Always } else { PullPolicy::IfNotPresent };
        let pulled =
            self.host.ensure_image(&reference, (policy, PullOrigin::Cluster), Arc::new(NoProgress)).await;
        let image = pulled.map_err(StepError::of("ErrImagePull"))?;
        let Some(keys) = self.image_keys()? else { return Ok(()) };
        let options = PullOptions { origin: PullOrigin::Cluster, ..PullOptions::default() };
        let verified = self.host.verify_image(&reference, &image, &keys, &options).await;
        verified.map_err(StepError::of("ErrImagePull"))
    }

    fn image_keys(&self) -> Result<Option<PublicKeys>, StepError> {
        self.image_keys.now().map_err(|why| StepError::new("ErrImagePull", why))
    }

    /// Restores a VM from a snapshot, which may be of another VM, so that its image is verified. A VM's own saved state was
    /// verified when the VM was created.
    async fn copy_of(&self, snapshot: &str, wanted: &Wanted) -> Result<(), StepError> {
        if let Some(keys) = self.image_keys()? {
            let verified = self.host.verify_snapshot(snapshot, &keys, PullOrigin::Cluster).await;
            verified.map_err(StepError::of("CloneFailed"))?;
        }
        self.restore(snapshot, wanted, RestoredIdentity::New).await
    }

    async fn create(&self, object: &Pod, wanted: &Wanted) -> Result<(), StepError> {
        let Source::Run { image } = &wanted.source else { return Ok(()) };
        let request = vm_request_of(object)?;
        let spec = VmSpec {
            owner: self.owner(),
            origin: PullOrigin::Cluster,
            vcpus: request.vcpus,
            memory: request.memory.unwrap_or(self.default_memory),
            disk_mib: request.disk_mib,
            driver: self.driver(request.backend),
            network: request.network,
            metadata: self.metadata(false),
            // As in every Kubernetes cluster, pods reach each other and their node.
            reach: crate::REACH,
            idempotent: true,
            ..VmSpec::of(wanted.vm.clone(), image)
        };
        let began = Instant::now();
        let made = self.host.create(spec, Arc::new(NoProgress)).await;
        made.map_err(StepError::of("CreateFailed"))?;
        self.start(&wanted.vm).await?;
        self.metrics.observe_boot(wanted.source.mode(), began.elapsed());
        Ok(())
    }

    /// Returns the requested hypervisor, if this node has it; else an empty name, which stands for the default one.
    fn driver(&self, backend: Option<Backend>) -> String {
        let able = |name: &str| {
            self.host.probes().iter().any(|(known, probe)| *known == name && probe.accelerator.is_some())
        };
        let wanted = backend.map(Backend::as_str).filter(|name| able(name));
        wanted.unwrap_or_default().to_owned()
    }

    async fn start(&self, vm: &VmName) -> Result<(), StepError> {
        self.host.start(vm.as_str(), None).await.map(drop).map_err(StepError::of("StartFailed"))
    }

    async fn pull_snapshot(&self, wanted: &Wanted) -> Result<(), StepError> {
        let Source::Clone { snapshot } = &wanted.source else { return Ok(()) };
        let Some(registry) = &self.registry else {
            let message = format!("snapshot {snapshot} is not on this node, which has no registry");
            return Err(StepError::new("ErrSnapshotPull", message));
        };
        let reference = registry.snapshot(snapshot);
        let reference = reference.map_err(|why| StepError::new("InvalidImageName", why))?;
        self.pull(&reference, &local_name(snapshot)).await
    }

    /// Pulls a snapshot for VMs of this namespace. Refuses if this node has a different snapshot of the same name.
    async fn pull(&self, reference: &Reference, name: &str) -> Result<(), StepError> {
        let failed = StepError::of("ErrSnapshotPull");
        let there = self.host.remote_snapshot(reference).await.map_err(&failed)?;
        let there =
            there.ok_or_else(|| StepError::new("ErrSnapshotPull", format!("no snapshot {reference}")))?;
        self.check_saved_here(&there.metadata, reference)?;
        if let Ok(here) = self.host.snapshot(name).await
            && (here.taken_at, &here.image_digest) != (there.taken_at, &there.image_digest)
        {
            let message =
                format!("snapshot {name} of this node is another one, and not shared with this namespace");
            return Err(StepError::new("SnapshotNotShared", message));
        }
        let local = snapshot_name(name)?;
        let began = Instant::now();
        let pulled = self.host.pull_snapshot(reference, local, Arc::new(|_, _| {})).await;
        self.metrics.observe_pull(pulled.is_ok(), began.elapsed());
        self.share_taken(pulled, name).await
    }

    /// Refuses a snapshot that a pod of another namespace saved: it contains the memory of a guest, secrets included.
    fn check_saved_here(
        &self,
        metadata: &BTreeMap<String, String>,
        snapshot: &dyn std::fmt::Display,
    ) -> Result<(), StepError> {
        let saved_in = metadata.get(key::NAMESPACE).map(String::as_str).unwrap_or_default();
        if saved_in.is_empty() || saved_in == self.pod.namespace {
            return Ok(());
        }
        let message = format!("snapshot {snapshot} was saved in namespace {saved_in}");
        Err(StepError::new("SnapshotNotShared", message))
    }

    /// Shares a pulled or imported snapshot with this namespace.
    async fn share_taken(&self, taken: Result<SnapshotInfo, HostError>, name: &str) -> Result<(), StepError> {
        let failed = StepError::of("ErrSnapshotPull");
        let here = match taken {
            Ok(here) => here,
            // Another pod has pulled or imported the snapshot.
            Err(HostError::SnapshotExists { .. }) => self.host.snapshot(name).await.map_err(&failed)?,
            Err(error) => return Err(failed(error)),
        };
        self.check_saved_here(&here.metadata, &name)?;
        let shared = self.host.share_snapshot(name, &self.pod.namespace, true).await;
        shared.map(drop).map_err(failed)
    }

    /// Imports the exported snapshot from the directory that the pod names.
    async fn import_exported(&self, wanted: &Wanted) -> Result<(), StepError> {
        let archive = self.archive(wanted).await?;
        let name = archive.name.to_string();
        let imported = self.host.import_snapshot(archive.name, Owner::default(), archive.file).await;
        self.share_taken(imported, &name).await
    }

    async fn archive(&self, wanted: &Wanted) -> Result<Archive, StepError> {
        let Source::Exported { dir } = &wanted.source else {
            return Err(StepError::new("CloneFailed", "the pod names no directory"));
        };
        let (exported, dir) = (self.exported.clone(), dir.clone());
        let opened = tokio::task::spawn_blocking(move || exported.open(&dir)).await;
        let opened = opened.unwrap_or_else(|error| Err(error.to_string()));
        opened.map_err(|why| StepError::new("ErrSnapshotPull", why))
    }

    /// Returns the name on this node of the snapshot to clone. The snapshot may not exist yet.
    pub(crate) async fn clone_source(&self, wanted: &Wanted) -> Result<String, StepError> {
        match &wanted.source {
            Source::Clone { snapshot } => Ok(local_name(snapshot)),
            Source::Exported { .. } => Ok(self.archive(wanted).await?.name.to_string()),
            _ => Err(StepError::new("CloneFailed", "the pod names no snapshot")),
        }
    }

    async fn restore(
        &self,
        snapshot: &str,
        wanted: &Wanted,
        identity: RestoredIdentity,
    ) -> Result<(), StepError> {
        let spec = RestoreSpec {
            name: Some(wanted.vm.clone()),
            owner: self.owner(),
            metadata: self.metadata(identity == RestoredIdentity::Same),
            origin: PullOrigin::Cluster,
            identity,
            reach: crate::REACH,
            ..RestoreSpec::default()
        };
        let began = Instant::now();
        let restored = self.host.restore(snapshot, spec).await;
        restored.map_err(StepError::of("CloneFailed"))?;
        self.metrics.observe_boot(wanted.source.mode(), began.elapsed());
        Ok(())
    }

    /// Copies the source VM of a fork into a snapshot. Replaces an older copy.
    async fn save_fork_source(&self, wanted: &Wanted) -> Result<(), StepError> {
        let Source::Fork { from } = &wanted.source else { return Ok(()) };
        self.save_as(from, &fork_snapshot(from.as_str())).await
    }

    async fn copy(&self, vm: &VmName, purpose: Purpose) -> Result<(), StepError> {
        self.save_as(vm, &copy_name(vm, purpose)).await
    }

    async fn save_as(&self, vm: &VmName, name: &str) -> Result<(), StepError> {
        let local = snapshot_name(name)?;
        if let Ok(old) = self.host.snapshot(name).await {
            if !self.is_of_namespace(&old) {
                let message = format!("snapshot {name} of this node belongs to others");
                return Err(StepError::new("SaveFailed", message));
            }
            self.remove_copy(name).await;
        }
        let began = Instant::now();
        let saved = self.host.save_snapshot(vm.as_str(), Some(local)).await;
        self.metrics.observe_save(saved.is_ok(), began.elapsed());
        saved.map(drop).map_err(StepError::of("SaveFailed"))
    }

    async fn push(&self, vm: &VmName, purpose: Purpose) -> Result<(), StepError> {
        let reference = self.saved_reference(vm, purpose)?;
        let began = Instant::now();
        let name = copy_name(vm, purpose);
        let pushed = self.host.push_snapshot(&name, &reference, Arc::new(|_, _| {})).await;
        self.metrics.observe_push(pushed.is_ok(), began.elapsed());
        pushed.map(drop).map_err(StepError::of("PushFailed"))
    }

    async fn import(&self, vm: &VmName) -> Result<(), StepError> {
        let reference = self.saved_reference(vm, Purpose::Hibernation)?;
        // An earlier import may be older than the saved state.
        self.remove_import(vm).await;
        self.pull(&reference, &hibernate_import(vm.as_str())).await
    }

    async fn remove_vm(&self, vm: &VmName, keep_copy: bool) -> Result<(), StepError> {
        match self.host.delete(vm.as_str(), true, None).await {
            Err(error) if error.fault() != Fault::NotFound => {
                return Err(StepError::new("RemoveFailed", error.chain()));
            }
            _ => {}
        }
        self.remove_copy(&fork_snapshot(vm.as_str())).await;
        self.remove_copy(&copy_name(vm, Purpose::Hibernation)).await;
        if !keep_copy {
            self.remove_copy(&copy_name(vm, Purpose::Deletion)).await;
        }
        Ok(())
    }

    /// Returns whether a snapshot was saved from a VM of this namespace. Pulled snapshots have no owner, and other pods may
    /// need them.
    fn is_of_namespace(&self, info: &SnapshotInfo) -> bool {
        info.owner.namespace == self.pod.namespace
    }

    /// Removes a snapshot if it was saved in this namespace.
    async fn remove_copy(&self, name: &str) {
        if self.host.snapshot(name).await.is_ok_and(|info| self.is_of_namespace(&info)) {
            self.remove_snapshot(name).await;
        }
    }

    /// Removes the imported snapshot that a VM was woken from, if it exists.
    async fn remove_import(&self, vm: &VmName) {
        let name = hibernate_import(vm.as_str());
        if self.host.snapshot(&name).await.is_ok_and(|info| info.admits(&self.owner())) {
            self.remove_snapshot(&name).await;
        }
    }

    /// Removes a snapshot. A snapshot that cannot be removed is replaced the next time.
    async fn remove_snapshot(&self, name: &str) {
        if let Err(error) = self.host.delete_snapshot(name).await {
            tracing::warn!(snapshot = name, error = error.chain(), "remove a snapshot failed");
        }
    }

    /// Returns the VM with this name or id, if it exists.
    pub(crate) fn view(&self, vm: &str) -> Option<Arc<coracle_host::View>> {
        self.host.find(vm, Access::Change).ok()
    }
}

/// Returns the name of a VM's snapshot on this node. The snapshot of a deletion has the VM's own name, by which it can be
/// cloned.
fn copy_name(vm: &VmName, purpose: Purpose) -> String {
    match purpose {
        Purpose::Hibernation => format!("{vm}-hibernate"),
        Purpose::Deletion => vm.to_string(),
    }
}

fn fork_source(wanted: &Wanted) -> Result<String, StepError> {
    match &wanted.source {
        Source::Fork { from } => Ok(fork_snapshot(from.as_str())),
        _ => Err(StepError::new("CloneFailed", "the pod names no VM to fork")),
    }
}

fn snapshot_name(name: &str) -> Result<SnapshotName, StepError> {
    name.parse().map_err(|error| StepError::new("InvalidName", format!("{error}")))
}

fn vm_request_of(object: &Pod) -> Result<VmRequest, StepError> {
    pod::vm_request(object).map_err(|why| StepError::new("InvalidResources", why))
}

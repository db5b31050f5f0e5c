//! Creates VMs: from the request of a caller to a VM on disk.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use coracle_hypervisor::{Display, Driver as _, Forward};
use coracle_image::{Image, PublicKeys, PullOptions, PullPolicy};
use coracle_net::{Bandwidth, NetworkRequest, Reach};
use coracle_oci::{Progress, PullOrigin, Reference};
use coracle_types::{Identity, MacAddr, MemoryMib, SizeClass, Vcpus, VmId, VmName};
use tokio::sync::oneshot;

use super::resolve_image::ResolvedImage;
use super::{Access, Host};
use crate::commit_annotation::commit_request;
use crate::own_volumes::{self, OwnContent, OwnFile, OwnVolume, class_dirs, remove_class_dirs};
use crate::temporary::RemoveWhen;
use crate::vmm_config::{VmPaths, check_kernel, of_shape};
use crate::volumes::VolumeSource;
use crate::{
    BootFirmware, EventKind, HostError, HostEvent, Owner, Record, View, VolumeRequest, Workload, files,
};
use coracle_record::{Resolver, Sandbox};

/// Request for a VM.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// Name of the VM.
    pub name: VmName,
    /// Object on whose behalf the VM is created.
    pub owner: Owner,
    /// Image reference.
    pub image: String,
    /// When to pull the image.
    pub pull: PullPolicy,
    /// Origin of the request to the registry.
    pub origin: PullOrigin,
    /// Whether the image is present and [`Host::ensure_image_as`] has permitted the caller to use it.
    pub may_use_image: bool,
    /// Keys of which one must have signed the image; `None`: no signature is needed.
    pub image_keys: Option<PublicKeys>,
    /// Number of vCPUs.
    pub vcpus: Vcpus,
    /// Guest memory.
    pub memory: MemoryMib,
    /// Kernel path; empty: the default.
    pub kernel_path: String,
    /// Requested address.
    pub address: Option<Ipv4Addr>,
    /// Name of the VM's CNI network; `None`: the node's default. Nodes without CNI have one network and ignore the name.
    pub network: Option<String>,
    /// Traffic limits of the VM, if its CNI network has a plugin for them; ignored elsewhere.
    pub bandwidth: Option<Bandwidth>,
    /// Host name; empty: the name of the owner's object, else of the VM.
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
    /// Metadata of the VM, returned unchanged.
    pub metadata: BTreeMap<String, String>,
    /// Ports of the node that are forwarded to the VM.
    pub ports: Vec<Forward>,
    /// Destinations that the VM may reach in addition to those of every VM of the node.
    pub reach: Reach,
    /// Cgroup of the VM's pod, below which the VMM is placed; empty: that of the node.
    pub cgroup_parent: String,
    /// Size of the writable disk; `None`: the node's default.
    pub disk_mib: Option<u64>,
    /// Whether creating an identical VM again succeeds.
    pub idempotent: bool,
    /// Whether every start is a cold boot, even if a template could be cloned.
    pub cold: bool,
    /// Name of the VM's driver; empty: the node's default.
    pub driver: String,
    /// Disks and directories in addition to the VM's own disk.
    pub volumes: Vec<VolumeRequest>,
    /// Makes the VM a pod sandbox, without an image; its containers are created later.
    pub sandbox: Option<Sandbox>,
    /// Disks and directories that belong to the VM.
    pub own_volumes: Vec<OwnVolume>,
    /// SSH public keys that may log in: as root in a container image, as cloud-init's default user in a disk image.
    pub ssh_keys: Vec<String>,
    /// Firmware for a disk image; `None`: the one that the image needs.
    pub firmware: Option<BootFirmware>,
    /// User data of a disk image VM, for cloud-init or another reader of NoCloud seeds. May be empty.
    pub user_data: String,
    /// Resolver of a disk image VM; `None`: that of the node.
    pub resolver: Option<Resolver>,
    /// Display of a disk image VM; `None`: no display.
    pub display: Option<Display>,
    /// Whether a disk image VM counts as running as soon as its VMM runs, because its system has no guest agent (yet).
    pub without_agent: bool,
    /// VM whose address, MAC and ports this VM uses. The two must not run at the same time.
    pub address_of: Option<VmName>,
}

impl VmSpec {
    /// Minimal spec: no owner, smallest size, the command of the image, and an image of this node.
    #[must_use]
    pub fn of(name: VmName, image: &str) -> Self {
        Self {
            name,
            owner: Owner::default(),
            image: image.to_owned(),
            pull: PullPolicy::Never,
            origin: PullOrigin::Local,
            may_use_image: false,
            image_keys: None,
            vcpus: Vcpus::MIN,
            memory: MemoryMib::MIN,
            kernel_path: String::new(),
            address: None,
            network: None,
            bandwidth: None,
            hostname: String::new(),
            command: vec![],
            args: vec![],
            env: vec![],
            user: String::new(),
            workdir: String::new(),
            metadata: BTreeMap::new(),
            ports: vec![],
            reach: Reach::default(),
            cgroup_parent: String::new(),
            disk_mib: None,
            idempotent: false,
            cold: false,
            driver: String::new(),
            volumes: vec![],
            sandbox: None,
            own_volumes: vec![],
            ssh_keys: vec![],
            firmware: None,
            user_data: String::new(),
            resolver: None,
            display: None,
            without_agent: false,
            address_of: None,
        }
    }
}

impl Host {
    /// Creates a VM. When this returns, the VM is on disk and stays until it is deleted; after a failure nothing is left.
    /// Idempotent with [`VmSpec::idempotent`]. Cancel-safe: the call runs to completion.
    ///
    /// # Errors
    /// [`HostError::AlreadyExists`], [`HostError::Invalid`], [`HostError::Kernel`],
    /// [`HostError::Image`], [`HostError::NoCapacity`], [`HostError::Network`], [`HostError::Files`].
    pub async fn create(&self, spec: VmSpec, progress: Arc<dyn Progress>) -> Result<Record, HostError> {
        let host = self.clone();
        self.run_to_completion(async move { host.create_vm(spec, progress).await }).await
    }

    /// Runs `work` in a task of the host, which completes even if the caller is dropped.
    pub(super) async fn run_to_completion<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, HostError>> + Send + 'static,
    ) -> Result<T, HostError> {
        let (reply, answer) = oneshot::channel();
        self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(async move {
            let _caller_gone = reply.send(work.await);
        });
        answer.await.unwrap_or(Err(HostError::Stopping))
    }

    async fn create_vm(&self, spec: VmSpec, progress: Arc<dyn Progress>) -> Result<Record, HostError> {
        if let Some(existing) = self.find_existing(&spec)? {
            return Ok(existing);
        }
        self.check_driver(&spec.driver)?;
        commit_request(&spec.metadata)?;
        RemoveWhen::of(&spec.metadata)?;
        own_volumes::check(self.config(), &spec.own_volumes)?;
        let kernel = self.kernel(&spec.kernel_path)?;
        let image = self.resolve_image(&spec, progress).await?;
        let mut found = Vec::new();
        for request in &spec.volumes {
            found.push(self.inspect_volume(request).await?);
        }
        let owner = &spec.owner;
        let identity = Identity {
            cluster: &owner.cluster,
            namespace: &owner.namespace,
            name: &owner.name,
            uid: &owner.uid,
        };
        let id = VmId::of_object(&spec.name, identity);
        let reservation = self.reserve(&id, &spec.name, spec.vcpus, spec.memory)?;
        let result = self.provision(spec, id.clone(), image, kernel, &found).await;
        match result.and_then(|record| self.spawn(record.clone()).map(|_| record)) {
            Ok(record) => {
                reservation.keep();
                self.publish_event(EventKind::Created, &record);
                Ok(record)
            }
            Err(error) => {
                self.undo_creation(&id).await;
                Err(error)
            }
        }
    }

    /// Checks that the driver is usable on this node and supports its network; the error names usable drivers.
    fn check_driver(&self, name: &str) -> Result<(), HostError> {
        if name.is_empty() {
            return Ok(());
        }
        let refused = |message: String| Err(HostError::Invalid { message });
        let probes = self.probes();
        let able = || -> Vec<&str> {
            probes.iter().filter(|(_, probe)| probe.accelerator.is_some()).map(|(name, _)| *name).collect()
        };
        let Some((_, probe)) = probes.iter().find(|(known, _)| *known == name) else {
            return refused(format!("no driver {name} on this node; there is: {}", able().join(", ")));
        };
        if probe.accelerator.is_none() {
            let why = &probe.reason;
            return refused(format!(
                "driver {name} cannot be used on this node: {why}; there is: {}",
                able().join(", ")
            ));
        }
        let shared = &self.0.shared;
        let mut shape = of_shape(&shared.node.config, shared.node.accelerator(name));
        shape.driver = name.to_owned();
        if !shared.node.network.gives_addresses() && !shared.node.driver.has_user_network(&shape) {
            return refused(format!(
                "driver {name} needs a tap device, and guests of this node have a network inside the VMM: start the \
                 node as root, or use the driver qemu"
            ));
        }
        Ok(())
    }

    pub(super) fn publish_event(&self, kind: EventKind, record: &Record) {
        let event = HostEvent { kind, record: Arc::new(record.clone()), time: self.clock().now() };
        let _no_watcher = self.0.shared.events.send(event);
    }

    /// Removes every trace of a VM whose creation was not acknowledged.
    pub(super) async fn undo_creation(&self, id: &VmId) {
        let network = &self.0.shared.node.network;
        network.release(id);
        if let Err(error) = network.remove(id).await {
            tracing::warn!(vm = %id, %error, "remove the network of a VM failed");
        }
        self.0.shared.claims.release_all(id);
        let _leave_nothing = files::remove_tree(&VmPaths::of(self.config(), id).state);
        let _leave_nothing = remove_class_dirs(&class_dirs(self.config(), id));
    }

    fn find_existing(&self, spec: &VmSpec) -> Result<Option<Record>, HostError> {
        let Some(view) = self.named(&spec.name) else { return Ok(None) };
        let record = &view.record;
        let same = record.owner.uid == spec.owner.uid
            && record.image == spec.image
            && record.vcpus == spec.vcpus
            && record.memory == spec.memory;
        if spec.idempotent && same {
            return Ok(Some(Record::clone(record)));
        }
        Err(HostError::AlreadyExists { name: spec.name.to_string(), uid: record.owner.uid.clone() })
    }

    pub(super) fn kernel(&self, path: &str) -> Result<Option<PathBuf>, HostError> {
        if path.is_empty() {
            return Ok(None);
        }
        check_kernel(&self.config().kernel_dirs, path)
            .map(Some)
            .map_err(|why| HostError::Kernel { path: path.to_owned(), why })
    }

    /// Pulls an image into the store.
    ///
    /// # Errors
    /// [`HostError::Image`].
    pub async fn pull(
        &self,
        reference: &Reference,
        (policy, origin): (PullPolicy, PullOrigin),
        progress: Arc<dyn Progress>,
    ) -> Result<Image, HostError> {
        let options = PullOptions { policy, origin, ..PullOptions::default() };
        self.pull_as(reference, &options, progress).await
    }

    pub(super) async fn pull_as(
        &self,
        reference: &Reference,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, HostError> {
        self.0
            .images
            .pull(reference, options, progress)
            .await
            .map_err(|source| HostError::Image { reference: reference.to_string(), source })
    }

    async fn provision(
        &self,
        spec: VmSpec,
        id: VmId,
        image: ResolvedImage,
        kernel: Option<PathBuf>,
        found: &[VolumeSource],
    ) -> Result<Record, HostError> {
        let lender = spec.address_of.as_ref().map(|name| self.borrow_address(name, &id)).transpose()?;
        let wanted = lender.as_ref().map_or(spec.address, |lender| lender.record.address);
        let mac = lender.as_ref().map_or_else(|| MacAddr::of(&id), |lender| lender.record.mac);
        let request = NetworkRequest {
            network: spec.network.clone(),
            mac,
            address: wanted,
            address6: lender.as_ref().and_then(|lender| lender.record.address6),
            ports: spec.ports.clone(),
            bandwidth: spec.bandwidth,
        };
        let made = self.0.shared.node.network.setup(&id, &request).await;
        made.map_err(|source| HostError::Network { name: spec.name.to_string(), source })?;
        let lease = self.0.shared.node.network.lease(&id, wanted);
        let lease = lease.map_err(|source| HostError::Network { name: spec.name.to_string(), source })?;
        let claimed = self.0.shared.node.network.claim_ports(&id, &spec.ports);
        claimed.map_err(|source| HostError::Network { name: spec.name.to_string(), source })?;
        let own = self.own_volumes(&id, &spec, image.disk_image_vm.is_none()).await?;
        let wanted =
            spec.volumes.iter().zip(found).chain(own.iter().map(|(request, found)| (request, found)));
        let volumes = self.claim_volumes(&id, spec.sandbox.is_some(), wanted)?;
        let driver = spec.driver;
        let hostname =
            if spec.hostname.is_empty() { hostname(&spec.name, &spec.owner) } else { spec.hostname };
        let shape = (spec.vcpus, spec.memory);
        // A disk image VM has no size class: its system is limited only by the size of its VMM.
        let size_class = image.disk_image_vm.is_none().then(|| SizeClass::of(spec.vcpus, spec.memory));
        let mut record = Record {
            owner: spec.owner,
            image: spec.image,
            image_digest: image.digest,
            rootfs: image.file,
            kernel,
            disk_mib: image.disk_mib,
            hostname,
            address: lease.map(|l| l.address),
            address6: lease.and_then(|l| l.address6),
            ports: spec.ports,
            reach: spec.reach.or(self.config().guest_reach),
            cgroup_parent: spec.cgroup_parent,
            metadata: spec.metadata,
            cold: spec.cold,
            driver,
            volumes,
            disk_image_vm: image.disk_image_vm,
            sandbox: spec.sandbox,
            size_class,
            origin: spec.origin,
            ..Record::new(id, spec.name, shape, image.workload, self.clock().now())
        };
        if let Some(lender) = lender {
            (record.address_of, record.mac) = (Some(lender.record.id.clone()), lender.record.mac);
        }
        let paths = VmPaths::of(self.config(), &record.id);
        let id = record.id.clone();
        let save = move || -> io::Result<Record> {
            std::fs::create_dir_all(&paths.state)?;
            record.save(&paths.record())?;
            files::sync_parent(&paths.state)?;
            Ok(record)
        };
        let failed = |source| HostError::Files { operation: "write the record", id, source };
        files::blocking(save).await.map_err(failed)
    }

    /// Makes the volumes that belong to the VM.
    async fn own_volumes(
        &self,
        id: &VmId,
        spec: &VmSpec,
        is_container: bool,
    ) -> Result<Vec<(VolumeRequest, VolumeSource)>, HostError> {
        let mut volumes = spec.own_volumes.clone();
        volumes.extend(ssh_volume(spec).filter(|_| is_container));
        if volumes.is_empty() {
            return Ok(vec![]);
        }
        let (config, of) = (self.config().clone(), id.clone());
        let made = files::blocking(move || Ok(own_volumes::lay_out(&config, &of, &volumes))).await;
        let failed = |source| HostError::Files { operation: "make the volumes", id: id.clone(), source };
        made.map_err(failed)?.map_err(|message| HostError::Invalid { message })
    }

    /// Returns the VM whose address a new one borrows, and registers the borrower with the network.
    fn borrow_address(&self, name: &VmName, borrower: &VmId) -> Result<Arc<View>, HostError> {
        let lender = self.find(name.as_str(), Access::Change)?;
        self.0.addresses.borrow(borrower, &lender.record.id);
        Ok(lender)
    }
}

/// Volume with the keys that sshd reads for root. A disk image VM gets them by its cloud-init seed.
fn ssh_volume(spec: &VmSpec) -> Option<OwnVolume> {
    let keys: String = spec.ssh_keys.iter().flat_map(|key| [key.trim(), "\n"]).collect();
    let file = OwnFile { bytes: keys.into_bytes(), mode: 0o600 };
    (!spec.ssh_keys.is_empty()).then(|| OwnVolume {
        name: "ssh-keys".to_owned(),
        target: "/root/.ssh".to_owned(),
        read_only: true,
        content: OwnContent::Files([("authorized_keys".to_owned(), file)].into()),
    })
}

/// Workload of a VM. As in Kubernetes, `command` overrides ENTRYPOINT and discards CMD; `args` overrides CMD.
pub(super) fn workload(spec: &VmSpec, image: &Image) -> Result<Workload, HostError> {
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
    let pick =
        |request: &String, image: &String| if request.is_empty() { image.clone() } else { request.clone() };
    Ok(Workload {
        argv,
        env: environment(&config.env, &spec.env),
        user: pick(&spec.user, &config.user),
        cwd: pick(&spec.workdir, &config.workdir),
    })
}

/// Environment of the image, overridden by name.
pub(super) fn environment(image: &[String], own: &[String]) -> Vec<String> {
    let key = |entry: &String| entry.split('=').next().unwrap_or_default().to_owned();
    let overridden: HashSet<_> = own.iter().map(key).collect();
    image.iter().filter(|e| !overridden.contains(&key(e))).chain(own).cloned().collect()
}

/// Host name: the name of the owner's object, if there is one (`web`, not `default-web`), else that of the VM.
pub(super) fn hostname(name: &VmName, owner: &Owner) -> String {
    let name = if owner.name.is_empty() { name.as_str() } else { &owner.name };
    let clean = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' });
    clean.take(63).collect::<String>().trim_matches('-').to_owned()
}

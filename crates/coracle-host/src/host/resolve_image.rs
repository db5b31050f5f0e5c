//! Resolves the read-only file below a VM's own disk: the root file system of a container image, or a disk image.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_disk::DiskImage;
use coracle_disk::{pull_disk, raw_copy, resolve_disk, take_raw};
use coracle_hypervisor::Driver as _;
use coracle_image::{Image, ImageError, PullOptions, PullPolicy};
use coracle_oci::{Credentials, OciError, Progress, PullOrigin, Reference, Step};

use super::Host;
use super::create::{VmSpec, workload};
use super::registries::chunk_progress;
use crate::DiskImageVm;
use crate::disk_image_vm::USER_DATA_MAX;
use crate::private_images::{Decision, Use};
use crate::vmm_config::{VmPaths, machine_type, of_shape};
use crate::{COMMIT_ANNOTATION, HostError, Workload, files};
use coracle_instance::firmware;

/// Resolved image of a VM that is being created.
#[derive(Debug)]
pub(super) struct ResolvedImage {
    /// Digest of the image.
    pub(super) digest: String,
    /// Read-only file of the image.
    pub(super) file: PathBuf,
    /// Workload of the VM; may be empty for a disk image.
    pub(super) workload: Workload,
    /// Settings of a disk image VM.
    pub(super) disk_image_vm: Option<DiskImageVm>,
    /// Size of the VM's own disk.
    pub(super) disk_mib: u64,
}

/// Image of this node, in either form.
#[derive(Debug)]
pub enum NodeImage {
    /// A container image.
    Container(Box<Image>),
    /// A disk image.
    Disk(DiskImage),
}

impl Host {
    /// Finds or pulls the image of a VM, and checks that it fits the request.
    pub(super) async fn resolve_image(
        &self,
        spec: &VmSpec,
        progress: Arc<dyn Progress>,
    ) -> Result<ResolvedImage, HostError> {
        if spec.sandbox.is_some() {
            return self.resolve_no_image(spec);
        }
        let failed = |source| HostError::Image { reference: spec.image.clone(), source };
        let reference: Reference = spec.image.parse().map_err(|e: OciError| failed(e.into()))?;
        // With the policy `Never` no registry is asked, and the origin only says who may use the image.
        let how = match spec.may_use_image {
            true => (PullPolicy::Never, PullOrigin::Local),
            false => (spec.pull, spec.origin),
        };
        let image = self.ensure_image(&reference, how, progress).await?;
        if let Some(keys) = &spec.image_keys {
            let options = PullOptions { origin: spec.origin, ..PullOptions::default() };
            self.verify_image(&reference, &image, keys, &options).await?;
        }
        match image {
            NodeImage::Container(image) => {
                check_container(spec)?;
                let rootfs = self.images().rootfs(&image).await.map_err(failed)?;
                Ok(ResolvedImage {
                    digest: image.digest.to_string(),
                    file: rootfs.path,
                    workload: workload(spec, &image)?,
                    disk_image_vm: None,
                    disk_mib: spec.disk_mib.unwrap_or(self.config().disk_mib),
                })
            }
            NodeImage::Disk(image) => self.resolve_disk_image(spec, &image),
        }
    }

    /// Resolves a sandbox, which has a disk but no image of its own.
    fn resolve_no_image(&self, spec: &VmSpec) -> Result<ResolvedImage, HostError> {
        let own = !spec.image.is_empty() || !spec.command.is_empty() || !spec.args.is_empty();
        if own || spec.firmware.is_some() || !spec.user_data.is_empty() {
            let message = "a sandbox has no image, command, firmware or user data of its own".to_owned();
            return Err(HostError::Invalid { message });
        }
        Ok(ResolvedImage {
            digest: String::new(),
            file: PathBuf::new(),
            workload: Workload::default(),
            disk_image_vm: None,
            disk_mib: spec.disk_mib.unwrap_or(self.config().disk_mib),
        })
    }

    fn resolve_disk_image(&self, spec: &VmSpec, image: &DiskImage) -> Result<ResolvedImage, HostError> {
        check_disk_image_vm(spec, image)?;
        self.check_driver_boots_disk_images(&spec.driver)?;
        let file = self.disk_images().path(&image.digest);
        let firmware = firmware::choose(spec.firmware, &file)?;
        let least = image.disk_bytes.div_ceil(1 << 20);
        Ok(ResolvedImage {
            digest: image.digest.clone(),
            file,
            workload: Workload {
                argv: [spec.command.clone(), spec.args.clone()].concat(),
                env: spec.env.clone(),
                user: spec.user.clone(),
                cwd: spec.workdir.clone(),
            },
            disk_image_vm: Some(DiskImageVm {
                firmware,
                user_data: spec.user_data.clone(),
                ssh_keys: spec.ssh_keys.clone(),
                resolver: spec.resolver.clone(),
                display: spec.display,
                without_agent: spec.without_agent,
            }),
            disk_mib: spec.disk_mib.unwrap_or(self.config().disk_mib.max(least)),
        })
    }

    /// Checks that the driver boots disk images; the error names one that does.
    fn check_driver_boots_disk_images(&self, driver: &str) -> Result<(), HostError> {
        let shared = &self.0.shared;
        let mut shape = of_shape(&shared.node.config, shared.node.accelerator(driver));
        driver.clone_into(&mut shape.driver);
        shape.machine_type =
            machine_type(&DiskImageVm::default(), &VmPaths { state: shape.state_dir.clone() });
        if shared.node.driver.has_machine(&shape) {
            return Ok(());
        }
        let name = shared.node.driver_name(driver);
        let message = format!(
            "driver {name} starts container images only, and this is a disk image: use the driver qemu"
        );
        Err(HostError::Invalid { message })
    }

    /// Returns the image of this name, in either form, from this node or from its registry.
    pub async fn ensure_image(
        &self,
        reference: &Reference,
        (policy, origin): (PullPolicy, PullOrigin),
        progress: Arc<dyn Progress>,
    ) -> Result<NodeImage, HostError> {
        let options = PullOptions { policy, origin, ..PullOptions::default() };
        self.ensure_image_as(reference, &options, progress).await
    }

    /// Like [`Host::ensure_image`], with credentials of the caller. An image of a repository that was pulled with credentials
    /// of one caller is given to another only if the registry accepts theirs. A disk image that is present is not transferred
    /// again. Cancel-safe: a dropped call adds no image.
    ///
    /// # Errors
    /// Like [`Host::ensure_image`].
    pub async fn ensure_image_as(
        &self,
        reference: &Reference,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<NodeImage, HostError> {
        if !self.0.private_images.needs_decision(reference, &options.credentials) {
            return self.find_or_pull(reference, options, progress).await;
        }
        let is_here = self.is_image_here(reference).await?;
        let wanted = Use {
            reference,
            credentials: &options.credentials,
            origin: options.origin,
            policy: options.policy,
            is_here,
        };
        let private_images = &self.0.private_images;
        let state = |source| HostError::State { operation: "note a private image".to_owned(), source };
        let policy = match private_images.begin(wanted).await.map_err(state)? {
            Decision::Allow => options.policy,
            Decision::Ask => PullPolicy::Always,
            Decision::Refuse => return Err(HostError::PrivateImage { reference: reference.to_string() }),
        };
        let asked = PullOptions { policy, ..options.clone() };
        let image = self.find_or_pull(reference, &asked, progress).await?;
        if !is_here || policy == PullPolicy::Always {
            private_images.record_accepted(wanted).await.map_err(state)?;
        }
        Ok(image)
    }

    async fn is_image_here(&self, reference: &Reference) -> Result<bool, HostError> {
        if self.disk_images().named(reference).is_some() {
            return Ok(true);
        }
        let found = self.images().get(reference).await;
        let found = found.map_err(|source| HostError::Image { reference: reference.to_string(), source })?;
        Ok(found.is_some())
    }

    async fn find_or_pull(
        &self,
        reference: &Reference,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<NodeImage, HostError> {
        let here = self.disk_images().named(reference);
        match (here, options.policy) {
            (Some(image), PullPolicy::IfNotPresent | PullPolicy::Never) => return Ok(NodeImage::Disk(image)),
            (Some(image), PullPolicy::Always) if is_of_this_host(reference) => {
                return Ok(NodeImage::Disk(image));
            }
            _ => {}
        }
        match self.pull_as(reference, options, progress.clone()).await {
            Ok(image) => Ok(NodeImage::Container(Box::new(image))),
            Err(HostError::Image {
                source: ImageError::Oci(OciError::Unsupported { what }),
                reference: name,
            }) => {
                match self.pull_disk_image(reference, options, progress).await {
                    // Neither form: the error about a container image is returned.
                    Err(HostError::Image {
                        source: ImageError::Oci(OciError::Unsupported { .. }), ..
                    }) => Err(HostError::Image {
                        source: ImageError::Oci(OciError::Unsupported { what }),
                        reference: name,
                    }),
                    outcome => outcome.map(NodeImage::Disk),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Pulls a disk image from a registry. The next call finds the chunks that have arrived.
    async fn pull_disk_image(
        &self,
        reference: &Reference,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<DiskImage, HostError> {
        let images = self.disk_images();
        let state = |source| HostError::State { operation: "keep a disk image".to_owned(), source };
        let mut transfer = self.disk_options(reference, options.origin);
        if options.credentials != Credentials::default() {
            transfer.credentials = options.credentials.clone();
        }
        let failed = |source| HostError::Image { reference: reference.to_string(), source };
        let digest = resolve_disk(reference, &transfer).await.map_err(failed)?.map(|d| d.to_string());
        if let Some(known) = digest.and_then(|digest| images.of_digest(&digest)) {
            let now = self.clock().now().0;
            return images.tag(&known.digest, reference, known.disk_bytes, now).map_err(state);
        }
        images.prepare().map_err(state)?;
        let pulled = images.path(&coracle_oci::Digest::of(reference.to_string().as_bytes()).to_string());
        let pulled = pulled.with_extension("pulled");
        let progress_of_chunks = chunk_progress(Step::Download, progress.clone());
        let report = pull_disk(reference, &pulled, &transfer, progress_of_chunks).await.map_err(failed)?;
        let digest = report.digest.to_string();
        let (from, to) = (pulled.clone(), images.path(&digest));
        let progress_of_chunks = chunk_progress(Step::Unpack, progress);
        let taken = tokio::task::spawn_blocking(move || take_raw(&from, &to, &*progress_of_chunks));
        let taken = taken.await.map_err(|e| state(io::Error::other(e)))?;
        let (bytes, is_raw) = taken.inspect_err(|_| drop(files::remove_file(&pulled))).map_err(failed)?;
        if is_raw {
            images.keep_parts(&digest, &report.parts).map_err(state)?;
        }
        images.tag(&digest, reference, bytes, self.clock().now().0).map_err(state)
    }

    /// Imports a disk image from a file of this host, raw or qcow2, under `name` or the name of the file. Idempotent.
    ///
    /// # Errors
    /// [`HostError::Image`] with the defect of the file; [`HostError::State`].
    pub async fn import_disk(
        &self,
        file: &Path,
        name: Option<Reference>,
        progress: Arc<dyn Progress>,
    ) -> Result<DiskImage, HostError> {
        let unnamed = || HostError::Invalid {
            message: format!("{} gives its image no name: give one", file.display()),
        };
        let name = name.or_else(|| coracle_disk::name_of(file)).ok_or_else(unnamed)?;
        let path = file.to_owned();
        let digest = files::blocking(move || coracle_disk::digest_of(&path)).await;
        let digest = digest
            .map_err(|source| HostError::State { operation: format!("read {}", file.display()), source })?;
        self.disk_images()
            .prepare()
            .map_err(|source| HostError::State { operation: "keep a disk image".to_owned(), source })?;
        self.take_disk(file, &digest, &name, progress).await
    }

    /// Copies a disk into the store as raw, and names it.
    async fn take_disk(
        &self,
        file: &Path,
        digest: &str,
        name: &Reference,
        progress: Arc<dyn Progress>,
    ) -> Result<DiskImage, HostError> {
        let (from, to) = (file.to_owned(), self.disk_images().path(digest));
        let known = self.disk_images().of_digest(digest).map(|image| image.disk_bytes);
        let progress_of_chunks = chunk_progress(Step::Unpack, progress);
        let copied = tokio::task::spawn_blocking(move || match known {
            Some(bytes) if to.exists() => Ok(bytes),
            _ => raw_copy(&from, &to, &*progress_of_chunks),
        });
        let failed = |source| HostError::Image { reference: name.to_string(), source };
        let state = |source| HostError::State { operation: "keep a disk image".to_owned(), source };
        let bytes = copied.await.map_err(|e| state(io::Error::other(e)))?.map_err(failed)?;
        self.disk_images().tag(digest, name, bytes, self.clock().now().0).map_err(state)
    }

    /// Returns the file below the disk of a snapshot's VM; empty for a sandbox, whose disk has no base.
    pub(super) async fn file_under(
        &self,
        info: &crate::SnapshotInfo,
        origin: PullOrigin,
    ) -> Result<PathBuf, HostError> {
        let failed = |source| HostError::Image { reference: info.image.clone(), source };
        if info.sandbox.is_some() {
            return Ok(PathBuf::new());
        }
        if info.disk_image_vm.is_none() {
            let image = self.image_of(info, origin).await?;
            return Ok(self.images().rootfs_in(&image, info.rootfs_layout).await.map_err(failed)?.path);
        }
        if self.disk_images().of_digest(&info.image_digest).is_none() {
            let missing = || HostError::NoSnapshotImage {
                image: info.image.clone(),
                digest: info.image_digest.clone(),
            };
            let exact = exact_reference(&info.image, &info.image_digest);
            let reference: Reference = exact.parse().map_err(|e: OciError| failed(e.into()))?;
            if is_of_this_host(&reference) {
                return Err(missing());
            }
            let options = PullOptions { origin, ..PullOptions::default() };
            let pulled =
                self.pull_disk_image(&reference, &options, Arc::new(coracle_oci::NoProgress)).await?;
            if pulled.digest != info.image_digest {
                return Err(missing());
            }
        }
        Ok(self.disk_images().path(&info.image_digest))
    }

    /// Removes disk images without a name or a user.
    pub fn prune_disk_images(
        &self,
        in_use: &HashSet<String>,
        dry: bool,
    ) -> Result<Vec<(PathBuf, u64)>, HostError> {
        let state = |source| HostError::State { operation: "prune the disk images".to_owned(), source };
        self.disk_images().prune(in_use, dry).map_err(state)
    }
}

/// Whether the name was given by an import, so that no registry has it.
pub(super) fn is_of_this_host(reference: &Reference) -> bool {
    reference.to_string().starts_with("localhost/")
}

fn check_container(spec: &VmSpec) -> Result<(), HostError> {
    let only = |what: &str| {
        let message = format!("{what} is for disk images, and {} is a container image", spec.image);
        Err(HostError::Invalid { message })
    };
    match spec {
        _ if !spec.user_data.is_empty() => only("user data"),
        _ if spec.firmware.is_some() => only("the firmware"),
        _ if spec.resolver.is_some() => only("a resolver"),
        _ if spec.display.is_some() => only("a screen"),
        _ if spec.without_agent => only("a start without an agent"),
        _ => Ok(()),
    }
}

/// Returns `repository@digest` for a reference that may have a tag.
pub(super) fn exact_reference(reference: &str, digest: &str) -> String {
    let name = reference.split('@').next().unwrap_or_default();
    let slash = name.rfind('/').map_or(0, |at| at + 1);
    let end = name.get(slash..).and_then(|last| last.find(':')).map_or(name.len(), |at| slash + at);
    format!("{}@{digest}", name.get(..end).unwrap_or_default())
}

fn check_disk_image_vm(spec: &VmSpec, image: &DiskImage) -> Result<(), HostError> {
    let refused = |message: String| Err(HostError::Invalid { message });
    let disk_mib = image.disk_bytes.div_ceil(1 << 20);
    let has = |what: &str| format!("{} is a disk image, which has {what} of its own", spec.image);
    let has_command = !spec.command.is_empty() || !spec.args.is_empty();
    if spec.metadata.contains_key(COMMIT_ANNOTATION) && !has_command {
        return refused(format!(
            "{}: without a command there is no end after which an image could be made",
            has("a first process")
        ));
    }
    if has_command && spec.without_agent {
        return refused("a command needs the guest agent: leave one of them out".to_owned());
    }
    if !spec.kernel_path.is_empty() {
        return refused(has("a kernel"));
    }
    if !has_command && (!spec.user.is_empty() || !spec.workdir.is_empty()) {
        return refused(has("users and directories"));
    }
    if spec.user_data.len() > USER_DATA_MAX {
        return refused(format!("user data of {} bytes: {USER_DATA_MAX} at most", spec.user_data.len()));
    }
    match spec.disk_mib {
        Some(request) if request < disk_mib => {
            refused(format!("a disk of {request} MiB is smaller than the image's, which has {disk_mib} MiB"))
        }
        _ => Ok(()),
    }
}

//! What a VM's own disk lies over: the root of a container image, or the disk of a system.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_hypervisor::Driver as _;
use coracle_image::{DiskOptions, Image, ImageError, Progress, Reference, Step, pull_disk, raw_copy};

use super::create::{CreateSpec, workload};
use super::registries::windows;
use super::{Host, PullMode};
use crate::disk_images::{self, DiskImage};
use crate::recipe::{VmPaths, of_shape};
use crate::system::{self, System, USER_DATA_MAX};
use crate::{COMMIT_ANNOTATION, HostError, Workload, files};

/// What is known of it when a VM is made.
#[derive(Debug)]
pub(super) struct Ground {
    /// Digest of the image.
    pub(super) digest: String,
    /// The file that is never written.
    pub(super) file: PathBuf,
    /// What to run; nothing in a system.
    pub(super) workload: Workload,
    /// What is special about a system.
    pub(super) system: Option<System>,
    /// Size of the VM's own disk.
    pub(super) disk_mib: u64,
}

/// An image in either form.
#[derive(Debug)]
pub(crate) enum Found {
    /// A container's.
    Container(Box<Image>),
    /// A system's.
    Disk(DiskImage),
}

impl Host {
    /// Finds or brings the image of a VM, and judges whether it can be what the caller wants.
    pub(super) async fn ground(
        &self,
        spec: &CreateSpec,
        progress: Arc<dyn Progress>,
    ) -> Result<Ground, HostError> {
        let failed = |source| HostError::Image { reference: spec.image.clone(), source };
        let reference: Reference = spec.image.parse().map_err(failed)?;
        match self.bring(&reference, spec.pull, progress).await? {
            Found::Container(image) => {
                check_container(spec)?;
                let rootfs = self.images().rootfs(&image).await.map_err(failed)?;
                Ok(Ground {
                    digest: image.digest.to_string(),
                    file: rootfs.path,
                    workload: workload(spec, &image)?,
                    system: None,
                    disk_mib: spec.disk_mib.unwrap_or(self.config().disk_mib),
                })
            }
            Found::Disk(image) => self.system_ground(spec, &image),
        }
    }

    fn system_ground(&self, spec: &CreateSpec, image: &DiskImage) -> Result<Ground, HostError> {
        check_system(spec, image)?;
        self.check_machine_of_systems(&spec.driver)?;
        let file = self.disk_images().path(&image.digest);
        let firmware = system::choose(spec.firmware, &file)?;
        let least = image.disk_bytes.div_ceil(1 << 20);
        Ok(Ground {
            digest: image.digest.clone(),
            file,
            workload: Workload { env: spec.env.clone(), ..Workload::default() },
            system: Some(System { firmware, user_data: spec.user_data.clone() }),
            disk_mib: spec.disk_mib.unwrap_or(self.config().disk_mib.max(least)),
        })
    }

    /// The driver has a machine for systems; where not, the refusal names one that has.
    fn check_machine_of_systems(&self, driver: &str) -> Result<(), HostError> {
        let shared = &self.0.shared;
        let mut shape = of_shape(&shared.config, shared.accelerator(driver));
        driver.clone_into(&mut shape.driver);
        shape.machine = System::default().machine(&VmPaths::of(&shared.config, &shape.id));
        if shared.driver.has_machine(&shape) {
            return Ok(());
        }
        let name = shared.driver_name(driver);
        let message = format!(
            "driver {name} starts container images only, and this is a disk image: use the driver qemu"
        );
        Err(HostError::Invalid { message })
    }

    /// The image of that name, from here or from its registry, whichever form it has there.
    pub(crate) async fn bring(
        &self,
        reference: &Reference,
        mode: PullMode,
        progress: Arc<dyn Progress>,
    ) -> Result<Found, HostError> {
        let here = self.disk_images().named(reference);
        match (here, mode) {
            (Some(image), PullMode::IfNotPresent | PullMode::Never) => return Ok(Found::Disk(image)),
            (Some(image), PullMode::Always) if is_of_this_host(reference) => return Ok(Found::Disk(image)),
            _ => {}
        }
        match self.pull(reference, mode, progress.clone()).await {
            Ok(image) => Ok(Found::Container(Box::new(image))),
            Err(HostError::Image { source: ImageError::Unsupported { what }, reference: name }) => {
                match self.pull_disk_image(reference, progress).await {
                    // Neither: the first answer is about the usual kind.
                    Err(HostError::Image { source: ImageError::Unsupported { .. }, .. }) => {
                        Err(HostError::Image { source: ImageError::Unsupported { what }, reference: name })
                    }
                    outcome => outcome.map(Found::Disk),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Brings a disk from a registry. Windows that arrived are found by the next call.
    async fn pull_disk_image(
        &self,
        reference: &Reference,
        progress: Arc<dyn Progress>,
    ) -> Result<DiskImage, HostError> {
        let images = self.disk_images();
        let state = |source| HostError::State { operation: "keep a disk image".to_owned(), source };
        images.prepare().map_err(state)?;
        let pulled = images.path(&coracle_image::Digest::of(reference.to_string().as_bytes()).to_string());
        let pulled = pulled.with_extension("pulled");
        let told = windows(Step::Download, progress.clone());
        let report = pull_disk(reference, &pulled, &DiskOptions::default(), told).await;
        let report =
            report.map_err(|source| HostError::Image { reference: reference.to_string(), source })?;
        let taken = self.take_disk(&pulled, &report.digest.to_string(), reference, progress).await;
        files::remove_file(&pulled).map_err(state)?;
        taken
    }

    /// Takes a disk image from a file of this host, raw or qcow2, under `name` or that of the file. Idempotent.
    ///
    /// # Errors
    /// [`HostError::Image`] with what is wrong with it; [`HostError::State`].
    pub async fn import_disk(
        &self,
        file: &Path,
        name: Option<Reference>,
        progress: Arc<dyn Progress>,
    ) -> Result<DiskImage, HostError> {
        let unnamed = || HostError::Invalid {
            message: format!("{} gives its image no name: give one", file.display()),
        };
        let name = name.or_else(|| disk_images::name_of(file)).ok_or_else(unnamed)?;
        let path = file.to_owned();
        let digest = files::blocking(move || disk_images::digest_of(&path)).await;
        let digest = digest
            .map_err(|source| HostError::State { operation: format!("read {}", file.display()), source })?;
        self.disk_images()
            .prepare()
            .map_err(|source| HostError::State { operation: "keep a disk image".to_owned(), source })?;
        self.take_disk(file, &digest, &name, progress).await
    }

    /// Puts a disk in its place, raw, and names it.
    async fn take_disk(
        &self,
        file: &Path,
        digest: &str,
        name: &Reference,
        progress: Arc<dyn Progress>,
    ) -> Result<DiskImage, HostError> {
        let (from, to) = (file.to_owned(), self.disk_images().path(digest));
        let known = self.disk_images().of_digest(digest).map(|image| image.disk_bytes);
        let told = windows(Step::Unpack, progress);
        let copied = tokio::task::spawn_blocking(move || match known {
            Some(bytes) if to.exists() => Ok(bytes),
            _ => raw_copy(&from, &to, &*told),
        });
        let failed = |source| HostError::Image { reference: name.to_string(), source };
        let state = |source| HostError::State { operation: "keep a disk image".to_owned(), source };
        let bytes = copied.await.map_err(|e| state(io::Error::other(e)))?.map_err(failed)?;
        self.disk_images().name(digest, name, bytes, self.clock().now().0).map_err(state)
    }

    /// The file that the disk of a snapshot's VM lies over.
    pub(super) async fn file_under(&self, info: &crate::SnapshotInfo) -> Result<PathBuf, HostError> {
        let failed = |source| HostError::Image { reference: info.image.clone(), source };
        if info.system.is_none() {
            let image = self.image_of(info).await?;
            return Ok(self.images().rootfs(&image).await.map_err(failed)?.path);
        }
        if self.disk_images().of_digest(&info.image_digest).is_none() {
            let missing = || HostError::NoSnapshotImage {
                image: info.image.clone(),
                digest: info.image_digest.clone(),
            };
            let exact = super::snapshots::exact_reference(&info.image, &info.image_digest);
            let reference: Reference = exact.parse().map_err(failed)?;
            if is_of_this_host(&reference) {
                return Err(missing());
            }
            let pulled = self.pull_disk_image(&reference, Arc::new(coracle_image::NoProgress)).await?;
            if pulled.digest != info.image_digest {
                return Err(missing());
            }
        }
        Ok(self.disk_images().path(&info.image_digest))
    }

    /// Removes disk images that have no name and no user.
    pub(crate) fn prune_disks(
        &self,
        in_use: &HashSet<String>,
        dry: bool,
    ) -> Result<Vec<(PathBuf, u64)>, HostError> {
        let state = |source| HostError::State { operation: "prune the disk images".to_owned(), source };
        self.disk_images().prune(in_use, dry).map_err(state)
    }
}

/// Names that imports give: no registry has them.
fn is_of_this_host(reference: &Reference) -> bool {
    reference.to_string().starts_with("localhost/")
}

fn check_container(spec: &CreateSpec) -> Result<(), HostError> {
    let only = |what: &str| {
        let message = format!("{what} is for disk images, and {} is a container image", spec.image);
        Err(HostError::Invalid { message })
    };
    match spec {
        _ if !spec.user_data.is_empty() => only("user data"),
        _ if spec.firmware.is_some() => only("the firmware"),
        _ => Ok(()),
    }
}

fn check_system(spec: &CreateSpec, image: &DiskImage) -> Result<(), HostError> {
    let refused = |message: String| Err(HostError::Invalid { message });
    let disk_mib = image.disk_bytes.div_ceil(1 << 20);
    let has = |what: &str| format!("{} is a disk image, which has {what} of its own", spec.image);
    if !spec.command.is_empty() || !spec.args.is_empty() {
        return refused(format!("{}: run commands in it with exec, or by user data", has("a first process")));
    }
    if spec.metadata.contains_key(COMMIT_ANNOTATION) {
        return refused(format!(
            "{}: it ends no command that an image could be made after",
            has("a first process")
        ));
    }
    if !spec.kernel_path.is_empty() {
        return refused(has("a kernel"));
    }
    if !spec.user.is_empty() || !spec.workdir.is_empty() {
        return refused(has("users and folders"));
    }
    if spec.user_data.len() > USER_DATA_MAX {
        return refused(format!("user data of {} bytes: {USER_DATA_MAX} at most", spec.user_data.len()));
    }
    match spec.disk_mib {
        Some(wish) if wish < disk_mib => {
            refused(format!("a disk of {wish} MiB is smaller than the image's, which has {disk_mib} MiB"))
        }
        _ => Ok(()),
    }
}

//! Containers of VMs: requests to the VM's task, and information that is available without it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_image::{Image, PullPolicy};
use coracle_oci::{OciError, Progress, PullOrigin, Reference};
use coracle_proto::guest as pb;
use coracle_record::{ContainerId, ContainerRecord, ContainerSpec, ContainerState, Resources};
use tokio::sync::oneshot;

use super::{Access, Host, NodeImage};
use crate::vm::{Call, ContainerImage, ContainerRequest, ReplyTo, Request};
use crate::{HostError, files};

impl Host {
    /// Creates a container in a running sandbox VM. Its image is pulled according to `pull`. Command, environment, user and
    /// directory default to those of the image. Idempotent for an equal spec. Cancel-safe: the call runs to completion.
    ///
    /// # Errors
    /// [`HostError::ContainerExists`], [`HostError::Image`], [`HostError::Invalid`], [`HostError::Refused`],
    /// [`HostError::Guest`], [`HostError::Files`].
    pub async fn create_container(
        &self,
        vm: &str,
        id: ContainerId,
        spec: ContainerSpec,
        (pull, origin): (PullPolicy, PullOrigin),
        progress: Arc<dyn Progress>,
    ) -> Result<ContainerRecord, HostError> {
        let failed = |source| HostError::Image { reference: spec.image.clone(), source };
        let reference: Reference = spec.image.parse().map_err(|e: OciError| failed(e.into()))?;
        match self.ensure_image(&reference, (pull, origin), progress).await? {
            NodeImage::Container(image) => self.create_container_of(vm, id, spec, &image, &[]).await,
            NodeImage::Disk(_) => {
                let message = format!("{} is a disk image: a container needs a container image", spec.image);
                Err(HostError::Invalid { message })
            }
        }
    }

    /// Like [`Host::create_container`], with an image that this node has; `mounted` are the images of its mounts.
    ///
    /// # Errors
    /// Like [`Host::create_container`].
    pub async fn create_container_of(
        &self,
        vm: &str,
        id: ContainerId,
        spec: ContainerSpec,
        image: &Image,
        mounted: &[Image],
    ) -> Result<ContainerRecord, HostError> {
        let spec = Box::new(with_defaults(spec, &image.config)?);
        let mut images = Vec::new();
        for image in std::iter::once(image).chain(mounted) {
            let failed = |source| HostError::Image { reference: image.digest.to_string(), source };
            let rootfs = self.images().rootfs(image).await.map_err(failed)?.path;
            images.push(ContainerImage { digest: image.digest.to_string(), rootfs });
        }
        let image = images.remove(0);
        self.ask_container(vm, ContainerRequest::Create { id, spec, image, mounted: images }).await
    }

    /// Starts the process of a container. `Ok` if it already runs.
    ///
    /// # Errors
    /// [`HostError::NoContainer`], [`HostError::ContainerState`], [`HostError::Refused`], [`HostError::Guest`].
    pub async fn start_container(&self, vm: &str, id: &ContainerId) -> Result<ContainerRecord, HostError> {
        self.ask_container(vm, ContainerRequest::Start { id: id.clone() }).await
    }

    /// Ends a container, by SIGKILL after `grace`. Returns when it has ended and its output is in the log. `Ok` if it already
    /// has.
    ///
    /// # Errors
    /// Like [`Host::start_container`].
    pub async fn stop_container(
        &self,
        vm: &str,
        id: &ContainerId,
        grace: Duration,
    ) -> Result<ContainerRecord, HostError> {
        self.ask_container(vm, ContainerRequest::Stop { id: id.clone(), grace }).await
    }

    /// Sends a signal to the first process of a container.
    ///
    /// # Errors
    /// Like [`Host::start_container`].
    pub async fn kill_container(
        &self,
        vm: &str,
        id: &ContainerId,
        signal: i32,
    ) -> Result<ContainerRecord, HostError> {
        self.ask_container(vm, ContainerRequest::Kill { id: id.clone(), signal }).await
    }

    /// Changes limits of a running container; `metadata` is merged into the container's metadata.
    ///
    /// # Errors
    /// Like [`Host::start_container`].
    pub async fn update_container(
        &self,
        vm: &str,
        id: &ContainerId,
        resources: Resources,
        metadata: BTreeMap<String, String>,
    ) -> Result<ContainerRecord, HostError> {
        self.ask_container(vm, ContainerRequest::Update { id: id.clone(), resources, metadata }).await
    }

    /// Makes a process for [`Host::guest`] that joins a container and has its user, environment and directory. In a disk image
    /// VM, which has no containers, the process joins the VM's own command.
    ///
    /// # Errors
    /// [`HostError::NotFound`], [`HostError::NoContainer`], [`HostError::ContainerState`] if the container does not run.
    pub fn container_process(
        &self,
        vm: &str,
        id: &ContainerId,
        argv: Vec<String>,
    ) -> Result<pb::Process, HostError> {
        let view = self.find(vm, Access::Read)?;
        if view.record.sandbox.is_none() {
            let process = crate::vmm_config::process(&view.record);
            return Ok(pb::Process { argv, ..process });
        }
        let missing = || HostError::NoContainer { vm: vm.to_owned(), id: id.to_string() };
        let record = view.containers.get(id).ok_or_else(missing)?;
        if record.state != ContainerState::Running {
            let (vm, id, why) = (vm.to_owned(), id.to_string(), "it is not running");
            return Err(HostError::ContainerState { vm, id, operation: "run a command in", why });
        }
        let process = crate::containers::process(&record.spec);
        Ok(pb::Process { argv, container: id.to_string(), tty: false, stdin: false, ..process })
    }

    /// Ends and removes a container. Returns when nothing is left of it except a log at a path that the caller chose.
    ///
    /// # Errors
    /// Like [`Host::start_container`].
    pub async fn remove_container(&self, vm: &str, id: &ContainerId) -> Result<ContainerRecord, HostError> {
        self.ask_container(vm, ContainerRequest::Remove { id: id.clone() }).await
    }

    /// Lists the containers of a VM, by id. Never waits.
    ///
    /// # Errors
    /// [`HostError::NotFound`].
    pub fn containers(&self, vm: &str) -> Result<Vec<Arc<ContainerRecord>>, HostError> {
        Ok(self.find(vm, Access::Read)?.containers.values().cloned().collect())
    }

    /// Waits until a container has ended.
    ///
    /// # Errors
    /// [`HostError::NotFound`], [`HostError::NoContainer`], also if the container is removed meanwhile.
    pub async fn wait_container(&self, vm: &str, id: &ContainerId) -> Result<ContainerRecord, HostError> {
        let mut view = self.observe(vm)?;
        let missing = || HostError::NoContainer { vm: vm.to_owned(), id: id.to_string() };
        loop {
            let record = view.borrow_and_update().containers.get(id).cloned().ok_or_else(missing)?;
            if record.exit.is_some() {
                return Ok(Arc::unwrap_or_clone(record));
            }
            view.changed().await.map_err(|_| missing())?;
        }
    }

    /// Continues the log of a container in a new file, after the caller has renamed the old one.
    ///
    /// # Errors
    /// [`HostError::NoContainer`]; [`HostError::Files`], after which no new file exists.
    pub async fn reopen_container_log(&self, vm: &str, id: &ContainerId) -> Result<(), HostError> {
        let handle = self.handle(vm, Access::Change)?;
        let (logs, wanted) = (handle.container_logs, id.clone());
        let reopened =
            files::blocking(move || logs.lock().get_mut(&wanted).map(|log| log.reopen()).transpose());
        let failed =
            |source| HostError::Files { operation: "reopen a container's log", id: handle.id, source };
        let missing = || HostError::NoContainer { vm: vm.to_owned(), id: id.to_string() };
        reopened.await.map_err(failed)?.ok_or_else(missing)
    }

    /// Latest statistics of the containers from the guest, some 10 s old at most; `None` before the first ones. Never waits.
    ///
    /// # Errors
    /// [`HostError::NotFound`].
    pub fn container_statistics(&self, vm: &str) -> Result<Option<Arc<pb::Statistics>>, HostError> {
        Ok(self.handle(vm, Access::Read)?.statistics.borrow().clone())
    }

    async fn ask_container(&self, vm: &str, request: ContainerRequest) -> Result<ContainerRecord, HostError> {
        let handle = self.handle(vm, Access::Change)?;
        let (reply, answer) = oneshot::channel();
        let gone = || HostError::NotFound { name: vm.to_owned() };
        let request = Request::new(Call::Container(request), ReplyTo::Container(reply));
        handle.requests.send(Box::new(request)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

/// Completes the spec with the values of the image. As in Kubernetes, a command discards the image's arguments.
fn with_defaults(
    mut spec: ContainerSpec,
    image: &coracle_image::ImageConfig,
) -> Result<ContainerSpec, HostError> {
    let process = &mut spec.process;
    if process.argv.is_empty() {
        process.argv = [image.entrypoint.clone(), image.cmd.clone()].concat();
    }
    if process.argv.is_empty() {
        let message = format!("image {} names no command; give one", spec.image);
        return Err(HostError::Invalid { message });
    }
    process.env = super::create::environment(&image.env, &process.env);
    for (own, of_image) in [(&mut process.user, &image.user), (&mut process.cwd, &image.workdir)] {
        if own.is_empty() {
            own.clone_from(of_image);
        }
    }
    Ok(spec)
}

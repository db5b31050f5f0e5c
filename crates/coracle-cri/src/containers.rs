//! Containers in the VM of their pod.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{ContainerId, ContainerMountSource, ContainerSpec, ContainerState, HostError};
use coracle_image::Image;
use coracle_proto::cri::{
    ContainerStatusResponse, CreateContainerRequest, Mount, UpdateContainerResourcesRequest,
};
use tonic::Status;

use crate::facts::{ContainerFacts, resources_to_metadata};
use crate::images::Content;
use crate::refusal::{Refusal, of_host};
use crate::seccomp;
use crate::server::{Claim, CriServer, new_id};
use crate::status;
use crate::table::{ContainerEntry, Pod};
use crate::translate::container::{self, Inputs};
use crate::translate::mounts::{self, MountSource, Share, is_share};
use crate::translate::resources;
use crate::translate::security::{self, SeccompSource};

/// Most bytes of a seccomp profile.
const PROFILE_MAX: usize = 1 << 20;

/// Plan of a container in its VM.
#[derive(Debug)]
struct Planned {
    spec: ContainerSpec,
    image: Image,
    /// Images that the container mounts.
    mounted: Vec<Image>,
    shares: Vec<Share>,
}

impl CriServer {
    /// Creates a container without starting it, and returns its id.
    pub(crate) async fn create_container(&self, request: CreateContainerRequest) -> Result<String, Status> {
        let pod = self.0.table.pod(&self.0.host, &request.pod_sandbox_id)?;
        if !pod.is_ready() {
            let (what, id) = ("sandbox", pod.id().to_owned());
            let why = "it is not ready";
            return Err(Refusal::State { operation: "make a container in", what, id, why }.into());
        }
        let config = request.config.unwrap_or_default();
        container::check(&config, &pod.facts.config, &self.0.options)?;
        let metadata = config.metadata.clone().unwrap_or_default();
        let name = format!("{}/{}/{}", pod.id(), metadata.name, metadata.attempt);
        let exists = |id: &str| Refusal::Exists { what: "container", name: name.clone(), id: id.to_owned() };
        let claim = self.claim(name.clone()).ok_or_else(|| exists("one that is being created"))?;
        let same = |container: &&ContainerEntry| container.facts.config.metadata.as_ref() == Some(&metadata);
        if let Some(known) = pod.containers.iter().find(same) {
            return Err(exists(&known.entry.id).into());
        }
        let id = new_id();
        if pod.facts.disk {
            return self.create_alone(claim, pod, id, config).await;
        }
        let planned = self.plan_container(&pod, config).await?;
        let parsed: ContainerId = id.parse().map_err(|_| Refusal::invalid("id", id.clone()))?;
        let (server, sandbox, made) = (self.clone(), pod.id().to_owned(), parsed.clone());
        let work = async move {
            let _alone = server.change(&sandbox).await;
            server.make_container(&sandbox, made, planned).await
        };
        let (server, sandbox) = (self.clone(), pod.id().to_owned());
        let undo = async move {
            let _until_it_is_gone = claim;
            if let Err(error) = server.remove_from(&sandbox, &parsed).await {
                tracing::warn!(sandbox, container = %parsed, error = error.message(), "remove container failed");
            }
        };
        self.run_or_undo(work, undo).await?;
        Ok(id)
    }

    /// Creates the VM that is the container of a disk pod.
    async fn create_alone(
        &self,
        claim: Claim,
        pod: Arc<Pod>,
        id: String,
        config: coracle_proto::cri::ContainerConfig,
    ) -> Result<String, Status> {
        let (server, made) = (self.clone(), id.clone());
        let work = async move {
            let _alone = server.change(pod.id()).await;
            server.create_disk_container(&pod, &made, config).await.map(|()| made)
        };
        let server = self.clone();
        let undo = async move {
            let _until_it_is_gone = claim;
            if let Err(error) = server.remove_disk_container(&id).await {
                tracing::warn!(container = id, error = error.message(), "remove container failed");
            }
        };
        self.run_or_undo(work, undo).await
    }

    /// Resolves the image, mounts and seccomp profile of a container, and plans it.
    async fn plan_container(
        &self,
        pod: &Arc<Pod>,
        mut config: coracle_proto::cri::ContainerConfig,
    ) -> Result<Planned, Status> {
        let wanted = config.image.clone().unwrap_or_default().image;
        let stored = self.stored_image(&wanted).await?;
        let stored = stored.ok_or(Refusal::NotFound { what: "image", id: wanted })?;
        self.check_stored(pod.namespace(), &stored).await?;
        let (found, mounted) = self.look_at_mounts(pod.namespace(), &mut config.mounts).await?;
        let seccomp = seccomp_filter(&config).await?;
        let image_ref = stored.reference();
        let facts = ContainerFacts { config, image_id: stored.id.clone(), image_ref };
        let Content::Container(image) = stored.content else {
            let why = "it is a disk image: choose a RuntimeClass with the handler coracle-disk";
            return Err(Refusal::invalid("image", why).into());
        };
        let image = *image;
        let inputs =
            Inputs { facts: &facts, sandbox: &pod.facts.config, image: &image, found: &found, seccomp };
        let (spec, shares) = container::spec(inputs)?;
        Ok(Planned { spec, image, mounted, shares })
    }

    /// Resolves the sources of mounts. An image of a mount gets its id, which the kubelet reads back. Like the id of a pulled
    /// image, it does not depend on the registry.
    pub(crate) async fn look_at_mounts(
        &self,
        namespace: &str,
        mounts: &mut [Mount],
    ) -> Result<(Vec<MountSource>, Vec<Image>), Status> {
        let (mut found, mut images) = (Vec::new(), Vec::<Image>::new());
        for mount in mounts {
            if let Some(image) = &mut mount.image {
                let stored = self.stored_image(&image.image).await?;
                let missing = || Refusal::ImageVolume(format!("image {} is not on this node", image.image));
                let stored = stored.ok_or_else(missing)?;
                self.check_stored(namespace, &stored).await?;
                image.image_ref.clone_from(&stored.id);
                let Content::Container(stored) = stored.content else {
                    return Err(Refusal::ImageVolume(format!("image {} is a disk", image.image)).into());
                };
                found.push(MountSource::Image(stored.digest.to_string()));
                if images.iter().all(|known| known.digest != stored.digest) {
                    images.push(*stored);
                }
                continue;
            }
            let asked = mount.clone();
            let looked = tokio::task::spawn_blocking(move || mounts::resolve_source(&asked)).await;
            let looked = looked.map_err(|_| Status::unavailable("the server is stopping"))?;
            let failed = |e| Refusal::invalid("mount", format!("{}: {e}", mount.host_path));
            found.push(looked.map_err(failed)?);
        }
        Ok((found, images))
    }

    async fn make_container(&self, sandbox: &str, id: ContainerId, planned: Planned) -> Result<(), Status> {
        let Planned { spec, image, mounted, shares } = planned;
        let view = self.0.host.get(sandbox).map_err(|e| of_host(&e))?;
        let has = |share: &Share| view.record.volumes.iter().any(|volume| volume.name == share.name);
        for share in shares.iter().filter(|share| !has(share)) {
            self.0.host.attach_volume(sandbox, share.request(), None).await.map_err(|e| of_host(&e))?;
        }
        let made = self.0.host.create_container_of(sandbox, id, spec, &image, &mounted).await;
        made.map(drop).map_err(|error| of_creation(&error))
    }

    pub(crate) async fn start_container(&self, id: &str) -> Result<(), Status> {
        let (pod, container) = self.0.table.container(&self.0.host, id)?;
        let state = |why| Refusal::State { operation: "start", what: "container", id: id.to_owned(), why };
        match container.record.state {
            ContainerState::Created => {}
            ContainerState::Running => return Err(state("it runs already").into()),
            ContainerState::Exited => return Err(state("it has ended").into()),
        }
        if pod.facts.disk {
            return self.start_disk_container(&container).await;
        }
        let started = self.0.host.start_container(pod.id(), &container.record.id).await;
        let started = started.map_err(|e| of_host(&e))?;
        match started.exit.as_ref().and_then(status::start_failure) {
            Some(why) => Err(Refusal::Start { id: id.to_owned(), why: why.to_owned() }.into()),
            None => Ok(()),
        }
    }

    /// Stops a container. `Ok` for a container that does not run or is unknown.
    pub(crate) async fn stop_container(&self, id: &str, seconds: i64) -> Result<(), Status> {
        let Ok((pod, container)) = self.0.table.container(&self.0.host, id) else { return Ok(()) };
        if container.record.state != ContainerState::Running {
            return Ok(());
        }
        let grace = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        if pod.facts.disk {
            return self.stop_disk_container(id, grace).await;
        }
        match self.0.host.stop_container(pod.id(), &container.record.id, grace).await {
            Ok(_) | Err(HostError::NoContainer { .. } | HostError::NotFound { .. }) => Ok(()),
            Err(error) => Err(of_host(&error)),
        }
    }

    /// Stops and removes a container. `Ok` for an unknown one.
    pub(crate) async fn remove_container(&self, id: &str) -> Result<(), Status> {
        let Ok((pod, container)) = self.0.table.container(&self.0.host, id) else { return Ok(()) };
        if pod.facts.disk {
            return self.remove_disk_container(id).await;
        }
        self.remove_from(pod.id(), &container.record.id).await
    }

    /// Removes a container and the directories that only it mounts.
    async fn remove_from(&self, sandbox: &str, id: &ContainerId) -> Result<(), Status> {
        let _alone = self.change(sandbox).await;
        match self.0.host.remove_container(sandbox, id).await {
            Ok(_) | Err(HostError::NoContainer { .. }) => {}
            Err(HostError::NotFound { .. }) => return Ok(()),
            Err(error) => return Err(of_host(&error)),
        }
        let Ok(view) = self.0.host.get(sandbox) else { return Ok(()) };
        let used: BTreeSet<_> = view.containers.values().flat_map(|record| volumes(&record.spec)).collect();
        let shares = view.record.volumes.iter().filter(|volume| is_share(volume)).map(|volume| &volume.name);
        for unused in shares.filter(|name| !used.contains(name.as_str())) {
            if let Err(error) = self.0.host.detach_volume(sandbox, unused, None).await {
                tracing::warn!(sandbox, volume = unused, error = error.chain(), "detach directory failed");
            }
        }
        Ok(())
    }

    pub(crate) fn container_status(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<ContainerStatusResponse, Status> {
        let (pod, container) = self.0.table.container(&self.0.host, id)?;
        let status = status::container_status(&container.record, &container.facts, &pod.facts.config);
        let info = || {
            let argv = serde_json::json!({
                "sandboxID": pod.id(), "vm": pod.vm(&container), "argv": container.record.spec.process.argv,
            });
            [("info".to_owned(), argv.to_string())].into()
        };
        let info = if verbose { info() } else { Default::default() };
        Ok(ContainerStatusResponse { status: Some(status), info })
    }

    /// Changes the limits of a container that has not ended.
    pub(crate) async fn update_container(
        &self,
        request: UpdateContainerResourcesRequest,
    ) -> Result<(), Status> {
        let (pod, container) = self.0.table.container(&self.0.host, &request.container_id)?;
        if pod.facts.disk {
            let (what, why) = ("resize of a disk pod", "its VM keeps the size that it started with");
            return Err(Refusal::Unsupported { what, why }.into());
        }
        let update = request.linux.unwrap_or_default();
        let old = container.facts.config.linux.clone().unwrap_or_default().resources.unwrap_or_default();
        let metadata = resources_to_metadata(&resources::merge_resources(old.clone(), &update));
        // A quota is meaningful only with its period.
        let limits = resources::limits(&coracle_proto::cri::LinuxContainerResources {
            cpu_period: if update.cpu_period == 0 { old.cpu_period } else { update.cpu_period },
            ..update
        });
        let updated = self.0.host.update_container(pod.id(), &container.record.id, limits, metadata).await;
        updated.map(drop).map_err(|e| of_host(&e))
    }

    pub(crate) async fn reopen_container_log(&self, id: &str) -> Result<(), Status> {
        let (pod, container) = self.0.table.container(&self.0.host, id)?;
        if !container.is_running() {
            let (operation, why) = ("reopen the log of", "it is not running");
            return Err(Refusal::State { operation, what: "container", id: id.to_owned(), why }.into());
        }
        if pod.facts.disk {
            return self.reopen_disk_log(id).await;
        }
        let reopened = self.0.host.reopen_container_log(pod.id(), &container.record.id).await;
        reopened.map_err(|e| of_host(&e))
    }
}

fn volumes(spec: &ContainerSpec) -> impl Iterator<Item = &str> {
    spec.mounts.iter().filter_map(|mount| match &mount.source {
        ContainerMountSource::Volume { name, .. } => Some(name.as_str()),
        ContainerMountSource::Tmpfs { .. } | ContainerMountSource::Image { .. } => None,
    })
}

/// Converts an error of the creation. The guest reports what is missing in an image; the kubelet recognises that failure by its
/// first word.
fn of_creation(error: &HostError) -> Status {
    match error {
        HostError::Guest { source, .. } if source.to_string().ends_with("in an image") => {
            Refusal::ImageVolume(source.to_string()).into()
        }
        HostError::Guest { source, .. } if source.to_string().contains("in an image:") => {
            Refusal::ImageVolume(source.to_string()).into()
        }
        _ => of_host(error),
    }
}

/// Returns the seccomp filter of a container's profile; empty: none.
async fn seccomp_filter(config: &coracle_proto::cri::ContainerConfig) -> Result<Vec<u8>, Status> {
    let context = container::context(config);
    let source = security::seccomp_source(&context)?;
    if source == SeccompSource::Unconfined {
        return Ok(vec![]);
    }
    let capabilities = security::security(&context, &Default::default(), vec![])?.capabilities.unwrap_or(0);
    let filter = match source {
        SeccompSource::Unconfined => return Ok(vec![]),
        SeccompSource::RuntimeDefault => seccomp::runtime_default(capabilities),
        SeccompSource::Localhost(path) => {
            let failed = |why: String| Refusal::invalid("seccomp profile", format!("{path}: {why}"));
            let file = path.clone();
            let read = tokio::task::spawn_blocking(move || std::fs::read(file)).await;
            let read = read.map_err(|_| Status::unavailable("the server is stopping"))?;
            let text = read.map_err(|e| failed(e.to_string()))?;
            if text.len() > PROFILE_MAX {
                return Err(failed(format!("it has more than {PROFILE_MAX} bytes")).into());
            }
            return seccomp::compile(&text, capabilities).map_err(|e| failed(e.to_string()).into());
        }
    };
    filter.map_err(|e| Refusal::invalid("seccomp profile", e.to_string()).into())
}

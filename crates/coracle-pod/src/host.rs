//! Pod runtime on the host core: one sandbox VM for each pod, its directories, and its containers.

mod files;
mod views;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use coracle_host::{
    Access, ContainerMountSource, Fault, Host, HostError, NodeImage, Owner, PullOrigin, PullPolicy, Record,
    Tmpfs, VmSpec, VolumeRequest,
};
use coracle_hypervisor::{Forward, Protocol};
use coracle_image::{ImageError, PullOptions};
use coracle_net::Reach;
use coracle_oci::{Credentials, NoProgress, Reference};
use coracle_proto::guest as pb;
use coracle_record::{ContainerId, ContainerRecord};
use coracle_types::{VmId, VmName};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::container_spec::{NewContainer, key};
use crate::image_keys::ImageKeys;
use crate::observed::RuntimeState;
use crate::runtime::{ErrorKind, Exec, PodRuntime, RuntimeError};
use crate::step::{HostPort, SandboxSpec};
use crate::volume::{MeasuredVolume, SandboxVolume, SandboxVolumeSource, VolumeContent};
pub use files::PodDirs;

/// Most bytes of a command's output that are kept.
const OUTPUT_MAX: usize = 10 << 10;
/// Time for the guest's reply after it killed a command.
const KILL_MARGIN: Duration = Duration::from_secs(5);
/// Signal number of a kill.
const SIGKILL: i32 = 9;
/// Most characters of the pod's name in the name of its VM.
const NAME_MAX: usize = 200;

/// Identity of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodId {
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// Uid of the object, which distinguishes it from a later pod of the same name.
    pub uid: String,
}

impl PodId {
    /// Returns the pod of a VM; `None` for a VM that [`HostRuntime`] did not create.
    #[must_use]
    pub fn of(record: &Record) -> Option<Self> {
        let uid = record.metadata.get(key::POD_UID)?;
        let Owner { namespace, name, .. } = record.owner.clone();
        Some(Self { namespace, name, uid: uid.clone() })
    }
}

/// Pod on the host core.
#[derive(Debug)]
pub struct HostRuntime {
    host: Host,
    pod: PodId,
    vm: VmName,
    dirs: PodDirs,
    keys: ImageKeys,
    /// Last observed state of the VM.
    seen: Mutex<Option<watch::Receiver<Arc<coracle_host::View>>>>,
    /// Ends of logs that serve as termination messages. Each log is read once.
    messages: Mutex<BTreeMap<ContainerId, String>>,
}

impl HostRuntime {
    /// Returns the runtime of `pod`, whose files are in `dirs`.
    ///
    /// # Errors
    /// When the name and uid of the pod do not form a valid VM name.
    pub fn new(host: Host, pod: PodId, dirs: PodDirs) -> Result<Self, RuntimeError> {
        let cut: String = pod.name.chars().take(NAME_MAX).collect();
        let vm = format!("{cut}-{}", pod.uid).parse::<VmName>();
        let vm = vm.map_err(|error| RuntimeError::other(error.to_string()))?;
        let keys = ImageKeys::default();
        Ok(Self { host, pod, vm, dirs, keys, seen: Mutex::default(), messages: Mutex::default() })
    }

    /// Returns the same runtime, for images that must be signed with one of these keys.
    #[must_use]
    pub fn with_image_keys(self, keys: ImageKeys) -> Self {
        Self { keys, ..self }
    }

    /// Returns the name of the pod's VM.
    #[must_use]
    pub fn vm(&self) -> &VmName {
        &self.vm
    }

    async fn image(
        &self,
        reference: &str,
        (policy, origin): (PullPolicy, PullOrigin),
        credentials: &[Credentials],
    ) -> Result<(String, Box<coracle_image::Image>), RuntimeError> {
        let parsed: Reference = reference.parse().map_err(|error: coracle_oci::OciError| RuntimeError {
            message: format!("invalid image {reference:?}: {error}"),
            kind: ErrorKind::InvalidImageName,
        })?;
        let (mut options, mut found) = (PullOptions { policy, origin, ..PullOptions::default() }, None);
        for credentials in credentials {
            options.credentials = credentials.clone();
            let pulled = self.host.ensure_image_as(&parsed, &options, Arc::new(NoProgress)).await;
            let is_found = pulled.is_ok();
            found = Some(pulled);
            if is_found {
                break;
            }
        }
        let found = match found {
            Some(found) => found,
            None => self.host.ensure_image_as(&parsed, &options, Arc::new(NoProgress)).await,
        };
        match found {
            Ok(NodeImage::Container(image)) => {
                if let Some(keys) = self.keys.now().map_err(RuntimeError::other)? {
                    let verified = self.host.verify_digest(&parsed, &image.digest, &keys, &options).await;
                    verified.map_err(|error| runtime_error(&error))?;
                }
                Ok((image.digest.to_string(), image))
            }
            Ok(NodeImage::Disk(_)) => Err(RuntimeError {
                message: format!("{reference} is a disk image: a container needs a container image"),
                kind: ErrorKind::DiskImage,
            }),
            Err(
                error @ (HostError::Image { source: ImageError::NotPresent { .. }, .. }
                | HostError::PrivateImage { .. }),
            ) => Err(RuntimeError { kind: ErrorKind::ImageNeverPull, ..runtime_error(&error) }),
            Err(error) => Err(runtime_error(&error)),
        }
    }

    async fn vm_spec(&self, spec: &SandboxSpec) -> Result<VmSpec, RuntimeError> {
        let mut volumes = Vec::new();
        for volume in &spec.volumes {
            volumes.push(self.volume(volume).await?);
        }
        let owner = Owner {
            namespace: self.pod.namespace.clone(),
            name: self.pod.name.clone(),
            uid: self.pod.uid.clone(),
            ..Owner::default()
        };
        Ok(VmSpec {
            owner,
            origin: PullOrigin::Cluster,
            vcpus: spec.vcpus,
            memory: spec.memory,
            hostname: spec.hostname.clone(),
            ports: spec.ports.iter().map(forward).collect::<Result<_, _>>()?,
            volumes,
            bandwidth: spec.bandwidth,
            metadata: [(key::POD_UID.to_owned(), self.pod.uid.clone())].into(),
            // As in every Kubernetes cluster, pods reach each other and their node.
            reach: Reach { guests: true, node: true },
            sandbox: Some(spec.sandbox.clone()),
            idempotent: true,
            ..VmSpec::of(self.vm.clone(), "")
        })
    }

    async fn volume(&self, volume: &SandboxVolume) -> Result<VolumeRequest, RuntimeError> {
        let named = VolumeRequest {
            name: volume.name.clone(),
            read_only: volume.read_only,
            ..VolumeRequest::default()
        };
        // Sources that the node chose are not checked against the directories that users may name.
        let (source, local_user) = match &volume.source {
            SandboxVolumeSource::Area(area) => (self.dirs.area(*area).display().to_string(), Some(0)),
            SandboxVolumeSource::Claim(source) => (source.clone(), Some(0)),
            SandboxVolumeSource::Memory { size_bytes } => {
                let tmpfs = Tmpfs { size_bytes: *size_bytes, mode: 0o777, ..Tmpfs::default() };
                return Ok(VolumeRequest { tmpfs: Some(tmpfs), ..named });
            }
            SandboxVolumeSource::HostPath { path, create } => {
                if *create {
                    self.make_host_path(path).await?;
                }
                (path.clone(), None)
            }
        };
        Ok(VolumeRequest { source, local_user, ..named })
    }

    /// Creates the directory of a hostPath volume, if its nearest existing ancestor is allowed.
    async fn make_host_path(&self, path: &str) -> Result<(), RuntimeError> {
        let path = PathBuf::from(path);
        let plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
        let nearest = path.ancestors().find(|dir| dir.exists()).map(PathBuf::from);
        let Some(nearest) = nearest.filter(|_| plain) else {
            return Err(RuntimeError::other(format!("invalid path {}", path.display())));
        };
        self.host.granted_path(&nearest, None).await.map_err(|error| runtime_error(&error))?;
        let made = coracle_files::blocking(move || std::fs::create_dir_all(path)).await;
        made.map_err(|error| RuntimeError::other(format!("cannot make a directory: {error}")))
    }

    /// Reads the ends of logs that serve as termination messages of containers that left none.
    async fn messages_of_logs(&self, vm: &VmId, records: &[Arc<ContainerRecord>]) {
        let unread: Vec<_> = {
            let known = self.messages.lock();
            let unread =
                records.iter().filter(|one| !known.contains_key(&one.id) && files::is_message_in_log(one));
            unread.map(|one| one.id.clone()).collect()
        };
        if unread.is_empty() {
            return;
        }
        let dir = self.host.config().state_dir.join("vms").join(vm.as_str()).join("containers");
        let read = move || {
            let message = |id: ContainerId| {
                let end = files::log_end(&dir.join(format!("{id}.log"))).unwrap_or_default();
                (id, end)
            };
            Ok(unread.into_iter().map(message).collect::<Vec<_>>())
        };
        match coracle_files::blocking(read).await {
            Ok(read) => self.messages.lock().extend(read),
            Err(error) => tracing::warn!(%error, "read end of logs failed"),
        }
    }
}

/// Converts an error of the host core.
fn runtime_error(error: &HostError) -> RuntimeError {
    let kind = if error.fault() == Fault::NotFound { ErrorKind::NotFound } else { ErrorKind::Other };
    RuntimeError { message: error.chain(), kind }
}

fn forward(port: &HostPort) -> Result<Forward, RuntimeError> {
    let host_address = match port.host_address {
        None => std::net::Ipv4Addr::UNSPECIFIED,
        Some(std::net::IpAddr::V4(address)) => address,
        Some(std::net::IpAddr::V6(address)) => {
            return Err(RuntimeError::other(format!(
                "invalid hostIP {address}: ports of IPv4 addresses are forwarded"
            )));
        }
    };
    Ok(Forward {
        protocol: if port.udp { Protocol::Udp } else { Protocol::Tcp },
        host_address,
        host_port: port.host_port,
        guest_port: port.container_port,
    })
}

#[async_trait]
impl PodRuntime for HostRuntime {
    async fn observe(&self) -> Result<RuntimeState, RuntimeError> {
        let mut receiver = match self.host.observe(self.vm.as_str()) {
            Err(error) if error.fault() == Fault::NotFound => {
                *self.seen.lock() = None;
                return Ok(RuntimeState::default());
            }
            found => found.map_err(|error| runtime_error(&error))?,
        };
        let view = receiver.borrow_and_update().clone();
        *self.seen.lock() = Some(receiver);
        let records: Vec<_> = view.containers.values().cloned().collect();
        self.messages_of_logs(&view.record.id, &records).await;
        let messages = self.messages.lock();
        Ok(views::runtime_state(&view.record, &records, &messages))
    }

    async fn changed(&self) {
        let seen = self.seen.lock().clone();
        match seen {
            // The removal of a VM counts as a change; the next observation sees it.
            Some(mut seen) => drop(seen.changed().await),
            None => std::future::pending().await,
        }
    }

    async fn start_sandbox(&self, spec: &SandboxSpec) -> Result<(), RuntimeError> {
        if spec.volumes.iter().any(|volume| matches!(volume.source, SandboxVolumeSource::Area(_))) {
            self.dirs.make().await?;
        }
        let exists = self.host.find(self.vm.as_str(), Access::Change).is_ok();
        if !exists {
            let spec = self.vm_spec(spec).await?;
            self.host.create(spec, Arc::new(NoProgress)).await.map_err(|error| runtime_error(&error))?;
        }
        self.host.start(self.vm.as_str(), None).await.map(drop).map_err(|error| runtime_error(&error))
    }

    async fn stop_sandbox(&self, grace: Duration) -> Result<(), RuntimeError> {
        self.host.stop(self.vm.as_str(), grace, None).await.map(drop).map_err(|error| runtime_error(&error))
    }

    async fn remove_sandbox(&self) -> Result<(), RuntimeError> {
        match self.host.delete(self.vm.as_str(), true, None).await {
            Err(error) if error.fault() != Fault::NotFound => return Err(runtime_error(&error)),
            _ => {}
        }
        self.dirs.remove().await
    }

    async fn write_volume(&self, content: &VolumeContent) -> Result<(), RuntimeError> {
        let at = crate::execute::now(self.host.clock());
        self.dirs.write(content.clone(), at).await
    }

    async fn measure_volumes(
        &self,
        volumes: &[MeasuredVolume],
    ) -> Result<BTreeMap<String, u64>, RuntimeError> {
        self.dirs.measure(volumes.to_vec()).await
    }

    async fn pull_image(
        &self,
        image: &str,
        policy: PullPolicy,
        credentials: &[Credentials],
    ) -> Result<(), RuntimeError> {
        self.image(image, (policy, PullOrigin::Cluster), credentials).await.map(drop)
    }

    async fn create_container(&self, id: &ContainerId, container: &NewContainer) -> Result<(), RuntimeError> {
        // The preceding step has pulled the image, with the credentials of the pod.
        let here = (PullPolicy::Never, PullOrigin::Local);
        let (_, image) = self.image(&container.spec.image, here, &[]).await?;
        let spec = container.of_image(&image.config.entrypoint, &image.config.user);
        let mut spec = spec.map_err(RuntimeError::other)?;
        let if_absent = (PullPolicy::IfNotPresent, PullOrigin::Cluster);
        let mut mounted = Vec::new();
        for mount in &mut spec.mounts {
            if let ContainerMountSource::Image { digest, .. } = &mut mount.source {
                let credentials = container.credentials.get(digest).map(Vec::as_slice).unwrap_or_default();
                let (found, image) = self.image(digest, if_absent, credentials).await?;
                *digest = found;
                mounted.push(*image);
            }
        }
        let made = self.host.create_container_of(self.vm.as_str(), id.clone(), spec, &image, &mounted).await;
        made.map(drop).map_err(|error| runtime_error(&error))
    }

    async fn start_container(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        self.host.start_container(self.vm.as_str(), id).await.map(drop).map_err(|error| runtime_error(&error))
    }

    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        self.host
            .stop_container(self.vm.as_str(), id, grace)
            .await
            .map(drop)
            .map_err(|error| runtime_error(&error))
    }

    async fn remove_container(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        let removed = self.host.remove_container(self.vm.as_str(), id).await;
        removed.map_err(|error| runtime_error(&error))?;
        self.messages.lock().remove(id);
        Ok(())
    }

    async fn exec(&self, id: &ContainerId, argv: &[String], limit: Duration) -> Result<Exec, RuntimeError> {
        let process = self.host.container_process(self.vm.as_str(), id, argv.to_vec());
        let mut process = process.map_err(|error| runtime_error(&error))?;
        process.timeout_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).max(1);
        let view = self.host.find(self.vm.as_str(), Access::Read).map_err(|error| runtime_error(&error))?;
        let guest = view.guest.clone().ok_or_else(|| RuntimeError::other("the guest has no session"))?;
        let began = Instant::now();
        let ran = timeout(limit.saturating_add(KILL_MARGIN), collect(&guest, process)).await;
        match ran {
            Err(_) => Ok(Exec::TimedOut),
            Ok(Ok((exit, _))) if exit.signal == SIGKILL && began.elapsed() >= limit => Ok(Exec::TimedOut),
            Ok(Ok((exit, _))) if !exit.error.is_empty() => Err(RuntimeError::other(exit.error)),
            Ok(Ok((exit, output))) => Ok(Exec::Exited { code: exit.code, output }),
            Ok(Err(why)) => Err(RuntimeError::other(why)),
        }
    }
}

/// Runs a command to its end and keeps the beginning of its output. The guest is hostile: the rest is read and dropped.
async fn collect(
    guest: &coracle_host::GuestClient,
    process: pb::Process,
) -> Result<(pb::ExitStatus, String), String> {
    use pb::exec_response::Message;
    let mut replies = guest.exec(process).await.map_err(|error| error.to_string())?;
    let mut output = Vec::new();
    while let Some(reply) = replies.message().await.map_err(|status| status.message().to_owned())? {
        match reply.message {
            Some(Message::Stdout(data) | Message::Stderr(data)) => {
                let room = OUTPUT_MAX.saturating_sub(output.len());
                output.extend_from_slice(data.get(..room.min(data.len())).unwrap_or_default());
            }
            Some(Message::Exit(exit)) => return Ok((exit, String::from_utf8_lossy(&output).into_owned())),
            Some(Message::Started(_)) | None => {}
        }
    }
    Err("the session ended before the command did".to_owned())
}

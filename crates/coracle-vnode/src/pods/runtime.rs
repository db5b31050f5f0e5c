//! Pod runtime on the host core that updates the table of pods with each observation.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use coracle_host::PullPolicy;
use coracle_oci::Credentials;
use coracle_pod::container_spec::NewContainer;
use coracle_pod::host::HostRuntime;
use coracle_pod::observed::RuntimeState;
use coracle_pod::runtime::{ErrorKind, Exec, PodRuntime, RuntimeError};
use coracle_pod::step::SandboxSpec;
use coracle_pod::volume::{MeasuredVolume, VolumeContent};
use coracle_record::ContainerId;
use tokio::sync::Notify;

use super::row::Row;

/// Runtime that publishes its observations in the table of pods.
pub(super) struct ShownRuntime {
    pub(super) inner: HostRuntime,
    pub(super) row: Arc<Row>,
    /// Image of the pod's only container; `None`: the pod has several containers.
    pub(super) only_image: Option<String>,
    /// Notified when that image is a disk image. The image of a debug container, added later, does not count.
    pub(super) disk_image: Arc<Notify>,
}

#[async_trait]
impl PodRuntime for ShownRuntime {
    async fn observe(&self) -> Result<RuntimeState, RuntimeError> {
        let observed = self.inner.observe().await;
        self.row.update_from_sandbox(self.inner.vm().as_str());
        observed
    }

    async fn changed(&self) {
        self.inner.changed().await;
    }

    async fn start_sandbox(&self, spec: &SandboxSpec) -> Result<(), RuntimeError> {
        self.inner.start_sandbox(spec).await
    }

    async fn stop_sandbox(&self, grace: Duration) -> Result<(), RuntimeError> {
        self.inner.stop_sandbox(grace).await
    }

    async fn remove_sandbox(&self) -> Result<(), RuntimeError> {
        self.inner.remove_sandbox().await
    }

    async fn write_volume(&self, content: &VolumeContent) -> Result<(), RuntimeError> {
        self.inner.write_volume(content).await
    }

    async fn measure_volumes(
        &self,
        volumes: &[MeasuredVolume],
    ) -> Result<BTreeMap<String, u64>, RuntimeError> {
        self.inner.measure_volumes(volumes).await
    }

    async fn pull_image(
        &self,
        image: &str,
        policy: PullPolicy,
        credentials: &[Credentials],
    ) -> Result<(), RuntimeError> {
        let pulled = self.inner.pull_image(image, policy, credentials).await;
        let is_disk = pulled.as_ref().is_err_and(|error| error.kind == ErrorKind::DiskImage);
        if is_disk && self.only_image.as_deref() == Some(image) {
            self.disk_image.notify_one();
        }
        pulled
    }

    async fn create_container(&self, id: &ContainerId, container: &NewContainer) -> Result<(), RuntimeError> {
        self.inner.create_container(id, container).await
    }

    async fn start_container(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        self.inner.start_container(id).await
    }

    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        self.inner.stop_container(id, grace).await
    }

    async fn remove_container(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        self.inner.remove_container(id).await
    }

    async fn exec(&self, id: &ContainerId, argv: &[String], limit: Duration) -> Result<Exec, RuntimeError> {
        self.inner.exec(id, argv, limit).await
    }
}

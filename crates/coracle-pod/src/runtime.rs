//! What a pod's task needs of the node: VMs and containers on one side, the API server on the other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use coracle_host::PullPolicy;
use coracle_oci::Credentials;
use coracle_record::ContainerId;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodStatus;

use crate::container_spec::NewContainer;
use crate::events::PodEvent;
use crate::observed::RuntimeState;
use crate::probe::{ProbeKind, ProbeOutcome};
use crate::step::SandboxSpec;
use crate::volume::Token;
use crate::volume::{MeasuredVolume, TokenRequest, VolumeContent};

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RuntimeError {
    /// The failure and its causes, in one line.
    pub message: String,
    /// What kind of failure it is.
    pub kind: ErrorKind,
}

/// Kinds of failures that lead to reasons of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Nothing of that name exists.
    NotFound,
    /// The name of an image cannot be one.
    InvalidImageName,
    /// The image is not on the node, and may not be pulled.
    ImageNeverPull,
    /// The image is the disk of a VM: no container can be made from it.
    DiskImage,
    /// Anything else.
    Other,
}

impl RuntimeError {
    /// A failure of no particular kind.
    #[must_use]
    pub fn other(message: impl Into<String>) -> Self {
        Self { message: message.into(), kind: ErrorKind::Other }
    }
}

/// How a command in a container ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exec {
    /// By itself, or by a signal (128 + its number).
    Exited {
        /// 0 to 255.
        code: i32,
        /// The beginning of what it printed, bounded.
        output: String,
    },
    /// It was killed when its time was over.
    TimedOut,
}

/// The VM of one pod and its containers. Every call is idempotent, so that it can be repeated when its answer was lost.
#[async_trait]
pub trait PodRuntime: Send + Sync {
    /// What exists.
    async fn observe(&self) -> Result<RuntimeState, RuntimeError>;

    /// Resolves when something has changed since the last [`PodRuntime::observe`]; may resolve too often. Cancel-safe.
    async fn changed(&self);

    /// Makes the VM, if it does not exist, and starts it; returns when its guest takes containers.
    async fn start_sandbox(&self, spec: &SandboxSpec) -> Result<(), RuntimeError>;

    /// Powers the VM off.
    async fn stop_sandbox(&self, grace: Duration) -> Result<(), RuntimeError>;

    /// Removes the VM, its containers and all files of the pod.
    async fn remove_sandbox(&self) -> Result<(), RuntimeError>;

    /// Writes files of a volume.
    async fn write_volume(&self, content: &VolumeContent) -> Result<(), RuntimeError>;

    /// What volumes hold, bytes by name. A volume that does not exist holds nothing.
    async fn measure_volumes(
        &self,
        volumes: &[MeasuredVolume],
    ) -> Result<BTreeMap<String, u64>, RuntimeError>;

    /// Brings an image to the node, with the first of the credentials that its registry takes; without any, with the node's
    /// own.
    async fn pull_image(
        &self,
        image: &str,
        policy: PullPolicy,
        credentials: &[Credentials],
    ) -> Result<(), RuntimeError>;

    /// Makes a container from an image of the node.
    async fn create_container(&self, id: &ContainerId, container: &NewContainer) -> Result<(), RuntimeError>;

    /// Starts a container.
    async fn start_container(&self, id: &ContainerId) -> Result<(), RuntimeError>;

    /// Ends a container; returns when it has ended. A later call with less grace shortens it.
    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError>;

    /// Removes a container.
    async fn remove_container(&self, id: &ContainerId) -> Result<(), RuntimeError>;

    /// Runs a command in a container, and kills it with all that it started when its time is over.
    async fn exec(&self, id: &ContainerId, argv: &[String], limit: Duration) -> Result<Exec, RuntimeError>;
}

/// The object of a pod at the API server. Calls may fail for as long as it is away: pods keep running.
#[async_trait]
pub trait PodObject: Send + Sync {
    /// Takes the status as it is now, which may be reported later. Returns at once.
    fn observe(&self, _status: &Arc<PodStatus>) {}

    /// Stores a status.
    async fn report(&self, status: &PodStatus) -> Result<(), RuntimeError>;

    /// Removes the object, when it is still this one. `Ok` when it is gone.
    async fn remove(&self) -> Result<(), RuntimeError>;

    /// Issues a token of the pod's service account, bound to the pod.
    async fn request_token(&self, request: &TokenRequest, now: Timestamp) -> Result<Token, RuntimeError>;

    /// Takes an event. Returns at once.
    fn event(&self, event: PodEvent);

    /// Takes the result of a check of a container, for statistics. Returns at once.
    fn probed(&self, _container: &str, _kind: ProbeKind, _outcome: &ProbeOutcome) {}
}

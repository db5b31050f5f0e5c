//! Ports of a pod's task: the VM and containers on the node, and the object at the API server.

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

/// Error of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RuntimeError {
    /// The failure and its causes, in one line.
    pub message: String,
    /// Kind of the failure.
    pub kind: ErrorKind,
}

/// Kinds of failures that lead to status reasons of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The object does not exist.
    NotFound,
    /// The name of the image is invalid.
    InvalidImageName,
    /// The image is not on the node, and its pull policy is Never.
    ImageNeverPull,
    /// The image is a disk image of a VM: containers cannot be created from it.
    DiskImage,
    /// Any other failure.
    Other,
}

impl RuntimeError {
    /// Returns a failure of kind [`ErrorKind::Other`].
    #[must_use]
    pub fn other(message: impl Into<String>) -> Self {
        Self { message: message.into(), kind: ErrorKind::Other }
    }
}

/// End of a command in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exec {
    /// The command exited by itself or by a signal (128 + signal number).
    Exited {
        /// Exit code, 0 to 255.
        code: i32,
        /// Beginning of the output, bounded.
        output: String,
    },
    /// The command was killed because its time limit was over.
    TimedOut,
}

/// The VM of one pod and its containers. Every call is idempotent, so that it can be repeated when its reply was lost.
#[async_trait]
pub trait PodRuntime: Send + Sync {
    /// Returns the VM and containers that exist.
    async fn observe(&self) -> Result<RuntimeState, RuntimeError>;

    /// Resolves when something has changed since the last [`PodRuntime::observe`]; may resolve too often. Cancel-safe.
    async fn changed(&self);

    /// Creates the VM, if it does not exist, and starts it. Returns when its guest accepts containers.
    async fn start_sandbox(&self, spec: &SandboxSpec) -> Result<(), RuntimeError>;

    /// Powers the VM off.
    async fn stop_sandbox(&self, grace: Duration) -> Result<(), RuntimeError>;

    /// Removes the VM, its containers and all files of the pod.
    async fn remove_sandbox(&self) -> Result<(), RuntimeError>;

    /// Writes the files of a volume.
    async fn write_volume(&self, content: &VolumeContent) -> Result<(), RuntimeError>;

    /// Returns the usage of volumes in bytes, by name. A volume that does not exist has usage 0.
    async fn measure_volumes(
        &self,
        volumes: &[MeasuredVolume],
    ) -> Result<BTreeMap<String, u64>, RuntimeError>;

    /// Pulls an image to the node, with the first of the credentials that its registry accepts; without any, with those of the
    /// node.
    async fn pull_image(
        &self,
        image: &str,
        policy: PullPolicy,
        credentials: &[Credentials],
    ) -> Result<(), RuntimeError>;

    /// Creates a container from an image of the node.
    async fn create_container(&self, id: &ContainerId, container: &NewContainer) -> Result<(), RuntimeError>;

    /// Starts a container.
    async fn start_container(&self, id: &ContainerId) -> Result<(), RuntimeError>;

    /// Stops a container and returns when it has ended. A later call with a shorter grace period shortens it.
    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError>;

    /// Removes a container.
    async fn remove_container(&self, id: &ContainerId) -> Result<(), RuntimeError>;

    /// Runs a command in a container. At the limit, kills it with all processes that it started.
    async fn exec(&self, id: &ContainerId, argv: &[String], limit: Duration) -> Result<Exec, RuntimeError>;
}

/// Object of a pod at the API server. Calls may fail as long as the API server is unavailable: pods keep running.
#[async_trait]
pub trait PodObject: Send + Sync {
    /// Takes the current status, which may be reported later. Returns at once.
    fn observe(&self, _status: &Arc<PodStatus>) {}

    /// Stores a status.
    async fn report(&self, status: &PodStatus) -> Result<(), RuntimeError>;

    /// Removes the object if its uid is unchanged. `Ok` when it does not exist.
    async fn remove(&self) -> Result<(), RuntimeError>;

    /// Issues a token of the pod's service account, bound to the pod.
    async fn request_token(&self, request: &TokenRequest, now: Timestamp) -> Result<Token, RuntimeError>;

    /// Takes an event. Returns at once.
    fn event(&self, event: PodEvent);

    /// Takes the result of a check of a container, for statistics. Returns at once.
    fn probed(&self, _container: &str, _kind: ProbeKind, _outcome: &ProbeOutcome) {}
}

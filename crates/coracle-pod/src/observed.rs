//! Input of a plan: the pod, its objects, the state of the runtime, and the memory of the pod's task.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};

use crate::node::NodeFacts;
use crate::objects::Objects;
use crate::probe::{ProbeKind, ProbeState};
use crate::step::{HookKind, Step, Target};
use crate::time::{add, backoff};
use crate::volume::Token;
use coracle_record::{ContainerId, ProcessUser};

/// Snapshot from which a plan is made.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// Pod object.
    pub pod: &'a Pod,
    /// Properties of the node.
    pub node: &'a NodeFacts,
    /// Objects that the pod refers to.
    pub objects: &'a Objects,
    /// VM and containers of the pod.
    pub runtime: &'a RuntimeState,
    /// Memory of the pod's task.
    pub memory: &'a Memory,
    /// Last reported status; at first that of the object.
    pub reported: &'a PodStatus,
    /// Decision of the node against the pod.
    pub failure: Option<&'a PodFailure>,
    /// The object vanished: end everything at once, without hooks.
    pub forced: bool,
    /// Current time.
    pub now: Timestamp,
}

/// A decision of the node against a pod: admission failed, or it was evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFailure {
    /// Status reason, e.g. `OutOfmemory` or `Evicted`.
    pub reason: String,
    /// Status message: one sentence.
    pub message: String,
    /// Time at which the containers of the pod are killed.
    pub deadline: Timestamp,
    /// Reason of the condition DisruptionTarget; `None`: the condition is not set.
    pub disruption: Option<&'static str>,
}

/// VM and containers of a pod that exist.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RuntimeState {
    /// VM of the pod.
    pub sandbox: Option<SandboxState>,
    /// Containers of the pod, unordered; a container may have several attempts.
    pub containers: Vec<ContainerView>,
}

/// State of the VM of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxState {
    /// Phase of the VM.
    pub phase: SandboxPhase,
    /// Addresses that the guest has confirmed.
    pub addresses: Vec<IpAddr>,
    /// Start time of the VM.
    pub started_at: Option<Timestamp>,
    /// Reason of the phase; may be empty.
    pub message: String,
}

/// Phase of the VM of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxPhase {
    /// The VM exists and was never started.
    Created,
    /// The VM boots.
    Starting,
    /// The VM accepts containers.
    Ready,
    /// The VM is paused or hibernated: nothing runs in it.
    Suspended,
    /// The VM powers off.
    Stopping,
    /// The VM ran and is off.
    Down,
}

/// Container of a pod, as the runtime reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerView {
    /// Id of the container.
    pub id: ContainerId,
    /// Name of the container in the pod's spec.
    pub name: String,
    /// Number of the attempt, from 0.
    pub attempt: u32,
    /// Number of quick restarts in a row that led to this attempt.
    pub streak: u32,
    /// Phase of the container.
    pub phase: ContainerPhase,
    /// Creation time.
    pub created_at: Timestamp,
    /// Start time of the process.
    pub started_at: Option<Timestamp>,
    /// Image as the pod's spec names it.
    pub image: String,
    /// Digest of the image.
    pub image_id: String,
    /// User of the process, once it is known.
    pub user: Option<ProcessUser>,
}

/// Phase of a container.
#[derive(Clone, Debug, PartialEq)]
pub enum ContainerPhase {
    /// Created, not started.
    Created,
    /// Running.
    Running,
    /// Ended.
    Exited(Exited),
}

/// Exit of a container.
#[derive(Clone, Debug, PartialEq)]
pub struct Exited {
    /// Time of the exit.
    pub at: Timestamp,
    /// Exit code, 0 to 255; 128 + signal number when a signal killed the process.
    pub code: i32,
    /// Signal that killed the process; 0: none.
    pub signal: i32,
    /// The kernel killed the process because of memory shortage (OOM).
    pub oom_killed: bool,
    /// Reason why the container never ran or was lost; else empty.
    pub error: String,
    /// Termination message that the container left.
    pub message: String,
}

impl ContainerView {
    /// Returns the exit of the container, if it has ended.
    #[must_use]
    pub fn exited(&self) -> Option<&Exited> {
        match &self.phase {
            ContainerPhase::Exited(exited) => Some(exited),
            ContainerPhase::Created | ContainerPhase::Running => None,
        }
    }

    /// Returns whether the process of the container runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.phase == ContainerPhase::Running
    }
}

/// Memory of a pod's task. All of it may be lost: a plan without it repeats only steps that may be repeated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// Steps under way, at most one per target.
    pub busy: BTreeMap<Target, Arc<Step>>,
    /// Last failure of each target that has not succeeded since.
    pub failures: BTreeMap<Target, Failure>,
    /// Pulled images, by the container that they were pulled for.
    pub images: BTreeSet<ContainerId>,
    /// Hooks that ran.
    pub hooks: BTreeSet<(ContainerId, HookKind)>,
    /// State of probes, by container.
    pub probes: BTreeMap<(ContainerId, ProbeKind), ProbeState>,
    /// Digests of written volumes, by name.
    pub volumes: BTreeMap<String, String>,
    /// Service account tokens, by volume and path.
    pub tokens: BTreeMap<(String, String), Token>,
    /// Time and error of failed postStart hooks, by container.
    pub hook_failures: BTreeMap<ContainerId, (Timestamp, String)>,
    /// Last measured usage of volumes with a limit.
    pub usage: Option<VolumeUsage>,
    /// The VM and all files of the pod were removed.
    pub removed: bool,
}

/// Usage of volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeUsage {
    /// Bytes on disk or in memory, by volume.
    pub bytes: BTreeMap<String, u64>,
    /// Time of the measurement.
    pub at: Timestamp,
}

/// Last failure of a step, with the number of consecutive failures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Reason for the container status.
    pub reason: &'static str,
    /// Error message.
    pub message: String,
    /// Number of consecutive failures.
    pub count: u32,
    /// Time of the last failure.
    pub at: Timestamp,
}

impl Failure {
    /// Returns when the step may be retried.
    #[must_use]
    pub fn retry_at(&self) -> Timestamp {
        add(self.at, backoff(self.count))
    }
}

//! What a plan sees: the pod, its objects, what the runtime reports, and what the pod's task remembers.

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

/// A snapshot that a plan decides from.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// The object.
    pub pod: &'a Pod,
    /// What its node is.
    pub node: &'a NodeFacts,
    /// Objects that it names.
    pub objects: &'a Objects,
    /// What exists of it.
    pub runtime: &'a RuntimeState,
    /// What its task remembers.
    pub memory: &'a Memory,
    /// The status that was reported last; at first the object's own.
    pub reported: &'a PodStatus,
    /// A decision of the node against the pod.
    pub failure: Option<&'a PodFailure>,
    /// The object vanished: everything is ended at once, without hooks.
    pub forced: bool,
    /// The time.
    pub now: Timestamp,
}

/// A decision of the node against a pod: admission failed, or it was evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFailure {
    /// Reason of the status, as `OutOfmemory` or `Evicted`.
    pub reason: String,
    /// One sentence.
    pub message: String,
    /// When its containers are killed.
    pub deadline: Timestamp,
    /// Reason of the condition DisruptionTarget; `None`: no such condition.
    pub disruption: Option<&'static str>,
}

/// What exists of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RuntimeState {
    /// Its VM.
    pub sandbox: Option<SandboxState>,
    /// Its containers, in no order; several attempts of one may be there.
    pub containers: Vec<ContainerView>,
}

/// The VM of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxState {
    /// How far it is.
    pub phase: SandboxPhase,
    /// Addresses that the guest has confirmed.
    pub addresses: Vec<IpAddr>,
    /// When it began to run.
    pub started_at: Option<Timestamp>,
    /// Why it is so; may be empty.
    pub message: String,
}

/// How far the VM of a pod is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxPhase {
    /// It exists and was never started.
    Created,
    /// It boots.
    Starting,
    /// It takes containers.
    Ready,
    /// It is paused or hibernated: nothing happens in it.
    Suspended,
    /// It powers off.
    Stopping,
    /// It ran and is off.
    Down,
}

/// A container of a pod, as the runtime reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerView {
    /// Its id.
    pub id: ContainerId,
    /// Name in the pod's spec.
    pub name: String,
    /// Which start of that name it is, from 0.
    pub attempt: u32,
    /// Quick restarts in a row that led to it.
    pub streak: u32,
    /// How far it is.
    pub phase: ContainerPhase,
    /// When it was made.
    pub created_at: Timestamp,
    /// When its process began.
    pub started_at: Option<Timestamp>,
    /// Image as the spec names it.
    pub image: String,
    /// Digest of its image.
    pub image_id: String,
    /// Who its process runs as, once that is known.
    pub user: Option<ProcessUser>,
}

/// How far a container is.
#[derive(Clone, Debug, PartialEq)]
pub enum ContainerPhase {
    /// Made, not started.
    Created,
    /// It runs.
    Running,
    /// It has ended.
    Exited(Exited),
}

/// How a container ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Exited {
    /// When.
    pub at: Timestamp,
    /// 0 to 255; 128 + signal when a signal killed it.
    pub code: i32,
    /// 0 when it was none.
    pub signal: i32,
    /// The kernel killed it for want of memory.
    pub oom_killed: bool,
    /// Why it never ran, or was lost; else empty.
    pub error: String,
    /// What it left as its termination message.
    pub message: String,
}

impl ContainerView {
    /// How it ended.
    #[must_use]
    pub fn exited(&self) -> Option<&Exited> {
        match &self.phase {
            ContainerPhase::Exited(exited) => Some(exited),
            ContainerPhase::Created | ContainerPhase::Running => None,
        }
    }

    /// True while its process runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.phase == ContainerPhase::Running
    }
}

/// What the task of a pod remembers. Everything in it can be lost: a plan without it repeats at most what may be repeated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// Steps under way, at most one per target.
    pub busy: BTreeMap<Target, Arc<Step>>,
    /// Last failure of targets that did not succeed since.
    pub failures: BTreeMap<Target, Failure>,
    /// Images that were pulled, by the container that they are for.
    pub images: BTreeSet<ContainerId>,
    /// Hooks that ran.
    pub hooks: BTreeSet<(ContainerId, HookKind)>,
    /// Probes, by the container that they are of.
    pub probes: BTreeMap<(ContainerId, ProbeKind), ProbeState>,
    /// Digests of volumes that were written.
    pub volumes: BTreeMap<String, String>,
    /// Tokens, by volume and path.
    pub tokens: BTreeMap<(String, String), Token>,
    /// Containers whose postStart hook failed: when, and how.
    pub hook_failures: BTreeMap<ContainerId, (Timestamp, String)>,
    /// What volumes with a limit held when they were measured last.
    pub usage: Option<VolumeUsage>,
    /// The VM and all files were removed.
    pub removed: bool,
}

/// What volumes hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeUsage {
    /// Bytes on disk or in memory, by volume.
    pub bytes: BTreeMap<String, u64>,
    /// When they were measured.
    pub at: Timestamp,
}

/// A failure of a step, and how many came in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Reason for the status of a container.
    pub reason: &'static str,
    /// What failed.
    pub message: String,
    /// Failures in a row.
    pub count: u32,
    /// When the last one was.
    pub at: Timestamp,
}

impl Failure {
    /// When the step may be tried again.
    #[must_use]
    pub fn retry_at(&self) -> Timestamp {
        add(self.at, backoff(self.count))
    }
}

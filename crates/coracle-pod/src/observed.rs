//! What a plan sees: the pod, its objects, what the runtime reports, and what the pod's task remembers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use coracle_types::MemoryMib;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodStatus};

use crate::network::ResolverConfig;
use crate::objects::Objects;
use crate::probe::{ProbeKind, ProbeState};
use crate::step::{HookKind, Step, Target};
use coracle_record::{ContainerId, ProcessUser};

/// First delay after a failure, and the longest one.
const BACKOFF_FIRST: Duration = Duration::from_secs(10);
const BACKOFF_MAX: Duration = Duration::from_secs(300);

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
    pub verdict: Option<&'a Verdict>,
    /// The object vanished: everything is ended at once, without hooks.
    pub forced: bool,
    /// The time.
    pub now: Timestamp,
}

/// What pods see of their node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeFacts {
    /// Name of the Node object.
    pub name: String,
    /// Addresses of the node.
    pub addresses: Vec<IpAddr>,
    /// Domain of the cluster, as `cluster.local`.
    pub cluster_domain: String,
    /// Name servers of the cluster.
    pub cluster_dns: Vec<IpAddr>,
    /// The resolver of the node, for pods with the policy Default.
    pub resolver: ResolverConfig,
    /// CPUs that pods may have.
    pub allocatable_cpus: u32,
    /// Memory that pods may have.
    pub allocatable_memory: MemoryMib,
    /// Memory of a pod that asks for none.
    pub default_memory: MemoryMib,
    /// Memory of the guest's kernel and agent, beside that of the containers.
    pub guest_overhead_mib: u32,
}

/// A decision of the node against a pod: admission failed, or it was evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
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
    pub busy: BTreeMap<Target, Step>,
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
    /// The VM and all files were removed.
    pub removed: bool,
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

/// A token of a service account.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The secret.
    pub value: String,
    /// When it was issued.
    pub issued_at: Timestamp,
    /// When it ends.
    pub expires_at: Timestamp,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

/// Delay before try number `count` + 1: nothing, 10 s, then twice the last one, up to 5 min.
#[must_use]
pub fn backoff(count: u32) -> Duration {
    match count.checked_sub(1) {
        None => Duration::ZERO,
        Some(doublings) => BACKOFF_FIRST.saturating_mul(1 << doublings.min(10)).min(BACKOFF_MAX),
    }
}

/// The time `later`; the latest that there is where it would be beyond.
#[must_use]
pub fn add(time: Timestamp, later: Duration) -> Timestamp {
    let later = SignedDuration::try_from(later).unwrap_or(SignedDuration::MAX);
    time.checked_add(later).unwrap_or(Timestamp::MAX)
}

/// Time from `now` until `then`; nothing when it has passed.
#[must_use]
pub fn until(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(then.duration_since(now)).unwrap_or_default()
}

/// Seconds of the API, which are never negative after its validation.
#[must_use]
pub fn seconds(value: i64) -> Duration {
    Duration::from_secs(u64::try_from(value).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_five_minutes() {
        let delays: Vec<_> = (0..9).map(|count| backoff(count).as_secs()).collect();
        assert_eq!(delays, [0, 10, 20, 40, 80, 160, 300, 300, 300]);
        assert_eq!(backoff(u32::MAX), BACKOFF_MAX);
    }

    #[test]
    fn times_beyond_the_calendar_are_its_end() {
        assert_eq!(add(Timestamp::UNIX_EPOCH, Duration::MAX), Timestamp::MAX);
        assert_eq!(until(Timestamp::MAX, Timestamp::UNIX_EPOCH), Duration::ZERO);
    }

    #[test]
    fn token_is_not_shown_in_logs() {
        let (issued_at, expires_at) = (Timestamp::UNIX_EPOCH, Timestamp::MAX);
        let shown = format!("{:?}", Token { value: "secret".into(), issued_at, expires_at });
        assert!(!shown.contains("secret"), "{shown}");
    }
}

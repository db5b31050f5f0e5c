//! State of a pod whose container is a VM, from which its status is derived.

use std::net::IpAddr;

use coracle_host::Exit;
use coracle_types::UnixMillis;

use crate::facts::Failure;

/// State of a pod whose container is a VM.
#[derive(Clone, Debug, PartialEq)]
pub enum VmPodState {
    /// The annotations are invalid.
    Invalid(String),
    /// The node refuses the pod, with this reason and message.
    Refused(String, String),
    /// The VM does not exist or run yet.
    Waiting(WaitReason),
    /// The VM runs.
    Running {
        /// The VM answers its probe.
        is_ready: bool,
        /// Start time of the VM.
        since: Option<UnixMillis>,
        /// Addresses of the VM, in the order of the status.
        ips: Vec<IpAddr>,
    },
    /// The VM is hibernated or being hibernated.
    Hibernated,
    /// The VM is being woken.
    Waking,
    /// The VM is off and stays off.
    Exited {
        /// The workload succeeded.
        succeeded: bool,
        /// Exit of the workload.
        exit: Option<Exit>,
        /// The workload was killed because the guest ran out of memory.
        oom_killed: bool,
        /// Start time.
        since: Option<UnixMillis>,
        /// End time.
        ended: Option<UnixMillis>,
        /// Reason.
        message: String,
    },
    /// The VM is lost.
    Lost(String),
    /// The pod is being ended: its status stays as it is.
    Ending,
    /// The pod has ended.
    Ended,
}

/// Reason why a container waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitReason {
    /// Reason: one word.
    pub reason: &'static str,
    /// Message: one line; may be empty.
    pub message: String,
}

impl WaitReason {
    pub(crate) fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

impl VmPodState {
    /// Replaces the reason and message of a waiting pod by those of the failed step.
    pub(crate) fn explain(&mut self, failure: &Failure) {
        if let Self::Waiting(waits) = self {
            *waits = WaitReason::new(failure.reason, failure.message.clone());
        }
    }
}

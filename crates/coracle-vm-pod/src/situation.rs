//! How a pod is, for its status.

use std::net::IpAddr;

use coracle_host::Exit;
use coracle_types::UnixMillis;

use crate::facts::Failure;

/// How a pod is.
#[derive(Clone, Debug, PartialEq)]
pub enum Situation {
    /// Its annotations name no VM.
    Invalid(String),
    /// The node does not take it: reason and message.
    Refused(String, String),
    /// Its VM is not there yet.
    Waits(Waits),
    /// Its VM runs.
    Runs {
        /// It answers.
        is_ready: bool,
        /// When it began.
        since: Option<UnixMillis>,
        /// Its addresses, in the order of its status.
        ips: Vec<IpAddr>,
    },
    /// It is hibernated, or about to be.
    Sleeps,
    /// It is being woken.
    Wakes,
    /// Its VM is off, and stays off.
    Exited {
        /// Its workload succeeded.
        succeeded: bool,
        /// How it ended.
        exit: Option<Exit>,
        /// It was killed, in a guest that was out of memory.
        oom_killed: bool,
        /// When it began.
        since: Option<UnixMillis>,
        /// When it ended.
        ended: Option<UnixMillis>,
        /// Why.
        message: String,
    },
    /// Its VM is gone for good.
    Lost(String),
    /// It ends, or has ended: its status stays.
    Ends,
    /// It has ended.
    Ended,
}

/// Why a container waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waits {
    /// One word.
    pub reason: &'static str,
    /// One line; may be empty.
    pub message: String,
}

impl Waits {
    pub(crate) fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

impl Situation {
    /// Says why the last step failed, where the pod waits for it.
    pub(crate) fn explain(&mut self, failure: &Failure) {
        if let Self::Waits(waits) = self {
            *waits = Waits::new(failure.reason, failure.message.clone());
        }
    }
}

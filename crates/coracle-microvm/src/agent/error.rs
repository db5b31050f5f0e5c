//! One error type for calls to nodes, and what follows from an error. Pure.

use tonic::Code;

/// Code of our agents for a call on behalf of an older generation, or of another object.
const FENCED: &str = "COR-VM-006";

/// Origin of an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// The agent, or the connection to it.
    #[default]
    Agent,
    /// This process: too many of its calls to that agent are under way.
    Busy,
    /// This process: its certificates are unusable.
    Configuration,
}

/// A failed call to an agent.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{operation} at agent {address}: {message}")]
pub struct AgentError {
    /// The RPC.
    pub operation: &'static str,
    /// The agent.
    pub address: String,
    /// gRPC code.
    pub code: Code,
    /// Message of the agent or of the transport.
    pub message: String,
    /// Stable error code (`COR-IMG-004`) from our agents; empty from others.
    pub failure: String,
    /// Origin.
    pub origin: Origin,
}

impl AgentError {
    /// True when the same call may succeed later with nothing changed (docs/reference/agent-service.md).
    #[must_use]
    pub fn is_transient(&self) -> bool {
        use Code::{Aborted, DeadlineExceeded, Internal, ResourceExhausted, Unavailable};
        self.is_local()
            || matches!(self.code, Unavailable | Internal | DeadlineExceeded | Aborted | ResourceExhausted)
    }

    /// Too many calls of this process to that agent are under way; it says nothing about the agent.
    #[must_use]
    pub fn busy(address: &str) -> Self {
        let message = "too many calls to it are under way".into();
        Self {
            operation: "wait for a call",
            address: address.to_owned(),
            code: Code::ResourceExhausted,
            message,
            failure: String::new(),
            origin: Origin::Busy,
        }
    }

    /// The node has no such call.
    #[must_use]
    pub fn unsupported(address: &str, operation: &'static str) -> Self {
        Self {
            operation,
            address: address.to_owned(),
            code: Code::Unimplemented,
            message: "the node has no such call".into(),
            failure: String::new(),
            origin: Origin::Agent,
        }
    }

    /// True for [`Self::busy`].
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.origin == Origin::Busy
    }

    /// True when the error says nothing about the agent or its VMs.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.origin != Origin::Agent
    }

    /// True when the agent has seen a newer generation of the object: read it again.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.failure == FENCED
    }

    /// True when there was no answer.
    #[must_use]
    pub fn is_silence(&self) -> bool {
        !self.is_local()
            && self.failure.is_empty()
            && matches!(self.code, Code::Unavailable | Code::DeadlineExceeded)
    }

    /// True when the agent explains a failure that a person can fix.
    #[must_use]
    pub fn is_explained(&self) -> bool {
        let telling = ["COR-IMG-", "COR-GST-", "COR-DRV-"];
        let full = self.code == Code::ResourceExhausted && !self.failure.is_empty();
        full || telling.iter().any(|prefix| self.failure.starts_with(prefix))
    }

    /// True when the image cannot be pulled or used. A full disk is a failure of the node.
    #[must_use]
    pub fn is_of_image(&self) -> bool {
        self.failure.starts_with("COR-IMG-") && self.code != Code::ResourceExhausted
    }

    /// True when the agent cannot start a stopped VM: it must be deleted and created again.
    #[must_use]
    pub fn must_recreate(&self) -> bool {
        self.code == Code::FailedPrecondition && self.message.contains("must be recreated")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_codes_table() {
        let error = |code| AgentError {
            operation: "CreateVM",
            address: "a:1".into(),
            code,
            message: "x".into(),
            failure: String::new(),
            origin: Origin::Agent,
        };
        for (code, want) in [
            (Code::Unavailable, true),
            (Code::Internal, true),
            (Code::DeadlineExceeded, true),
            (Code::Aborted, true),
            (Code::ResourceExhausted, true),
            (Code::InvalidArgument, false),
            (Code::FailedPrecondition, false),
            (Code::PermissionDenied, false),
            (Code::Unimplemented, false),
        ] {
            assert_eq!(error(code).is_transient(), want, "{code}");
        }
    }
}

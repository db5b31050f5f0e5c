//! Error type of calls to nodes, and the consequences of an error. Pure.

use tonic::Code;

/// Error code of coracle agents for a call on behalf of an older generation, or of another object.
const FENCED: &str = "COR-VM-006";

/// Origin of an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// The agent, or the connection to it.
    #[default]
    Agent,
    /// This process: too many of its calls to that agent are in progress.
    Busy,
    /// This process: its certificates are unusable.
    Configuration,
}

/// A failed call to an agent.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{operation} at agent {address}: {message}")]
pub struct AgentError {
    /// Name of the RPC.
    pub operation: &'static str,
    /// Address of the agent.
    pub address: String,
    /// gRPC code of the error.
    pub code: Code,
    /// Message of the agent or of the transport.
    pub message: String,
    /// Stable error code (`COR-IMG-004`) from coracle agents; empty from others.
    pub failure: String,
    /// Origin of the error.
    pub origin: Origin,
}

impl AgentError {
    /// True when the same call may succeed later without any change (docs/reference/agent-service.md).
    #[must_use]
    pub fn is_transient(&self) -> bool {
        use Code::{Aborted, DeadlineExceeded, Internal, ResourceExhausted, Unavailable};
        self.is_local()
            || matches!(self.code, Unavailable | Internal | DeadlineExceeded | Aborted | ResourceExhausted)
    }

    /// Returns the error for too many calls in progress to that agent. It says nothing about the agent.
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

    /// Returns the error for a call that the node does not have.
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

    /// True when the agent has seen a newer generation of the object: the caller must read the object again.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.failure == FENCED
    }

    /// True when there was no response.
    #[must_use]
    pub fn is_silence(&self) -> bool {
        !self.is_local()
            && self.failure.is_empty()
            && matches!(self.code, Code::Unavailable | Code::DeadlineExceeded)
    }

    /// True when the agent explains a failure that a user can fix.
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

//! One call to a node: deadline, metrics, and conversion of its failure to an [`AgentError`].

use std::time::Duration;

use coracle_reconcile::{ControllerMetrics, ReconcileResult};
use tokio::time::Instant;
use tonic::{Code, Response, Status};

use super::error::{AgentError, Origin};

/// Longest part of an agent's error text in conditions and Events.
const MESSAGE_CHARS_MAX: usize = 512;

/// Deadlines of calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deadlines {
    /// Deadline for connecting.
    pub connect: Duration,
    /// Deadline of CreateVM and StartVM. Coracle agents answer when the guest has acknowledged its configuration.
    pub boot: Duration,
    /// Deadline of every other call.
    pub call: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { connect: seconds(5), boot: seconds(150), call: seconds(10) }
    }
}

/// Makes calls to one node.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// `host:port` of the agent, which identifies the node in errors.
    pub(super) address: String,
    pub(super) deadlines: Deadlines,
    pub(super) metrics: ControllerMetrics,
}

impl Caller {
    /// Waits for the reply, at most until `deadline`.
    pub(super) async fn call<T>(
        &self,
        operation: &'static str,
        deadline: Duration,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, AgentError> {
        let began = Instant::now();
        let result = match tokio::time::timeout(deadline, call).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(self.status_error(operation, &status)),
            Err(_) => {
                let message = format!("no answer within {deadline:?}");
                Err(self.error(operation, Code::DeadlineExceeded, message))
            }
        };
        let outcome = if result.is_ok() { ReconcileResult::Ok } else { ReconcileResult::Error };
        self.metrics.record_call(operation, outcome, began.elapsed());
        result
    }

    /// Returns the error of a call that the agent, or the connection to it, ended with `status`.
    pub(super) fn status_error(&self, operation: &'static str, status: &Status) -> AgentError {
        let failure = failure(status);
        AgentError { failure, ..self.error(operation, code(status), message_with_help(status)) }
    }

    /// Returns the error of a failed call.
    pub(super) fn error(&self, operation: &'static str, code: Code, message: String) -> AgentError {
        AgentError {
            operation,
            address: self.address.clone(),
            code,
            message,
            failure: String::new(),
            origin: Origin::Agent,
        }
    }
}

/// Turns NOT_FOUND into success: stopping or deleting an absent VM is done.
pub(super) fn ignore_not_found(result: Result<(), AgentError>) -> Result<(), AgentError> {
    match result {
        Err(error) if error.code == Code::NotFound => Ok(()),
        result => result,
    }
}

/// Returns the stable error code from a coracle agent. Text in another form is dropped.
fn failure(status: &Status) -> String {
    let code = status.metadata().get("coracle-code").and_then(|v| v.to_str().ok()).unwrap_or_default();
    let plain = code.len() <= 16 && code.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if plain { code.to_owned() } else { String::new() }
}

/// Returns the agent's message, with its code and help.
fn message_with_help(status: &Status) -> String {
    let help = status.metadata().get_bin("coracle-help-bin").and_then(|v| v.to_bytes().ok());
    let help = help.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    match (failure(status).as_str(), help.as_str()) {
        ("", _) => sanitise_message(status.message()),
        (code, "") => sanitise_message(&format!("{} ({code})", status.message())),
        (code, help) => sanitise_message(&format!("{} ({code}; {help})", status.message())),
    }
}

/// Returns the gRPC code. A broken connection appears as UNKNOWN or CANCELLED with a cause; it counts as UNAVAILABLE.
fn code(status: &Status) -> Code {
    let broke = std::error::Error::source(status).is_some();
    match status.code() {
        Code::Unknown | Code::Cancelled if broke => Code::Unavailable,
        code => code,
    }
}

/// Truncates an agent's text and replaces control characters.
pub(super) fn sanitise_message(message: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut text: String = message.chars().take(MESSAGE_CHARS_MAX).map(clean).collect();
    if text.trim().is_empty() {
        text = "the agent gave no reason".into();
    }
    text
}

/// Formats an error with its causes.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    sanitise_message(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_error_includes_code_and_help() {
        let mut status = Status::unavailable("image r/x: get manifest from registry r");
        assert_eq!(failure(&status), "");
        assert_eq!(message_with_help(&status), "image r/x: get manifest from registry r");
        status.metadata_mut().insert("coracle-code", "COR-IMG-011".parse().unwrap());
        let help = tonic::metadata::MetadataValue::from_bytes(b"check that r can be reached");
        status.metadata_mut().insert_bin("coracle-help-bin", help);
        assert_eq!(
            message_with_help(&status),
            "image r/x: get manifest from registry r (COR-IMG-011; check that r can be reached)"
        );
        let error = AgentError {
            operation: "CreateVM",
            address: "a:1".into(),
            code: Code::Unavailable,
            message: message_with_help(&status),
            failure: failure(&status),
            origin: Origin::Agent,
        };
        assert!(error.is_transient() && error.is_explained() && !error.is_silence());
        status.metadata_mut().insert("coracle-code", "not a code!".parse().unwrap());
        assert_eq!(failure(&status), "");
    }
}

//! Errors of the command line: what happened, why, what to do, and an exit code.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

use miette::{Diagnostic, ReportHandler};
use tonic::Code;

/// Error with a stable code, written for users.
#[derive(Debug)]
pub struct Failure {
    pub code: String,
    pub message: String,
    pub help: Option<String>,
    pub exit: u8,
}

/// Exit codes that scripts rely on.
pub mod exit {
    pub const FAILED: u8 = 1;
    pub const USAGE: u8 = 2;
    pub const NOT_FOUND: u8 = 3;
    pub const CONFLICT: u8 = 4;
    pub const UNSUPPORTED: u8 = 5;
    pub const TIMED_OUT: u8 = 6;
    pub const FORBIDDEN: u8 = 7;
    /// Failure of the command itself, where the exit code of the guest's command is the result.
    pub const OURS: u8 = 125;
}

impl Failure {
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), help: None, exit: exit::FAILED }
    }

    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    pub fn exit(mut self, exit: u8) -> Self {
        self.exit = exit;
        self
    }

    /// Creates the failure of a wrong argument.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new("COR-CLI-001", message).exit(exit::USAGE)
    }
}

/// Converts a failure of the host core in this process, with its code and help.
pub fn of_host(error: coracle_host::HostError) -> Failure {
    let failure = Failure::new(error.code(), error.chain());
    match error.help() {
        Some(help) => failure.help(help),
        None => failure,
    }
}

impl From<tonic::Status> for Failure {
    fn from(status: tonic::Status) -> Self {
        let text = |key| status.metadata().get(key).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let help = status.metadata().get_bin("coracle-help-bin").and_then(|v| v.to_bytes().ok());
        let known = text("coracle-code");
        let exit = exit_of(status.code(), known.as_deref().unwrap_or_default());
        Self {
            code: known.unwrap_or_else(|| format!("COR-RPC-{:03}", status.code() as i32)),
            message: printable(status.message()),
            help: help.map(|h| printable(&String::from_utf8_lossy(&h))),
            exit,
        }
    }
}

/// Returns the exit code for a reply. The error's COR code decides where it is more specific than the gRPC code. Pure.
fn exit_of(code: Code, known: &str) -> u8 {
    match known {
        "COR-IMG-003" | "COR-IMG-004" => return exit::NOT_FOUND,
        "COR-IMG-005" => return exit::FORBIDDEN,
        "COR-IMG-006" => return exit::UNSUPPORTED,
        "COR-VM-005" | "COR-VM-006" => return exit::CONFLICT,
        _ => {}
    }
    match code {
        Code::NotFound => exit::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted => exit::CONFLICT,
        Code::InvalidArgument => exit::USAGE,
        Code::Unimplemented => exit::UNSUPPORTED,
        Code::DeadlineExceeded => exit::TIMED_OUT,
        Code::PermissionDenied | Code::Unauthenticated => exit::FORBIDDEN,
        _ => exit::FAILED,
    }
}

/// Replaces control characters of foreign text, so that it cannot move the cursor.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Failure {}

impl Diagnostic for Failure {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(&self.code))
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help.as_ref().map(|h| Box::new(h) as Box<dyn fmt::Display>)
    }
}

/// Report format: `error[CODE]: message`, causes indented, then `help:`.
struct Plain;

impl ReportHandler for Plain {
    fn debug(&self, error: &dyn Diagnostic, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match error.code() {
            Some(code) => write!(f, "error[{code}]: {error}")?,
            None => write!(f, "error: {error}")?,
        }
        let mut cause = error.source();
        while let Some(error) = cause {
            write!(f, "\n  {error}")?;
            cause = error.source();
        }
        if let Some(help) = error.help() {
            for (n, line) in help.to_string().lines().enumerate() {
                write!(f, "\n  {:5} {line}", if n == 0 { "help:" } else { "" })?;
            }
        }
        Ok(())
    }
}

/// Installs the format for all reports.
pub fn install() {
    let _only_the_first_counts = miette::set_hook(Box::new(|_| Box::new(Plain)));
}

/// Prints a failure to stderr and returns the exit code of the process.
pub fn exit_code(outcome: miette::Result<u8>) -> ExitCode {
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(report) => {
            eprintln!("{report:?}");
            ExitCode::from(report.downcast_ref::<Failure>().map_or(exit::FAILED, |f| f.exit))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_match_the_contract() {
        for (code, known, want) in [
            (Code::NotFound, "COR-VM-001", 3),
            (Code::AlreadyExists, "COR-VM-003", 4),
            (Code::InvalidArgument, "COR-VM-004", 2),
            (Code::FailedPrecondition, "COR-VM-005", 4),
            (Code::FailedPrecondition, "COR-IMG-004", 3),
            (Code::FailedPrecondition, "COR-IMG-005", 7),
            (Code::FailedPrecondition, "COR-IMG-006", 5),
            (Code::FailedPrecondition, "COR-VM-009", 1),
            (Code::DeadlineExceeded, "", 6),
            (Code::PermissionDenied, "", 7),
            (Code::Internal, "", 1),
        ] {
            assert_eq!(exit_of(code, known), want, "{code:?} {known}");
        }
    }

    #[test]
    fn golden_report_of_a_reply_with_advice() {
        let mut status =
            tonic::Status::failed_precondition("image r/nope:1: registry r has no manifest\u{1b}[2J");
        status.metadata_mut().insert("coracle-code", "COR-IMG-004".parse().unwrap());
        let help = tonic::metadata::MetadataValue::from_bytes(b"check the name\nor the tag");
        status.metadata_mut().insert_bin("coracle-help-bin", help);
        // Does not use a report: the first report of a process decides which hook all of them use.
        struct Shown(Failure);
        impl fmt::Debug for Shown {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                miette::ReportHandler::debug(&Plain, &self.0, f)
            }
        }
        let report = Shown(Failure::from(status));
        insta::assert_snapshot!("report", format!("{report:?}"));
    }
}

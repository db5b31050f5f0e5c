//! Seccomp filters of containers, compiled on the host to classic BPF and loaded by the guest agent. Pure.
//!
//! ```text
//! profile (JSON of the OCI runtimes) ─▶ rules ─▶ bpf (instructions over struct seccomp_data)
//! ```

mod bpf;
mod default;
mod profile;

pub(crate) use default::runtime_default;
pub(crate) use profile::compile;

/// Error of a seccomp profile.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SeccompError {
    #[error("it is not a seccomp profile: {0}")]
    Json(#[from] serde_json::Error),
    #[error("action {0:?} is unknown")]
    Action(String),
    #[error("operator {0:?} is unknown")]
    Operator(String),
    #[error("argument {0} of a system call does not exist")]
    Argument(u32),
    #[error("it has {0} instructions, at most 4096 are possible")]
    TooLong(usize),
}

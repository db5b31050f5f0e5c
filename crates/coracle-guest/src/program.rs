//! Runs programs of the system in which the agent is a service.

use std::io;
use std::process::{Command, Stdio};

/// Path of the programs, because a service may be started without one.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs a program to its end, without output; blocking.
///
/// # Errors
/// When the program is missing, or fails.
pub(crate) fn run(program: &str, args: &[&str]) -> io::Result<()> {
    let mut command = Command::new(program);
    command.args(args).env("PATH", PATH).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let status = command.status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("{program}: {status}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_by_name() {
        assert!(run("true", &[]).is_ok());
        assert!(run("false", &[]).unwrap_err().to_string().contains("false: exit status: 1"));
        assert_eq!(run("no-such-program", &[]).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

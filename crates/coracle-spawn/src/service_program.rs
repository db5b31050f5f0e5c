//! Runs programs of the system in which the agent is a service.

use std::io;
use std::process::{Command, Stdio};

/// Path of the programs, because a service may be started without one.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs a program of the system to its end, without output; blocking. Not for PID 1, whose reaper takes every exit status.
///
/// # Errors
/// When the program is missing, or fails.
pub fn run_to_end(program: &str, args: &[&str]) -> io::Result<()> {
    let mut command = Command::new(program);
    command.args(args).env("PATH", PATH).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let status = command.status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("{program}: {status}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_has_the_name_of_the_program() {
        assert!(run_to_end("true", &[]).is_ok());
        assert!(run_to_end("false", &[]).unwrap_err().to_string().contains("false: exit status: 1"));
        assert_eq!(run_to_end("no-such-program", &[]).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

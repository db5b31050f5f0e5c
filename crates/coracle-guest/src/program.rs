//! Programs of the system that the agent is a service of.

use std::io;
use std::process::{Command, Stdio};

/// Where they are; a service may be started without a path.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs one to its end, silently; blocking.
///
/// # Errors
/// It is not there, or failed.
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

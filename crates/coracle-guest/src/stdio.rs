//! Standard streams of a process, between fork and exec. System calls on values prepared before the fork, nothing else.

use std::ffi::CString;

use rustix::fs::{Mode, OFlags};
use rustix::stdio;
use rustix::thread::{Gid, Uid};

/// The group of terminals, as the OCI runtimes have it.
pub(crate) const TERMINALS: u32 = 5;

/// What is done to the standard streams of one process, which opens them again by name: /dev/stdout.
pub(crate) struct Streams {
    /// User of the process in the guest.
    pub(crate) user: Uid,
    /// Group of its terminal in the guest; `None`: as its file system has it.
    pub(crate) group: Option<Gid>,
    /// Its standard input is a pipe, not /dev/null.
    pub(crate) has_stdin: bool,
    /// The path of its terminal inside its root, where it has one.
    pub(crate) terminal: Option<CString>,
}

impl Streams {
    /// Gives them to the user, as the OCI runtimes do. Before namespaces are entered.
    pub(crate) fn give(&self) {
        let user = Some(self.user);
        if self.terminal.is_some() {
            let _not_ours = rustix::fs::fchown(stdio::stdin(), user, self.group);
            return;
        }
        if self.has_stdin {
            let _not_ours = rustix::fs::fchown(stdio::stdin(), user, None);
        }
        let _not_ours = rustix::fs::fchown(stdio::stdout(), user, None);
        let _not_ours = rustix::fs::fchown(stdio::stderr(), user, None);
    }

    /// Replaces a terminal by the same one, opened at its place in the root: one that was opened outside has no name inside.
    /// Once the root is entered. Where something else lies there, all stays as it is.
    pub(crate) fn name_terminal(&self) {
        let Some(path) = &self.terminal else { return };
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(named) = rustix::fs::open(path.as_c_str(), flags, Mode::empty()) else { return };
        let (Ok(inside), Ok(ours)) = (rustix::fs::fstat(&named), rustix::fs::fstat(stdio::stdin())) else {
            return;
        };
        if (inside.st_dev, inside.st_ino) == (ours.st_dev, ours.st_ino) {
            let _stay = stdio::dup2_stdin(&named)
                .and_then(|()| stdio::dup2_stdout(&named))
                .and_then(|()| stdio::dup2_stderr(&named));
        }
    }
}

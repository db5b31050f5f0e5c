//! Owner of the standard streams of a process, which changes between fork and exec: only system calls on values prepared before
//! the fork.

use std::ffi::CString;

use rustix::fs::{Mode, OFlags};
use rustix::stdio;
use rustix::thread::{Gid, Uid};

/// Group of terminals, as in the OCI runtimes.
pub const TERMINALS: u32 = 5;

/// Owner of a process's standard streams, which the process may open again by name (/dev/stdout).
pub struct Streams {
    /// User of the process in the guest.
    pub user: Uid,
    /// Group of its terminal in the guest; `None`: that of the file system.
    pub group: Option<Gid>,
    /// Whether standard input is a pipe, not /dev/null.
    pub has_stdin: bool,
    /// Path of the terminal inside the root, if there is one.
    pub terminal: Option<CString>,
}

impl Streams {
    /// Changes the owner to the user, as the OCI runtimes do. Must be called before namespaces are entered.
    pub fn give(&self) {
        let user = Some(self.user);
        if self.terminal.is_some() {
            let _not_ours = rustix::fs::fchown(stdio::stdin(), user, self.group);
            return;
        }
        // Pipes belong to the user that made them.
        if self.user == rustix::process::geteuid() {
            return;
        }
        if self.has_stdin {
            let _not_ours = rustix::fs::fchown(stdio::stdin(), user, None);
        }
        let _not_ours = rustix::fs::fchown(stdio::stdout(), user, None);
        let _not_ours = rustix::fs::fchown(stdio::stderr(), user, None);
    }

    /// Replaces the terminal by the same one, opened by its path in the root, because a terminal opened outside has no name
    /// inside. Must be called after the root is entered. Does nothing if the path leads to another file.
    pub fn name_terminal(&self) {
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

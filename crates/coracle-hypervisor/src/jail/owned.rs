//! Files of the host that a VMM sees as its own: bind mounts that map owners (mount_setattr(2), `MOUNT_ATTR_IDMAP`).
//!
//! Owner, mode and links of the file itself do not change: one image serves any number of VMMs, each of which sees its own user
//! as the owner. A read-only mount stays read-only, even for the owner.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::mount::OpenTreeFlags;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal};
use rustix::thread::UnshareFlags;

/// User namespaces that map the owner of a file to the user of one VMM, by that owner.
#[derive(Debug)]
pub(super) struct Owners {
    vmm: u32,
    known: Vec<((u32, u32), OwnedFd)>,
}

impl Owners {
    /// Returns an empty map for a VMM with this uid and gid.
    pub(super) fn of(vmm: u32) -> Self {
        Self { vmm, known: Vec::new() }
    }

    /// Creates a detached mount of `from`, a file or directory of the host. Closing the descriptor removes the mount unless it
    /// was attached to a path. Blocking.
    ///
    /// # Errors
    /// `InvalidInput` where the kernel or the file system does not map owners, with the path.
    pub(super) fn mount(&mut self, from: &Path, is_writable: bool) -> io::Result<OwnedFd> {
        let named = |e: io::Error| {
            io::Error::new(e.kind(), format!("map the owner of {} for a jail: {e}", from.display()))
        };
        let found = std::fs::metadata(from).map_err(named)?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let mount = rustix::mount::open_tree(rustix::fs::CWD, from, flags).map_err(|e| named(e.into()))?;
        let owner = (found.uid(), found.gid());
        let at = match self.known.iter().position(|(known, _)| *known == owner) {
            Some(at) => at,
            None => {
                self.known.push((owner, user_namespace(owner, self.vmm).map_err(named)?));
                self.known.len() - 1
            }
        };
        set_attributes(&mount, &self.known[at].1, is_writable).map_err(named)?;
        Ok(mount)
    }
}

fn set_attributes(mount: &OwnedFd, owners: &OwnedFd, is_writable: bool) -> io::Result<()> {
    let read_only = if is_writable { 0 } else { libc::MOUNT_ATTR_RDONLY };
    let closed = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    let number = |fd: &OwnedFd| u64::try_from(fd.as_raw_fd()).map_err(io::Error::other);
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP | closed | read_only,
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: number(owners)?,
    };
    // SAFETY: both descriptors are open, and path and structure outlive the call, which only reads them.
    #[allow(unsafe_code, reason = "a system call without a wrapper")]
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Creates a user namespace that maps one user and group of the file system to those of the VMM. A process must be in the
/// namespace while it is set up (user_namespaces(7)).
fn user_namespace(file: (u32, u32), vmm: u32) -> io::Result<OwnedFd> {
    let (ready, is_ready) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let daemon = rustix::process::getpid();
    // SAFETY: the child only makes system calls until it ends (signal-safety(7)).
    #[allow(unsafe_code, reason = "fork has no safe form")]
    let pid = match unsafe { libc::fork() } {
        0 => child(&is_ready, daemon),
        n if n < 0 => return Err(io::Error::last_os_error()),
        pid => Holder(pid),
    };
    drop(is_ready);
    let mut outcome = [0; 4];
    if rustix::io::read(&ready, &mut outcome)? != outcome.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match i32::from_ne_bytes(outcome) {
        0 => {}
        error => return Err(io::Error::from_raw_os_error(error)),
    }
    let proc = Path::new("/proc").join(pid.0.to_string());
    for (name, id) in [("uid_map", file.0), ("gid_map", file.1)] {
        std::fs::write(proc.join(name), format!("{id} {vmm} 1"))?;
    }
    File::open(proc.join("ns/user")).map(Into::into)
}

/// Enters a user namespace, reports it, and waits to be killed: by its [`Holder`], or when the daemon ends. The child does not
/// wait for the end of a pipe: a child that another thread forks at the same time also holds the other end.
fn child(is_ready: &OwnedFd, daemon: Pid) -> ! {
    // SAFETY: this process has one thread.
    #[allow(unsafe_code, reason = "as of the fork before it")]
    let made = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) };
    // Set after unshare, since a change of credentials clears it (prctl(2)).
    let bound = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let error = made.and(bound).map_or_else(|e| e.raw_os_error(), |()| 0);
    let _parent_gone = rustix::io::write(is_ready, &error.to_ne_bytes());
    // SAFETY: only system calls; the last one ends the process without running exit handlers of the daemon.
    #[allow(unsafe_code, reason = "the daemon's exit handlers must not run")]
    unsafe {
        while rustix::process::getppid() == Some(daemon) {
            libc::pause();
        }
        libc::_exit(0)
    }
}

/// Process that keeps the namespace; killed on drop.
struct Holder(i32);

impl Drop for Holder {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.0) {
            let _ended = rustix::process::kill_process(pid, Signal::KILL);
            let _reaped = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::Jail;

    #[test]
    fn namespaces_that_are_made_at_once_do_not_wait_for_each_other() {
        assert!(Jail::is_possible(), "this test runs as root of the host");
        let (made, all) = mpsc::channel();
        for vmm in 0..8 {
            let made = made.clone();
            thread::spawn(move || {
                for _ in 0..20 {
                    made.send(user_namespace((0, 0), 1_900_000_000 + vmm).map(drop)).unwrap();
                }
            });
        }
        for _ in 0..8 * 20 {
            all.recv_timeout(Duration::from_secs(30)).expect("one is made").unwrap();
        }
    }
}

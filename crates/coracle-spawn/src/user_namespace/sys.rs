//! System calls of user namespaces. All `unsafe` code of the parent module is here; callers see plain values and `io::Result`.
#![expect(unsafe_code, reason = "clone, mount_setattr and setfsuid have no safe wrapper")]

use std::ffi::c_ulong;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::process::Pid;

/// Starts a process in a new user namespace, which waits until it is killed. It ends with the calling thread.
pub(super) fn wait_in_user_namespace() -> io::Result<Pid> {
    let flags = c_ulong::from((libc::CLONE_NEWUSER | libc::SIGCHLD).unsigned_abs());
    let none: c_ulong = 0;
    // SAFETY: like a fork; the child only makes system calls until it is killed (signal-safety(7)).
    let pid = unsafe {
        match libc::syscall(libc::SYS_clone, flags, none, none, none, none) {
            0 => {
                libc::prctl(libc::PR_SET_PDEATHSIG, c_ulong::from(libc::SIGKILL.unsigned_abs()));
                loop {
                    libc::pause();
                }
            }
            pid if pid < 0 => return Err(io::Error::last_os_error()),
            pid => pid,
        }
    };
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Maps the owners of a detached mount to a user namespace (mount_setattr(2)).
pub(super) fn map_owners(mount: BorrowedFd<'_>, namespace: BorrowedFd<'_>) -> io::Result<()> {
    let userns_fd = u64::try_from(namespace.as_raw_fd()).map_err(io::Error::other)?;
    let attributes =
        libc::mount_attr { attr_set: libc::MOUNT_ATTR_IDMAP, attr_clr: 0, propagation: 0, userns_fd };
    // SAFETY: both descriptors are open, and path and structure outlive the call, which only reads them.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets user and group of the calling thread for file operations (setfsuid(2)), a call that reports no errors.
pub(super) fn set_filesystem_ids(id: u32) {
    // SAFETY: no memory is involved, and other threads keep theirs.
    unsafe {
        libc::setfsgid(id);
        libc::setfsuid(id);
    }
}

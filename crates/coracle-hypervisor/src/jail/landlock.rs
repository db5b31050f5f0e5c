//! Landlock rules that isolate a VMM in the network namespace of the host (landlock(7)): no TCP connection or listener (Linux
//! 6.7), no abstract Unix socket and no signal to another process (Linux 6.12). The tap of the VMM is not affected.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// ABI versions that restrict TCP, and abstract sockets and signals (linux/landlock.h).
const NET_SINCE: i64 = 4;
const SCOPES_SINCE: i64 = 6;
/// `LANDLOCK_CREATE_RULESET_VERSION`.
const VERSION: u32 = 1;
/// `LANDLOCK_ACCESS_NET_BIND_TCP` and `…_CONNECT_TCP`; `LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET` and `…_SIGNAL`.
const BOTH: u64 = 0b11;

/// `struct landlock_ruleset_attr`, as of version 6.
#[repr(C)]
struct Attributes {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

/// Creates a ruleset with the restrictions that the kernel supports; `None`: none.
pub(super) fn ruleset() -> io::Result<Option<OwnedFd>> {
    // SAFETY: without a structure the call only returns the ABI version.
    #[allow(unsafe_code, reason = "a system call without a wrapper")]
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0_usize, VERSION) };
    if version < NET_SINCE {
        return Ok(None);
    }
    let has_scopes = version >= SCOPES_SINCE;
    let attributes = Attributes {
        handled_access_fs: 0,
        handled_access_net: BOTH,
        scoped: if has_scopes { BOTH } else { 0 },
    };
    // A kernel that does not know the last field accepts a structure without it.
    let size = if has_scopes { size_of::<Attributes>() } else { size_of::<[u64; 2]>() };
    // SAFETY: the structure is readable for `size` bytes during the call.
    #[allow(unsafe_code, reason = "a system call without a wrapper")]
    let made =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attributes, size, 0_u32) };
    let number =
        i32::try_from(made).ok().filter(|number| *number >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just opened it for this process, close-on-exec.
    #[allow(unsafe_code, reason = "a new descriptor")]
    Ok(Some(unsafe { OwnedFd::from_raw_fd(number) }))
}

/// Applies the ruleset to this thread, which has `no_new_privs`, and to what it executes. Allocates nothing.
pub(super) fn restrict(ruleset: &OwnedFd) -> Result<(), rustix::io::Errno> {
    // SAFETY: the descriptor is open; the call takes only numbers.
    #[allow(unsafe_code, reason = "a system call without a wrapper")]
    let restricted = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0_u32) };
    if restricted < 0 {
        let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EPERM);
        return Err(rustix::io::Errno::from_raw_os_error(error));
    }
    Ok(())
}

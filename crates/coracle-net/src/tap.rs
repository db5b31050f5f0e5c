//! Taps by descriptor: a VMM that inherits one needs neither the privilege nor the network namespace to open it.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long to retry a busy tap. A process that another thread starts has copies of all descriptors between fork and exec,
/// including those of a tap that was just closed.
const BUSY_LIMIT: Duration = Duration::from_secs(1);
/// Pause between two tries.
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// Attaches to a tap of the host, with the header that allows guests to leave checksums and segmentation to the host
/// (`IFF_VNET_HDR`). If no tap has this name, one is made that exists while it is open (Linux,
/// Documentation/networking/tuntap.rst). Blocking.
///
/// # Errors
/// `ResourceBusy` if another process still has the tap after a second. Fails without the privilege to attach to the tap, or to
/// make one.
pub fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let since = Instant::now();
    loop {
        match attach(name) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && since.elapsed() < BUSY_LIMIT => {
                std::thread::sleep(BUSY_PAUSE);
            }
            other => return other,
        }
    }
}

fn attach(name: &str) -> io::Result<OwnedFd> {
    let tun = File::options().read(true).write(true).open("/dev/net/tun")?;
    let name = CString::new(name)?;
    let bytes = name.as_bytes_with_nul();
    if bytes.len() > libc::IFNAMSIZ {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: all-zero bytes are a valid ifreq.
    #[allow(unsafe_code, reason = "the kernel's own structure, without a safe constructor")]
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open and `request` lives over the call.
    #[allow(unsafe_code, reason = "ioctl")]
    let attached = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if attached < 0 { Err(io::Error::last_os_error()) } else { Ok(tun.into()) }
}

/// Makes a persistent tap of this name, which exists without a process that has it open (`TUNSETPERSIST`). Idempotent.
pub(crate) fn make_tap(name: &str) -> io::Result<()> {
    let tap = open_tap(name)?;
    // SAFETY: the descriptor is attached to the interface; the argument is a plain number.
    #[allow(unsafe_code, reason = "ioctl")]
    let kept = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETPERSIST, 1) };
    if kept < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Allows the user `uid` to open a persistent tap without any network privilege (`TUNSETOWNER`). Idempotent.
///
/// # Errors
/// Like [`open_tap`].
pub fn set_tap_owner(name: &str, uid: u32) -> io::Result<()> {
    let tap = open_tap(name)?;
    // SAFETY: the descriptor is attached to the interface; the argument is a plain number.
    #[allow(unsafe_code, reason = "ioctl")]
    let given = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOWNER, libc::c_ulong::from(uid)) };
    if given < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

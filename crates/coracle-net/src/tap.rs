//! Taps by descriptor: VMMs that inherit one need neither the right nor the network namespace to open it.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// A process that another thread starts has copies of all descriptors between fork and exec, those of a tap that was let go
/// among them. It is waited for so long.
const BUSY_LIMIT: Duration = Duration::from_secs(1);
/// Between two tries.
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// Attaches to a tap of the host, which is made for as long as it is open if there is none of this name (Linux,
/// Documentation/networking/tuntap.rst), with the header by which guests leave checksums and segmentation to the host.
/// Blocking.
///
/// # Errors
/// `ResourceBusy` while another process has it, after a second; without the right to attach to it, or to make one.
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

/// Makes a tap of this name that stays without a process that has it open (`TUNSETPERSIST`). Idempotent.
pub(crate) fn make_tap(name: &str) -> io::Result<()> {
    let tap = open_tap(name)?;
    // SAFETY: the descriptor is attached to the interface; the argument is a plain number.
    #[allow(unsafe_code, reason = "ioctl")]
    let kept = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETPERSIST, 1) };
    if kept < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Lets the user `uid` open a tap that stays by itself, without any right over the network (`TUNSETOWNER`). Idempotent.
///
/// # Errors
/// As [`open_tap`].
pub fn give_tap(name: &str, uid: u32) -> io::Result<()> {
    let tap = open_tap(name)?;
    // SAFETY: the descriptor is attached to the interface; the argument is a plain number.
    #[allow(unsafe_code, reason = "ioctl")]
    let given = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOWNER, libc::c_ulong::from(uid)) };
    if given < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

//! System calls that safe libraries do not wrap. All `unsafe` code of the crate is in this module; callers see plain values and
//! `io::Result`.
#![expect(unsafe_code, reason = "ioctls, fork hooks and poll registration have no safe wrapper")]

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::thread::UnshareFlags;
use rustix::time::{ClockId, Timespec, clock_gettime};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Maximum size of the entropy in one request, bytes.
pub(crate) const ENTROPY_MAX: usize = 512;

const RNDADDENTROPY: c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: c_ulong = 0x5207;
const BLKFLSBUF: c_ulong = 0x1261;

/// Registers `fd` with the runtime. The registration owns the descriptor.
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the `AsyncFd` owns the `OwnedFd`, which neither closes nor changes its number before it is dropped.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}

/// Ports and values that stop channel 0 of the interval timer: mode 0, whose count ends and does not restart, and a count of 0,
/// the longest (Intel 8254 data sheet, "Control Word Format" and "Mode Definitions").
#[cfg(target_arch = "x86_64")]
const STOP_TIMER: [(u16, u8); 3] = [(0x43, 0x30), (0x40, 0), (0x40, 0)];

/// Stops channel 0 of the interval timer. Does nothing on architectures without one.
///
/// # Errors
/// When the kernel refuses access to the ports, which ioperm(2) grants to this thread meanwhile.
pub(crate) fn stop_interval_timer() -> io::Result<()> {
    #[cfg(target_arch = "x86_64")]
    for (port, byte) in STOP_TIMER {
        let access = |granted: c_int| {
            // SAFETY: changes only which ports this thread may use.
            let result = unsafe { libc::ioperm(c_ulong::from(port), 1, granted) };
            if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        };
        access(1)?;
        // SAFETY: the thread may use the port, and the timer changes no memory.
        unsafe { std::arch::asm!("out dx, al", in("dx") port, in("al") byte, options(nomem, nostack)) };
        access(0)?;
    }
    Ok(())
}

/// Writes `text` to the file `path`, without allocation. For use between fork and exec.
pub(crate) fn write_file(path: &CStr, text: &[u8]) -> io::Result<()> {
    use rustix::fs::{Mode, OFlags};
    let file = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, text)?;
    Ok(())
}

/// Moves the calling thread into new namespaces.
pub(crate) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: none of the callers' flags unshares the table of descriptors, which is what makes the call unsafe.
    unsafe { rustix::thread::unshare_unsafe(flags.difference(UnshareFlags::FILES)) }.map_err(io::Error::from)
}

/// Installs a seccomp filter, with 8 bytes per instruction. Without CAP_SYS_ADMIN, no_new_privs must be set (seccomp(2)). For
/// use between fork and exec.
pub(crate) fn seccomp_filter(instructions: &[u8]) -> io::Result<()> {
    #[repr(C)]
    struct Program {
        length: u16,
        instructions: *const c_void,
    }
    const FILTER: c_int = 2; // SECCOMP_MODE_FILTER
    let length = u16::try_from(instructions.len() / 8).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = Program { length, instructions: instructions.as_ptr().cast() };
    // SAFETY: the program has as many instructions as it says and outlives the call, which copies it.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, FILTER, &raw const program) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends SIGKILL to every process except this one. Does nothing unless this is PID 1.
pub(crate) fn kill_everything() {
    if std::process::id() == 1 {
        // SAFETY: no memory is involved; the check above restricts the call to a guest's PID 1.
        unsafe {
            libc::kill(-1, libc::SIGKILL);
        }
    }
}

/// Adds bytes from the host to the entropy pool, credits them and reseeds at once, so that the next random number depends on
/// them.
pub(crate) fn add_entropy(bytes: &[u8]) -> io::Result<()> {
    #[repr(C)]
    struct PoolInfo {
        bits: c_int,
        size: c_int,
        bytes: [u8; ENTROPY_MAX],
    }
    let size = bytes.len().min(ENTROPY_MAX);
    let count = c_int::try_from(size).unwrap_or(0);
    let mut info = PoolInfo { bits: count.saturating_mul(8), size: count, bytes: [0; ENTROPY_MAX] };
    for (to, from) in info.bytes.iter_mut().zip(bytes) {
        *to = *from;
    }
    let random = std::fs::OpenOptions::new().write(true).open("/dev/urandom")?;
    ioctl(random.as_fd(), RNDADDENTROPY, (&raw mut info).cast())?;
    ioctl(random.as_fd(), RNDRESEEDCRNG, std::ptr::null_mut())
}

/// Drops the kernel's cache of a block device, because the disk in a slot may have been swapped.
pub(crate) fn flush_block_cache(device: BorrowedFd<'_>) -> io::Result<()> {
    ioctl(device, BLKFLSBUF, std::ptr::null_mut())
}

/// Makes a non-blocking socket that listens on a vsock port.
pub(crate) fn listen_vsock(port: u32) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is involved; a non-negative result is a descriptor without another owner.
    let socket = unsafe {
        match libc::socket(libc::AF_VSOCK, kind, 0) {
            number if number < 0 => return Err(io::Error::last_os_error()),
            number => OwnedFd::from_raw_fd(number),
        }
    };
    // SAFETY: a structure of integers, for which all zeros are a valid value.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap_or_default();
    (address.svm_cid, address.svm_port) = (libc::VMADDR_CID_ANY, port);
    let size = libc::socklen_t::try_from(size_of::<libc::sockaddr_vm>()).unwrap_or_default();
    // SAFETY: the address outlives the calls and has the length that is passed.
    let result = unsafe {
        match libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) {
            0 => libc::listen(socket.as_raw_fd(), 1),
            failed => failed,
        }
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(socket) }
}

fn ioctl(fd: BorrowedFd<'_>, request: c_ulong, argument: *mut c_void) -> io::Result<()> {
    // SAFETY: every caller in this file passes the structure that the request's manual names, alive for the call.
    // The request is cast because its C type differs between musl (int) and glibc (unsigned long).
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Payload of an interface request: the union in `struct ifreq`.
pub(crate) type IfValue = [u8; 24];

/// Makes a `SIOC?IF*` request for the interface `name`; returns the union as the kernel left it.
pub(crate) fn interface(
    socket: BorrowedFd<'_>,
    request: c_ulong,
    name: &str,
    value: IfValue,
) -> io::Result<IfValue> {
    #[repr(C)]
    struct IfReq {
        name: [u8; 16],
        value: IfValue,
    }
    let mut ifreq = IfReq { name: [0; 16], value };
    if name.len() >= ifreq.name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in ifreq.name.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    ioctl(socket, request, (&raw mut ifreq).cast())?;
    Ok(ifreq.value)
}

/// IPv4 route for `SIOCADDRT`; each address is a `sockaddr_in`.
pub(crate) struct Route {
    pub(crate) destination: [u8; 16],
    pub(crate) gateway: [u8; 16],
    pub(crate) mask: [u8; 16],
    pub(crate) flags: u16,
}

/// Makes a `SIOCADDRT` or `SIOCDELRT` request for `route` on `device`.
pub(crate) fn route(
    socket: BorrowedFd<'_>,
    request: c_ulong,
    route: &Route,
    device: Option<&CStr>,
) -> io::Result<()> {
    #[repr(C)]
    struct RtEntry {
        pad1: c_ulong,
        destination: [u8; 16],
        gateway: [u8; 16],
        mask: [u8; 16],
        flags: u16,
        pad2: i16,
        pad3: c_ulong,
        pad4: *mut c_void,
        metric: i16,
        device: *const c_char,
        mtu: c_ulong,
        window: c_ulong,
        irtt: u16,
    }
    let mut entry = RtEntry {
        pad1: 0,
        destination: route.destination,
        gateway: route.gateway,
        mask: route.mask,
        flags: route.flags,
        pad2: 0,
        pad3: 0,
        pad4: std::ptr::null_mut(),
        metric: 0,
        device: device.map_or(std::ptr::null(), CStr::as_ptr),
        mtu: 0,
        window: 0,
        irtt: 0,
    };
    ioctl(socket, request, (&raw mut entry).cast())
}

/// IPv6 address of a link, `struct in6_ifreq`.
#[repr(C)]
pub(crate) struct Address6 {
    pub(crate) address: [u8; 16],
    pub(crate) prefix: u32,
    pub(crate) link: c_int,
}

/// Makes a `SIOCSIFADDR` request on an IPv6 socket.
pub(crate) fn address6(socket: BorrowedFd<'_>, request: c_ulong, mut address: Address6) -> io::Result<()> {
    ioctl(socket, request, (&raw mut address).cast())
}

/// IPv6 route.
#[derive(Clone, Copy)]
pub(crate) struct Route6 {
    pub(crate) destination: [u8; 16],
    pub(crate) gateway: [u8; 16],
    pub(crate) prefix: u16,
    pub(crate) flags: u32,
    pub(crate) link: c_int,
}

/// Makes a `SIOCADDRT` or `SIOCDELRT` request on an IPv6 socket for `route`, with the kernel's default metric.
pub(crate) fn route6(socket: BorrowedFd<'_>, request: c_ulong, route: Route6) -> io::Result<()> {
    #[repr(C)]
    struct In6RtMsg {
        destination: [u8; 16],
        source: [u8; 16],
        gateway: [u8; 16],
        kind: u32,
        prefix: u16,
        source_prefix: u16,
        metric: u32,
        info: c_ulong,
        flags: u32,
        link: c_int,
    }
    let mut message = In6RtMsg {
        destination: route.destination,
        source: [0; 16],
        gateway: route.gateway,
        kind: 0,
        prefix: route.prefix,
        source_prefix: 0,
        metric: 0,
        info: 0,
        flags: route.flags,
        link: route.link,
    };
    ioctl(socket, request, (&raw mut message).cast())
}

/// Wall clock of the guest, nanoseconds since 1970.
pub(crate) fn wall_clock_ns() -> i64 {
    nanoseconds(clock_gettime(ClockId::Realtime))
}

/// Time since the kernel started, including suspend, milliseconds.
pub(crate) fn uptime_ms() -> u64 {
    u64::try_from(nanoseconds(clock_gettime(ClockId::Boottime)) / 1_000_000).unwrap_or(0)
}

fn nanoseconds(time: Timespec) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn loopback_has_its_address() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let value = interface(socket.as_fd(), 0x8915, "lo", [0; 24]).unwrap(); // SIOCGIFADDR
        assert_eq!(value[4..8], [127, 0, 0, 1]);
        assert!(interface(socket.as_fd(), 0x8915, "a-name-that-is-too-long", [0; 24]).is_err());
        assert!(interface(socket.as_fd(), 0x8915, "nosuch0", [0; 24]).is_err());
    }

    #[test]
    fn invalid_route_is_an_error_and_not_a_crash() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let bad = Route { destination: [0xff; 16], gateway: [0; 16], mask: [0; 16], flags: 1 };
        assert!(route(socket.as_fd(), 0x890b, &bad, None).is_err());
    }

    #[test]
    fn block_cache_flush_of_a_regular_file_fails() {
        let file = tempfile::tempfile().unwrap();
        assert!(flush_block_cache(file.as_fd()).is_err());
    }

    #[tokio::test]
    async fn watched_pipe_becomes_readable() {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        let read = watch(read, Interest::READABLE).unwrap();
        rustix::io::write(&write, b"x").unwrap();
        read.readable().await.unwrap().retain_ready();
    }
}

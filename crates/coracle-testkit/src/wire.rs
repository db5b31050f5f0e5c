//! Valid and forged Ethernet frames of a guest, the guest's end of a tap, and captures of frames.
#![allow(unsafe_code, reason = "taps and packet sockets are bare system calls")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::netns::Netns;

/// Start of the payload of every frame. The kind follows, terminated by a line feed.
const MARK: &[u8] = b"coracle-frame:";
const BROADCAST: [u8; 6] = [0xff; 6];
/// Length of IPv4 header and payload, bytes.
const IPV4_LENGTH: u8 = 20 + 32;
/// Smallest frame with room for the longest header, that of IPv6, and its payload, bytes.
const FRAME_MIN: usize = 14 + 40 + 32;
/// Limited broadcast: every guest on the bridge receives it.
const EVERYONE: [u8; 4] = [255; 4];
const METADATA: [u8; 4] = [169, 254, 169, 254];

/// Addresses of a guest.
#[derive(Clone, Copy, Debug)]
pub struct Station {
    /// MAC address of its network device.
    pub mac: [u8; 6],
    /// IPv4 address of the guest.
    pub address: Ipv4Addr,
}

/// Frame whose payload contains its kind.
#[derive(Clone, Debug)]
pub struct Frame(Vec<u8>);

impl Frame {
    fn new(kind: &str, source: [u8; 6], ethertype: &[u8], header: &[u8]) -> Self {
        let mut bytes =
            [&BROADCAST[..], &source[..], ethertype, header, MARK, kind.as_bytes(), b"\n"].concat();
        bytes.resize(bytes.len().max(FRAME_MIN), 0);
        Self(bytes)
    }

    fn ipv4(kind: &str, mac: [u8; 6], source: [u8; 4], target: [u8; 4]) -> Self {
        Self::new(kind, mac, &[0x08, 0x00], &ipv4(source, target))
    }

    /// ARP request for the gateway, which has the first address of the guest's /24.
    fn arp(kind: &str, from: Station, sender: [u8; 6], address: [u8; 4]) -> Self {
        let [a, b, c, _] = from.address.octets();
        let request = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &sender, &address, &[0; 6], &[a, b, c, 1]].concat();
        Self::new(kind, from.mac, &[0x08, 0x06], &request)
    }

    /// Frame that a guest may send: a broadcast from its own addresses, of the kind `honest`.
    #[must_use]
    pub fn honest(from: Station) -> Self {
        Self::ipv4("honest", from.mac, from.address.octets(), EVERYONE)
    }

    /// Frames that a guest may not send, each of a different kind.
    #[must_use]
    pub fn forged(from: Station, neighbour: Station) -> Vec<Self> {
        let (mac, ip) = (from.mac, from.address.octets());
        let (other_mac, other_ip) = (neighbour.mac, neighbour.address.octets());
        let ipv6 = [&[0x60, 0, 0, 0, 0, 32, 58, 255][..], &[0xfe; 16], &[0xff; 16]].concat();
        let tagged = [&[0, 5, 0x08, 0x00][..], &ipv4(other_ip, EVERYONE)].concat();
        vec![
            Self::ipv4("unknown MAC", [2, 0, 0, 0, 0, 0x66], ip, EVERYONE),
            Self::ipv4("MAC of the neighbour", other_mac, ip, EVERYONE),
            Self::ipv4("address of the neighbour", mac, other_ip, EVERYONE),
            Self::ipv4("metadata", mac, ip, METADATA),
            Self::arp("ARP for the neighbour's address", from, mac, other_ip),
            Self::arp("ARP with the neighbour's MAC", from, other_mac, ip),
            Self::new("IPv6", mac, &[0x86, 0xdd], &ipv6),
            Self::new("VLAN", mac, &[0x81, 0x00], &tagged),
        ]
    }

    /// Bytes of the frame, starting at the destination address.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Complete header before 32 bytes of payload: a host with `br_netfilter` drops frames with a wrong length or checksum itself.
fn ipv4(source: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let header =
        |sum: [u8; 2]| [&[0x45, 0, 0, IPV4_LENGTH, 0, 0, 0, 0, 64, 17][..], &sum, &source, &target].concat();
    let words = header([0, 0]);
    let sum: u32 = words.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let sum = !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap();
    header(sum.to_be_bytes())
}

/// Kind of a frame of this module. `None` for other frames.
fn kind(bytes: &[u8]) -> Option<String> {
    let at = bytes.windows(MARK.len()).position(|window| window == MARK)?;
    let rest = &bytes[at + MARK.len()..];
    Some(String::from_utf8_lossy(rest.split(|byte| *byte == b'\n').next()?).into_owned())
}

/// Tap, opened like a VMM opens it.
#[derive(Debug)]
pub struct Tap(File);

impl Tap {
    /// Opens the tap with this name.
    ///
    /// # Panics
    /// When the tap does not exist, or a VMM has it open.
    #[must_use]
    pub fn open(name: &str) -> Self {
        let mut options = File::options();
        let tun = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun").unwrap();
        // SAFETY: all-zero bytes are a valid ifreq.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
            *to = from.cast_signed();
        }
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_TAP | libc::IFF_NO_PI).unwrap();
        // SAFETY: the descriptor is open and `request` outlives the call.
        let made = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        assert_eq!(made, 0, "open tap {name}: {}", std::io::Error::last_os_error());
        Self(tun)
    }

    /// Sends a frame as the guest. A tap that is down drops the frame.
    pub fn send(&self, frame: &Frame) {
        let _down = (&self.0).write(&frame.0);
    }
}

/// Capture that collects the kinds of the frames that arrive.
#[derive(Debug)]
pub struct Sniffer {
    seen: Arc<Mutex<BTreeSet<String>>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Sniffer {
    /// Captures the frames that the guest at this tap receives.
    #[must_use]
    pub fn of_tap(tap: Tap) -> Self {
        Self::of(tap.0)
    }

    /// Captures the frames of an interface of the host, in both directions.
    ///
    /// # Panics
    /// When the interface does not exist, or capturing is not permitted.
    #[must_use]
    pub fn of_interface(name: &str) -> Self {
        let name = CString::new(name).unwrap();
        let protocol = u16::try_from(libc::ETH_P_ALL).unwrap().to_be();
        // SAFETY: plain system calls on a descriptor that is owned from here on. The address is plain data that outlives the
        // call, and its length is passed.
        let socket = unsafe {
            let index = libc::if_nametoindex(name.as_ptr());
            assert_ne!(index, 0, "{name:?} exists");
            let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            // Without a protocol until the socket is bound: otherwise it would receive the frames of every interface until
            // then.
            let fd = libc::socket(libc::AF_PACKET, kind, 0);
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            let socket = OwnedFd::from_raw_fd(fd);
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = u16::try_from(libc::AF_PACKET).unwrap();
            address.sll_protocol = protocol;
            address.sll_ifindex = i32::try_from(index).unwrap();
            let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).unwrap();
            assert_eq!(libc::bind(fd, (&raw const address).cast(), length), 0);
            socket
        };
        Self::of(File::from(socket))
    }

    fn of(mut source: File) -> Self {
        let (seen, stop) = (Arc::<Mutex<BTreeSet<String>>>::default(), Arc::new(AtomicBool::new(false)));
        let (kinds, stopped) = (seen.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut frame = [0; 2048];
            loop {
                match source.read(&mut frame) {
                    Ok(length) => kinds.lock().unwrap().extend(kind(&frame[..length])),
                    Err(e) if e.kind() == ErrorKind::WouldBlock && stopped.load(Ordering::Relaxed) => return,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(e) => panic!("read frames: {e}"),
                }
            }
        });
        Self { seen, stop, thread }
    }

    /// Waits until a frame of this kind has arrived.
    ///
    /// # Panics
    /// After ten seconds without such a frame.
    pub fn wait_for(&self, kind: &str) {
        let end = Instant::now() + Duration::from_secs(10);
        while !self.seen.lock().unwrap().contains(kind) {
            assert!(Instant::now() < end, "{kind} frames arrive");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the capture. Returns the kinds of all frames that have arrived, including those that wait in the queue.
    ///
    /// # Panics
    /// When the capture failed.
    #[must_use]
    pub fn end(self) -> BTreeSet<String> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

/// True when an interface is administratively up.
///
/// # Panics
/// When the interface does not exist.
#[must_use]
pub fn is_up(interface: &str) -> bool {
    let flags = std::fs::read_to_string(format!("/sys/class/net/{interface}/flags")).unwrap();
    let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).unwrap();
    flags & 1 == 1
}

/// Guest simulated by a network namespace. Its interface is connected to the tap that a VMM would open.
#[derive(Debug)]
pub struct GuestHost {
    netns: Netns,
    stop: Arc<AtomicBool>,
    pumps: Vec<JoinHandle<()>>,
}

impl GuestHost {
    /// Starts a guest at the tap `tap`, with an address in a /24 whose first address is the gateway's.
    ///
    /// # Panics
    /// When the interface cannot be created.
    #[must_use]
    pub fn start(tap: &str, station: Station) -> Self {
        let netns = Netns::new().unwrap();
        let inner = netns.sync(|| {
            let inner = Tap::open("eth0");
            let [a, b, c, _] = station.address.octets();
            let mac = station.mac.map(|byte| format!("{byte:02x}")).join(":");
            for line in [
                format!("link set eth0 address {mac}"),
                format!("addr add {}/24 dev eth0", station.address),
                "link set eth0 up".to_owned(),
                format!("route add default via {a}.{b}.{c}.1"),
            ] {
                let status = Command::new("busybox").arg("ip").args(line.split(' ')).status().unwrap();
                assert!(status.success(), "ip {line}");
            }
            inner
        });
        let outer = Tap::open(tap);
        let stop = Arc::new(AtomicBool::new(false));
        let pump = |from: File, to: File| {
            let stop = stop.clone();
            std::thread::spawn(move || pump(from, to, &stop))
        };
        let pumps =
            vec![pump(inner.0.try_clone().unwrap(), outer.0.try_clone().unwrap()), pump(outer.0, inner.0)];
        Self { netns, stop, pumps }
    }

    /// Runs `f` in the guest's network namespace.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.netns.sync(f)
    }

    /// Closes the tap and ends the guest.
    ///
    /// # Panics
    /// When a thread of the guest has panicked.
    pub fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for pump in self.pumps {
            pump.join().unwrap();
        }
    }
}

/// Forwards frames until it is stopped. An interface that is down or full drops frames.
fn pump(mut from: File, mut to: File, stop: &AtomicBool) {
    let mut frame = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        match from.read(&mut frame) {
            Ok(length) => drop(to.write(&frame[..length])),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

//! Readiness of a VM: its agent is connected, a TCP port accepts connections, or it answers an ICMP echo.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, sockopt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Time limit of one probe.
const LIMIT: Duration = Duration::from_secs(3);
/// Consecutive failures after which a VM that answered counts as not ready.
const FAILURES_MAX: u32 = 3;
/// Interval between probes of a VM that answers.
const PERIOD: Duration = Duration::from_secs(5);
/// First interval between probes, and the longest one until the first answer.
const FIRST: Duration = Duration::from_millis(100);
const SLOWEST: Duration = Duration::from_secs(1);
/// Types of an ICMP echo request and reply (RFC 792).
const ECHO: u8 = 8;
const ECHO_REPLY: u8 = 0;

/// Kind of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Probe {
    /// TCP connection.
    Tcp(SocketAddr),
    /// ICMP echo.
    Icmp(Ipv4Addr),
}

impl Probe {
    /// Returns the probe of a VM at `ip`.
    pub(crate) fn of(ip: IpAddr, port: Option<u16>) -> Option<Self> {
        match (port, ip) {
            (Some(port), ip) => Some(Self::Tcp(SocketAddr::new(ip, port))),
            (None, IpAddr::V4(ip)) => Some(Self::Icmp(ip)),
            (None, IpAddr::V6(_)) => None,
        }
    }

    /// Probes the VM once. If this process may not send ICMP echoes, the VM counts as answering.
    pub(crate) async fn ask(self) -> bool {
        match self {
            Self::Tcp(at) => matches!(timeout(LIMIT, TcpStream::connect(at)).await, Ok(Ok(_))),
            Self::Icmp(ip) => {
                let asked = tokio::task::spawn_blocking(move || echo(ip)).await;
                match asked {
                    Ok(Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS)) => true,
                    Ok(answer) => answer.unwrap_or(false),
                    Err(_) => false,
                }
            }
        }
    }
}

/// Sends an ICMP echo request and waits for its reply. Blocking.
fn echo(ip: Ipv4Addr) -> rustix::io::Result<bool> {
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(ipproto::ICMP),
    )?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(LIMIT))?;
    let identifier = u16::from_be_bytes([ip.octets()[2], ip.octets()[3]]) ^ 0x436f;
    let request = request(identifier);
    rustix::net::sendto(&socket, &request, SendFlags::empty(), &std::net::SocketAddrV4::new(ip, 0))?;
    let began = std::time::Instant::now();
    let mut buffer = [0_u8; 1500];
    while began.elapsed() < LIMIT {
        let (length, ..) = rustix::net::recvfrom(&socket, &mut buffer[..], RecvFlags::empty())?;
        if is_reply(buffer.get(..length).unwrap_or_default(), ip, identifier) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns an ICMP echo request with its checksum (RFC 792, RFC 1071).
fn request(identifier: u16) -> [u8; 8] {
    let [high, low] = identifier.to_be_bytes();
    let mut packet = [ECHO, 0, 0, 0, high, low, 0, 1];
    let sum: u32 = packet.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !u16::try_from(folded & 0xffff).unwrap_or(0);
    packet[2..4].copy_from_slice(&checksum.to_be_bytes());
    packet
}

/// Returns whether an IPv4 packet is the echo reply of `ip`.
fn is_reply(packet: &[u8], ip: Ipv4Addr, identifier: u16) -> bool {
    let header = usize::from(packet.first().copied().unwrap_or(0) & 0x0f) * 4;
    let source = packet.get(12..16) == Some(ip.octets().as_slice());
    let body = packet.get(header..).unwrap_or_default();
    source && body.first() == Some(&ECHO_REPLY) && body.get(4..6) == Some(identifier.to_be_bytes().as_slice())
}

/// Result of the probes so far. Pure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answers {
    /// The VM answers.
    pub(crate) is_answering: bool,
    failures: u32,
    /// Time until the next probe.
    pub(crate) rest: Duration,
}

impl Default for Answers {
    fn default() -> Self {
        Self { is_answering: false, failures: 0, rest: Duration::ZERO }
    }
}

impl Answers {
    /// Returns the result after one more probe.
    pub(crate) fn after(self, answered: bool) -> Self {
        if answered {
            return Self { is_answering: true, failures: 0, rest: PERIOD };
        }
        let failures = self.failures.saturating_add(1);
        let is_answering = self.is_answering && failures < FAILURES_MAX;
        let rest = match is_answering {
            true => PERIOD,
            false => self.rest.max(FIRST).mul_f64(1.5).min(SLOWEST),
        };
        Self { is_answering, failures, rest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_ends_after_three_missed_replies() {
        let mut answers = Answers::default();
        let mut seen = Vec::new();
        for answered in [false, true, false, false, true, false, false, false, false] {
            answers = answers.after(answered);
            seen.push(answers.is_answering);
        }
        assert_eq!(seen, [false, true, true, true, true, true, true, false, false]);
        assert!(answers.rest <= SLOWEST);
    }

    #[test]
    fn checksum_of_a_request_adds_up() {
        let packet = request(0x1234);
        let sum: u32 = packet.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }

    #[test]
    fn foreign_echo_replies_are_ignored() {
        let ip = Ipv4Addr::new(10, 0, 0, 5);
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 5, 10, 0, 0, 1];
        packet.extend([ECHO_REPLY, 0, 0, 0, 0x12, 0x34, 0, 1]);
        assert!(is_reply(&packet, ip, 0x1234));
        assert!(!is_reply(&packet, ip, 0x1235));
        assert!(!is_reply(&packet, Ipv4Addr::new(10, 0, 0, 6), 0x1234));
        assert!(!is_reply(&packet[..10], ip, 0x1234));
    }
}

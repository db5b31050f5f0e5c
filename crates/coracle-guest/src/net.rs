//! Network interface of the guest, configured by the old interface ioctls: they suffice for a VM with one address of each
//! family.

mod ipv6;

use std::ffi::{CString, c_ulong};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use self::ipv6::Ipv6;
use crate::console::say;
use crate::error::Error;
use crate::sys::{self, IfValue, Route};

/// Time limit for a system to load the driver of its NIC; shorter than that of a Configure.
const LINK_LIMIT: Duration = Duration::from_secs(15);
/// Interval of checks for a link.
const LINK_POLL: Duration = Duration::from_millis(100);
const SIOCADDRT: c_ulong = 0x890b;
const SIOCDELRT: c_ulong = 0x890c;
const SIOCGIFFLAGS: c_ulong = 0x8913;
const SIOCSIFFLAGS: c_ulong = 0x8914;
const SIOCGIFADDR: c_ulong = 0x8915;
const SIOCSIFADDR: c_ulong = 0x8916;
const SIOCGIFNETMASK: c_ulong = 0x891b;
const SIOCSIFNETMASK: c_ulong = 0x891c;
const SIOCGIFMTU: c_ulong = 0x8921;
const SIOCSIFMTU: c_ulong = 0x8922;
const SIOCSIFHWADDR: c_ulong = 0x8924;
const SIOCGIFHWADDR: c_ulong = 0x8927;

const IFF_UP: u16 = 1;
const ARPHRD_ETHER: u16 = 1;
const RTF_UP: u16 = 1;
const RTF_GATEWAY: u16 = 2;
const RTF_HOST: u16 = 4;
/// Directory of all links; a link of a device has an entry `device`.
const LINKS: &str = "/sys/class/net";
/// Default MTU, that of Ethernet.
const MTU: u32 = 1500;
/// MTUs that a link with IPv4 may have (RFC 791, section 3.2; `ETH_MAX_MTU` of the kernel).
const MTUS: std::ops::RangeInclusive<u32> = 68..=65_535;
/// Maximum number of default routes that are removed.
const ROUTES_MAX: usize = 16;

/// Validated network configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Ethernet link; `None`: loopback only.
    pub(crate) link: Option<Link>,
    pub(crate) nameservers: Vec<IpAddr>,
    pub(crate) search: Vec<String>,
    pub(crate) resolver_options: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) mac: [u8; 6],
    pub(crate) address: Ipv4Addr,
    pub(crate) prefix: u8,
    pub(crate) gateway: Option<Ipv4Addr>,
    pub(crate) mtu: u32,
    pub(crate) routes: Vec<Hop>,
    pub(crate) ipv6: Option<Ipv6>,
}

/// Route in addition to the connected network and the default route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hop {
    to: Ipv4Addr,
    prefix: u8,
    /// Router; `None`: the gateway of the link, or the link itself if it has no gateway.
    by: Option<Ipv4Addr>,
}

impl Plan {
    /// Validates the network of a request.
    pub(crate) fn parse(wire: &coracle_proto::guest::Network) -> Result<Self, Error> {
        let link = if wire.mac.is_empty() { None } else { Some(Link::parse(wire)?) };
        if wire.nameservers.len() > 8 || wire.search_domains.len() > 32 || wire.resolver_options.len() > 32 {
            return Err(Error::invalid("more than 8 nameservers, 32 search domains or 32 resolver options"));
        }
        let server = |s: &String| {
            s.parse().map_err(|_| Error::invalid(format!("invalid nameserver {s:?}: not an IP address")))
        };
        let nameservers = wire.nameservers.iter().map(server).collect::<Result<_, _>>()?;
        for domain in &wire.search_domains {
            if !is_name(domain, 253) {
                return Err(Error::invalid(format!("search domain {domain:?}")));
            }
        }
        for option in &wire.resolver_options {
            let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_:.".contains(&b);
            if option.is_empty() || option.len() > 64 || !option.bytes().all(plain) {
                return Err(Error::invalid(format!("resolver option {option:?}")));
            }
        }
        let (search, resolver_options) = (wire.search_domains.clone(), wire.resolver_options.clone());
        Ok(Self { link, nameservers, search, resolver_options })
    }

    /// Content of `/etc/resolv.conf`.
    pub(crate) fn resolv_conf(&self) -> String {
        let mut text: String = self.nameservers.iter().map(|n| format!("nameserver {n}\n")).collect();
        if !self.search.is_empty() {
            text.push_str(&format!("search {}\n", self.search.join(" ")));
        }
        if !self.resolver_options.is_empty() {
            text.push_str(&format!("options {}\n", self.resolver_options.join(" ")));
        }
        text
    }
}

impl Link {
    fn parse(wire: &coracle_proto::guest::Network) -> Result<Self, Error> {
        let (mac, address) = (wire.mac.as_str(), wire.address.as_str());
        let octets: Vec<u8> =
            mac.split(':').filter(|o| o.len() == 2).filter_map(|o| u8::from_str_radix(o, 16).ok()).collect();
        let mac: [u8; 6] = octets.try_into().map_err(|_| invalid("MAC address", mac))?;
        let [first, ..] = mac;
        if first & 1 == 1 || mac == [0; 6] {
            return Err(Error::invalid("invalid MAC address: not unicast"));
        }
        let (address, prefix) = with_prefix(address, "IPv4", 32)?;
        let mtu = if wire.mtu == 0 { MTU } else { wire.mtu };
        if !MTUS.contains(&mtu) {
            return Err(Error::invalid(format!("invalid MTU {mtu}: not 68 to 65535")));
        }
        let hop = |route: &coracle_proto::guest::Route| {
            let (to, prefix): (Ipv4Addr, u8) = with_prefix(&route.to, "IPv4", 32)?;
            Ok(Hop { to: to & mask(prefix), prefix, by: router(&route.gateway)? })
        };
        let routes = wire.routes.iter().filter(|route| !ipv6::is_ipv6(&route.to));
        let routes = routes.map(hop).collect::<Result<_, _>>()?;
        let ipv6 = Ipv6::parse(wire)?;
        Ok(Self { mac, address, prefix, gateway: router(&wire.gateway)?, mtu, routes, ipv6 })
    }

    fn contains(&self, other: Ipv4Addr) -> bool {
        let mask = mask(self.prefix);
        self.address & mask == other & mask
    }
}

fn invalid(what: &str, text: &str) -> Error {
    Error::invalid(format!("{what} {text:?}"))
}

fn mask(prefix: u8) -> Ipv4Addr {
    Ipv4Addr::from(u32::MAX.checked_shl(32u32.saturating_sub(prefix.into())).unwrap_or(0))
}

fn with_prefix<A: FromStr>(text: &str, family: &str, max: u8) -> Result<(A, u8), Error> {
    let (ip, prefix) = text.split_once('/').ok_or_else(|| invalid("address without a prefix", text))?;
    let prefix =
        prefix.parse().ok().filter(|p| (1..=max).contains(p)).ok_or_else(|| invalid("prefix of", text))?;
    Ok((ip.parse().map_err(|_| invalid(&format!("{family} address"), text))?, prefix))
}

fn router<A: FromStr>(text: &str) -> Result<Option<A>, Error> {
    let parsed = (!text.is_empty()).then(|| text.parse().map_err(|_| invalid("gateway", text)));
    parsed.transpose()
}

/// Whether the text is a host name or domain, which can add neither a line nor an option to a file.
pub(crate) fn is_name(text: &str, max: usize) -> bool {
    (1..=max).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        && !text.starts_with(['-', '.'])
}

/// Result of [`prepare`]: what a clone knows without asking, because all of its code is slow on an emulated CPU.
static PREPARED: OnceLock<Prepared> = OnceLock::new();

struct Prepared {
    net: Net,
    link: Option<PreparedLink>,
}

/// Ethernet link, as it was prepared.
struct PreparedLink {
    name: String,
    /// MAC address, as SIOCGIFHWADDR returns it.
    hardware: IfValue,
    mtu: u32,
    /// Whether it is still up, and without addresses and routes.
    is_new: AtomicBool,
    /// New MAC address of a link that has not announced itself.
    unannounced: Mutex<Option<IfValue>>,
}

impl PreparedLink {
    fn unannounced(&self) -> MutexGuard<'_, Option<IfValue>> {
        self.unannounced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the link as used. Returns it if it was new and gets another MAC address.
    fn take(&self, link: Option<&Link>) -> Option<&Self> {
        let was_new = self.is_new.swap(false, Ordering::Relaxed);
        link.filter(|link| was_new && !has_mac(&self.hardware, link.mac)).map(|_| self)
    }
}

/// Brings up loopback and the Ethernet link, ready to get its address. The link will announce a new address (`arp_notify`), and
/// has IPv6 disabled until it gets an IPv6 address. Idempotent.
///
/// # Errors
/// When the kernel refuses, or the VM has more than one link.
pub(crate) fn prepare() -> Result<(), Error> {
    prepared().map(drop)
}

fn prepared() -> Result<&'static Prepared, Error> {
    if let Some(prepared) = PREPARED.get() {
        return Ok(prepared);
    }
    let net = Net::open()?;
    net.up("lo", true).map_err(Error::io("bring up loopback"))?;
    let link = net.ethernet(|_| true)?.map(|name| net.prepare(name)).transpose()?;
    Ok(PREPARED.get_or_init(|| Prepared { net, link }))
}

/// Configures loopback and the Ethernet link as planned. Idempotent. [`announce`] must follow.
pub(crate) fn apply(plan: &Plan) -> Result<Vec<String>, Error> {
    let Prepared { net, link: prepared } = prepared()?;
    let new = prepared.as_ref().and_then(|prepared| prepared.take(plan.link.as_ref()));
    let name = prepared.as_ref().map(|prepared| prepared.name.as_str());
    let mut addresses = net.apply(name, plan, new)?;
    if let (Some(name), Some(link)) = (name, &plan.link) {
        let replaced = ipv6::replace(name, link.ipv6.as_ref());
        addresses.extend(replaced.map_err(Error::io(format!("configure IPv6 of {name}")))?);
    }
    Ok(addresses)
}

/// Has the kernel announce the address of a link that was new (ARP), unless it has. Until then, neighbours with an earlier MAC
/// for the address keep it; nothing else waits for this.
pub(crate) fn announce() {
    let Some(Prepared { net, link: Some(link) }) = PREPARED.get() else { return };
    let mac = link.unannounced().take();
    // The kernel does so whenever the MAC is set (`arp_notify`, Documentation/networking/ip-sysctl.rst), also to the same.
    if let Some(Err(e)) = mac.map(|mac| net.request(SIOCSIFHWADDR, &link.name, mac)) {
        say!("announce the address of {}: {e}", link.name);
    }
}

/// Undoes [`apply`]: the link is as it was prepared.
pub(crate) fn forget() -> Result<(), Error> {
    let Prepared { net, link: Some(link) } = prepared()? else { return Ok(()) };
    let (name, none) = (&link.name, pad(socket_address(Ipv4Addr::UNSPECIFIED)));
    let undone = ipv6::replace(name, None)
        .and_then(|_| net.set_mtu(name, link.mtu))
        .and_then(|()| net.request(SIOCSIFADDR, name, none))
        .and_then(|_| net.request(SIOCSIFHWADDR, name, link.hardware))
        .and_then(|_| net.up(name, true));
    undone.map_err(Error::io(format!("take the addresses of {name}")))?;
    link.unannounced().take();
    link.is_new.store(true, Ordering::Relaxed);
    Ok(())
}

/// Like [`apply`], for a system that names its links itself, and has other links without a device. If a unit starts the agent
/// before the driver of the NIC is loaded, this waits for the link. Blocking.
pub(crate) fn apply_to_system(plan: &Plan) -> Result<Vec<String>, Error> {
    let net = Net::open()?;
    let since = Instant::now();
    let link = loop {
        let link = net.ethernet(|name| Path::new(LINKS).join(name).join("device").exists())?;
        if link.is_some() || plan.link.is_none() || since.elapsed() >= LINK_LIMIT {
            break link;
        }
        std::thread::sleep(LINK_POLL);
    };
    let mut addresses = net.apply(link.as_deref(), plan, None)?;
    if let (Some(name), Some(ipv6)) = (&link, plan.link.as_ref().and_then(|link| link.ipv6.as_ref())) {
        let added = ipv6::add(name, ipv6);
        addresses.extend(added.map_err(Error::io(format!("configure IPv6 of {name}")))?);
    }
    Ok(addresses)
}

struct Net {
    socket: OwnedFd,
}

impl Net {
    /// Configures the link `name`. `new`: it is prepared, and still new.
    fn apply(
        &self,
        name: Option<&str>,
        plan: &Plan,
        new: Option<&PreparedLink>,
    ) -> Result<Vec<String>, Error> {
        let Some(link) = &plan.link else {
            if let Some(name) = name {
                self.up(name, false).map_err(Error::io(format!("take down {name}")))?;
            }
            return Ok(Vec::new());
        };
        let name = name.ok_or_else(|| Error::State("this machine has no Ethernet link".into()))?;
        // If it cannot be done that way, all steps are taken.
        let new = new.filter(|new| self.configure_new(new, link).is_ok());
        if new.is_none() {
            self.configure(name, link).map_err(Error::io(format!("configure {name}")))?;
            self.remove_default_routes();
        }
        self.add_routes(name, link).map_err(Error::io(format!("route by {name}")))?;
        let address = self.address(name).map_err(Error::io(format!("read the address of {name}")))?;
        Ok(vec![address])
    }

    fn open() -> Result<Self, Error> {
        rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map(|socket| Self { socket })
            .map_err(Error::io("open a socket for interface requests"))
    }

    fn request(&self, request: c_ulong, name: &str, value: IfValue) -> io::Result<IfValue> {
        sys::interface(self.socket.as_fd(), request, name, value)
    }

    /// Returns the only link except loopback. Fails if there are several, which this agent does not support.
    fn ethernet(&self, wanted: impl Fn(&str) -> bool) -> Result<Option<String>, Error> {
        let links = std::fs::read_dir(LINKS).map_err(Error::io("list links"))?;
        let mut found = links.flatten().filter_map(|l| l.file_name().into_string().ok()).filter(|name| {
            let hardware = self.request(SIOCGIFHWADDR, name, [0; 24]);
            name != "lo"
                && wanted(name)
                && hardware.is_ok_and(|[a, b, ..]| u16::from_ne_bytes([a, b]) == ARPHRD_ETHER)
        });
        match (found.next(), found.next()) {
            (found, None) => Ok(found),
            (None, _) => Ok(None),
            (Some(a), Some(b)) => {
                Err(Error::State(format!("this machine has more than one Ethernet link: {a}, {b}")))
            }
        }
    }

    fn up(&self, name: &str, up: bool) -> io::Result<()> {
        let mut value = self.request(SIOCGIFFLAGS, name, [0; 24])?;
        let [a, b, ..] = &mut value;
        let flags = u16::from_ne_bytes([*a, *b]);
        let wanted = if up { flags | IFF_UP } else { flags & !IFF_UP };
        if wanted == flags {
            return Ok(());
        }
        [*a, *b] = wanted.to_ne_bytes();
        self.request(SIOCSIFFLAGS, name, value).map(drop)
    }

    /// Brings up a link that announces its address and has no IPv6.
    fn prepare(&self, name: String) -> Result<PreparedLink, Error> {
        for (family, setting) in [("ipv4", "arp_notify"), ("ipv6", "disable_ipv6")] {
            let path = Path::new("/proc/sys/net").join(family).join("conf").join(&name).join(setting);
            match std::fs::write(&path, "1") {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::io(format!("write {}", path.display()))(e));
                }
                _ => {}
            }
        }
        let prepared = self.up(&name, true).and_then(|()| {
            let [a, b, c, d, ..] = self.request(SIOCGIFMTU, &name, [0; 24])?;
            let hardware = self.request(SIOCGIFHWADDR, &name, [0; 24])?;
            Ok((hardware, u32::from_ne_bytes([a, b, c, d])))
        });
        let (hardware, mtu) = prepared.map_err(Error::io(format!("bring up {name}")))?;
        let (is_new, unannounced) = (AtomicBool::new(true), Mutex::default());
        Ok(PreparedLink { name, hardware, mtu, is_new, unannounced })
    }

    /// Configures a link that is new, which has no neighbours: it stays up. It is announced later: its MAC changes while it has no
    /// address.
    fn configure_new(&self, new: &PreparedLink, link: &Link) -> io::Result<()> {
        if new.mtu != link.mtu {
            self.set_mtu(&new.name, link.mtu)?;
        }
        let mac = self.set_mac(&new.name, new.hardware, link)?;
        *new.unannounced() = Some(mac);
        self.set_address(&new.name, link)
    }

    fn configure(&self, name: &str, link: &Link) -> io::Result<()> {
        self.set_mtu(name, link.mtu)?;
        let hardware = self.request(SIOCGIFHWADDR, name, [0; 24])?;
        let same_mac = has_mac(&hardware, link.mac);
        let had = self.address(name);
        if same_mac && had.as_ref().is_ok_and(|a| *a == format!("{}/{}", link.address, link.prefix)) {
            return self.up(name, true);
        }
        // Takes the link down first: some drivers change a MAC only then, and the neighbours of the old address are forgotten.
        self.up(name, false)?;
        if !same_mac {
            self.set_mac(name, hardware, link)?;
        }
        self.set_address(name, link)?;
        self.up(name, true)
    }

    fn set_mac(&self, name: &str, mut hardware: IfValue, link: &Link) -> io::Result<IfValue> {
        hardware.iter_mut().skip(2).zip(link.mac).for_each(|(to, from)| *to = from);
        self.request(SIOCSIFHWADDR, name, hardware).map(|_| hardware)
    }

    fn set_mtu(&self, name: &str, mtu: u32) -> io::Result<()> {
        let mut value = [0; 24];
        value.iter_mut().zip(mtu.to_ne_bytes()).for_each(|(to, from)| *to = from);
        self.request(SIOCSIFMTU, name, value).map(drop)
    }

    fn set_address(&self, name: &str, link: &Link) -> io::Result<()> {
        self.request(SIOCSIFADDR, name, pad(socket_address(link.address)))?;
        self.request(SIOCSIFNETMASK, name, pad(socket_address(mask(link.prefix)))).map(drop)
    }

    fn remove_default_routes(&self) {
        let any = socket_address(Ipv4Addr::UNSPECIFIED);
        let old = Route { destination: any, gateway: any, mask: any, flags: RTF_UP };
        for _ in 0..ROUTES_MAX {
            if sys::route(self.socket.as_fd(), SIOCDELRT, &old, None).is_err() {
                break;
            }
        }
    }

    /// Adds the default route and the other routes.
    fn add_routes(&self, name: &str, link: &Link) -> io::Result<()> {
        let default =
            link.gateway.map(|gateway| Hop { to: Ipv4Addr::UNSPECIFIED, prefix: 0, by: Some(gateway) });
        // The gateway is added first, because it must be reachable for the other routes.
        default.iter().chain(&link.routes).try_for_each(|hop| self.route(name, link, hop))
    }

    fn route(&self, name: &str, link: &Link, hop: &Hop) -> io::Result<()> {
        let by = hop.by.or(link.gateway);
        if let Some(by) = by
            && !link.contains(by)
        {
            let router = Route { flags: RTF_UP | RTF_HOST, ..on_link(by, 32) };
            self.add_route(name, &router)?;
        }
        let direct = on_link(hop.to, hop.prefix);
        self.add_route(
            name,
            &match by {
                Some(by) => Route { gateway: socket_address(by), flags: RTF_UP | RTF_GATEWAY, ..direct },
                None => direct,
            },
        )
    }

    fn add_route(&self, name: &str, route: &Route) -> io::Result<()> {
        let device = CString::new(name)?;
        match sys::route(self.socket.as_fd(), SIOCADDRT, route, Some(&device)) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    /// Address and prefix of the link, as the kernel has them.
    fn address(&self, name: &str) -> io::Result<String> {
        let address = ipv4(self.request(SIOCGIFADDR, name, [0; 24])?);
        let mask = ipv4(self.request(SIOCGIFNETMASK, name, [0; 24])?);
        Ok(format!("{address}/{}", u32::from(mask).leading_ones()))
    }
}

/// Whether a value of SIOCGIFHWADDR is this MAC address.
fn has_mac(hardware: &IfValue, mac: [u8; 6]) -> bool {
    hardware.get(2..8) == Some(mac.as_slice())
}

/// Route to a connected network.
fn on_link(to: Ipv4Addr, prefix: u8) -> Route {
    Route {
        destination: socket_address(to),
        gateway: socket_address(Ipv4Addr::UNSPECIFIED),
        mask: socket_address(mask(prefix)),
        flags: RTF_UP,
    }
}

/// `sockaddr_in` without a port.
fn socket_address(ip: Ipv4Addr) -> [u8; 16] {
    let [f0, f1] = AddressFamily::INET.as_raw().to_ne_bytes();
    let [a, b, c, d] = ip.octets();
    [f0, f1, 0, 0, a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0]
}

fn pad(address: [u8; 16]) -> IfValue {
    let mut value = [0; 24];
    value.iter_mut().zip(address).for_each(|(to, from)| *to = from);
    value
}

fn ipv4(value: IfValue) -> Ipv4Addr {
    let [_, _, _, _, a, b, c, d, ..] = value;
    Ipv4Addr::new(a, b, c, d)
}

#[cfg(test)]
mod tests {
    use super::*;
    use coracle_proto::guest::Network;

    fn wire(mac: &str, address: &str, gateway: &str) -> Network {
        Network { mac: mac.into(), address: address.into(), gateway: gateway.into(), ..Network::default() }
    }

    #[test]
    fn parse_table() {
        for (why, mac, address, gateway, good) in [
            ("usual", "02:00:00:00:00:0a", "10.100.0.2/24", "10.100.0.1", true),
            ("no gateway", "02:00:00:00:00:0a", "10.100.0.2/32", "", true),
            ("loopback only", "", "", "", true),
            ("short MAC", "02:00:00:00:0a", "10.0.0.2/24", "", false),
            ("long octet", "002:0:00:00:00:0a", "10.0.0.2/24", "", false),
            ("multicast MAC", "03:00:00:00:00:0a", "10.0.0.2/24", "", false),
            ("zero MAC", "00:00:00:00:00:00", "10.0.0.2/24", "", false),
            ("no prefix", "02:00:00:00:00:0a", "10.0.0.2", "", false),
            ("prefix 0", "02:00:00:00:00:0a", "10.0.0.2/0", "", false),
            ("prefix 33", "02:00:00:00:00:0a", "10.0.0.2/33", "", false),
            ("gateway a name", "02:00:00:00:00:0a", "10.0.0.2/24", "gw", false),
        ] {
            assert_eq!(Plan::parse(&wire(mac, address, gateway)).is_ok(), good, "{why}");
        }
    }

    #[test]
    fn mtu_and_routes_table() {
        let route =
            |to: &str, gateway: &str| coracle_proto::guest::Route { to: to.into(), gateway: gateway.into() };
        for (why, mtu, route, good) in [
            ("that of Ethernet", 0, route("192.168.0.0/16", ""), true),
            ("of a tunnel", 1450, route("192.168.0.0/16", "10.100.0.254"), true),
            ("of jumbo frames", 9001, route("10.0.0.1/8", ""), true),
            ("too small for IPv4", 67, route("192.168.0.0/16", ""), false),
            ("larger than a packet", 65_536, route("192.168.0.0/16", ""), false),
            ("a second default route", 0, route("0.0.0.0/0", ""), false),
            ("an address alone", 0, route("192.168.0.1", ""), false),
            ("a router's name", 0, route("192.168.0.0/16", "gw"), false),
        ] {
            let routes = vec![route];
            let wire = Network { mtu, routes, ..wire("02:00:00:00:00:0a", "10.100.0.2/24", "") };
            let plan = Plan::parse(&wire).map(|plan| plan.link.unwrap());
            assert_eq!(plan.is_ok(), good, "{why}");
            let Ok(link) = plan else { continue };
            assert_eq!(link.mtu, if mtu == 0 { 1500 } else { mtu }, "{why}");
            let [hop] = link.routes.as_slice() else { panic!("{why}: one route") };
            assert_eq!(hop.to & mask(hop.prefix), hop.to, "{why}: no bit below the prefix");
        }
    }

    #[test]
    fn netmask_and_on_link_table() {
        let link = |a: &str| Plan::parse(&wire("02:00:00:00:00:01", a, "")).unwrap().link.unwrap();
        assert_eq!(mask(24), Ipv4Addr::new(255, 255, 255, 0));
        assert_eq!((mask(32), mask(0)), (Ipv4Addr::BROADCAST, Ipv4Addr::UNSPECIFIED));
        assert!(
            link("10.1.2.3/24").contains("10.1.2.1".parse().unwrap())
                && !link("10.1.2.3/32").contains("10.1.2.1".parse().unwrap())
        );
    }

    #[test]
    fn invalid_dns_names_are_refused() {
        assert!(is_name("web-0.default.svc", 64));
        for bad in ["", "a b", "a\nb", "-x", ".x", "ü", &"x".repeat(65)] {
            assert!(!is_name(bad, 64), "{bad:?}");
        }
    }

    #[test]
    fn search_domain_cannot_inject_a_resolv_conf_line() {
        let net = Network {
            nameservers: vec!["10.0.2.3".into()],
            search_domains: vec!["a.b".into(), "c".into()],
            resolver_options: vec![],
            ..Network::default()
        };
        assert_eq!(Plan::parse(&net).unwrap().resolv_conf(), "nameserver 10.0.2.3\nsearch a.b c\n");
        let evil = Network { search_domains: vec!["x\nnameserver 6.6.6.6".into()], ..Network::default() };
        assert!(Plan::parse(&evil).is_err());
    }
}

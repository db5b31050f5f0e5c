//! IPv6 of the guest's link, in addition to its IPv4 address: by the ioctls of an IPv6 socket (`linux/ipv6.h`,
//! `linux/ipv6_route.h`) and the link's settings in `/proc/sys/net/ipv6` (`ip-sysctl` of the kernel).

use std::net::Ipv6Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, io};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::{
    LINKS, ROUTES_MAX, RTF_GATEWAY, RTF_UP, SIOCADDRT, SIOCDELRT, SIOCSIFADDR, invalid, router, with_prefix,
};
use crate::error::Error;
use crate::sys::{self, Address6, Route6};

/// Validated IPv6 address of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ipv6 {
    address: Ipv6Addr,
    prefix: u8,
    gateway: Option<Ipv6Addr>,
    routes: Vec<Hop>,
}

/// Route in addition to the connected network and the default route.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hop {
    to: Ipv6Addr,
    prefix: u8,
    /// Router; `None`: the gateway of the address, or the link itself if there is no gateway.
    by: Option<Ipv6Addr>,
}

impl Ipv6 {
    /// Validates the IPv6 address and the IPv6 routes of a request.
    pub(super) fn parse(wire: &coracle_proto::guest::Network) -> Result<Option<Self>, Error> {
        let mut routes = wire.routes.iter().filter(|route| is_ipv6(&route.to)).peekable();
        let Some(ipv6) = &wire.ipv6 else {
            let stray = routes.peek().map(|route| invalid("route without an IPv6 address", &route.to));
            return stray.map_or(Ok(None), Err);
        };
        let (address, prefix): (Ipv6Addr, u8) = with_prefix(&ipv6.address, "IPv6", 128)?;
        if address.is_multicast() || address.is_unspecified() || address.is_loopback() {
            return Err(invalid("IPv6 address of a link", &ipv6.address));
        }
        let hop = |route: &coracle_proto::guest::Route| {
            let (to, prefix): (Ipv6Addr, u8) = with_prefix(&route.to, "IPv6", 128)?;
            Ok(Hop { to: to & mask(prefix), prefix, by: router(&route.gateway)? })
        };
        let routes = routes.map(hop).collect::<Result<_, _>>()?;
        Ok(Some(Self { address, prefix, gateway: router(&ipv6.gateway)?, routes }))
    }

    /// Whether the link reaches a router directly: it has a link-local address, or is in the network of the address.
    fn is_on_link(&self, other: Ipv6Addr) -> bool {
        let mask = mask(self.prefix);
        other.is_unicast_link_local() || self.address & mask == other & mask
    }
}

/// Whether the destination of a route is IPv6, by its notation.
pub(super) fn is_ipv6(net: &str) -> bool {
    net.contains(':')
}

fn mask(prefix: u8) -> Ipv6Addr {
    Ipv6Addr::from(u128::MAX.checked_shl(128u32.saturating_sub(prefix.into())).unwrap_or(0))
}

/// Whether [`replace`] has enabled IPv6 on the link.
static SPEAKS: AtomicBool = AtomicBool::new(false);

/// Sets the address and the routes of the link, and removes all others. Without an address it disables IPv6, if an earlier call
/// enabled it. Idempotent. Returns the address as the kernel has it.
pub(super) fn replace(link: &str, wanted: Option<&Ipv6>) -> io::Result<Option<String>> {
    let Some(wanted) = wanted else {
        if SPEAKS.load(Ordering::Relaxed) {
            set(link, "disable_ipv6", "1")?;
            SPEAKS.store(false, Ordering::Relaxed);
        }
        return Ok(None);
    };
    if address_of(link, wanted)?.is_none() {
        // Removes the previous addresses and routes.
        set(link, "disable_ipv6", "1")?;
        // The network has assigned the address: it is used at once, and router advertisements do not change it.
        for setting in ["accept_dad", "accept_ra"] {
            set(link, setting, "0")?;
        }
        set(link, "disable_ipv6", "0")?;
        SPEAKS.store(true, Ordering::Relaxed);
    }
    add(link, wanted)
}

/// Like [`replace`], but keeps the addresses that a system gives its links itself.
pub(super) fn add(link: &str, wanted: &Ipv6) -> io::Result<Option<String>> {
    let socket = Socket::open(link)?;
    if address_of(link, wanted)?.is_none() {
        socket.add_address(wanted)?;
    }
    socket.routes(wanted)?;
    address_of(link, wanted)
}

fn set(link: &str, setting: &str, value: &str) -> io::Result<()> {
    let path = Path::new("/proc/sys/net/ipv6/conf").join(link).join(setting);
    fs::write(&path, value).map_err(|e| io::Error::new(e.kind(), format!("write {}: {e}", path.display())))
}

/// Address and prefix, if the link has them.
fn address_of(link: &str, wanted: &Ipv6) -> io::Result<Option<String>> {
    let table = fs::read_to_string("/proc/net/if_inet6")?;
    Ok(table.lines().any(|line| is_line_of(line, link, wanted)).then(|| {
        let Ipv6 { address, prefix, .. } = wanted;
        format!("{address}/{prefix}")
    }))
}

/// Whether a line of `/proc/net/if_inet6` has the address of the link. Example:
/// `fd000000000000000000000000000005 02 40 00 80 eth0`, with address, index, prefix, scope and flags in hexadecimal, and link.
fn is_line_of(line: &str, link: &str, wanted: &Ipv6) -> bool {
    let fields: Vec<_> = line.split_whitespace().collect();
    let &[address, _, prefix, _, _, name] = fields.as_slice() else { return false };
    name == link
        && u128::from_str_radix(address, 16) == Ok(wanted.address.to_bits())
        && u8::from_str_radix(prefix, 16) == Ok(wanted.prefix)
}

/// Socket for requests about one link.
struct Socket {
    socket: OwnedFd,
    link: i32,
}

impl Socket {
    fn open(link: &str) -> io::Result<Self> {
        let socket =
            rustix::net::socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let index = fs::read_to_string(Path::new(LINKS).join(link).join("ifindex"))?;
        let link = index.trim().parse().map_err(|_| io::Error::other("invalid ifindex"))?;
        Ok(Self { socket, link })
    }

    fn add_address(&self, wanted: &Ipv6) -> io::Result<()> {
        let address =
            Address6 { address: wanted.address.octets(), prefix: wanted.prefix.into(), link: self.link };
        sys::address6(self.socket.as_fd(), SIOCSIFADDR, address)
    }

    /// Replaces all default routes of the link by the planned one, and adds the other routes.
    fn routes(&self, wanted: &Ipv6) -> io::Result<()> {
        let default = self.route(Ipv6Addr::UNSPECIFIED, 0, None);
        for _ in 0..ROUTES_MAX {
            if sys::route6(self.socket.as_fd(), SIOCDELRT, default).is_err() {
                break;
            }
        }
        let default = wanted.gateway.map(|by| Hop { to: Ipv6Addr::UNSPECIFIED, prefix: 0, by: Some(by) });
        default.iter().chain(&wanted.routes).try_for_each(|hop| {
            let by = hop.by.or(wanted.gateway);
            if let Some(by) = by.filter(|by| !wanted.is_on_link(*by)) {
                self.add_route(self.route(by, 128, None))?;
            }
            self.add_route(self.route(hop.to, hop.prefix, by))
        })
    }

    fn route(&self, to: Ipv6Addr, prefix: u8, by: Option<Ipv6Addr>) -> Route6 {
        let flags = if by.is_some() { RTF_UP | RTF_GATEWAY } else { RTF_UP };
        Route6 {
            destination: to.octets(),
            gateway: by.unwrap_or(Ipv6Addr::UNSPECIFIED).octets(),
            prefix: prefix.into(),
            flags: flags.into(),
            link: self.link,
        }
    }

    fn add_route(&self, route: Route6) -> io::Result<()> {
        match sys::route6(self.socket.as_fd(), SIOCADDRT, route) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_proto::guest::{Ipv6 as Wire, Network, Route};

    use super::*;

    fn wire(address: &str, gateway: &str, routes: &[(&str, &str)]) -> Network {
        let route = |(to, gateway): &(&str, &str)| Route { to: (*to).into(), gateway: (*gateway).into() };
        let ipv6 = Wire { address: address.into(), gateway: gateway.into() };
        Network { ipv6: Some(ipv6), routes: routes.iter().map(route).collect(), ..Network::default() }
    }

    #[test]
    fn parse_table() {
        for (why, wire, good) in [
            ("usual", wire("fd00::5/64", "fd00::1", &[]), true),
            ("a router by its link-local address", wire("fd00::5/128", "fe80::1", &[]), true),
            (
                "routes of both families",
                wire("fd00::5/64", "", &[("10.0.0.0/8", ""), ("fd01::/48", "")]),
                true,
            ),
            ("no prefix", wire("fd00::5", "", &[]), false),
            ("a prefix of 129", wire("fd00::5/129", "", &[]), false),
            ("of the other family", wire("10.0.0.5/24", "", &[]), false),
            ("multicast", wire("ff02::5/64", "", &[]), false),
            ("a gateway of the other family", wire("fd00::5/64", "10.0.0.1", &[]), false),
            ("a router of the other family", wire("fd00::5/64", "", &[("fd01::/48", "10.0.0.1")]), false),
            ("a second default route", wire("fd00::5/64", "", &[("::/0", "")]), false),
            ("a route alone", Network { ipv6: None, ..wire("", "", &[("fd01::/48", "")]) }, false),
            ("none", Network::default(), true),
        ] {
            assert_eq!(Ipv6::parse(&wire).is_ok(), good, "{why}");
        }
        let parsed =
            Ipv6::parse(&wire("fd00::5/64", "fe80::1", &[("fd01::9/48", "fd00::2")])).unwrap().unwrap();
        let hop = Hop { to: "fd01::".parse().unwrap(), prefix: 48, by: "fd00::2".parse().ok() };
        assert_eq!(parsed.routes, [hop], "no bit below the prefix");
        for (router, want) in [("fe80::1", true), ("fd00::ff", true), ("fd02::1", false)] {
            assert_eq!(parsed.is_on_link(router.parse().unwrap()), want, "{router}");
        }
    }

    #[test]
    fn if_inet6_line_match_table() {
        let wanted = Ipv6::parse(&wire("fd00::5/64", "", &[])).unwrap().unwrap();
        for (why, line, want) in [
            ("its own", "fd000000000000000000000000000005 02 40 00 80     eth0", true),
            ("of another link", "fd000000000000000000000000000005 03 40 00 80     eth1", false),
            ("another prefix", "fd000000000000000000000000000005 02 80 00 80     eth0", false),
            ("another address", "fe800000000000000000000000000005 02 40 20 80     eth0", false),
            ("a broken line", "fd000000000000000000000000000005 02", false),
        ] {
            assert_eq!(is_line_of(line, "eth0", &wanted), want, "{why}");
        }
    }
}

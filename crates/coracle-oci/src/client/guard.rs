//! Addresses that requests of a cluster may reach. Users who may create VMs choose registries, and registries choose token
//! servers and redirects; a node reaches more addresses than these users do.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use reqwest::{
    Url,
    dns::{Addrs, Name, Resolve, Resolving},
};

use super::{address::origin_of, hosts::Registries};

/// EC2's metadata service over IPv6. Other metadata addresses of EC2 are link-local.
const EC2_METADATA: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

/// Address rule for requests of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct Guard {
    /// Hosts and ports of configured registries, which are always allowed.
    named: BTreeSet<(String, u16)>,
    deny_private: bool,
}

/// Address that was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{host} is {kind}, and not a configured registry")]
pub(crate) struct Refused {
    pub(crate) host: String,
    pub(crate) kind: &'static str,
}

/// Route to a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// To any address.
    Any,
    /// To permitted addresses only.
    Permitted,
}

impl Guard {
    pub(crate) fn new(registries: &Registries) -> Self {
        Self { named: registries.configured_origins(), deny_private: registries.is_private_denied() }
    }

    pub(crate) fn resolver(&self) -> PermittedAddresses {
        PermittedAddresses { deny_private: self.deny_private }
    }

    /// Route to `url`. Checks addresses in URLs; addresses of names are checked when the connection is made. Pure.
    pub(crate) fn route(&self, url: &Url) -> Result<Route, Refused> {
        if origin_of(url).is_some_and(|origin| self.named.contains(&origin)) {
            return Ok(Route::Any);
        }
        let host = url.host_str().unwrap_or_default();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        match bare.parse().ok().and_then(|ip| forbidden(ip, self.deny_private)) {
            Some(kind) => Err(Refused { host: host.to_owned(), kind }),
            None => Ok(Route::Permitted),
        }
    }
}

/// Resolves names to permitted addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PermittedAddresses {
    deny_private: bool,
}

impl Resolve for PermittedAddresses {
    fn resolve(&self, name: Name) -> Resolving {
        let deny_private = self.deny_private;
        Box::pin(async move {
            let host = name.as_str().to_owned();
            let all: Vec<_> = tokio::net::lookup_host((host.as_str(), 0)).await?.collect();
            let refused = all.iter().find_map(|address| forbidden(address.ip(), deny_private));
            let permitted: Vec<SocketAddr> =
                all.into_iter().filter(|address| forbidden(address.ip(), deny_private).is_none()).collect();
            match refused {
                Some(kind) if permitted.is_empty() => Err(Refused { host, kind }.into()),
                _ => Ok(Box::new(permitted.into_iter()) as Addrs),
            }
        })
    }
}

/// Kind of an address that requests of a cluster may not reach. Pure.
fn forbidden(ip: IpAddr, deny_private: bool) -> Option<&'static str> {
    match ip {
        IpAddr::V4(v4) => forbidden_v4(v4, deny_private),
        IpAddr::V6(v6) => match embedded(v6) {
            Some(v4) => forbidden_v4(v4, deny_private),
            None => forbidden_v6(v6, deny_private),
        },
    }
}

/// IPv4 address embedded in an IPv6 address: mapped, compatible (RFC 4291), 6to4 (RFC 3056) or translated (RFC 6052).
fn embedded(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let v4 = |high: u16, low: u16| Some(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low)));
    match v6.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => None,
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => v4(high, low),
        [0x2002, high, low, ..] => v4(high, low),
        _ => None,
    }
}

fn forbidden_v4(ip: Ipv4Addr, deny_private: bool) -> Option<&'static str> {
    let [a, b, ..] = ip.octets();
    match (a, b) {
        (0, _) => Some("an address of this host"),
        (127, _) => Some("a loopback address"),
        (169, 254) => Some("a link-local address"),
        (100, 64..=127) if deny_private => Some("a private address"),
        _ if deny_private && ip.is_private() => Some("a private address"),
        _ if ip.is_multicast() || ip.is_broadcast() => Some("a multicast address"),
        _ => None,
    }
}

fn forbidden_v6(ip: Ipv6Addr, deny_private: bool) -> Option<&'static str> {
    match ip.segments()[0] {
        _ if ip.is_unspecified() => Some("an address of this host"),
        _ if ip.is_loopback() => Some("a loopback address"),
        _ if ip == EC2_METADATA => Some("a metadata address"),
        0xfe80..=0xfebf => Some("a link-local address"),
        0xfc00..=0xfdff if deny_private => Some("a private address"),
        0xff00..=0xffff => Some("a multicast address"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegistryHosts;

    #[test]
    fn guard_address_table() {
        for (url, open, strict) in [
            ("https://127.0.0.1/", "a loopback address", "a loopback address"),
            ("https://127.9.9.9:5000/", "a loopback address", "a loopback address"),
            ("https://2130706433/", "a loopback address", "a loopback address"),
            ("https://0x7f.1/", "a loopback address", "a loopback address"),
            ("https://0.0.0.0/", "an address of this host", "an address of this host"),
            ("https://169.254.169.254/latest", "a link-local address", "a link-local address"),
            ("https://[::1]/", "a loopback address", "a loopback address"),
            ("https://[::]/", "an address of this host", "an address of this host"),
            ("https://[::ffff:127.0.0.1]/", "a loopback address", "a loopback address"),
            ("https://[::ffff:169.254.169.254]/", "a link-local address", "a link-local address"),
            ("https://[64:ff9b::a9fe:a9fe]/", "a link-local address", "a link-local address"),
            ("https://[2002:7f00:1::]/", "a loopback address", "a loopback address"),
            ("https://[fe80::1]/", "a link-local address", "a link-local address"),
            ("https://[fd00:ec2::254]/", "a metadata address", "a metadata address"),
            ("https://224.0.0.1/", "a multicast address", "a multicast address"),
            ("https://10.0.0.1/", "", "a private address"),
            ("https://192.168.1.1:8443/", "", "a private address"),
            ("https://172.16.0.1/", "", "a private address"),
            ("https://100.64.0.1/", "", "a private address"),
            ("https://[fd12::1]/", "", "a private address"),
            ("https://[::ffff:10.0.0.1]/", "", "a private address"),
            ("https://192.0.2.1/", "", ""),
            ("https://[2001:db8::1]/", "", ""),
            ("https://registry.example/", "", ""),
        ] {
            for (deny, want) in [(false, open), (true, strict)] {
                let guard = Guard::new(&Registries::default().deny_private(deny));
                let route = guard.route(&Url::parse(url).unwrap());
                assert_eq!(route.err().map_or("", |refused| refused.kind), want, "{url} {deny}");
            }
        }
    }

    #[test]
    fn guard_permits_configured_registries() {
        let registries = Registries::default().with("127.0.0.1:5000", RegistryHosts::default());
        let guard = Guard::new(&registries);
        let route = |url: &str| guard.route(&Url::parse(url).unwrap());
        assert_eq!(route("http://127.0.0.1:5000/v2/"), Ok(Route::Any));
        assert_eq!(route("http://registry.example/v2/"), Ok(Route::Permitted));
        assert!(route("http://127.0.0.1:5001/token").is_err(), "another port is another server");
    }
}

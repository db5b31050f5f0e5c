//! Results of plugins (CNI specification 1.0, section 6). Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Route of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination of the route.
    pub to: IpNet,
    /// Router, of the same address family; `None`: the default gateway of that family.
    pub gateway: Option<IpAddr>,
}

/// IPv6 configuration of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniIpv6 {
    /// IPv6 address of the guest.
    pub address: Ipv6Addr,
    /// Prefix length of the network.
    pub prefix: u8,
    /// Default gateway.
    pub gateway: Option<Ipv6Addr>,
}

/// DNS configuration of a network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Addresses of the name servers.
    pub nameservers: Vec<String>,
    /// Search domains.
    pub search: Vec<String>,
    /// Resolver options.
    pub options: Vec<String>,
}

/// Network configuration of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniAddresses {
    /// IPv4 address of the guest.
    pub address: Ipv4Addr,
    /// Prefix length of the network.
    pub prefix: u8,
    /// Default gateway.
    pub gateway: Option<Ipv4Addr>,
    /// IPv6 configuration, on a network with both address families.
    pub ipv6: Option<CniIpv6>,
    /// Routes in addition to the connected networks and the default routes.
    pub routes: Vec<Route>,
    /// DNS configuration.
    pub dns: Dns,
    /// MTU, bytes; `None`: that of Ethernet.
    pub mtu: Option<u32>,
}

#[derive(Deserialize)]
struct Wire {
    #[serde(default)]
    ips: Vec<WireIp>,
    #[serde(default)]
    routes: Vec<WireRoute>,
    #[serde(default)]
    dns: Dns,
}

#[derive(Deserialize)]
struct WireIp {
    #[serde(deserialize_with = "net")]
    address: IpNet,
    gateway: Option<IpAddr>,
}

#[derive(Deserialize)]
struct WireRoute {
    #[serde(deserialize_with = "net")]
    dst: IpNet,
    gw: Option<IpAddr>,
}

fn net<'de, D: Deserializer<'de>>(from: D) -> Result<IpNet, D::Error> {
    String::deserialize(from)?.parse().map_err(D::Error::custom)
}

fn v4(address: IpAddr) -> Option<Ipv4Addr> {
    if let IpAddr::V4(address) = address { Some(address) } else { None }
}

fn v6(address: IpAddr) -> Option<Ipv6Addr> {
    if let IpAddr::V6(address) = address { Some(address) } else { None }
}

impl Wire {
    /// First address of a family with its prefix length, and the gateway of that family: the gateway of the default route, else
    /// that of the address.
    fn first<A>(&self, family: fn(IpAddr) -> Option<A>) -> Option<(A, u8, Option<A>)> {
        let mut ips = self.ips.iter();
        let (address, ip) = ips.find_map(|ip| Some((family(ip.address.addr())?, ip)))?;
        let mut defaults = self.routes.iter().filter(|route| route.dst.prefix_len() == 0);
        let gateway = defaults.find_map(|route| family(route.gw?));
        Some((address, ip.address.prefix_len(), gateway.or_else(|| family(ip.gateway?))))
    }

    /// Routes of the address families that the guest has, without default routes. Routes by a router of another family are left
    /// out.
    fn routes(&self, has_ipv6: bool) -> Vec<Route> {
        let routes = self.routes.iter().filter(|route| {
            let is_spoken = has_ipv6 || route.dst.addr().is_ipv4();
            is_spoken
                && route.dst.prefix_len() > 0
                && route.gw.is_none_or(|gw| gw.is_ipv4() == route.dst.addr().is_ipv4())
        });
        routes.map(|route| Route { to: route.dst, gateway: route.gw }).collect()
    }
}

impl CniAddresses {
    /// Parses the first IPv4 address of a result, the first IPv6 address if there is one, and the gateways, routes and DNS
    /// settings.
    pub(super) fn parse(result: &Value) -> Result<Self, String> {
        let wire = Wire::deserialize(result).map_err(|error| error.to_string())?;
        let (address, prefix, gateway) = wire.first(v4).ok_or("the result has no IPv4 address")?;
        let ipv6 = wire.first(v6).map(|(address, prefix, gateway)| CniIpv6 { address, prefix, gateway });
        let routes = wire.routes(ipv6.is_some());
        Ok(Self { address, prefix, gateway, ipv6, routes, dns: wire.dns, mtu: None })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn result_table() {
        let parse = |value: Value| CniAddresses::parse(&value);
        let whole = parse(json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/x"}],
            "ips": [{"address": "fd00::2/64", "gateway": "fd00::1"}, {"address": "10.1.2.3/24", "gateway": "10.1.2.1"}],
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.2.254"}, {"dst": "192.168.0.0/16"}, {"dst": "::/0", "gw": "fe80::1"},
                {"dst": "fd01::/64"}, {"dst": "fd02::/64", "gw": "10.1.2.1"}],
            "dns": {"nameservers": ["10.1.2.1"], "search": ["example"]}}))
        .unwrap();
        assert_eq!((whole.address, whole.prefix), ([10, 1, 2, 3].into(), 24));
        assert_eq!(whole.gateway, Some([10, 1, 2, 254].into()), "the default route outweighs the gateway");
        let to = |net: &str| Route { to: net.parse().unwrap(), gateway: None };
        assert_eq!(whole.routes, [to("192.168.0.0/16"), to("fd01::/64")], "no router of another family");
        let ipv6 =
            CniIpv6 { address: "fd00::2".parse().unwrap(), prefix: 64, gateway: "fe80::1".parse().ok() };
        assert_eq!(whole.ipv6, Some(ipv6));
        let one = parse(json!({"ips": [{"address": "10.1.2.3/24", "gateway": "10.1.2.1"}],
            "routes": [{"dst": "::/0"}, {"dst": "fd01::/64"}]}))
        .unwrap();
        assert_eq!((one.ipv6, one.routes), (None, vec![]), "no route of a family without an address");
        assert_eq!((whole.dns.nameservers.len(), whole.dns.search.len()), (1, 1));
        for (why, value) in [
            ("no address", json!({})),
            ("only IPv6", json!({"ips": [{"address": "fd00::2/64"}]})),
            ("an address without a prefix", json!({"ips": [{"address": "10.1.2.3"}]})),
            ("no object", json!("yes")),
        ] {
            parse(value).expect_err(why);
        }
    }
}

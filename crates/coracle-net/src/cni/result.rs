//! Results of plugins (CNI specification 1.0, section 6). Pure.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// A route of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where it leads.
    pub to: Ipv4Net,
    /// By which router; `None`: the gateway.
    pub gateway: Option<Ipv4Addr>,
}

/// Name servers of a network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Addresses.
    pub nameservers: Vec<String>,
    /// Domains that names are looked up in.
    pub search: Vec<String>,
    /// Options of the resolver.
    pub options: Vec<String>,
}

/// What a guest is given of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniAddresses {
    /// Its address.
    pub address: Ipv4Addr,
    /// Length of the prefix.
    pub prefix: u8,
    /// The way out.
    pub gateway: Option<Ipv4Addr>,
    /// Routes beside those to its network and by the gateway.
    pub routes: Vec<Route>,
    /// Name servers.
    pub dns: Dns,
    /// Longest packet, bytes; `None`: that of Ethernet.
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

impl CniAddresses {
    /// The first IPv4 address of a result, and what belongs to it.
    pub(super) fn parse(result: &Value) -> Result<Self, String> {
        let wire = Wire::deserialize(result).map_err(|error| error.to_string())?;
        let first = wire.ips.iter().find_map(|ip| match ip.address {
            IpNet::V4(net) => Some((net, ip.gateway.and_then(v4))),
            IpNet::V6(_) => None,
        });
        let (net, gateway) = first.ok_or("the result has no IPv4 address")?;
        let routes = wire.routes.iter().filter_map(|route| match route.dst {
            IpNet::V4(to) => Some(Route { to, gateway: route.gw.and_then(v4) }),
            IpNet::V6(_) => None,
        });
        let (defaults, routes): (Vec<_>, Vec<_>) = routes.partition(|route| route.to.prefix_len() == 0);
        let gateway = defaults.iter().find_map(|route| route.gateway).or(gateway);
        Ok(Self { address: net.addr(), prefix: net.prefix_len(), gateway, routes, dns: wire.dns, mtu: None })
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
            "ips": [{"address": "fd00::2/64"}, {"address": "10.1.2.3/24", "gateway": "10.1.2.1", "interface": 0}],
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.2.254"}, {"dst": "192.168.0.0/16"}, {"dst": "::/0"}],
            "dns": {"nameservers": ["10.1.2.1"], "search": ["example"]}}))
        .unwrap();
        assert_eq!((whole.address, whole.prefix), ([10, 1, 2, 3].into(), 24));
        assert_eq!(whole.gateway, Some([10, 1, 2, 254].into()), "the default route outweighs the gateway");
        let lan = Route { to: "192.168.0.0/16".parse().unwrap(), gateway: None };
        assert_eq!(whole.routes, [lan]);
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

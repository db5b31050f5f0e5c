//! IPv4 subnets, and the choice of a free one.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

/// IPv4 network with zero host bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Subnet(Ipv4Net);

/// Error for an invalid subnet text.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid subnet {0:?}: want an IPv4 network with a prefix of 8 to 30 bits, like 10.100.0.0/24")]
pub struct InvalidSubnet(String);

impl Subnet {
    /// Default pool of guest subnets.
    pub const POOL: Self = Self(Ipv4Net::new_assert(Ipv4Addr::new(10, 100, 0, 0), 16));

    /// First address, that of the network itself.
    #[must_use]
    pub fn network(self) -> Ipv4Addr {
        self.0.network()
    }

    /// Prefix length.
    #[must_use]
    pub fn prefix(self) -> u8 {
        self.0.prefix_len()
    }

    /// First host address, which belongs to the bridge.
    #[must_use]
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.0.network()) + 1)
    }

    /// Addresses that guests can have, in ascending order.
    pub fn guests(self) -> impl Iterator<Item = Ipv4Addr> {
        self.0.hosts().skip(1)
    }

    /// Whether this address can belong to a guest.
    #[must_use]
    pub fn has_guest(self, address: Ipv4Addr) -> bool {
        self.gateway() < address && address < self.0.broadcast()
    }

    /// Whether the two subnets share an address.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.0.contains(&other.0) || other.0.contains(&self.0)
    }

    /// Whether this address is in the subnet.
    #[must_use]
    pub fn contains(self, address: Ipv4Addr) -> bool {
        self.0.contains(&address)
    }

    /// Network that contains an address.
    #[must_use]
    pub fn around(address: Ipv4Addr, prefix: u8) -> Self {
        Self(Ipv4Net::new_assert(address, prefix.min(32)).trunc())
    }

    /// First /24 of `self` that overlaps with no subnet of `used`.
    #[must_use]
    pub fn first_free_24(self, used: &[Self]) -> Option<Self> {
        let mut candidates = self.0.subnets(24).into_iter().flatten().map(Self);
        candidates.find(|candidate| !used.iter().any(|u| u.overlaps(*candidate)))
    }
}

/// Candidates for the guest subnet of a node, in descending order of precedence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Subnet that an administrator set by a flag.
    pub flag: Option<Subnet>,
    /// Subnet that the cluster assigned: `spec.podCIDR` of the Node, or what the node leased before it opened its network.
    pub cluster: Option<Subnet>,
    /// Subnet in the node's own state, which it had before.
    pub kept: Option<Subnet>,
    /// Range to choose a free /24 from; `None`: [`Subnet::POOL`].
    pub range: Option<Subnet>,
}

/// Networks that a new subnet must not overlap with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Guest subnets of other nodes.
    pub by_nodes: Vec<Subnet>,
    /// Networks that this host has addresses in or routes to.
    pub by_host: Vec<Subnet>,
}

/// Chooses the subnet of a node; `None` if no /24 of the range is free. A subnet set by an administrator or by the cluster is
/// used even if it overlaps: the operator reports that. The subnet that the node had is kept unless another node has it. Pure.
#[must_use]
pub fn choose(sources: &Sources, taken: &Taken) -> Option<Subnet> {
    let is_other_nodes = |subnet: &Subnet| taken.by_nodes.iter().any(|other| other.overlaps(*subnet));
    let kept = sources.kept.filter(|kept| !is_other_nodes(kept));
    let used = [taken.by_nodes.as_slice(), &taken.by_host].concat();
    let free = || sources.range.unwrap_or(Subnet::POOL).first_free_24(&used);
    sources.flag.or(sources.cluster).or(kept).or_else(free)
}

impl FromStr for Subnet {
    type Err = InvalidSubnet;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let net = text.parse::<Ipv4Net>().ok();
        let net = net.filter(|net| (8..=30).contains(&net.prefix_len()) && net.addr() == net.network());
        net.map(Self).ok_or_else(|| InvalidSubnet(text.chars().take(60).collect()))
    }
}

impl From<Ipv4Net> for Subnet {
    fn from(net: Ipv4Net) -> Self {
        Self(net.trunc())
    }
}

impl From<Subnet> for Ipv4Net {
    fn from(subnet: Subnet) -> Self {
        subnet.0
    }
}

impl TryFrom<String> for Subnet {
    type Error = InvalidSubnet;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Subnet> for String {
    fn from(subnet: Subnet) -> Self {
        subnet.to_string()
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    #[test]
    fn first_free_subnet_avoids_used_subnets() {
        for (used, want) in [
            (vec![], "10.100.0.0/24"),
            (vec!["10.100.0.0/24"], "10.100.1.0/24"),
            (vec!["10.100.0.0/30", "10.100.1.0/24"], "10.100.2.0/24"),
            (vec!["10.100.0.0/17"], "10.100.128.0/24"),
            (vec!["10.96.0.0/16"], "10.100.0.0/24"),
        ] {
            let used: Vec<_> = used.into_iter().map(subnet).collect();
            assert_eq!(Subnet::POOL.first_free_24(&used).unwrap().to_string(), want);
        }
        assert_eq!(Subnet::POOL.first_free_24(&[subnet("10.0.0.0/8")]), None);
    }

    #[test]
    fn choice_of_a_subnet_table() {
        let all = |texts: &[&str]| texts.iter().map(|text| subnet(text)).collect::<Vec<_>>();
        let one = |text: &str| (!text.is_empty()).then(|| subnet(text));
        for (why, [flag, cluster, kept, range], by_nodes, by_host, want) in [
            ("nothing is known", ["", "", "", ""], &[][..], &[][..], "10.100.0.0/24"),
            (
                "a flag outweighs all",
                ["10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/24", ""],
                &[],
                &[],
                "10.1.0.0/24",
            ),
            (
                "a flag holds where it overlaps",
                ["10.1.0.0/24", "", "", ""],
                &["10.1.0.0/16"],
                &[],
                "10.1.0.0/24",
            ),
            (
                "the pod CIDR outweighs what was kept",
                ["", "10.2.0.0/24", "10.3.0.0/24", ""],
                &[],
                &[],
                "10.2.0.0/24",
            ),
            (
                "the node's own route does not move it",
                ["", "", "10.3.0.0/24", ""],
                &[],
                &["10.3.0.0/24"],
                "10.3.0.0/24",
            ),
            ("another node has it", ["", "", "10.100.0.0/24", ""], &["10.100.0.0/24"], &[], "10.100.1.0/24"),
            (
                "first free of nodes and host",
                ["", "", "", ""],
                &["10.100.0.0/24"],
                &["10.100.1.0/30"],
                "10.100.2.0/24",
            ),
            ("of a range", ["", "", "", "10.7.0.0/23"], &["10.7.0.0/24"], &[], "10.7.1.0/24"),
            ("none is free", ["", "", "", "10.7.0.0/24"], &["10.7.0.0/28"], &[], ""),
            ("a range that is too small", ["", "", "", "10.7.0.0/25"], &[], &[], ""),
        ] {
            let sources =
                Sources { flag: one(flag), cluster: one(cluster), kept: one(kept), range: one(range) };
            let taken = Taken { by_nodes: all(by_nodes), by_host: all(by_host) };
            assert_eq!(choose(&sources, &taken), one(want), "{why}");
        }
    }

    #[test]
    fn guests_are_neither_network_nor_gateway_nor_broadcast() {
        let small = subnet("10.100.0.0/29");
        let guests: Vec<_> = small.guests().map(|g| g.to_string()).collect();
        assert_eq!(guests, ["10.100.0.2", "10.100.0.3", "10.100.0.4", "10.100.0.5", "10.100.0.6"]);
        assert!(!small.has_guest(small.gateway()));
    }

    #[test]
    fn bad_text_is_refused() {
        for text in
            ["10.0.0.0", "10.0.0.1/24", "10.0.0.0/31", "0.0.0.0/0", "x/24", "10.0.0.0/99", "10.0.0.0/+24"]
        {
            assert!(text.parse::<Subnet>().is_err(), "{text}");
        }
    }
}

//! IPv4 subnets, and the choice of a free one.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

/// An IPv4 network, its host bits zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Subnet(Ipv4Net);

/// Invalid text of a subnet.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid subnet {0:?}: want an IPv4 network with a prefix of 8 to 30 bits, like 10.100.0.0/24")]
pub struct InvalidSubnet(String);

impl Subnet {
    /// The pool that guests' subnets are taken from.
    pub const POOL: Self = Self(Ipv4Net::new_assert(Ipv4Addr::new(10, 100, 0, 0), 16));

    /// Length of the prefix.
    #[must_use]
    pub fn prefix(self) -> u8 {
        self.0.prefix_len()
    }

    /// The first address of a host: the bridge's own.
    #[must_use]
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.0.network()) + 1)
    }

    /// The addresses that guests can have, in order.
    pub fn guests(self) -> impl Iterator<Item = Ipv4Addr> {
        self.0.hosts().skip(1)
    }

    /// Can this address be a guest's?
    #[must_use]
    pub fn has_guest(self, address: Ipv4Addr) -> bool {
        self.gateway() < address && address < self.0.broadcast()
    }

    /// Do the two share an address?
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.0.contains(&other.0) || other.0.contains(&self.0)
    }

    /// The network around an address.
    #[must_use]
    pub fn around(address: Ipv4Addr, prefix: u8) -> Self {
        Self(Ipv4Net::new_assert(address, prefix.min(32)).trunc())
    }

    /// The first /24 of `self` that overlaps with nothing of `used`.
    #[must_use]
    pub fn first_free_24(self, used: &[Self]) -> Option<Self> {
        let mut candidates = self.0.subnets(24).into_iter().flatten().map(Self);
        candidates.find(|candidate| !used.iter().any(|u| u.overlaps(*candidate)))
    }
}

impl FromStr for Subnet {
    type Err = InvalidSubnet;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let net = text.parse::<Ipv4Net>().ok();
        let net = net.filter(|net| (8..=30).contains(&net.prefix_len()) && net.addr() == net.network());
        net.map(Self).ok_or_else(|| InvalidSubnet(text.chars().take(60).collect()))
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
    fn the_first_free_subnet_avoids_what_the_host_has() {
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

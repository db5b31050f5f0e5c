//! IPv4 subnets, and the choice of a free one.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An IPv4 network, its host bits zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Subnet {
    network: u32,
    prefix: u8,
}

/// Text that is no subnet.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is no IPv4 subnet with a prefix of 8 to 30 bits, like 10.100.0.0/24")]
pub struct InvalidSubnet(String);

impl Subnet {
    /// The pool that guests' subnets are taken from.
    pub const POOL: Self = Self { network: 0x0a64_0000, prefix: 16 };

    /// Length of the prefix.
    #[must_use]
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The first address of a host: the bridge's own.
    #[must_use]
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from(self.network + 1)
    }

    /// The addresses that guests can have, in order.
    pub fn guests(self) -> impl Iterator<Item = Ipv4Addr> {
        (self.network + 2..self.last()).map(Ipv4Addr::from)
    }

    /// Can this address be a guest's?
    #[must_use]
    pub fn has_guest(self, address: Ipv4Addr) -> bool {
        (self.network + 2..self.last()).contains(&u32::from(address))
    }

    /// Do the two share an address?
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.network <= other.last() && other.network <= self.last()
    }

    /// The network around an address.
    #[must_use]
    pub fn around(address: Ipv4Addr, prefix: u8) -> Self {
        let prefix = prefix.min(32);
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        Self { network: u32::from(address) & mask, prefix }
    }

    /// The first /24 of `self` that overlaps with nothing of `used`.
    #[must_use]
    pub fn first_free_24(self, used: &[Self]) -> Option<Self> {
        (self.network..=self.last())
            .step_by(256)
            .map(|network| Self { network, prefix: 24 })
            .find(|candidate| !used.iter().any(|u| u.overlaps(*candidate)))
    }

    fn last(self) -> u32 {
        self.network | u32::MAX.checked_shr(u32::from(self.prefix)).unwrap_or(0)
    }
}

impl FromStr for Subnet {
    type Err = InvalidSubnet;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || InvalidSubnet(text.chars().take(60).collect());
        let (address, prefix) = text.split_once('/').ok_or_else(bad)?;
        let address: Ipv4Addr = address.parse().map_err(|_| bad())?;
        let prefix: u8 = prefix.parse().map_err(|_| bad())?;
        let subnet = Self::around(address, prefix);
        if (8..=30).contains(&prefix) && subnet.network == u32::from(address) {
            Ok(subnet)
        } else {
            Err(bad())
        }
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
        write!(f, "{}/{}", Ipv4Addr::from(self.network), self.prefix)
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
        for text in ["10.0.0.0", "10.0.0.1/24", "10.0.0.0/31", "0.0.0.0/0", "x/24", "10.0.0.0/99"] {
            assert!(text.parse::<Subnet>().is_err(), "{text}");
        }
    }
}

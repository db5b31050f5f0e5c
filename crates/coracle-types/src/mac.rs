//! Ethernet addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Ethernet address, written `02:00:00:00:00:01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// Returns the address of the first NIC of a VM or of an unassigned VMM instance: locally administered (first octet 02),
    /// the other five octets from a hash of the whole id.
    #[must_use]
    pub fn of(id: &impl fmt::Display) -> Self {
        let hash = Sha256::digest(format!("mac {id}"));
        Self([2, hash[0], hash[1], hash[2], hash[3], hash[4]])
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Error for a text that is not an Ethernet address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid Ethernet address {0:?}")]
pub struct InvalidMac(String);

impl FromStr for MacAddr {
    type Err = InvalidMac;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || InvalidMac(text.chars().take(40).collect());
        let mut octets = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut octets {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(bad)?;
            *octet = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() { Err(bad()) } else { Ok(Self(octets)) }
    }
}

impl TryFrom<String> for MacAddr {
    type Error = InvalidMac;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<MacAddr> for String {
    fn from(mac: MacAddr) -> Self {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VmId;

    #[test]
    fn addresses_are_local_unicast_and_round_trip() {
        let mac = MacAddr::of(&VmId::of_name(&"web".parse().unwrap()));
        assert_eq!(mac.0[0], 2);
        assert_eq!(mac.to_string().parse(), Ok(mac));
    }

    #[test]
    fn swapped_pairs_do_not_collide() {
        let mac = |name: &str| MacAddr::of(&VmId::of_name(&name.parse().unwrap()));
        assert_ne!(mac("default-ab"), mac("default-ba"));
    }
}

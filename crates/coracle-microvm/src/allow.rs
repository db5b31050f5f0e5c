//! Agents outside the cluster that the operator may call. Pure.
//!
//! Tenants write `spec.agentAddress`. Without this list the operator calls only agents that a node or Pod announces, or that
//! are at a Node's own address: otherwise each object could probe the operator's network.

use std::{net::IpAddr, str::FromStr};

/// One entry of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentRule {
    /// Exactly this `host:port`.
    Address(String),
    /// Every port of this host.
    Host(String),
    /// Every port of the addresses with this prefix.
    Network(IpAddr, u8),
}

/// An invalid entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid agent {0:?}: it is HOST:PORT, HOST or ADDRESS/PREFIX")]
pub struct InvalidAgentRule(String);

impl FromStr for AgentRule {
    type Err = InvalidAgentRule;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidAgentRule(text.to_owned());
        if let Some((address, prefix)) = text.split_once('/') {
            let address: IpAddr = address.parse().map_err(|_| invalid())?;
            let prefix = prefix.parse().ok().filter(|n| *n <= bits(address).1).ok_or_else(invalid)?;
            return Ok(Self::Network(address, prefix));
        }
        if text.parse::<IpAddr>().is_ok() {
            return Ok(Self::Host(text.to_owned()));
        }
        match split(text) {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Address(text.to_owned()))
            }
            None if !text.is_empty() && !text.contains(char::is_whitespace) => {
                Ok(Self::Host(text.to_owned()))
            }
            _ => Err(invalid()),
        }
    }
}

impl AgentRule {
    /// True when the agent at `address` (`host:port`) may be called.
    #[must_use]
    pub fn allows(&self, address: &str) -> bool {
        let Some((host, _)) = split(address) else { return false };
        match self {
            Self::Address(allowed) => allowed == address,
            Self::Host(allowed) => allowed == host,
            Self::Network(network, prefix) => host.parse().is_ok_and(|host: IpAddr| {
                let ((one, width), (other, other_width)) = (bits(*network), bits(host));
                let shift = u32::from(width.saturating_sub(*prefix));
                let top = |bits: u128| bits.checked_shr(shift).unwrap_or(0);
                width == other_width && top(one) == top(other)
            }),
        }
    }
}

/// Splits host and port; an IPv6 host loses its brackets.
fn split(address: &str) -> Option<(&str, &str)> {
    let (host, port) = address.rsplit_once(':')?;
    Some((host.trim_start_matches('[').trim_end_matches(']'), port))
}

/// Returns the address as a number, and its width in bits.
fn bits(address: IpAddr) -> (u128, u8) {
    match address {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()), 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_is_allowed_by_its_rule_only() {
        for (rule, address, want) in [
            ("10.0.0.5:50051", "10.0.0.5:50051", true),
            ("10.0.0.5:50051", "10.0.0.5:22", false),
            ("10.0.0.5", "10.0.0.5:22", true),
            ("10.0.0.5", "10.0.0.50:22", false),
            ("vmhost.example", "vmhost.example:50051", true),
            ("vmhost.example", "evil-vmhost.example:50051", false),
            ("10.0.0.0/24", "10.0.0.200:50051", true),
            ("10.0.0.0/24", "10.0.1.1:50051", false),
            ("10.0.0.0/24", "vmhost.example:50051", false),
            ("0.0.0.0/0", "192.0.2.1:1", true),
            ("0.0.0.0/0", "[2001:db8::1]:1", false),
            ("2001:db8::/32", "[2001:db8::1]:50051", true),
            ("2001:db8::1", "[2001:db8::1]:50051", true),
        ] {
            let parsed: AgentRule = rule.parse().unwrap();
            assert_eq!(parsed.allows(address), want, "{rule} and {address}");
        }
        for wrong in ["", "10.0.0.0/33", "host/8", "host:port", ":1", "a b"] {
            assert!(wrong.parse::<AgentRule>().is_err(), "{wrong:?}");
        }
    }
}

//! Fields, verdicts and statements of rules.

use std::net::Ipv4Addr;

use crate::Value;

/// Field of a packet, or of the metadata that the kernel has of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// `iifname`: name of the input interface.
    InputInterface,
    /// `iifgroup`: group of the input interface.
    InputGroup,
    /// `meta l4proto`: IP protocol.
    InetProtocol,
    /// `ether saddr`.
    EtherSource,
    /// `ether type`.
    EtherType,
    /// `arp saddr ether`, of ARP for IPv4 on Ethernet.
    ArpSourceEther,
    /// `arp saddr ip`, of ARP for IPv4 on Ethernet.
    ArpSourceIp,
    /// `ip saddr`.
    Ipv4Source,
    /// `ip daddr`.
    Ipv4Destination,
    /// `icmp type`.
    IcmpType,
    /// `th dport`: destination port of TCP, UDP and similar protocols.
    DestinationPort,
    /// `ct state`, as bits.
    ConnectionState,
    /// `ct status`, as bits.
    ConnectionStatus,
    /// `ct original ip daddr`: destination before translation.
    OriginalDestination,
    /// `ct original proto-dst`: destination port before translation.
    OriginalDestinationPort,
    /// `fib daddr type`: address type of the destination, by the routes of the host.
    DestinationType,
}

/// Comparison of a field with a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// `==`.
    Is,
    /// `!=`.
    IsNot,
}

/// Verdict on a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Accepts the packet.
    Accept,
    /// Drops the packet.
    Drop,
    /// Continues with the rules of this chain, then after this rule.
    Jump(String),
    /// Continues with the rules of this chain, without a return to this one.
    Goto(String),
}

/// Statement of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// Matches when the field has the value, or has not.
    Compare(Field, Relation, Value),
    /// Matches when the field begins with this many bits of the address, or does not.
    Within(Field, Relation, Ipv4Addr, u8),
    /// Matches when the field has any of these bits.
    AnyBit(Field, u32),
    /// Matches when the field is in the set of this name, or is not.
    Member(Field, Relation, String),
    /// Applies the verdict that the map of this name has for the fields. Matches no packet without an element.
    Lookup(Vec<Field>, String),
    /// Matches a packet of a connection when more than `above` connections with the same field are open. They are counted in a
    /// set.
    LimitConnections {
        /// Field that connections are counted by.
        key: Field,
        /// Name of a set of [`crate::SetKind::Connections`].
        set: String,
        /// Number of connections that do not match yet.
        above: u32,
    },
    /// Translates the destination of the connection to this address and port.
    DestinationNat(Ipv4Addr, u16),
    /// Translates the source of the connection to the address of the output interface.
    Masquerade,
    /// Ends the evaluation with a verdict.
    Verdict(Verdict),
}

//! What a rule says.

use std::net::Ipv4Addr;

use crate::Value;

/// A part of a packet, or of what the kernel knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// `iifname`: name of the interface that it came from.
    InputInterface,
    /// `iifgroup`: group of that interface.
    InputGroup,
    /// `meta l4proto`: protocol above IP.
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
    /// `th dport`: destination port of TCP, UDP and their like.
    DestinationPort,
    /// `ct state`, as bits.
    ConnectionState,
    /// `ct status`, as bits.
    ConnectionStatus,
    /// `ct original ip daddr`: destination before translation.
    OriginalDestination,
    /// `ct original proto-dst`: destination port before translation.
    OriginalDestinationPort,
    /// `fib daddr type`: whose the destination is, by the routes of the host.
    DestinationType,
}

/// Whether what is named applies, or everything else does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// `==`.
    Is,
    /// `!=`.
    IsNot,
}

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It passes.
    Accept,
    /// It is gone.
    Drop,
    /// The rules of this chain are next, then those after this one.
    Jump(String),
    /// The rules of this chain are next, and none after this one.
    Goto(String),
}

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// Applies when the field has the value, or has not.
    Compare(Field, Relation, Value),
    /// Applies when the field begins with so many bits of the address, or does not.
    Within(Field, Relation, Ipv4Addr, u8),
    /// Applies when the field has any of these bits.
    AnyBit(Field, u32),
    /// Applies when the field is in the set of this name, or is not.
    Member(Field, Relation, String),
    /// What the map of this name says of the fields. Applies to no packet that is not in there.
    Lookup(Vec<Field>, String),
    /// Applies to a packet of a connection when more than so many with that field are open. They are counted in the set of
    /// this name.
    LimitConnections {
        /// What connections are counted by.
        key: Field,
        /// A set of [`crate::SetKind::Connections`].
        set: String,
        /// How many are not too many.
        above: u32,
    },
    /// Leads the connection to that address and port.
    DestinationNat(Ipv4Addr, u16),
    /// Gives the connection the source address of the interface that it leaves by.
    Masquerade,
    /// Decides.
    Verdict(Verdict),
}

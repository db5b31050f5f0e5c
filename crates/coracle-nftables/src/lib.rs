//! The kernel's packet filter, nf_tables: tables, sets and rules as values, and batches of changes over netlink.
//!
//! ```text
//! Change (values) ─ encode ─▶ one message each, between the marks of a batch ─ Connection ─▶ kernel: all of them, or none
//! ```
//! Only what the rules of nodes need is implemented. Names are those of nft(8). Sets have nft's data type numbers, so that `nft
//! list ruleset` shows them. Messages: Linux, include/uapi/linux/netfilter/nf_tables.h.

mod abi;
mod attributes;
mod display;
mod encode;
mod expression;
mod rule;
mod socket;

use std::net::Ipv4Addr;

pub use rule::{Field, Relation, Statement, Verdict};
pub use socket::{Connection, NftablesError};

/// Address family of a table: the packets that it sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    Ipv4,
    /// Frames that a bridge forwards.
    Bridge,
}

/// Table, whose name is unique within its family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Address family.
    pub family: Family,
    /// Name, at most 255 bytes.
    pub name: String,
}

/// Change of a table. An object that is added may exist already; an object that is deleted must exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Table to change.
    pub table: Table,
    /// Action on the table, or on an object in it.
    pub action: Action,
}

/// Action on a table, or on an object in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Adds the table.
    AddTable,
    /// Deletes the table with everything in it.
    DeleteTable,
    /// Adds a chain. An existing chain keeps its rules.
    AddChain(Chain),
    /// Deletes all rules of the chain of this name.
    FlushChain(String),
    /// Deletes the chain of this name, which must have no rules and no references.
    DeleteChain(String),
    /// Adds a set or a verdict map.
    AddSet(Set),
    /// Adds an element to a set.
    AddElement(Element),
    /// Deletes an element from a set.
    DeleteElement(Element),
    /// Appends a rule to a chain.
    AddRule(Rule),
}

/// Chain of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Name, at most 255 bytes.
    pub name: String,
    /// Hook of a base chain; `None`: the chain is entered from rules and elements.
    pub base: Option<Base>,
}

/// Hook at which the kernel enters a base chain. Packets without a verdict are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// Type of the chain.
    pub kind: ChainKind,
    /// Hook in the packet path.
    pub hook: Hook,
    /// Priority: chains of a hook are entered in ascending order.
    pub priority: i32,
}

/// Type of a base chain, which limits what its rules may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// Accepts and drops packets.
    Filter,
    /// Translates addresses of connections.
    Nat,
}

/// Point in the packet path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Packets that came in.
    Prerouting,
    /// Packets to the host.
    Input,
    /// Packets that the host forwards.
    Forward,
    /// Packets that the host made.
    Output,
    /// Packets that leave.
    Postrouting,
}

/// Set of keys. A key is one value, or several concatenated ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Name, at most 255 bytes.
    pub name: String,
    /// Types of the values of a key, in order.
    pub key: Vec<DataType>,
    /// Data that the set stores for a key.
    pub kind: SetKind,
}

/// Data that a set stores for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetKind {
    /// Membership only.
    Members,
    /// Verdict for packets with the key (a map of type `verdict`).
    Verdicts,
    /// Number of connections with the key. Rules add the keys ([`Statement::LimitConnections`]).
    Connections {
        /// Maximum number of keys.
        size: u32,
    },
}

/// Type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataType {
    /// `ipv4_addr`.
    Ipv4Address,
    /// `inet_proto`, an IP protocol.
    InetProtocol,
    /// `inet_service`, a port.
    InetService,
    /// `ifname`.
    InterfaceName,
}

/// Value that packets are compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// An IPv4 address.
    Ipv4Address(Ipv4Addr),
    /// MAC address.
    EtherAddress([u8; 6]),
    /// EtherType of a frame (include/uapi/linux/if_ether.h).
    EtherType(u16),
    /// IP protocol (include/uapi/linux/in.h).
    InetProtocol(u8),
    /// A port.
    InetService(u16),
    /// Name of an interface, at most 15 bytes.
    InterfaceName(String),
    /// Number in host byte order, such as an interface group or an address type.
    Number(u32),
    /// Type of an ICMP message.
    IcmpType(u8),
}

/// Element of a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    /// Name of the set.
    pub set: String,
    /// Key: one value for each type of the set's key.
    pub key: Vec<Value>,
    /// Verdict for packets with the key, in a verdict map.
    pub verdict: Option<Verdict>,
}

/// Rule: statements in order. The rule ends at the first statement that does not match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Name of the chain.
    pub chain: String,
    /// Statements, in order.
    pub statements: Vec<Statement>,
}

impl Table {
    /// Table of this name.
    #[must_use]
    pub fn new(family: Family, name: &str) -> Self {
        Self { family, name: name.to_owned() }
    }

    /// Change of this table.
    #[must_use]
    pub fn change(&self, action: Action) -> Change {
        Change { table: self.clone(), action }
    }

    /// Change that appends a rule to a chain of this table.
    #[must_use]
    pub fn rule(&self, chain: &str, statements: Vec<Statement>) -> Change {
        self.change(Action::AddRule(Rule { chain: chain.to_owned(), statements }))
    }
}

//! The kernel's packet filter, nf_tables: tables, sets and rules as values, and batches of changes over netlink.
//!
//! ```text
//! Change (values) ─ encode ─▶ one message each, between the marks of a batch ─ Connection ─▶ kernel: all of them, or none
//! ```
//! Only what rules of nodes need is here. Names are those of nft(8), and so that `nft list ruleset` shows what was made, sets
//! have the numbers of its data types. Messages: Linux, include/uapi/linux/netfilter/nf_tables.h.

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

/// Packets that a table sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    Ipv4,
    /// Frames that a bridge forwards.
    Bridge,
}

/// A table. Its name is unique within its family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Its packets.
    pub family: Family,
    /// Its name, at most 255 bytes.
    pub name: String,
}

/// One change of a table. What is added may be there already, and what is deleted must be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The table.
    pub table: Table,
    /// What becomes of it, or of an object in it.
    pub action: Action,
}

/// What becomes of a table, or of an object in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Makes the table.
    AddTable,
    /// Deletes the table with everything in it.
    DeleteTable,
    /// Makes a chain. Rules of a chain that is there stay.
    AddChain(Chain),
    /// Deletes all rules of the chain of this name.
    FlushChain(String),
    /// Deletes the chain of this name, which has no rules and which nothing leads to.
    DeleteChain(String),
    /// Makes a set or a verdict map.
    AddSet(Set),
    /// Adds an element to a set.
    AddElement(Element),
    /// Deletes an element of a set.
    DeleteElement(Element),
    /// Appends a rule to a chain.
    AddRule(Rule),
}

/// A chain of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its name, at most 255 bytes.
    pub name: String,
    /// Where the kernel enters it; `None`: rules and elements lead to it.
    pub base: Option<Base>,
}

/// Where the kernel enters a chain. A packet that no rule decides is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// Filter or address translation.
    pub kind: ChainKind,
    /// The place.
    pub hook: Hook,
    /// Chains of one hook are entered from the lowest to the highest.
    pub priority: i32,
}

/// What the rules of a base chain may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// Accept and drop packets.
    Filter,
    /// Translate addresses of connections.
    Nat,
}

/// Where a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// It came in.
    Prerouting,
    /// It is for the host.
    Input,
    /// It passes through the host.
    Forward,
    /// The host made it.
    Output,
    /// It leaves.
    Postrouting,
}

/// A set of keys, each one or several values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Its name, at most 255 bytes.
    pub name: String,
    /// Types of a key's values, in order.
    pub key: Vec<DataType>,
    /// What it keeps of a key.
    pub kind: SetKind,
}

/// What a set keeps of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetKind {
    /// That it is there.
    Members,
    /// What becomes of packets that have it (a map of type `verdict`).
    Verdicts,
    /// How many connections have it, of at most `size` keys. Rules fill it ([`Statement::LimitConnections`]).
    Connections {
        /// Keys at most.
        size: u32,
    },
}

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataType {
    /// `ipv4_addr`.
    Ipv4Address,
    /// `inet_proto`, a protocol above IP.
    InetProtocol,
    /// `inet_service`, a port.
    InetService,
    /// `ifname`.
    InterfaceName,
}

/// A value that packets are compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// An IPv4 address.
    Ipv4Address(Ipv4Addr),
    /// A MAC.
    EtherAddress([u8; 6]),
    /// Protocol of a frame (include/uapi/linux/if_ether.h).
    EtherType(u16),
    /// A protocol above IP (include/uapi/linux/in.h).
    InetProtocol(u8),
    /// A port.
    InetService(u16),
    /// Name of an interface, at most 15 bytes.
    InterfaceName(String),
    /// A number of the host's: an interface group, a type of addresses.
    Number(u32),
    /// Type of an ICMP message.
    IcmpType(u8),
}

/// An element of a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    /// Name of the set.
    pub set: String,
    /// Its key, a value of each type of the set's key.
    pub key: Vec<Value>,
    /// What becomes of packets that have it, in a set of verdicts.
    pub verdict: Option<Verdict>,
}

/// A rule: statements, of which each that does not apply ends the rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Name of its chain.
    pub chain: String,
    /// In order.
    pub statements: Vec<Statement>,
}

impl Table {
    /// The table of this name.
    #[must_use]
    pub fn new(family: Family, name: &str) -> Self {
        Self { family, name: name.to_owned() }
    }

    /// A change of it.
    #[must_use]
    pub fn change(&self, action: Action) -> Change {
        Change { table: self.clone(), action }
    }

    /// Appends a rule to a chain of it.
    #[must_use]
    pub fn rule(&self, chain: &str, statements: Vec<Statement>) -> Change {
        self.change(Action::AddRule(Rule { chain: chain.to_owned(), statements }))
    }
}

//! Changes in the syntax of nft(8), for errors.

use std::fmt;

use crate::{Action, Change, Element, Family, Table, Value, Verdict};

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "ip",
            Self::Bridge => "bridge",
        })
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family, self.name)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = &self.table;
        match &self.action {
            Action::AddTable => write!(f, "add table {table}"),
            Action::DeleteTable => write!(f, "delete table {table}"),
            Action::AddChain(chain) => write!(f, "add chain {table} {}", chain.name),
            Action::FlushChain(chain) => write!(f, "flush chain {table} {chain}"),
            Action::DeleteChain(chain) => write!(f, "delete chain {table} {chain}"),
            Action::AddSet(set) => write!(f, "add set {table} {}", set.name),
            Action::AddElement(element) => write!(f, "add element {table} {element}"),
            Action::DeleteElement(element) => write!(f, "delete element {table} {element}"),
            Action::AddRule(rule) => write!(f, "add rule {table} {} {:?}", rule.chain, rule.statements),
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key: Vec<_> = self.key.iter().map(Value::to_string).collect();
        write!(f, "{} {{ {}", self.set, key.join(" . "))?;
        if let Some(verdict) = &self.verdict {
            write!(f, " : {verdict}")?;
        }
        f.write_str(" }")
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipv4Address(address) => write!(f, "{address}"),
            Self::EtherAddress(bytes) => {
                let parts: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                f.write_str(&parts.join(":"))
            }
            Self::EtherType(number) => write!(f, "{number:#06x}"),
            Self::InetProtocol(number) | Self::IcmpType(number) => write!(f, "{number}"),
            Self::InetService(number) => write!(f, "{number}"),
            Self::InterfaceName(name) => write!(f, "{name:?}"),
            Self::Number(number) => write!(f, "{number}"),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept => f.write_str("accept"),
            Self::Drop => f.write_str("drop"),
            Self::Jump(chain) => write!(f, "jump {chain}"),
            Self::Goto(chain) => write!(f, "goto {chain}"),
        }
    }
}

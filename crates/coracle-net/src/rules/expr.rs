//! Statements and actions that both tables use. Pure.

use std::net::Ipv4Addr;

use coracle_nftables::{
    Action, Chain, DataType, Element, Field, Relation, Set, SetKind, Statement, Value, Verdict,
};

use crate::Subnet;

pub(super) fn is(field: Field, value: Value) -> Statement {
    Statement::Compare(field, Relation::Is, value)
}

pub(super) fn is_not(field: Field, value: Value) -> Statement {
    Statement::Compare(field, Relation::IsNot, value)
}

pub(super) fn is_in_prefix(field: Field, network: Ipv4Addr, prefix: u8) -> Statement {
    Statement::Within(field, Relation::Is, network, prefix)
}

pub(super) fn is_in_subnet(field: Field, subnet: Subnet) -> Statement {
    is_in_prefix(field, subnet.network(), subnet.prefix())
}

pub(super) fn is_not_in_subnet(field: Field, subnet: Subnet) -> Statement {
    Statement::Within(field, Relation::IsNot, subnet.network(), subnet.prefix())
}

pub(super) fn is_in(field: Field, set: &str) -> Statement {
    Statement::Member(field, Relation::Is, set.to_owned())
}

pub(super) fn is_not_in(field: Field, set: &str) -> Statement {
    Statement::Member(field, Relation::IsNot, set.to_owned())
}

pub(super) fn drop() -> Statement {
    Statement::Verdict(Verdict::Drop)
}

pub(super) fn accept() -> Statement {
    Statement::Verdict(Verdict::Accept)
}

pub(super) fn address(address: Ipv4Addr) -> Value {
    Value::Ipv4Address(address)
}

/// Adds a chain that elements jump to.
pub(super) fn chain(name: &str) -> Action {
    Action::AddChain(Chain { name: name.to_owned(), base: None })
}

/// Set of IPv4 addresses.
pub(super) fn addresses(name: &str) -> Set {
    Set { name: name.to_owned(), key: vec![DataType::Ipv4Address], kind: SetKind::Members }
}

/// Address as an element of a set.
pub(super) fn member(set: &str, of: Ipv4Addr) -> Element {
    Element { set: set.to_owned(), key: vec![address(of)], verdict: None }
}

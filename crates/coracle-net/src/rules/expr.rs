//! Expressions of rules, as libnftables-json(5) writes them. Pure.

use serde_json::{Value, json};

use crate::Subnet;

pub(super) fn field(protocol: &str, field: &str) -> Value {
    json!({"payload": {"protocol": protocol, "field": field}})
}

pub(super) fn matches(op: &str, left: Value, right: Value) -> Value {
    json!({"match": {"op": op, "left": left, "right": right}})
}

pub(super) fn is(left: Value, right: Value) -> Value {
    matches("==", left, right)
}

pub(super) fn is_not(left: Value, right: Value) -> Value {
    matches("!=", left, right)
}

pub(super) fn network(subnet: Subnet) -> Value {
    let text = subnet.to_string();
    json!({"prefix": {"addr": text.split('/').next().unwrap_or_default(), "len": subnet.prefix()}})
}

/// Packets of connections that were let through before.
pub(super) fn known_connections() -> Value {
    matches("in", json!({"ct": {"key": "state"}}), json!(["established", "related"]))
}

pub(super) fn drop() -> Value {
    json!({"drop": null})
}

pub(super) fn accept() -> Value {
    json!({"accept": null})
}

//! Firewall rules of a node: one bridge table against spoofing, with a chain
//! per tap, and one IPv4 table that masquerades the guests. JSON for `nft`,
//! each change one atomic batch. The builders are pure.

use std::net::Ipv4Addr;

use coracle_types::MacAddr;
use serde_json::{Value, json};

use crate::{NetError, Subnet};

/// Link-local address of cloud metadata services: no business of a guest.
const METADATA: &str = "169.254.169.254";

/// Names of the tables of one node.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    table: String,
}

impl Rules {
    pub(crate) fn new(suffix: &str) -> Self {
        Self { table: format!("coracle_{suffix}") }
    }

    /// Starts from nothing: both tables as they are before any tap is plugged in.
    pub(crate) async fn reset(&self, subnet: Subnet) -> Result<(), NetError> {
        apply("set up the firewall", self.base(subnet)).await
    }

    pub(crate) async fn allow(&self, tap: &str, mac: MacAddr, ip: Ipv4Addr) -> Result<(), NetError> {
        apply(&format!("open the firewall for {tap}"), self.tap(tap, mac, ip)).await
    }

    /// Removes a tap's chain. The batch is all or nothing, so the chain is made
    /// first: then removing what was never there is no error.
    pub(crate) async fn forget(&self, tap: &str) -> Result<(), NetError> {
        let ops = vec![
            json!({"add": self.chain(tap)}),
            json!({"add": self.element(tap)}),
            json!({"delete": self.element(tap)}),
            json!({"flush": self.chain(tap)}),
            json!({"delete": self.chain(tap)}),
        ];
        apply(&format!("close the firewall for {tap}"), ops).await
    }

    pub(crate) async fn remove(&self) -> Result<(), NetError> {
        let ops = ["bridge", "ip"].into_iter().flat_map(|family| self.drop_table(family)).collect();
        apply("remove the firewall tables", ops).await
    }

    fn drop_table(&self, family: &str) -> [Value; 2] {
        let table = json!({"table": {"family": family, "name": self.table}});
        [json!({"add": table}), json!({"delete": table})]
    }

    fn base(&self, subnet: Subnet) -> Vec<Value> {
        let table = &self.table;
        let mut ops = Vec::new();
        for family in ["bridge", "ip"] {
            ops.extend(self.drop_table(family));
            ops.push(json!({"add": {"table": {"family": family, "name": table}}}));
        }
        ops.push(json!({"add": {"map": {"family": "bridge", "table": table, "name": "taps",
            "type": "ifname", "map": "verdict"}}}));
        ops.push(json!({"add": {"chain": {"family": "bridge", "table": table, "name": "from_guest",
            "type": "filter", "hook": "prerouting", "prio": -300, "policy": "accept"}}}));
        ops.push(
            json!({"add": {"rule": {"family": "bridge", "table": table, "chain": "from_guest", "expr": [
            {"vmap": {"key": {"meta": {"key": "iifname"}}, "data": "@taps"}}]}}}),
        );
        ops.push(json!({"add": {"chain": {"family": "ip", "table": table, "name": "to_outside",
            "type": "nat", "hook": "postrouting", "prio": 100, "policy": "accept"}}}));
        let guests = json!({"prefix": {"addr": network(subnet), "len": subnet.prefix()}});
        ops.push(json!({"add": {"rule": {"family": "ip", "table": table, "chain": "to_outside", "expr": [
            matches("==", field("ip", "saddr"), guests.clone()),
            matches("!=", field("ip", "daddr"), guests),
            {"masquerade": null}]}}}));
        ops
    }

    /// Only the VM's own MAC and address may enter; IPv6 and everything unknown may not.
    fn tap(&self, tap: &str, mac: MacAddr, ip: Ipv4Addr) -> Vec<Value> {
        let (mac, ip) = (mac.to_string(), ip.to_string());
        let drop = json!({"drop": null});
        let accept = json!({"accept": null});
        let ethertype = |name| matches("==", field("ether", "type"), json!(name));
        let rules = [
            json!([matches("!=", field("ether", "saddr"), json!(mac)), drop]),
            json!([ethertype("arp"), matches("!=", field("arp", "saddr ether"), json!(mac)), drop]),
            json!([ethertype("arp"), matches("!=", field("arp", "saddr ip"), json!(ip)), drop]),
            json!([ethertype("arp"), accept]),
            json!([ethertype("ip"), matches("!=", field("ip", "saddr"), json!(ip)), drop]),
            json!([ethertype("ip"), matches("==", field("ip", "daddr"), json!(METADATA)), drop]),
            json!([ethertype("ip"), accept]),
            json!([drop]),
        ];
        let mut ops = vec![json!({"add": self.chain(tap)}), json!({"flush": self.chain(tap)})];
        ops.extend(rules.into_iter().map(|expr| {
            json!({"add": {"rule": {"family": "bridge", "table": self.table, "chain": tap, "expr": expr}}})
        }));
        ops.push(json!({"add": self.element(tap)}));
        ops
    }

    fn chain(&self, tap: &str) -> Value {
        json!({"chain": {"family": "bridge", "table": self.table, "name": tap}})
    }

    fn element(&self, tap: &str) -> Value {
        json!({"element": {"family": "bridge", "table": self.table, "name": "taps",
            "elem": [[tap, {"jump": {"target": tap}}]]}})
    }
}

fn field(protocol: &str, field: &str) -> Value {
    json!({"payload": {"protocol": protocol, "field": field}})
}

fn matches(op: &str, left: Value, right: Value) -> Value {
    json!({"match": {"op": op, "left": left, "right": right}})
}

fn network(subnet: Subnet) -> String {
    let text = subnet.to_string();
    text.split('/').next().unwrap_or_default().to_owned()
}

async fn apply(operation: &str, ops: Vec<Value>) -> Result<(), NetError> {
    let batch = json!({"nftables": ops}).to_string();
    nftables::helper::apply_ruleset_raw_async(&batch, None::<&str>, std::iter::empty::<&str>())
        .await
        .map(|_output| ())
        .map_err(|source| NetError::Rules { operation: operation.to_owned(), source: Box::new(source) })
}

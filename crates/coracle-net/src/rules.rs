//! Firewall rules of a node: one bridge table against spoofing, with a chain
//! per tap, and one IPv4 table that masquerades the guests. JSON for `nft`,
//! each change one atomic batch. The builders are pure.
//!
//! The filter fails closed: a tap of this node that is in no chain passes nothing. The taps of a node are known by
//! their interface group (`meta iifgroup`, nft(8)), because other programs' bridges and other nodes' taps must not be
//! touched, and not every kernel can match the name of a port's bridge.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::{GuestNic, NetError, Subnet};

/// Link-local address of cloud metadata services: no business of a guest.
const METADATA: &str = "169.254.169.254";

/// Above the groups that people and distributions number by hand.
const GROUP_BASE: u32 = 0x0c00_0000;

/// The tables of one node, and the group of its taps.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    table: String,
    group: u32,
}

impl Rules {
    pub(crate) fn new(suffix: &str) -> Self {
        let digits = u32::from_str_radix(suffix, 16).unwrap_or_default();
        Self { table: format!("coracle_{suffix}"), group: GROUP_BASE | (digits & 0x00ff_ffff) }
    }

    /// Interface group of the node's taps.
    pub(crate) fn group(&self) -> u32 {
        self.group
    }

    /// Replaces both tables by those of exactly these guests, in one transaction.
    pub(crate) async fn replace(&self, subnet: Subnet, guests: &[GuestNic]) -> Result<(), NetError> {
        apply("set up the firewall", self.ruleset(subnet, guests)).await
    }

    pub(crate) async fn allow(&self, guest: &GuestNic) -> Result<(), NetError> {
        apply(&format!("open the firewall for VMM instance {}", guest.instance), self.guest(guest)).await
    }

    /// Removes a tap's chain. The batch is all or nothing, so everything is made
    /// first, so that removing it never fails.
    pub(crate) async fn forget(&self, tap: &str) -> Result<(), NetError> {
        let ops = vec![
            json!({"add": {"table": {"family": "bridge", "name": self.table}}}),
            json!({"add": self.map()}),
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

    /// Everything, from what the records say of the guests. A guest whose address is not of this subnet, or is that of
    /// one before it, is not admitted. Pure.
    pub(crate) fn ruleset(&self, subnet: Subnet, guests: &[GuestNic]) -> Vec<Value> {
        let mut ops = self.base(subnet);
        let mut taken = BTreeSet::new();
        for guest in guests {
            if subnet.has_guest(guest.address) && taken.insert(guest.address) {
                ops.extend(self.guest(guest));
            }
        }
        ops
    }

    fn base(&self, subnet: Subnet) -> Vec<Value> {
        let table = &self.table;
        let mut ops = Vec::new();
        for family in ["bridge", "ip"] {
            ops.extend(self.drop_table(family));
            ops.push(json!({"add": {"table": {"family": family, "name": table}}}));
        }
        ops.push(json!({"add": self.map()}));
        ops.push(json!({"add": {"chain": {"family": "bridge", "table": table, "name": "from_guest",
            "type": "filter", "hook": "prerouting", "prio": -300, "policy": "accept"}}}));
        ops.push(
            json!({"add": {"rule": {"family": "bridge", "table": table, "chain": "from_guest", "expr": [
            {"vmap": {"key": {"meta": {"key": "iifname"}}, "data": "@taps"}}]}}}),
        );
        ops.push(
            json!({"add": {"rule": {"family": "bridge", "table": table, "chain": "from_guest", "expr": [
            matches("==", json!({"meta": {"key": "iifgroup"}}), json!(self.group)),
            {"drop": null}]}}}),
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
    fn guest(&self, guest: &GuestNic) -> Vec<Value> {
        let (tap, mac, ip) = (guest.instance.tap_name(), guest.mac.to_string(), guest.address.to_string());
        let tap = tap.as_str();
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

    fn map(&self) -> Value {
        json!({"map": {"family": "bridge", "table": self.table, "name": "taps",
            "type": "ifname", "map": "verdict"}})
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

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(name: &str, address: &str) -> GuestNic {
        let vm = coracle_types::VmId::of_name(&name.parse().unwrap());
        GuestNic {
            mac: coracle_types::MacAddr::of(&vm),
            instance: vm.into(),
            address: address.parse().unwrap(),
        }
    }

    /// Taps that the whole ruleset admits.
    fn admitted(ops: &[Value]) -> Vec<String> {
        let element =
            |op: &Value| op.pointer("/add/element/elem/0/0").and_then(Value::as_str).map(str::to_owned);
        ops.iter().filter_map(element).collect()
    }

    #[test]
    fn ruleset_admits_table() {
        let (rules, subnet) = (Rules::new("00beef"), "10.100.0.0/24".parse().unwrap());
        for (why, guests, want) in [
            ("no guest", vec![], vec![]),
            ("every guest", vec![guest("a", "10.100.0.2"), guest("b", "10.100.0.3")], vec!["a", "b"]),
            ("address of another subnet", vec![guest("a", "10.200.0.2")], vec![]),
            ("address of the gateway", vec![guest("a", "10.100.0.1")], vec![]),
            ("one address twice", vec![guest("a", "10.100.0.2"), guest("b", "10.100.0.2")], vec!["a"]),
        ] {
            let want: Vec<_> =
                want.into_iter().map(|name| guest(name, "10.100.0.2").instance.tap_name()).collect();
            assert_eq!(admitted(&rules.ruleset(subnet, &guests)), want, "{why}");
        }
    }

    #[test]
    fn ruleset_drops_taps_in_no_chain() {
        let rules = Rules::new("00beef").ruleset("10.100.0.0/24".parse().unwrap(), &[]);
        let of_guests: Vec<_> = rules
            .iter()
            .filter_map(|op| op.pointer("/add/rule"))
            .filter(|rule| rule["chain"] == "from_guest")
            .map(|rule| rule["expr"].clone())
            .collect();
        let known = json!([{"vmap": {"key": {"meta": {"key": "iifname"}}, "data": "@taps"}}]);
        let ours = matches("==", json!({"meta": {"key": "iifgroup"}}), json!(0x0c00_beef));
        assert_eq!(of_guests, [known, json!([ours, {"drop": null}])]);
    }
}

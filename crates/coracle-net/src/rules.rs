//! Firewall rules of a node: one bridge table against spoofing, with a chain per tap, and one IPv4 table
//! ([`node`]). JSON for `nft`, each change one atomic batch. The builders are pure.
//!
//! The filter fails closed: a tap of this node that is in no chain passes nothing. The taps of a node are known by
//! their interface group (`meta iifgroup`, nft(8)), because other programs' bridges and other nodes' taps must not be
//! touched, and not every kernel can match the name of a port's bridge.

mod expr;
mod node;

use std::collections::BTreeSet;
use std::net::SocketAddrV4;

use serde_json::{Value, json};

use self::expr::{accept, drop, field, is, is_not, network};
use crate::{GuestNic, NetError, Subnet};

/// Addresses that are no business of a guest: link-local ones, with the metadata services of most clouds, those of
/// Azure, Alibaba and Oracle, and the node's loopback, which routes while ports of it lead to guests.
const REFUSED: [(&str, u8); 5] = [
    ("169.254.0.0", 16),
    ("168.63.129.16", 32),
    ("100.100.100.200", 32),
    ("192.0.0.192", 32),
    ("127.0.0.0", 8),
];

pub(crate) const CONNECTIONS_MAX: u32 = node::CONNECTIONS_MAX;

/// Set of the addresses of guests that reach other guests, in the bridge table.
const REACH_GUESTS: &str = node::REACH_GUESTS;

/// Above the groups that people and distributions number by hand.
const GROUP_BASE: u32 = 0x0c00_0000;

/// Interface group of the taps of the node with these six hex digits.
pub(crate) fn group_of(suffix: &str) -> u32 {
    let digits = u32::from_str_radix(suffix, 16).unwrap_or_default();
    GROUP_BASE | (digits & 0x00ff_ffff)
}

/// The tables of one node, and the group of its taps.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    table: String,
    bridge: String,
    subnet: Subnet,
    group: u32,
    api_server: Vec<SocketAddrV4>,
    /// Of Pods of the whole cluster.
    pod_networks: Vec<Subnet>,
}

impl Rules {
    /// Of the node with these six hex digits, on the bridge of that name.
    pub(crate) fn new(suffix: &str, bridge: &str, subnet: Subnet) -> Self {
        let group = group_of(suffix);
        Self {
            table: format!("coracle_{suffix}"),
            bridge: bridge.to_owned(),
            subnet,
            group,
            api_server: vec![],
            pod_networks: vec![],
        }
    }

    /// The same with another subnet.
    pub(crate) fn with_subnet(self, subnet: Subnet) -> Self {
        Self { subnet, ..self }
    }

    /// The same with the addresses at which the cluster's API server answers.
    pub(crate) fn with_api_server(self, api_server: Vec<SocketAddrV4>) -> Self {
        Self { api_server, ..self }
    }

    /// The same with the networks of the cluster's Pods.
    pub(crate) fn with_pod_networks(self, pod_networks: Vec<Subnet>) -> Self {
        Self { pod_networks, ..self }
    }

    /// Interface group of the node's taps.
    pub(crate) fn group(&self) -> u32 {
        self.group
    }

    /// Replaces both tables by those of exactly these guests, in one transaction.
    pub(crate) async fn replace(&self, guests: &[GuestNic]) -> Result<(), NetError> {
        apply("set up the firewall", self.ruleset(guests)).await
    }

    /// Admits a guest; `before` is what was admitted on its tap.
    pub(crate) async fn allow(&self, guest: &GuestNic, before: Option<&GuestNic>) -> Result<(), NetError> {
        let mut ops = before.map(|before| node::forget(&self.table, before, false)).unwrap_or_default();
        ops.extend(self.reach(before, false));
        ops.extend(self.guest(guest));
        apply(&format!("open the firewall for VMM instance {}", guest.instance), ops).await
    }

    /// Removes what is there of a guest. The batch is all or nothing, so everything is made first, so that removing it
    /// never fails. `keep_address`: another guest has its address by now.
    pub(crate) async fn forget(&self, guest: &GuestNic, keep_address: bool) -> Result<(), NetError> {
        let tap = guest.instance.tap_name();
        let mut ops = vec![
            json!({"add": {"table": {"family": "bridge", "name": self.table}}}),
            json!({"add": self.map()}),
            json!({"add": self.set()}),
            json!({"add": self.chain(&tap)}),
            json!({"add": self.element(&tap)}),
            json!({"delete": self.element(&tap)}),
            json!({"flush": self.chain(&tap)}),
            json!({"delete": self.chain(&tap)}),
        ];
        ops.extend(self.reach(Some(guest), keep_address));
        ops.extend(node::forget(&self.table, guest, keep_address));
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
    pub(crate) fn ruleset(&self, guests: &[GuestNic]) -> Vec<Value> {
        let mut ops = self.base();
        let mut taken = BTreeSet::new();
        for guest in guests {
            if self.subnet.has_guest(guest.address) && taken.insert(guest.address) {
                ops.extend(self.guest(guest));
            }
        }
        ops
    }

    fn base(&self) -> Vec<Value> {
        let table = &self.table;
        let mut ops = Vec::new();
        for family in ["bridge", "ip"] {
            ops.extend(self.drop_table(family));
            ops.push(json!({"add": {"table": {"family": family, "name": table}}}));
        }
        ops.push(json!({"add": self.map()}));
        ops.push(json!({"add": self.set()}));
        ops.push(json!({"add": {"chain": {"family": "bridge", "table": table, "name": "from_guest",
            "type": "filter", "hook": "prerouting", "prio": -300, "policy": "accept"}}}));
        ops.push(
            json!({"add": {"rule": {"family": "bridge", "table": table, "chain": "from_guest", "expr": [
            {"vmap": {"key": {"meta": {"key": "iifname"}}, "data": "@taps"}}]}}}),
        );
        ops.push(
            json!({"add": {"rule": {"family": "bridge", "table": table, "chain": "from_guest", "expr": [
            is(json!({"meta": {"key": "iifgroup"}}), json!(self.group)),
            drop()]}}}),
        );
        let outside = node::Outside { api_server: &self.api_server, pod_networks: &self.pod_networks };
        ops.extend(node::base(table, &self.bridge, self.subnet, outside));
        ops
    }

    /// Only the VM's own MAC and address may enter, and only for addresses that it may reach; IPv6 and everything unknown
    /// may not.
    fn guest(&self, guest: &GuestNic) -> Vec<Value> {
        let (tap, mac, ip) = (guest.instance.tap_name(), guest.mac.to_string(), guest.address.to_string());
        let tap = tap.as_str();
        let ethertype = |name| is(field("ether", "type"), json!(name));
        let to = || field("ip", "daddr");
        let mut rules = vec![
            vec![is_not(field("ether", "saddr"), json!(mac)), drop()],
            vec![ethertype("arp"), is_not(field("arp", "saddr ether"), json!(mac)), drop()],
            vec![ethertype("arp"), is_not(field("arp", "saddr ip"), json!(ip)), drop()],
            vec![ethertype("arp"), accept()],
            vec![ethertype("ip"), is_not(field("ip", "saddr"), json!(ip)), drop()],
        ];
        rules.extend(REFUSED.map(|(addr, len)| {
            vec![ethertype("ip"), is(to(), json!({"prefix": {"addr": addr, "len": len}})), drop()]
        }));
        let open = json!(format!("@{REACH_GUESTS}"));
        if guest.reach.guests {
            rules.push(vec![ethertype("ip"), is(to(), open), accept()]);
        }
        let gateway = json!(self.subnet.gateway().to_string());
        rules.push(vec![ethertype("ip"), is(to(), gateway), accept()]);
        rules.push(vec![ethertype("ip"), is(to(), network(self.subnet)), drop()]);
        rules.push(vec![ethertype("ip"), accept()]);
        rules.push(vec![drop()]);
        let mut ops = vec![json!({"add": self.chain(tap)}), json!({"flush": self.chain(tap)})];
        ops.extend(rules.into_iter().map(|expr| {
            json!({"add": {"rule": {"family": "bridge", "table": self.table, "chain": tap, "expr": expr}}})
        }));
        ops.push(json!({"add": self.element(tap)}));
        if guest.reach.guests {
            ops.push(json!({"add": self.member(guest)}));
        }
        ops.extend(node::guest(&self.table, guest));
        ops
    }

    /// Takes a guest out of those that reach others.
    fn reach(&self, guest: Option<&GuestNic>, keep_address: bool) -> Vec<Value> {
        match guest.filter(|guest| guest.reach.guests && !keep_address) {
            Some(guest) => vec![json!({"add": self.member(guest)}), json!({"delete": self.member(guest)})],
            None => vec![],
        }
    }

    fn map(&self) -> Value {
        json!({"map": {"family": "bridge", "table": self.table, "name": "taps",
            "type": "ifname", "map": "verdict"}})
    }

    fn set(&self) -> Value {
        json!({"set": {"family": "bridge", "table": self.table, "name": REACH_GUESTS, "type": "ipv4_addr"}})
    }

    fn chain(&self, tap: &str) -> Value {
        json!({"chain": {"family": "bridge", "table": self.table, "name": tap}})
    }

    fn element(&self, tap: &str) -> Value {
        json!({"element": {"family": "bridge", "table": self.table, "name": "taps",
            "elem": [[tap, {"jump": {"target": tap}}]]}})
    }

    fn member(&self, guest: &GuestNic) -> Value {
        json!({"element": {"family": "bridge", "table": self.table, "name": REACH_GUESTS,
            "elem": [guest.address.to_string()]}})
    }
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
    use coracle_hypervisor::{Forward, Protocol};

    use super::*;
    use crate::Reach;

    fn guest(name: &str, address: &str) -> GuestNic {
        let vm = coracle_types::VmId::of_name(&name.parse().unwrap());
        GuestNic {
            mac: coracle_types::MacAddr::of(&vm),
            instance: vm.into(),
            address: address.parse().unwrap(),
            reach: Reach::default(),
            ports: vec![],
        }
    }

    fn rules() -> Rules {
        Rules::new("00beef", "cor00beef", "10.100.0.0/24".parse().unwrap())
    }

    /// Elements of a map or set that the whole ruleset has.
    fn elements(ops: &[Value], name: &str) -> Vec<Value> {
        let element = |op: &Value| {
            let element = op.pointer("/add/element").filter(|element| element["name"] == name)?;
            element.pointer("/elem/0/0").or_else(|| element.pointer("/elem/0")).cloned()
        };
        ops.iter().filter_map(element).collect()
    }

    #[test]
    fn ruleset_admits_table() {
        for (why, guests, want) in [
            ("no guest", vec![], vec![]),
            ("every guest", vec![guest("a", "10.100.0.2"), guest("b", "10.100.0.3")], vec!["a", "b"]),
            ("address of another subnet", vec![guest("a", "10.200.0.2")], vec![]),
            ("address of the gateway", vec![guest("a", "10.100.0.1")], vec![]),
            ("one address twice", vec![guest("a", "10.100.0.2"), guest("b", "10.100.0.2")], vec!["a"]),
        ] {
            let want: Vec<_> =
                want.into_iter().map(|name| json!(guest(name, "10.100.0.2").instance.tap_name())).collect();
            assert_eq!(elements(&rules().ruleset(&guests), "taps"), want, "{why}");
        }
    }

    #[test]
    fn ruleset_drops_taps_in_no_chain() {
        let ruleset = rules().ruleset(&[]);
        let of_guests: Vec<_> = ruleset
            .iter()
            .filter_map(|op| op.pointer("/add/rule"))
            .filter(|rule| rule["chain"] == "from_guest")
            .map(|rule| rule["expr"].clone())
            .collect();
        let known = json!([{"vmap": {"key": {"meta": {"key": "iifname"}}, "data": "@taps"}}]);
        let ours = is(json!({"meta": {"key": "iifgroup"}}), json!(0x0c00_beef));
        assert_eq!(of_guests, [known, json!([ours, {"drop": null}])]);
    }

    #[test]
    fn guest_is_in_sets_by_what_it_reaches() {
        for (reach, want) in [
            (Reach::default(), [0, 0]),
            (Reach { guests: true, node: false }, [2, 0]),
            (Reach { guests: true, node: true }, [2, 1]),
        ] {
            let ruleset = rules().ruleset(&[GuestNic { reach, ..guest("a", "10.100.0.2") }]);
            let members = |set| elements(&ruleset, set).len();
            assert_eq!([members(REACH_GUESTS), members("reach_node")], want, "{reach:?}");
        }
    }

    #[test]
    fn ports_are_keyed_by_address_where_one_is_named() {
        let port = |host_address: [u8; 4], protocol| Forward {
            protocol,
            host_address: host_address.into(),
            host_port: 8080,
            guest_port: 80,
        };
        let ports = vec![port([0, 0, 0, 0], Protocol::Tcp), port([127, 0, 0, 1], Protocol::Udp)];
        let ruleset = rules().ruleset(&[GuestNic { ports, ..guest("a", "10.100.0.2") }]);
        assert_eq!(elements(&ruleset, "ports"), [json!({"concat": ["tcp", 8080]})]);
        assert_eq!(elements(&ruleset, "ports_at"), [json!({"concat": ["127.0.0.1", "udp", 8080]})]);
    }
}

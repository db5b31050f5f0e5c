//! Packet filter of a node: a bridge table against spoofing, with one chain per tap, and an IPv4 table ([`node`]). What a
//! function of [`Rules`] returns is one transaction. Pure.
//!
//! The filter fails closed: packets from a tap of this node that has no chain are dropped. The taps of a node are matched by
//! their interface group (`meta iifgroup`, nft(8)), because bridges of other programs and taps of other nodes must not be
//! affected, and not every kernel can match the name of a port's bridge.

mod expr;
mod node;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};

use coracle_nftables::{
    Action, Base, Chain, ChainKind, Change, DataType, Element, Family, Field, Hook, Set, SetKind, Statement,
    Table, Value, Verdict,
};

use self::expr::{accept, address, chain, drop, is, is_in, is_in_subnet, is_not};
use crate::{GuestNic, Subnet};

/// Destinations that are denied to every guest: link-local addresses, which include the metadata services of most clouds, the
/// metadata services of Azure, Alibaba and Oracle, and loopback addresses, which the node routes while its ports are forwarded
/// to guests.
const REFUSED: [(Ipv4Addr, u8); 5] = [
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(100, 100, 100, 200), 32),
    (Ipv4Addr::new(192, 0, 0, 192), 32),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
];

pub(crate) const CONNECTIONS_MAX: u32 = node::CONNECTIONS_MAX;

/// Set of the addresses of guests that reach other guests, in the bridge table.
const REACH_GUESTS: &str = node::REACH_GUESTS;

/// Chain that frames of guests enter, and the map of taps to chains.
const FROM_GUEST: &str = "from_guest";
const TAPS: &str = "taps";

/// Priority before connection tracking (nft(8), table of bridge priorities: `dstnat`).
const PRIORITY: i32 = -300;

/// EtherTypes (Linux, include/uapi/linux/if_ether.h).
const IPV4: Value = Value::EtherType(0x0800);
const ARP: Value = Value::EtherType(0x0806);

/// Base of the group numbers, above those that people and distributions choose.
const GROUP_BASE: u32 = 0x0c00_0000;

/// Interface group of the taps of the node with these six hex digits.
pub(crate) fn group_of(suffix: &str) -> u32 {
    let digits = u32::from_str_radix(suffix, 16).unwrap_or_default();
    GROUP_BASE | (digits & 0x00ff_ffff)
}

/// Tables of one node, and the interface group of its taps.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    frames: Table,
    packets: Table,
    bridge: String,
    subnet: Subnet,
    group: u32,
    api_server: Vec<SocketAddrV4>,
    /// Pod networks of the whole cluster.
    pod_networks: Vec<Subnet>,
}

impl Rules {
    /// Rules of the node with these six hex digits, on the bridge of this name.
    pub(crate) fn new(suffix: &str, bridge: &str, subnet: Subnet) -> Self {
        let name = format!("coracle_{suffix}");
        Self {
            frames: Table::new(Family::Bridge, &name),
            packets: Table::new(Family::Ipv4, &name),
            bridge: bridge.to_owned(),
            subnet,
            group: group_of(suffix),
            api_server: vec![],
            pod_networks: vec![],
        }
    }

    /// Changes the subnet.
    pub(crate) fn with_subnet(self, subnet: Subnet) -> Self {
        Self { subnet, ..self }
    }

    /// Changes the addresses of the cluster's API server.
    pub(crate) fn with_api_server(self, api_server: Vec<SocketAddrV4>) -> Self {
        Self { api_server, ..self }
    }

    /// Changes the Pod networks of the cluster.
    pub(crate) fn with_pod_networks(self, pod_networks: Vec<Subnet>) -> Self {
        Self { pod_networks, ..self }
    }

    /// Interface group of the node's taps.
    pub(crate) fn group(&self) -> u32 {
        self.group
    }

    /// Admits a guest. `before` is the guest that was admitted on its tap.
    pub(crate) fn admit(&self, guest: &GuestNic, before: Option<&GuestNic>) -> Vec<Change> {
        let mut changes = before.map(|before| self.forget_packets(before, false)).unwrap_or_default();
        changes.extend(self.forget_reach(before, false));
        changes.extend(self.guest(guest));
        changes
    }

    /// Removes everything of a guest. A batch is all or nothing, so every object is added before it is deleted, which then
    /// never fails. `keep_address`: another guest has its address by now.
    pub(crate) fn forget(&self, guest: &GuestNic, keep_address: bool) -> Vec<Change> {
        let tap = guest.instance.tap_name();
        let actions = [
            Action::AddTable,
            Action::AddSet(taps()),
            Action::AddSet(open_guests()),
            chain(&tap),
            Action::AddElement(of_tap(&tap)),
            Action::DeleteElement(of_tap(&tap)),
            Action::FlushChain(tap.clone()),
            Action::DeleteChain(tap.clone()),
        ];
        let mut changes: Vec<_> = actions.into_iter().map(|action| self.frames.change(action)).collect();
        changes.extend(self.forget_reach(Some(guest), keep_address));
        changes.extend(self.forget_packets(guest, keep_address));
        if !keep_address {
            changes.extend(node::forget_connections(&self.packets, guest.address));
        }
        changes
    }

    /// Removes both tables, whether they exist or not.
    pub(crate) fn remove(&self) -> Vec<Change> {
        [&self.frames, &self.packets].into_iter().flat_map(remove_table).collect()
    }

    /// Replaces both tables by tables for exactly these guests. A guest whose address is outside of the subnet, or the same as
    /// that of an earlier guest, is not admitted.
    pub(crate) fn replace(&self, guests: &[GuestNic]) -> Vec<Change> {
        let mut changes = self.remove();
        changes.extend(self.base());
        let outside = node::Outside { api_server: &self.api_server, pod_networks: &self.pod_networks };
        changes.extend(node::base(&self.packets, &self.bridge, self.subnet, outside));
        let mut taken = BTreeSet::new();
        for guest in guests {
            if self.subnet.has_guest(guest.address) && taken.insert(guest.address) {
                changes.extend(self.guest(guest));
            }
        }
        changes
    }

    /// Bridge table without guests.
    fn base(&self) -> Vec<Change> {
        let base = Base { kind: ChainKind::Filter, hook: Hook::Prerouting, priority: PRIORITY };
        let actions = [
            Action::AddTable,
            Action::AddSet(taps()),
            Action::AddSet(open_guests()),
            Action::AddChain(Chain { name: FROM_GUEST.to_owned(), base: Some(base) }),
        ];
        let rules = [
            vec![Statement::Lookup(vec![Field::InputInterface], TAPS.to_owned())],
            vec![is(Field::InputGroup, Value::Number(self.group)), drop()],
        ];
        let actions = actions.into_iter().map(|action| self.frames.change(action));
        actions.chain(rules.into_iter().map(|rule| self.frames.rule(FROM_GUEST, rule))).collect()
    }

    /// Admits frames that carry the MAC and address of the guest, to addresses that it may reach. IPv6 and unknown protocols
    /// are dropped.
    fn guest(&self, guest: &GuestNic) -> Vec<Change> {
        let tap = guest.instance.tap_name();
        let actions = [chain(&tap), Action::FlushChain(tap.clone())];
        let mut changes: Vec<_> = actions.into_iter().map(|action| self.frames.change(action)).collect();
        changes.extend(self.frame_rules(guest).into_iter().map(|rule| self.frames.rule(&tap, rule)));
        changes.push(self.frames.change(Action::AddElement(of_tap(&tap))));
        if guest.reach.guests {
            changes.push(self.frames.change(Action::AddElement(open_guest(guest))));
        }
        changes.extend(node::guest(&self.packets, guest));
        changes
    }

    fn frame_rules(&self, guest: &GuestNic) -> Vec<Vec<Statement>> {
        let (mac, own) = (Value::EtherAddress(guest.mac.0), address(guest.address));
        let is_arp = || is(Field::EtherType, ARP);
        let is_ipv4 = || is(Field::EtherType, IPV4);
        let to = Field::Ipv4Destination;
        let mut rules = vec![
            vec![is_not(Field::EtherSource, mac.clone()), drop()],
            vec![is_arp(), is_not(Field::ArpSourceEther, mac), drop()],
            vec![is_arp(), is_not(Field::ArpSourceIp, own.clone()), drop()],
            vec![is_arp(), accept()],
            vec![is_ipv4(), is_not(Field::Ipv4Source, own), drop()],
        ];
        let refused = REFUSED.map(|(network, prefix)| expr::is_in_prefix(to, network, prefix));
        rules.extend(refused.map(|there| vec![is_ipv4(), there, drop()]));
        if guest.reach.guests {
            rules.push(vec![is_ipv4(), is_in(to, REACH_GUESTS), accept()]);
        }
        rules.push(vec![is_ipv4(), is(to, address(self.subnet.gateway())), accept()]);
        rules.push(vec![is_ipv4(), is_in_subnet(to, self.subnet), drop()]);
        rules.push(vec![is_ipv4(), accept()]);
        rules.push(vec![drop()]);
        rules
    }

    fn forget_packets(&self, guest: &GuestNic, keep_address: bool) -> Vec<Change> {
        node::forget(&self.packets, guest, keep_address)
    }

    /// Removes a guest from the set of guests that reach other guests.
    fn forget_reach(&self, guest: Option<&GuestNic>, keep_address: bool) -> Vec<Change> {
        let actions = guest
            .filter(|guest| guest.reach.guests && !keep_address)
            .map(|guest| [Action::AddElement(open_guest(guest)), Action::DeleteElement(open_guest(guest))]);
        actions.into_iter().flatten().map(|action| self.frames.change(action)).collect()
    }
}

/// Adds and deletes a table in one transaction, which no packet sees, to test whether the kernel accepts changes.
pub(crate) fn probe() -> Vec<Change> {
    remove_table(&Table::new(Family::Bridge, "coracle_probe")).to_vec()
}

fn remove_table(table: &Table) -> [Change; 2] {
    [table.change(Action::AddTable), table.change(Action::DeleteTable)]
}

fn taps() -> Set {
    Set { name: TAPS.to_owned(), key: vec![DataType::InterfaceName], kind: SetKind::Verdicts }
}

fn of_tap(tap: &str) -> Element {
    let (key, verdict) = (Value::InterfaceName(tap.to_owned()), Verdict::Jump(tap.to_owned()));
    Element { set: TAPS.to_owned(), key: vec![key], verdict: Some(verdict) }
}

fn open_guests() -> Set {
    expr::addresses(REACH_GUESTS)
}

fn open_guest(guest: &GuestNic) -> Element {
    expr::member(REACH_GUESTS, guest.address)
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

    /// Keys of the elements that the whole ruleset has in sets of this name.
    fn keys(changes: &[Change], name: &str) -> Vec<Vec<Value>> {
        let key = |change: &Change| match &change.action {
            Action::AddElement(element) if element.set == name => Some(element.key.clone()),
            _ => None,
        };
        changes.iter().filter_map(key).collect()
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
            let tap = |name| vec![Value::InterfaceName(guest(name, "10.100.0.2").instance.tap_name())];
            let want: Vec<_> = want.into_iter().map(tap).collect();
            assert_eq!(keys(&rules().replace(&guests), TAPS), want, "{why}");
        }
    }

    #[test]
    fn ruleset_drops_taps_in_no_chain() {
        let ruleset = rules().replace(&[]);
        let of_guests: Vec<_> = ruleset
            .iter()
            .filter_map(|change| match &change.action {
                Action::AddRule(rule) if rule.chain == FROM_GUEST => Some(rule.statements.clone()),
                _ => None,
            })
            .collect();
        let known = Statement::Lookup(vec![Field::InputInterface], TAPS.to_owned());
        let ours = is(Field::InputGroup, Value::Number(0x0c00_beef));
        assert_eq!(of_guests, [vec![known], vec![ours, drop()]]);
    }

    #[test]
    fn guest_is_in_sets_by_what_it_reaches() {
        for (reach, want) in [
            (Reach::default(), [0, 0]),
            (Reach { guests: true, node: false }, [2, 0]),
            (Reach { guests: true, node: true }, [2, 1]),
        ] {
            let ruleset = rules().replace(&[GuestNic { reach, ..guest("a", "10.100.0.2") }]);
            let members = |set| keys(&ruleset, set).len();
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
        let ruleset = rules().replace(&[GuestNic { ports, ..guest("a", "10.100.0.2") }]);
        let (tcp, udp, number) = (Value::InetProtocol(6), Value::InetProtocol(17), Value::InetService(8080));
        assert_eq!(keys(&ruleset, "ports"), [[tcp, number.clone()]]);
        assert_eq!(keys(&ruleset, "ports_at"), [[address(Ipv4Addr::LOCALHOST), udp, number]]);
    }
}

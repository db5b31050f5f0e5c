//! IPv4 table of a node: masquerading, ports forwarded to guests, and destinations that guests may reach. Pure.
//!
//! ```text
//! host_ports, local_ports   packet to a port of the node ─▶ chain of the guest that has the port ─▶ dnat
//! to_node                   from guests: replies and pings, and guests in `reach_node`
//! between_guests            guest to guest, and between guests and Pods of other nodes: only guests of this node in
//!                           `reach_guests`; to the API server: only guests in `reach_node`
//! (both)                    connections of one guest at a time: CONNECTIONS_MAX
//! to_outside                masquerade, except to Pods of the cluster
//! ```

use std::net::{Ipv4Addr, SocketAddrV4};

use coracle_hypervisor::{Forward, Protocol};
use coracle_nftables::{
    Action, Base, Chain, ChainKind, Change, DataType, Element, Field, Hook, Set, SetKind, Statement, Table,
    Value, Verdict,
};

use super::expr::{
    accept, address, addresses, chain, drop, is, is_in, is_in_prefix, is_in_subnet, is_not_in,
    is_not_in_subnet, member,
};
use crate::{GuestNic, Subnet};

/// Addresses of guests that may reach other guests, and of guests that may reach the node.
pub(super) const REACH_GUESTS: &str = "reach_guests";
const REACH_NODE: &str = "reach_node";

/// Maximum number of connections of a guest at a time, including those that the kernel still tracks after their end. Together
/// 64 guests fill the smallest connection table that the kernel uses by default on hosts of 8 GiB and more (262,144 entries).
pub(super) const CONNECTIONS_MAX: u32 = 4096;

/// Sets that count the connections of each guest, one per direction (nft(8), `ct count`).
const COUNTED: [&str; 2] = ["connections_to_node", "connections_to_outside"];

/// Maximum number of guests whose connections are counted.
const COUNTED_MAX: u32 = 65_536;

/// Maps of the node's ports: by protocol and number, and by address as well.
const ANY_ADDRESS: &str = "ports";
const ONE_ADDRESS: &str = "ports_at";

/// IP protocols (Linux, include/uapi/linux/in.h).
const ICMP: Value = Value::InetProtocol(1);
const TCP: Value = Value::InetProtocol(6);
const UDP: Value = Value::InetProtocol(17);

/// ICMP type of a ping (RFC 792).
const ECHO_REQUEST: Value = Value::IcmpType(8);

/// Address type of the host's own addresses (Linux, include/uapi/linux/rtnetlink.h, `RTN_LOCAL`).
const LOCAL: Value = Value::Number(2);

/// `established` and `related` of `ct state` (Linux, include/net/netfilter/nf_conntrack.h and nf_conntrack_common.h: the bit
/// number is the state plus one).
const KNOWN: u32 = 1 << 1 | 1 << 2;

/// `dnat` of `ct status` (Linux, include/uapi/linux/netfilter/nf_conntrack_common.h, `IPS_DST_NAT`).
const TRANSLATED: u32 = 1 << 5;

/// Destinations outside of the node with rules of their own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outside<'a> {
    /// Addresses of the cluster's API server.
    pub(super) api_server: &'a [SocketAddrV4],
    /// Pod networks of the cluster.
    pub(super) pod_networks: &'a [Subnet],
}

/// IPv4 table without guests.
pub(super) fn base(table: &Table, bridge: &str, subnet: Subnet, outside: Outside<'_>) -> Vec<Change> {
    let mut changes = declarations(table);
    for (name, hook) in [("host_ports", Hook::Prerouting), ("local_ports", Hook::Output)] {
        let base = Base { kind: ChainKind::Nat, hook, priority: -100 };
        changes.extend(base_chain(table, name, base, ports().to_vec()));
    }
    let filter = |hook| Base { kind: ChainKind::Filter, hook, priority: 0 };
    changes.extend(base_chain(table, "to_node", filter(Hook::Input), to_node(bridge)));
    let between = between_guests(subnet, outside);
    changes.extend(base_chain(table, "between_guests", filter(Hook::Forward), between));
    let base = Base { kind: ChainKind::Nat, hook: Hook::Postrouting, priority: 100 };
    changes.extend(base_chain(table, "to_outside", base, to_outside(subnet, outside.pod_networks)));
    changes
}

fn base_chain(table: &Table, name: &str, base: Base, rules: Vec<Vec<Statement>>) -> Vec<Change> {
    let made = table.change(Action::AddChain(Chain { name: name.to_owned(), base: Some(base) }));
    let rules = rules.into_iter().map(|rule| table.rule(name, rule));
    std::iter::once(made).chain(rules).collect()
}

fn ports() -> [Vec<Statement>; 2] {
    let one = vec![Field::Ipv4Destination, Field::InetProtocol, Field::DestinationPort];
    let any = vec![Field::InetProtocol, Field::DestinationPort];
    let to_node = is(Field::DestinationType, LOCAL);
    [
        vec![Statement::Lookup(one, ONE_ADDRESS.to_owned())],
        vec![to_node, Statement::Lookup(any, ANY_ADDRESS.to_owned())],
    ]
}

fn to_node(bridge: &str) -> Vec<Vec<Statement>> {
    let from_guest = || is(Field::InputInterface, Value::InterfaceName(bridge.to_owned()));
    let ping = [is(Field::InetProtocol, ICMP), is(Field::IcmpType, ECHO_REQUEST)];
    vec![
        vec![from_guest(), known_connections(), accept()],
        vec![from_guest(), exceeds_connections(COUNTED[0]), drop()],
        [vec![from_guest()], ping.to_vec(), vec![accept()]].concat(),
        vec![from_guest(), is_in(Field::Ipv4Source, REACH_NODE), accept()],
        vec![from_guest(), drop()],
    ]
}

fn between_guests(subnet: Subnet, outside: Outside<'_>) -> Vec<Vec<Statement>> {
    let (from, to) = (Field::Ipv4Source, Field::Ipv4Destination);
    let mut rules = vec![vec![known_connections(), accept()]];
    rules.extend(outside.api_server.iter().flat_map(|at| api_server(subnet, *at)));
    rules.extend([
        vec![is_in_subnet(from, subnet), exceeds_connections(COUNTED[1]), drop()],
        vec![is_in(from, REACH_GUESTS), is_in(to, REACH_GUESTS), accept()],
        vec![is_in_subnet(from, subnet), is_in_subnet(to, subnet), drop()],
    ]);
    for pods in outside.pod_networks {
        rules.extend([
            vec![is_in_subnet(from, subnet), is_in_subnet(to, *pods), is_not_in(from, REACH_GUESTS), drop()],
            vec![is_in_subnet(from, *pods), is_in_subnet(to, subnet), is_not_in(to, REACH_GUESTS), drop()],
        ]);
    }
    rules
}

fn to_outside(subnet: Subnet, pod_networks: &[Subnet]) -> Vec<Vec<Statement>> {
    let (from, to) = (Field::Ipv4Source, Field::Ipv4Destination);
    // When a guest reaches another guest, or itself, by a port of the node, replies must return by the node.
    let translated = Statement::AnyBit(Field::ConnectionStatus, TRANSLATED);
    let hairpin =
        vec![is_in_subnet(from, subnet), is_in_subnet(to, subnet), translated, Statement::Masquerade];
    let local = vec![
        is_in_prefix(from, Ipv4Addr::new(127, 0, 0, 0), 8),
        is_in_subnet(to, subnet),
        Statement::Masquerade,
    ];
    let mut leaves = vec![is_in_subnet(from, subnet), self::is_not_in_subnet(to, subnet)];
    leaves.extend(pod_networks.iter().map(|pods| self::is_not_in_subnet(to, *pods)));
    leaves.push(Statement::Masquerade);
    vec![hairpin, local, leaves]
}

/// Matches packets of connections that were admitted before.
fn known_connections() -> Statement {
    Statement::AnyBit(Field::ConnectionState, KNOWN)
}

/// Matches new connections of a guest that has reached the limit.
fn exceeds_connections(set: &str) -> Statement {
    Statement::LimitConnections { key: Field::Ipv4Source, set: set.to_owned(), above: CONNECTIONS_MAX }
}

/// Denies the cluster's API server to guests that may not reach the node. Matches both the current destination of a packet,
/// which a service proxy of the node may have translated, and the original one.
fn api_server(subnet: Subnet, at: SocketAddrV4) -> [Vec<Statement>; 2] {
    let from = || {
        let may_not = is_not_in(Field::Ipv4Source, REACH_NODE);
        vec![is_in_subnet(Field::Ipv4Source, subnet), may_not, is(Field::InetProtocol, TCP)]
    };
    let to = |host, port| vec![is(host, address(*at.ip())), is(port, Value::InetService(at.port())), drop()];
    let now = to(Field::Ipv4Destination, Field::DestinationPort);
    let asked = to(Field::OriginalDestination, Field::OriginalDestinationPort);
    [now, asked].map(|to| [from(), to].concat())
}

fn declarations(table: &Table) -> Vec<Change> {
    let map = |name: &str, key| Set { name: name.to_owned(), key, kind: SetKind::Verdicts };
    let sets = [
        map(ANY_ADDRESS, vec![DataType::InetProtocol, DataType::InetService]),
        map(ONE_ADDRESS, vec![DataType::Ipv4Address, DataType::InetProtocol, DataType::InetService]),
        addresses(REACH_GUESTS),
        addresses(REACH_NODE),
    ];
    let counted = COUNTED.map(|name| {
        let kind = SetKind::Connections { size: COUNTED_MAX };
        Set { name: name.to_owned(), key: vec![DataType::Ipv4Address], kind }
    });
    let sets = sets.into_iter().chain(counted).map(Action::AddSet);
    std::iter::once(Action::AddTable).chain(sets).map(|action| table.change(action)).collect()
}

/// Adds the rules of one guest to a table that has none of them.
pub(super) fn guest(table: &Table, guest: &GuestNic) -> Vec<Change> {
    let tap = guest.instance.tap_name();
    let mut changes = Vec::new();
    if !guest.ports.is_empty() {
        changes.extend([chain(&tap), Action::FlushChain(tap.clone())].map(|action| table.change(action)));
    }
    for port in &guest.ports {
        let statements = vec![
            is(Field::InetProtocol, protocol(*port)),
            is(Field::DestinationPort, Value::InetService(port.host_port)),
            Statement::DestinationNat(guest.address, port.guest_port),
        ];
        changes.push(table.rule(&tap, statements));
    }
    let ports = guest.ports.iter().map(|port| port_element(&tap, *port));
    let elements = ports.chain(memberships(guest)).map(Action::AddElement);
    changes.extend(elements.map(|action| table.change(action)));
    changes
}

/// Removes everything of a guest except its connection counts. A batch is all or nothing, so every object is added before it is
/// deleted, which then never fails. `keep_address`: another guest has that address by now.
pub(super) fn forget(table: &Table, guest: &GuestNic, keep_address: bool) -> Vec<Change> {
    let tap = guest.instance.tap_name();
    let mut actions = Vec::new();
    if !guest.ports.is_empty() {
        actions.push(chain(&tap));
        actions.extend(guest.ports.iter().flat_map(|port| remove_element(port_element(&tap, *port))));
        actions.extend([Action::FlushChain(tap.clone()), Action::DeleteChain(tap)]);
    }
    if !keep_address {
        actions.extend(memberships(guest).into_iter().flat_map(remove_element));
    }
    let mut changes = declarations(table);
    changes.extend(actions.into_iter().map(|action| table.change(action)));
    changes
}

/// Resets the connection counts of an address, for the next guest that has it.
pub(super) fn forget_connections(table: &Table, of: Ipv4Addr) -> Vec<Change> {
    let actions = COUNTED.into_iter().flat_map(|set| remove_element(member(set, of)));
    actions.map(|action| table.change(action)).collect()
}

fn remove_element(element: Element) -> [Action; 2] {
    [Action::AddElement(element.clone()), Action::DeleteElement(element)]
}

fn memberships(guest: &GuestNic) -> Vec<Element> {
    let sets = [(guest.reach.guests, REACH_GUESTS), (guest.reach.node, REACH_NODE)];
    let member_of = |(is_member, set): (bool, &str)| is_member.then(|| member(set, guest.address));
    sets.into_iter().filter_map(member_of).collect()
}

fn protocol(port: Forward) -> Value {
    match port.protocol {
        Protocol::Tcp => TCP,
        Protocol::Udp => UDP,
    }
}

fn port_element(tap: &str, port: Forward) -> Element {
    let key = vec![protocol(port), Value::InetService(port.host_port)];
    let (set, key) = match port.host_address.is_unspecified() {
        true => (ANY_ADDRESS, key),
        false => (ONE_ADDRESS, [vec![address(port.host_address)], key].concat()),
    };
    Element { set: set.to_owned(), key, verdict: Some(Verdict::Goto(tap.to_owned())) }
}

//! The IPv4 table of a node: masquerading, ports of the node that lead to guests, and what guests may reach. Pure.
//!
//! ```text
//! host_ports, local_ports   to a port of the node ─▶ chain of the guest that has it ─▶ dnat
//! to_node                   from guests: replies and pings, and what `reach_node` admits
//! between_guests            routed from guest to guest, and between guests and Pods of other nodes: only where those of this node are in
//!                           `reach_guests`; to the API server: `reach_node`
//! (both)                    connections of one guest at a time: CONNECTIONS_MAX
//! to_outside                masquerade, but not to Pods of the cluster
//! ```

use std::net::SocketAddrV4;

use coracle_hypervisor::Forward;
use serde_json::{Value, json};

use super::expr::{accept, drop, field, is, is_not, known_connections, matches, network};
use crate::{GuestNic, Subnet};

/// Addresses of guests that reach other guests, and that reach the node.
pub(super) const REACH_GUESTS: &str = "reach_guests";
const REACH_NODE: &str = "reach_node";

/// Connections that a guest may have open at a time, those included that the kernel still remembers. With the smallest table
/// of the kernel's defaults for hosts of 8 GiB and more (262,144 entries), 64 guests fill it together.
pub(super) const CONNECTIONS_MAX: u32 = 4096;

/// Guests and how many connections each has, one meter for each way (nft(8), `ct count`).
const COUNTED: [&str; 2] = ["connections_to_node", "connections_to_outside"];

/// Guests that are counted.
const COUNTED_MAX: u32 = 65_536;

/// Ports of the node, by protocol and number, or by address as well.
const ANY_ADDRESS: &str = "ports";
const ONE_ADDRESS: &str = "ports_at";

/// What is special of what lies outside of the node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outside<'a> {
    /// Where the API server of the cluster answers.
    pub(super) api_server: &'a [SocketAddrV4],
    /// Networks of the cluster's Pods.
    pub(super) pod_networks: &'a [Subnet],
}

/// The table, which exists and is empty.
pub(super) fn base(table: &str, bridge: &str, subnet: Subnet, outside: Outside<'_>) -> Vec<Value> {
    let mut ops = declarations(table);
    let chain = |name: &str, kind: &str, hook: &str, priority: i32| {
        json!({"add": {"chain": {"family": "ip", "table": table, "name": name,
            "type": kind, "hook": hook, "prio": priority, "policy": "accept"}}})
    };
    let rule = |chain: &str, expr: Vec<Value>| json!({"add": {"rule": {"family": "ip", "table": table, "chain": chain, "expr": expr}}});
    let guests = network(subnet);
    for (name, hook) in [("host_ports", "prerouting"), ("local_ports", "output")] {
        ops.push(chain(name, "nat", hook, -100));
        let (protocol, port) = (json!({"meta": {"key": "l4proto"}}), field("th", "dport"));
        let at = json!({"concat": [field("ip", "daddr"), protocol.clone(), port.clone()]});
        ops.push(rule(name, vec![json!({"vmap": {"key": at, "data": format!("@{ONE_ADDRESS}")}})]));
        let to_node = is(json!({"fib": {"result": "type", "flags": "daddr"}}), json!("local"));
        let any = json!({"vmap": {"key": {"concat": [protocol, port]}, "data": format!("@{ANY_ADDRESS}")}});
        ops.push(rule(name, vec![to_node, any]));
    }
    ops.push(chain("to_node", "filter", "input", 0));
    let from_guests = || is(json!({"meta": {"key": "iifname"}}), json!(bridge));
    let is_echo = is(field("icmp", "type"), json!("echo-request"));
    let reaches_node = is(field("ip", "saddr"), json!(format!("@{REACH_NODE}")));
    ops.push(rule("to_node", vec![from_guests(), known_connections(), accept()]));
    ops.push(rule("to_node", [vec![from_guests()], too_many(COUNTED[0])].concat()));
    for admitted in [is_echo, reaches_node] {
        ops.push(rule("to_node", vec![from_guests(), admitted, accept()]));
    }
    ops.push(rule("to_node", vec![from_guests(), drop()]));
    ops.push(chain("between_guests", "filter", "forward", 0));
    ops.push(rule("between_guests", vec![known_connections(), accept()]));
    ops.extend(
        outside
            .api_server
            .iter()
            .flat_map(|at| api_server(subnet, at))
            .map(|expr| rule("between_guests", expr)),
    );
    let between = |from: Value, to: Value| vec![is(field("ip", "saddr"), from), is(field("ip", "daddr"), to)];
    let from_guest = is(field("ip", "saddr"), guests.clone());
    ops.push(rule("between_guests", [vec![from_guest], too_many(COUNTED[1])].concat()));
    let open = json!(format!("@{REACH_GUESTS}"));
    ops.push(rule("between_guests", [between(open.clone(), open), vec![accept()]].concat()));
    ops.push(rule("between_guests", [between(guests.clone(), guests.clone()), vec![drop()]].concat()));
    for pods in outside.pod_networks.iter().map(|pods| network(*pods)) {
        let closed = |key: &str| is_not(field("ip", key), json!(format!("@{REACH_GUESTS}")));
        let out = [between(guests.clone(), pods.clone()), vec![closed("saddr"), drop()]].concat();
        let into = [between(pods, guests.clone()), vec![closed("daddr"), drop()]].concat();
        ops.extend([out, into].map(|expr| rule("between_guests", expr)));
    }
    ops.push(chain("to_outside", "nat", "postrouting", 100));
    // A guest that reaches another one, or itself, by a port of the node must get its replies from there.
    let translated = matches("in", json!({"ct": {"key": "status"}}), json!("dnat"));
    let masquerade = || json!({"masquerade": null});
    let hairpin = [between(guests.clone(), guests.clone()), vec![translated, masquerade()]].concat();
    let loopback = json!({"prefix": {"addr": "127.0.0.0", "len": 8}});
    let local = [between(loopback, guests.clone()), vec![masquerade()]].concat();
    let mut leaves = vec![is(field("ip", "saddr"), guests.clone()), is_not(field("ip", "daddr"), guests)];
    leaves.extend(outside.pod_networks.iter().map(|pods| is_not(field("ip", "daddr"), network(*pods))));
    leaves.push(masquerade());
    ops.extend([hairpin, local, leaves].map(|expr| rule("to_outside", expr)));
    ops
}

/// A guest that has as many connections as it may gets no other one.
fn too_many(set: &str) -> Vec<Value> {
    let key = field("ip", "saddr");
    let count = json!({"ct count": {"val": CONNECTIONS_MAX, "inv": true}});
    vec![json!({"meter": {"name": set, "size": COUNTED_MAX, "key": key, "stmt": count}}), drop()]
}

/// Guests that may reach the node may reach the API server of its cluster. It is known by the address that the guest asked
/// for, and by what a service proxy of the node made of that.
fn api_server(subnet: Subnet, at: &SocketAddrV4) -> [Vec<Value>; 2] {
    let from = || {
        let may_not = is_not(field("ip", "saddr"), json!(format!("@{REACH_NODE}")));
        let is_tcp = is(json!({"meta": {"key": "l4proto"}}), json!("tcp"));
        vec![is(field("ip", "saddr"), network(subnet)), may_not, is_tcp]
    };
    let original = |key: &str| json!({"ct": {"key": key, "dir": "original"}});
    let (address, port) = (json!(at.ip().to_string()), json!(at.port()));
    let now =
        vec![is(field("ip", "daddr"), address.clone()), is(field("tcp", "dport"), port.clone()), drop()];
    let asked = vec![is(original("ip daddr"), address), is(original("proto-dst"), port), drop()];
    [now, asked].map(|to| [from(), to].concat())
}

fn declarations(table: &str) -> Vec<Value> {
    let map = |name: &str, key: &[&str]| json!({"add": {"map": {"family": "ip", "table": table, "name": name, "type": key, "map": "verdict"}}});
    let set = |name: &str| json!({"add": {"set": {"family": "ip", "table": table, "name": name, "type": "ipv4_addr"}}});
    vec![
        map(ANY_ADDRESS, &["inet_proto", "inet_service"]),
        map(ONE_ADDRESS, &["ipv4_addr", "inet_proto", "inet_service"]),
        set(REACH_GUESTS),
        set(REACH_NODE),
    ]
}

/// What the table has of one guest, in a table without anything of it.
pub(super) fn guest(table: &str, guest: &GuestNic) -> Vec<Value> {
    let tap = guest.instance.tap_name();
    let mut ops = Vec::new();
    if !guest.ports.is_empty() {
        ops.push(json!({"add": chain(table, &tap)}));
        ops.push(json!({"flush": chain(table, &tap)}));
    }
    for port in &guest.ports {
        let expr = [
            is(field(port.protocol.as_str(), "dport"), json!(port.host_port)),
            json!({"dnat": {"addr": guest.address.to_string(), "port": port.guest_port}}),
        ];
        ops.push(json!({"add": {"rule": {"family": "ip", "table": table, "chain": tap, "expr": expr}}}));
    }
    ops.extend(guest.ports.iter().map(|port| json!({"add": port_element(table, &tap, *port)})));
    ops.extend(memberships(guest).into_iter().map(|set| json!({"add": member(table, set, guest)})));
    ops
}

/// Removes everything of a guest. The batch is all or nothing, so everything is made first, so that removing it never
/// fails. `keep_address`: another guest has that address by now.
pub(super) fn forget(table: &str, guest: &GuestNic, keep_address: bool) -> Vec<Value> {
    let tap = guest.instance.tap_name();
    let mut ops = vec![json!({"add": {"table": {"family": "ip", "name": table}}})];
    ops.extend(declarations(table));
    if !guest.ports.is_empty() {
        ops.push(json!({"add": chain(table, &tap)}));
        for port in &guest.ports {
            let element = port_element(table, &tap, *port);
            ops.extend([json!({"add": element}), json!({"delete": element})]);
        }
        ops.extend([json!({"flush": chain(table, &tap)}), json!({"delete": chain(table, &tap)})]);
    }
    for set in memberships(guest).into_iter().filter(|_| !keep_address) {
        let element = member(table, set, guest);
        ops.extend([json!({"add": element}), json!({"delete": element})]);
    }
    ops
}

fn memberships(guest: &GuestNic) -> Vec<&'static str> {
    let sets = [(guest.reach.guests, REACH_GUESTS), (guest.reach.node, REACH_NODE)];
    sets.into_iter().filter_map(|(is_member, set)| is_member.then_some(set)).collect()
}

fn chain(table: &str, tap: &str) -> Value {
    json!({"chain": {"family": "ip", "table": table, "name": tap}})
}

fn member(table: &str, set: &str, guest: &GuestNic) -> Value {
    json!({"element": {"family": "ip", "table": table, "name": set, "elem": [guest.address.to_string()]}})
}

fn port_element(table: &str, tap: &str, port: Forward) -> Value {
    let (protocol, number) = (json!(port.protocol.as_str()), json!(port.host_port));
    let (map, key) = match port.host_address.is_unspecified() {
        true => (ANY_ADDRESS, json!([protocol, number])),
        false => (ONE_ADDRESS, json!([port.host_address.to_string(), protocol, number])),
    };
    let verdict = json!({"goto": {"target": tap}});
    json!({"element": {"family": "ip", "table": table, "name": map, "elem": [[{"concat": key}, verdict]]}})
}

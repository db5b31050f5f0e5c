//! Detects nodes whose guests have addresses of the same network. Pure.
//!
//! With overlapping networks two VMs could have the same address, and no route could tell them apart. The node with the older
//! Lease keeps receiving VMs, the other node does not.

use std::collections::HashMap;

use ipnet::Ipv4Net;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Subnet of the guests of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GuestSubnet {
    subnet: Ipv4Net,
    /// Time when the node first announced itself.
    since: Timestamp,
}

impl GuestSubnet {
    /// Parses the annotation; `None` when it is not a network.
    pub(super) fn of(text: &str, created: Option<&Time>) -> Option<Self> {
        let subnet = text.parse().ok()?;
        Some(Self { subnet, since: created.map_or(Timestamp::UNIX_EPOCH, |time| time.0) })
    }
}

fn overlap(one: Ipv4Net, other: Ipv4Net) -> bool {
    one.contains(&other) || other.contains(&one)
}

/// Returns why nodes receive no VMs, as the end of a sentence that begins with their name.
pub(super) fn overlaps<'a>(nodes: impl Iterator<Item = (&'a str, GuestSubnet)>) -> HashMap<&'a str, String> {
    let mut all: Vec<_> = nodes.collect();
    all.sort_by_key(|(node, on)| (on.since, *node));
    let mut reasons = HashMap::new();
    for (at, (node, on)) in all.iter().enumerate() {
        let earlier = all[..at].iter().find(|(other, of)| other != node && overlap(of.subnet, on.subnet));
        if let Some((other, of)) = earlier {
            let (own, theirs) = (on.subnet, of.subnet);
            reasons.entry(*node).or_insert_with(|| {
                format!("has guests in {own}, which overlaps with {theirs} of node {other}: give it another --subnet")
            });
        }
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_bars_the_younger_node_table() {
        for (why, nodes, want) in [
            ("apart", &[("a", "10.100.0.0/24", 1), ("b", "10.100.1.0/24", 2)][..], &[][..]),
            ("the same", &[("a", "10.100.0.0/24", 1), ("b", "10.100.0.0/24", 2)], &["b a"]),
            ("age decides, not the name", &[("a", "10.100.0.0/24", 2), ("b", "10.100.0.0/24", 1)], &["a b"]),
            (
                "of one age, the name decides",
                &[("b", "10.100.0.0/24", 1), ("a", "10.100.0.0/24", 1)],
                &["b a"],
            ),
            ("one in another", &[("a", "10.100.0.0/16", 1), ("b", "10.100.7.0/24", 2)], &["b a"]),
            ("one node, announced twice", &[("a", "10.100.0.0/24", 1), ("a", "10.100.0.0/24", 2)], &[]),
            (
                "three",
                &[("a", "10.1.0.0/24", 1), ("b", "10.1.0.0/24", 2), ("c", "10.1.0.0/24", 3)],
                &["b a", "c a"],
            ),
        ] {
            let at = |second| Time(Timestamp::from_second(second).unwrap());
            let subnet = |(node, text, second): &(&'static str, &str, i64)| {
                (*node, GuestSubnet::of(text, Some(&at(*second))).unwrap())
            };
            let reasons = overlaps(nodes.iter().map(subnet));
            let other =
                |reason: &str| reason.split("of node ").nth(1).unwrap().split(':').next().unwrap().to_owned();
            let mut got: Vec<_> =
                reasons.iter().map(|(node, reason)| format!("{node} {}", other(reason))).collect();
            got.sort();
            assert_eq!(got, want, "{why}");
        }
        assert_eq!(GuestSubnet::of("10.100.0.0", None), None);
    }
}

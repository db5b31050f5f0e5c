//! Nodes: shape, notice, failure, drift.

use super::*;

#[test]
fn node_table() {
    let drained = |v: &mut NodeView| v.facts.draining_ms = Some(NOW - 1000);
    let noticed = |v: &mut NodeView| {
        v.facts.draining_ms = Some(NOW - 40_000);
        v.facts.taints =
            vec![Taint { key: names::PREEMPTING.into(), value: "1".into(), effect: "NoSchedule".into() }];
    };
    let ill = |ms: i64| move |v: &mut NodeView| (v.facts.ready, v.facts.since_ms) = (false, NOW - ms);
    let with = |pods: &'static [&'static str]| {
        move |v: &mut NodeView| v.pods = pods.iter().map(|p| pod(p)).collect()
    };
    for (why, world, want) in [
        (
            "an emptied node is given back",
            world(0, 5).allocation("a", Active, "2").node(drained),
            "release:a",
        ),
        (
            "first its pods go",
            world(0, 5).allocation("a", Active, "2").node(drained).node(with(&["p", "q"])),
            "evict:p evict:q",
        ),
        (
            "what runs on every node stays",
            world(0, 5)
                .allocation("a", Active, "2")
                .node(drained)
                .node(with(&["d"]))
                .node(|v| v.pods[0].kind = PodKind::Daemon),
            "release:a",
        ),
        ("a notice emits an event", world(0, 5).allocation("a", Preempting, "2"), "notice:bn-a"),
        (
            "told once",
            world(0, 5).allocation("a", Preempting, "2").node(noticed).node(with(&["p"])),
            "evict:p",
        ),
        (
            "empty: given back at once",
            world(0, 5).allocation("a", Preempting, "2").node(noticed),
            "release:a",
        ),
        (
            "a replacement is waited for",
            world(1, 5)
                .allocation("a", Preempting, "2")
                .node(noticed)
                .node(with(&["p"]))
                .node(|v| v.facts.draining_ms = Some(NOW - 1000))
                .allocation("c", Provisioning, "2"),
            "",
        ),
        (
            "a pod whose grace ends with the notice is ended with all of it",
            world(0, 5)
                .allocation("a", Preempting, "2")
                .node(noticed)
                .node(with(&["p"]))
                .with(|w| w.owner.allocations.get_mut("a").unwrap().preempt_ms = NOW + 39_000),
            "end:p",
        ),
        (
            "an idle sibling goes instead",
            world(1, 5)
                .allocation("c", Active, "2")
                .allocation("a", Preempting, "2")
                .node(with(&["p"]))
                .node(|v| v.idle_ms = None),
            "substitute:a/c",
        ),
        ("not Ready for a moment", world(1, 5).allocation("a", Active, "2").node(ill(59_000)), ""),
        (
            "not Ready for a minute: replaced",
            world(1, 5).allocation("a", Active, "2").node(ill(61_000)),
            "place@2.8800×1",
        ),
        (
            "for three: given up",
            world(1, 5).allocation("a", Active, "2").node(ill(181_000)),
            "release:a place@2.8800×1",
        ),
        (
            "too many at once: held",
            world(2, 5)
                .allocation("a", Active, "2")
                .node(ill(181_000))
                .allocation("c", Active, "2")
                .node(ill(181_000)),
            "",
        ),
        (
            "a Node without allocation is deleted",
            world(0, 5).with(|w| w.nodes.push(node("z"))),
            "delete:bn-z",
        ),
        (
            "not while it is new",
            world(0, 5).with(|w| w.nodes.push(node("z"))).node(|v| v.facts.created_ms = NOW - 9000),
            "",
        ),
        (
            "nor while the market is away",
            world(0, 5).with(|w| w.nodes.push(node("z"))).with(|w| w.synced = false),
            "",
        ),
        (
            "labels of the specification",
            world(1, 5)
                .allocation("a", Active, "2")
                .with(|w| drop(w.object.spec.node_selector.insert("x".into(), "y".into()))),
            "patch:bn-a",
        ),
        (
            "the first taint goes when it is Ready",
            world(1, 5).allocation("a", Active, "2").node(|v| {
                v.facts.taints = vec![Taint {
                    key: names::UNINITIALIZED.into(),
                    value: String::new(),
                    effect: "NoSchedule".into(),
                }];
            }),
            "patch:bn-a",
        ),
        (
            "and stays until then",
            world(1, 5).allocation("a", Active, "2").node(|v| {
                v.facts.ready = false;
                v.facts.since_ms = NOW;
                v.facts.taints = vec![Taint {
                    key: names::UNINITIALIZED.into(),
                    value: String::new(),
                    effect: "NoSchedule".into(),
                }];
            }),
            "",
        ),
    ] {
        assert_eq!(world.verbs(), want, "{why}");
    }
}

/// Another type is asked for: replacements stand beside what they replace, and nothing leaves before one is Ready.
#[test]
fn drift_table() {
    let changed = |w: &mut World| {
        w.object.spec.instance_type = "l40s-4x".into();
        w.quotes = [("l40s-4x/us-west-2".into(), quote("1.25", "1.25", "2"))].into();
    };
    let old = world(2, 2).allocation("a", Active, "2").allocation("c", Active, "2").with(changed);
    assert_eq!(old.verbs(), "place@1.8000×1", "one more than the maximum, as the disruption budget says");
    let waits = old.with(|w| {
        let market = "l40s-4x/us-west-2";
        w.owner.bids.insert(
            "n".into(),
            Bid { market: market.into(), open: 1, limit: price("1.8"), ..w.owner.bids["b"].clone() },
        );
        w.owner.bids.get_mut("n").unwrap().active = 0;
    });
    assert_eq!(waits.verbs(), "", "nothing leaves yet");
    let ready = waits.with(|w| {
        let bid = w.owner.bids.get_mut("n").unwrap();
        (bid.open, bid.active) = (0, 1);
        let allocation =
            Allocation { bid: "n".into(), market: bid.market.clone(), ..w.owner.allocations["a"].clone() };
        w.owner.allocations.insert("n".into(), allocation);
        w.nodes.push(node("n"));
        w.nodes.last_mut().unwrap().facts.labels.insert(names::INSTANCE_TYPE.into(), "l40s-4x".into());
    });
    assert_eq!(ready.verbs(), "drain:bn-a", "one is Ready, one goes");
    let boots = world(1, 5).allocation("a", Provisioning, "2").bid("x", HERE, "2.88", 1).with(changed);
    assert_eq!(boots.verbs(), "cancel:x release:a", "what waits or boots goes at once");
}

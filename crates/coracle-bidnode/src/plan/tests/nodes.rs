//! Tests for Nodes: labels and taints, notice, failure, drift.

use super::*;

/// A state that this version does not know: the Node stays and is not changed.
#[test]
fn node_of_allocation_in_unknown_state_stays() {
    let old = |w: &mut World| {
        let mut node = node("a");
        node.facts.created_ms = 0;
        w.nodes.push(node);
    };
    assert_eq!(world(0, 5).with(old).verbs(), "delete:bn-a", "of an allocation that is over");
    let unknown = world(0, 5).with(old).with(|w| w.owner.unknown = ["a".into()].into());
    assert_eq!(unknown.verbs(), "");
}

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
            "the notice comes first; an idle sibling may go instead",
            world(1, 5)
                .allocation("c", Active, "2")
                .allocation("a", Preempting, "2")
                .node(with(&["p"]))
                .node(|v| v.idle_ms = None),
            "notice:bn-a substitute:a/c",
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

/// Notices and drains are handled even if the BidNode is paused or invalid; only shaping, buying and selling stop.
#[test]
fn notice_and_drain_survive_pause_and_bad_spec() {
    let paused = |w: World| w.with_annotation(annotation::PAUSED, "true");
    let invalid = |w: World| w.with_annotation(annotation::IDLE_AFTER, "soon");
    let drained = |v: &mut NodeView| v.facts.draining_ms = Some(NOW - 1000);
    let with_pod = |v: &mut NodeView| v.pods = vec![pod("p")];
    let worlds: [fn() -> World; 4] = [
        || world(3, 5).allocation("a", Preempting, "2"),
        || world(3, 5).allocation("a", Active, "2"),
        || world(3, 5).with(|w| w.nodes.push(node("z"))),
        || world(3, 5).allocation("a", Active, "2").node(|v| v.facts.ready = false),
    ];
    for (why, world, want) in [
        ("a notice", worlds[0](), "notice:bn-a"),
        ("a drain under way", worlds[1]().node(drained).node(with_pod), "evict:p"),
        ("a Node without allocation", worlds[2](), "delete:bn-z"),
        ("nothing is bought or released", worlds[3](), ""),
    ] {
        for change in [paused as fn(World) -> World, invalid] {
            let world = change(world.clone());
            assert_eq!(world.verbs(), want, "{why}");
        }
    }
}

#[test]
fn notice_precedes_evictions_of_other_nodes() {
    let drained = |v: &mut NodeView| (v.facts.draining_ms, v.pods) = (Some(NOW - 1000), vec![pod("p")]);
    let world = world(0, 5).allocation("a", Active, "2").node(drained).allocation("b", Preempting, "2");
    assert_eq!(world.verbs(), "notice:bn-b evict:p");
}

#[test]
fn spared_node_loses_its_notice() {
    let noticed = |v: &mut NodeView| {
        v.facts.taints =
            vec![Taint { key: names::PREEMPTING.into(), value: "1".into(), effect: "NoSchedule".into() }];
        v.facts.draining_ms = Some(NOW - 1000);
    };
    let world = world(1, 5).allocation("a", Active, "2").node(noticed);
    let plan = world.plan();
    let Some(Step::PatchNode(change)) = plan.steps.first() else { panic!("{:?}", plan.steps) };
    assert_eq!(change.patch["spec"], serde_json::json!({"unschedulable": false, "taints": []}));
    assert_eq!(change.patch["metadata"]["annotations"][names::DRAINING], serde_json::Value::Null);
}

#[test]
fn deleted_node_is_drained_then_released() {
    let deleted = |v: &mut NodeView| (v.facts.deleting, v.pods) = (true, vec![pod("p")]);
    let first = world(1, 5).allocation("a", Active, "2").node(deleted);
    assert!(first.verbs().starts_with("drain:bn-a"), "{}", first.verbs());
    let then = first.node(|v| v.facts.draining_ms = Some(NOW - 1000));
    assert!(then.verbs().starts_with("evict:p"), "{}", then.verbs());
    let fresh = world(1, 5).allocation("a", Active, "2").node(|v| v.facts.finalizers.clear());
    let plan = fresh.plan();
    let Some(Step::PatchNode(change)) = plan.steps.first() else { panic!("{:?}", plan.steps) };
    assert_eq!(change.patch["metadata"]["finalizers"], serde_json::json!([NODE_FINALIZER]));
}

/// BidNodes with one node suspend repairs when many nodes of others fail at once.
#[test]
fn repair_waits_while_the_fleet_is_unhealthy() {
    let ill = |v: &mut NodeView| (v.facts.ready, v.facts.since_ms) = (false, NOW - 181_000);
    let world = world(1, 5).allocation("a", Active, "2").node(ill).with(|w| w.fleet_unhealthy = true);
    assert_eq!(world.verbs(), "");
    assert!(world.plan().facts.degraded.is_some_and(|why| why.contains("of other BidNodes")));
}

#[test]
fn failed_launches_delay_the_next_bid() {
    let failed =
        |count, ago| world(1, 5).with(|w| (w.owner.failures, w.owner.failed_ms) = (count, NOW - ago));
    for (why, world, want) in [
        ("30 s after the first", failed(1, 29_000), ""),
        ("then again", failed(1, 30_000), "place@2.8800×1"),
        ("a minute after the second", failed(2, 59_000), ""),
        ("five minutes at most", failed(9, 300_000), "place@2.8800×1"),
    ] {
        assert_eq!(world.verbs(), want, "{why}");
        assert!(world.plan().facts.provision_failing.is_some());
    }
}

/// A DaemonSet recreates pods that tolerate the notice at once, so critical pods do not wait for them.
#[test]
fn tolerating_daemons_do_not_delay_critical_pod_evictions() {
    let noticed = |v: &mut NodeView| {
        v.facts.draining_ms = Some(NOW - 40_000);
        v.facts.taints =
            vec![Taint { key: names::PREEMPTING.into(), value: "1".into(), effect: "NoSchedule".into() }];
        let blanket =
            k8s_openapi::api::core::v1::Toleration { operator: Some("Exists".into()), ..Default::default() };
        let daemon = PodFacts { kind: PodKind::Daemon, tolerations: vec![blanket], ..pod("logs") };
        v.pods = vec![daemon, PodFacts { critical: true, ..pod("dns") }];
    };
    assert_eq!(world(0, 5).allocation("a", Preempting, "2").node(noticed).verbs(), "evict:dns");
}

/// After a change of the type, replacements exist beside what they replace, and nothing leaves before one is Ready.
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

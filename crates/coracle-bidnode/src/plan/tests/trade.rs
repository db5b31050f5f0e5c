//! Tests of bids, limits, cancellations and releases.

use super::*;

#[test]
fn buying_table() {
    for (why, world, want) in [
        ("the seed's test: one bid for both", world(2, 5), "place@2.8800×2"),
        (
            "the finalizer first",
            world(1, 5).with(|w| w.object.metadata.finalizers = None),
            "add-finalizer place@2.8800×1",
        ),
        ("what is open counts", world(2, 5).bid("x", HERE, "2.88", 2), ""),
        (
            "what boots counts",
            world(2, 5).allocation("a", Provisioning, "2").allocation("c", Matched, "2"),
            "",
        ),
        ("what runs counts", world(1, 5).allocation("a", Active, "2"), ""),
        (
            "what leaves does not, and one is bought",
            world(1, 5).allocation("a", Preempting, "2"),
            "notice:bn-a place@2.8800×1",
        ),
        ("no node is wanted", world(0, 5), ""),
        ("paused", world(2, 5).with_annotation(annotation::PAUSED, "true"), ""),
        ("a gang", world(3, 5).with_annotation(annotation::GANG, "true"), "place@2.8800×3!"),
        ("a price that is not known", world(2, 5).with(|w| w.quotes.clear()), ""),
        ("a halted market", world(2, 5).with(|w| w.quotes.get_mut(HERE).unwrap().halted = true), ""),
        ("the market is away", world(2, 5).with(|w| w.synced = false), ""),
        (
            "the cap lets one pass",
            world(3, 5).with_annotation(annotation::MAX_HOURLY_COST, "3"),
            "place@2.8800×1",
        ),
        ("the cap lets none pass", world(3, 5).with_annotation(annotation::MAX_HOURLY_COST, "2"), ""),
        (
            "a gang that the cap cuts",
            world(3, 5)
                .with_annotation(annotation::GANG, "true")
                .with_annotation(annotation::MAX_HOURLY_COST, "6"),
            "",
        ),
        ("pods wait", world(0, 5).with(|w| w.need.nodes = 3), "place@2.8800×3"),
        ("never more than the maximum", world(0, 5).with(|w| w.need.nodes = 30), "place@2.8800×5"),
    ] {
        assert_eq!(world.verbs(), want, "{why}");
    }
}

/// Limits of each strategy, to the micro-dollar: in an idle market, in a scarce one, and capped by maxBid.
#[test]
fn limit_table() {
    use BidStrategy::{AvailabilityOptimized as A, Balanced as B, CostOptimized as C};
    for (strategy, max_bid, seen, want) in [
        (C, 4.5, quote("2", "2", "3.2"), 2_080_000),
        (B, 4.5, quote("2", "2", "3.2"), 2_880_000),
        (A, 4.5, quote("2", "2", "3.2"), 3_840_000),
        (C, 4.5, quote("2", "4", "4"), 2_600_000),
        (B, 4.5, quote("2", "4", "4"), 3_600_000),
        (A, 4.5, quote("2", "4", "4"), 4_500_000),
        (C, 1.5, quote("2", "2", "3.2"), 1_500_000),
        (B, 1.5, quote("2", "2", "3.2"), 1_500_000),
        (A, 8.0, quote("2", "8", "8"), 8_000_000),
        (B, 4.5, quote("2", "2", "3.333333"), 2_999_900),
        (B, 2.12345, quote("2", "2", "3.2"), 2_123_400),
    ] {
        let w = world(1, 5).with(|w| {
            (w.object.spec.bid_strategy, w.object.spec.max_bid) = (strategy, max_bid);
            w.quotes.insert(HERE.into(), seen);
        });
        let limit = w.plan().facts.limit.map(Price::as_micros);
        assert_eq!(limit, Some(want), "{strategy:?} {max_bid}");
    }
}

#[test]
fn raises_are_noted_while_they_last() {
    let raised = world(1, 5).allocation("a", Active, "2").with(|w| {
        w.owner.raised_from.insert("b".into(), price("2.000001"));
    });
    let noted = |w: &World| w.observed(|o| crate::status::derive(o, &w.plan().facts, &Default::default()));
    let status = noted(&raised);
    assert_eq!(status.raised_from, [("b".to_owned(), 2.000_001)].into());
    // A later process has only the value in the status. A reverted limit is not in the status.
    let next = raised.with(|w| {
        w.owner.raised_from.clear();
        w.object.status = Some(status.clone());
    });
    assert_eq!(noted(&next).raised_from, status.raised_from);
    let lower = next.clone().with(|w| w.owner.bids.get_mut("b").unwrap().limit = price("2.000001"));
    assert!(noted(&lower).raised_from.is_empty());
    let cut_off = lower.with(|w| (w.synced, w.owner) = (false, Owner::default()));
    assert_eq!(noted(&cut_off).raised_from, status.raised_from, "nothing is known of the bids");
}

#[test]
fn price_table() {
    let quoted = |price: &'static str, at: &'static str| {
        move |w: &mut World| {
            w.quotes.insert(HERE.into(), quote("2", price, at));
        }
    };
    let scarce = quoted("4", "4");
    let at_risk = |keep: &'static str| {
        move |w: &mut World| {
            scarce(w);
            w.owner.allocations.get_mut("a").unwrap().price_to_keep = price(keep);
        }
    };
    // Bid at 3.10 that was bought at 2, ten minutes after it was raised.
    let raised = |change: &dyn Fn(&mut World)| {
        world(1, 5).allocation("a", Active, "3.1").with(|w| {
            w.owner.raised_from.insert("b".into(), price("2"));
            w.owner.amended_ms.insert("b".into(), NOW - 600_000);
            change(w);
        })
    };
    let strategy = |s: BidStrategy| move |w: &mut World| w.object.spec.bid_strategy = s;
    use BidStrategy::{AvailabilityOptimized, CostOptimized};
    for (why, world, want) in [
        ("an open bid follows", world(1, 5).bid("x", HERE, "2.88", 1).with(scarce), "amend:x@3.6000"),
        (
            "not when that is less than 2 %",
            world(1, 5).bid("x", HERE, "2.88", 1).with(quoted("2", "3.25")),
            "",
        ),
        (
            "not twice a minute",
            world(1, 5)
                .bid("x", HERE, "2.88", 1)
                .with(scarce)
                .with(|w| w.owner.amended_ms = [("x".into(), NOW - 59_000)].into()),
            "",
        ),
        (
            "a lowered maxBid at once",
            world(1, 5).bid("x", HERE, "2.88", 1).with(|w| {
                w.object.spec.max_bid = 2.5;
                w.owner.amended_ms.insert("x".into(), NOW);
            }),
            "amend:x@2.5000",
        ),
        (
            "of running nodes too",
            world(1, 5).allocation("a", Active, "2").with(|w| w.object.spec.max_bid = 2.5),
            "amend:b@2.5000",
        ),
        ("running nodes do not follow", world(1, 5).allocation("a", Active, "2").with(scarce), ""),
        (
            "balanced: what is at risk is kept",
            world(1, 5).allocation("a", Active, "2").with(at_risk("3.1")),
            "amend:b@3.1000",
        ),
        ("not above the quote", world(1, 5).allocation("a", Active, "2").with(at_risk("4.1")), ""),
        ("a raise is taken back when all is calm", raised(&|_| {}), "amend:b@2.0000"),
        (
            "and by the operator that comes after the one that raised it",
            raised(&|w| {
                w.owner.raised_from.clear();
                w.owner.amended_ms.clear();
                w.owner.bids.get_mut("b").unwrap().placed_ms = NOW - 1_000_000;
                let noted = [("b".to_owned(), 2.0)].into();
                w.object.status = Some(BidNodeStatus { raised_from: noted, ..BidNodeStatus::default() });
            }),
            "amend:b@2.0000",
        ),
        (
            "not soon after the change that the status notes",
            raised(&|w| {
                w.owner.raised_from.clear();
                w.owner.amended_ms.clear();
                let at = jiff::Timestamp::from_millisecond(NOW - 599_000).unwrap();
                w.object.status = Some(BidNodeStatus {
                    raised_from: [("b".to_owned(), 2.0)].into(),
                    last_bid_time: Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at)),
                    ..BidNodeStatus::default()
                });
            }),
            "",
        ),
        ("not soon", raised(&|w| w.owner.amended_ms = [("b".into(), NOW - 599_000)].into()), ""),
        ("not below the last call", raised(&quoted("2.5", "4")), "amend:b@2.5000"),
        ("not without a raise", raised(&|w| w.owner.raised_from.clear()), ""),
        ("not at risk", raised(&at_risk("4.1")), ""),
        (
            "not above maxBid",
            world(1, 5)
                .allocation("a", Active, "2")
                .with(at_risk("3.1"))
                .with(|w| w.object.spec.max_bid = 3.0),
            "",
        ),
        (
            "defend=false: as the article has it",
            world(1, 5)
                .allocation("a", Active, "2")
                .with(at_risk("3.1"))
                .with_annotation(annotation::DEFEND, "false"),
            "",
        ),
        (
            "cost-optimized keeps its limit",
            world(1, 5).allocation("a", Active, "2").with(at_risk("3.1")).with(strategy(CostOptimized)),
            "",
        ),
        (
            "availability-optimized: maxBid as soon as active",
            world(1, 5).allocation("a", Active, "2").with(strategy(AvailabilityOptimized)),
            "amend:b@4.5000",
        ),
        (
            "but not before",
            world(1, 5).allocation("a", Provisioning, "2").with(strategy(AvailabilityOptimized)),
            "",
        ),
        (
            "nor past the cap",
            world(1, 5)
                .allocation("a", Active, "2")
                .with(strategy(AvailabilityOptimized))
                .with_annotation(annotation::MAX_HOURLY_COST, "4"),
            "",
        ),
        (
            "open units beside running ones leave, to be bought at their own limit",
            world(2, 5)
                .allocation("a", Active, "2")
                .with(|w| w.owner.bids.get_mut("b").unwrap().open = 1)
                .with(scarce),
            "amend:b×1",
        ),
    ] {
        assert_eq!(world.verbs(), want, "{why}");
    }
}

#[test]
fn selling_table() {
    let busy = |v: &mut NodeView| (v.idle_ms, v.pods) = (None, vec![pod("p")]);
    let idle = |v: &mut NodeView| v.idle_ms = Some(NOW - 400_000);
    let all = |w: World| w.with_annotation(annotation::DISRUPTION_BUDGET, "100%");
    for (why, world, want) in [
        ("open units first", world(1, 5).bid("x", HERE, "2.88", 3), "amend:x×1"),
        ("whole bids are cancelled", world(0, 5).bid("x", HERE, "2.88", 3), "cancel:x"),
        (
            "then matched allocations",
            world(1, 5).allocation("a", Matched, "2").allocation("c", Provisioning, "2"),
            "release:a",
        ),
        ("then what boots", world(0, 5).allocation("a", Provisioning, "2"), "release:a"),
        ("a node that was busy a moment ago stays", world(0, 5).allocation("a", Active, "2"), ""),
        ("an idle one goes", world(0, 5).allocation("a", Active, "2").node(idle), "drain:bn-a"),
        ("never below the minimum", world(1, 5).allocation("a", Active, "2").node(idle), ""),
        (
            "idle before busy",
            all(world(1, 1).allocation("a", Active, "3").node(busy).allocation("c", Active, "2").node(idle)),
            "drain:bn-c",
        ),
        (
            "among equals the most expensive",
            all(world(0, 5).allocation("a", Active, "2").node(idle).allocation("c", Active, "3").node(idle)),
            "drain:bn-c drain:bn-a",
        ),
        (
            "one at a time by default",
            world(0, 5).allocation("a", Active, "2").node(idle).allocation("c", Active, "3").node(idle),
            "drain:bn-c",
        ),
        (
            "none with a budget of 0",
            world(0, 5)
                .allocation("a", Active, "2")
                .node(idle)
                .with_annotation(annotation::DISRUPTION_BUDGET, "0"),
            "",
        ),
        (
            "a pod that must not be moved keeps its node",
            world(1, 1)
                .allocation("a", Active, "2")
                .node(busy)
                .allocation("c", Active, "2")
                .node(busy)
                .node(|v| v.pods[0].keep = true),
            "drain:bn-a",
        ),
        (
            "consolidation=never",
            world(0, 5)
                .allocation("a", Active, "2")
                .node(idle)
                .with_annotation(annotation::CONSOLIDATION, "never"),
            "",
        ),
    ] {
        assert_eq!(world.verbs(), want, "{why}");
    }
}

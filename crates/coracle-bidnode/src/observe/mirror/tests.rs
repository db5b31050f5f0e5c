//! Tests of the mirror: frames as input; owners, changes and events as output.

use pb::{AllocationStage as Stage, AllocationState as Sent};

use super::*;

fn frame(frame: Frame) -> pb::OwnerFrame {
    pb::OwnerFrame { seq: 1, market: "t/r".into(), frame: Some(frame) }
}

fn bid(open: u32, active: u32) -> pb::Bid {
    let (bid, owner_uid, market) = ("b".into(), "u".into(), "t/r".into());
    pb::Bid { bid, owner_uid, market, open, active, ..pb::Bid::default() }
}

fn allocation(state: impl Into<i32>) -> pb::Allocation {
    let (allocation, owner_uid) = ("a".into(), "u".into());
    pb::Allocation { allocation, owner_uid, state: state.into(), ..pb::Allocation::default() }
}

/// State of a market that is newer than this program.
const LEARNED: i32 = 77;

#[test]
fn owner_is_current_once_stream_reaches_reply() {
    let mirror = Mirror::default();
    mirror.record_reply("u", &"t/r".into(), 1, 5, None);
    assert!(!mirror.owner("u").is_current());
    mirror.frame(frame(Frame::Bid(bid(2, 0))), 0);
    assert!(!mirror.owner("u").is_current());
    mirror.frame(frame(Frame::Owner(pb::OwnerVersion { owner_uid: "u".into(), version: 1 })), 0);
    let owner = mirror.owner("u");
    assert!(owner.is_current() && owner.bids["b"].open == 2 && owner.last_bid_ms == 5);
}

#[test]
fn new_stream_replaces_owners_of_old_stream() {
    let mirror = Mirror::default();
    mirror.frame(frame(Frame::Bid(bid(2, 0))), 0);
    mirror.record_reply("u", &"t/r".into(), 9, 5, None);
    mirror.frame(frame(Frame::Synced(false)), 0);
    assert_eq!(mirror.owner("u").bids.len(), 1, "old owners stay until the new stream is complete");
    assert_eq!(mirror.frame(frame(Frame::Synced(true)), 0), [Change::Everyone]);
    let owner = mirror.owner("u");
    assert!(owner.bids.is_empty() && owner.is_current() && owner.last_bid_ms == 5);
    assert!(!mirror.is_synced(), "prices are not known yet");
    mirror.set_prices_synced();
    assert!(mirror.is_synced());
    assert_eq!(mirror.on_stream_end(), [Change::Everyone]);
    assert!(!mirror.is_synced() && mirror.on_stream_end().is_empty());
}

#[test]
fn notice_is_urgent_and_failed_launch_is_removed() {
    let mirror = Mirror::default();
    mirror.frame(frame(Frame::Allocation(allocation(Sent::Provisioning))), 0);
    let gone = pb::Allocation { owner_uid: String::new(), ..allocation(Sent::Returned) };
    assert_eq!(
        mirror.frame(frame(Frame::Allocation(gone)), 0),
        [Change::Owner { uid: "u".into(), urgent: false }]
    );
    assert!(mirror.owner("u").allocations.is_empty());
    mirror.frame(frame(Frame::Allocation(allocation(Sent::Active))), 0);
    assert_eq!(
        mirror.frame(frame(Frame::Allocation(allocation(Sent::Preempting))), 0),
        [Change::Owner { uid: "u".into(), urgent: true }]
    );
    let reasons: Vec<_> = mirror.take_events("u").into_iter().map(|n| n.reason).collect();
    assert_eq!(reasons, ["NodeLaunched", "NodeReady"]);
}

#[test]
fn milestone_is_reported_once_and_not_while_listing() {
    let mirror = Mirror::default();
    let placed = pb::Bid { placed_at_ms: 1_000, ..bid(0, 1) };
    mirror.frame(frame(Frame::Bid(placed.clone())), 0);
    let put = |state: Sent, stage: Stage, now_ms| {
        let (matched_at_ms, active_at_ms) = (1_500, 9_000);
        let allocation = pb::Allocation { bid: "b".into(), stage: stage.into(), ..allocation(state) };
        let allocation = pb::Allocation { matched_at_ms, active_at_ms, ..allocation };
        mirror.frame(frame(Frame::Allocation(allocation)), now_ms);
    };
    put(Sent::Provisioning, Stage::Ordered, 1_600);
    put(Sent::Provisioning, Stage::Launched, 4_000);
    put(Sent::Provisioning, Stage::Launched, 4_100);
    put(Sent::Provisioning, Stage::Registered, 6_000);
    put(Sent::Active, Stage::Unspecified, 9_100);
    put(Sent::Active, Stage::Unspecified, 9_900);
    put(Sent::Preempting, Stage::Unspecified, 9_950);
    let reached: Vec<_> = mirror.take_reached().into_iter().map(|r| (r.milestone, r.took_ms)).collect();
    let want = [
        (Milestone::Matched, 500),
        (Milestone::Launched, 3_000),
        (Milestone::Registered, 5_000),
        (Milestone::Ready, 8_000),
    ];
    assert_eq!(reached, want);
    mirror.frame(frame(Frame::Synced(false)), 0);
    mirror.frame(frame(Frame::Bid(placed)), 0);
    put(Sent::Provisioning, Stage::Launched, 9_990);
    mirror.frame(frame(Frame::Synced(true)), 0);
    assert_eq!(mirror.take_reached(), [], "milestones before the stream began are not reported");
}

/// A newer market with a new state must not make an older operator delete the Node, neither through a change nor through a new
/// stream, even if the operator was started after the change.
#[test]
fn unknown_state_keeps_the_allocation() {
    let mirror = Mirror::default();
    let put = |state: i32| mirror.frame(frame(Frame::Allocation(allocation(state))), 0);
    put(Sent::Active.into());
    assert_eq!(put(LEARNED), []);
    assert_eq!(mirror.owner("u").allocations["a"].state, AllocationState::Active);
    mirror.frame(frame(Frame::Synced(false)), 0);
    put(LEARNED);
    mirror.frame(frame(Frame::Synced(true)), 0);
    assert_eq!(mirror.owner("u").allocations["a"].state, AllocationState::Active, "in a new stream");

    let started = Mirror::default();
    started.frame(frame(Frame::Synced(false)), 0);
    started.frame(frame(Frame::Allocation(allocation(LEARNED))), 0);
    started.frame(frame(Frame::Synced(true)), 0);
    assert!(started.has_allocation(&"a".into()) && !started.owner("u").is_over());
    started.frame(frame(Frame::Allocation(allocation(Sent::Ended))), 0);
    assert!(!started.has_allocation(&"a".into()), "it is over in a state that is known");
}

#[test]
fn raise_of_running_bid_is_known_until_reverted() {
    let mirror = Mirror::default();
    let put = |micros: i64, active: u32| {
        let bid = pb::Bid { limit_micros: micros, ..bid(1, active) };
        mirror.frame(frame(Frame::Bid(bid)), 0);
    };
    let from = || mirror.owner("u").raised_from.get("b").map(|price| price.as_micros());
    put(100, 0);
    put(200, 0);
    assert_eq!(from(), None, "an open bid follows the price");
    put(200, 1);
    put(300, 1);
    put(400, 1);
    assert_eq!(from(), Some(200));
    mirror.frame(frame(Frame::Synced(false)), 0);
    put(400, 1);
    mirror.frame(frame(Frame::Synced(true)), 0);
    assert_eq!(from(), Some(200), "in a new stream");
    put(200, 1);
    assert_eq!(from(), None);
}

#[test]
fn failed_launches_are_counted_until_a_node_is_active() {
    let mirror = Mirror::default();
    let fail = || {
        mirror.frame(frame(Frame::Allocation(allocation(Sent::Provisioning))), 0);
        let reason = EndReason::ProvisionFailed.as_str().into();
        let ended = pb::Allocation { reason, ended_at_ms: 7, ..allocation(Sent::Ended) };
        mirror.frame(frame(Frame::Allocation(ended)), 0);
    };
    fail();
    fail();
    assert_eq!((mirror.owner("u").failures, mirror.owner("u").failed_ms), (2, 7));
    mirror.frame(frame(Frame::Allocation(allocation(Sent::Active))), 0);
    assert_eq!(mirror.owner("u").failures, 0);
}

#[test]
fn bidnodes_are_owners_with_bidnode_labels() {
    let mirror = Mirror::default();
    mirror.frame(frame(Frame::Bid(bid(1, 0))), 0);
    assert_eq!(mirror.bidnodes(), []);
    let labels = [(names::BIDNODE, "ml"), (names::NAMESPACE, "team")];
    let labels = labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    mirror.frame(frame(Frame::Bid(pb::Bid { labels, tenant: "c/team".into(), ..bid(1, 0) })), 0);
    let (uid, owner) = mirror.bidnodes().remove(0);
    assert_eq!((&*uid, owner.bidnode.as_deref(), &*owner.tenant), ("u", Some("team/ml"), "c/team"));
}

//! Deletion of a BidNode: its bids, allocations and Nodes are removed first, the finalizer last.

use coracle_api::bidnode::names;
use coracle_auction::AllocationState;
use kube::ResourceExt as _;

use super::{
    counts,
    drain::Haste,
    input::Observed,
    nodes::{delete_node, drain_change, drain_node, plan_orphan},
    output::{Plan, Release, Step},
};

/// Drain timeout if the specification is invalid, in milliseconds.
const DRAIN_MS: i64 = 300_000;

pub(super) fn plan(o: &Observed<'_>, plan: &mut Plan) {
    if !o.object.finalizers().iter().any(|f| f == names::FINALIZER) {
        return;
    }
    if o.settings.is_ok_and(|s| s.force_delete) {
        plan.steps.extend(o.nodes.iter().map(delete_node));
        plan.steps.push(Step::RemoveFinalizer { confirm: false });
        return;
    }
    if !o.synced {
        plan.facts.terminating =
            Some("the market does not answer, so bids and allocations cannot be released".to_owned());
        plan.again = Some(o.times.retry);
        return;
    }
    if !o.owner.is_current() {
        plan.again = Some(o.times.wait);
        return;
    }
    plan.again = Some(o.times.evict);
    release_all(o, plan);
    let timeout = o.settings.map_or(DRAIN_MS, |s| s.drain_timeout_ms);
    for view in o.nodes {
        match o.owner.allocations.get(&view.facts.allocation) {
            None if o.owner.has(&view.facts.allocation) => {}
            None => plan_orphan(o, view, 0, plan),
            Some(allocation)
                if matches!(allocation.state, AllocationState::Active | AllocationState::Preempting) =>
            {
                match view.facts.draining_ms {
                    None => plan.steps.push(Step::DrainNode(drain_change(&view.facts, o.now_ms))),
                    Some(from_ms) => {
                        let notice = if allocation.preempt_ms > 0 { allocation.preempt_ms } else { i64::MAX };
                        let deadline_ms = (from_ms + timeout).min(notice);
                        drain_node(o, view, allocation, Haste::By { deadline_ms, from_ms }, plan);
                    }
                }
            }
            Some(_) => {}
        }
    }
    let left = o.owner.bids.values().map(|b| b.open).sum::<u32>();
    if o.owner.allocations.is_empty() && o.owner.unknown.is_empty() && left == 0 && o.nodes.is_empty() {
        plan.steps.push(Step::RemoveFinalizer { confirm: true });
    } else {
        let (allocations, nodes) = (o.owner.allocations.len(), o.nodes.len());
        plan.facts.terminating =
            Some(format!("{left} open bids, {allocations} allocations and {nodes} Nodes are left"));
    }
}

/// Cancels open bids, and releases allocations that are starting or run without a Node.
fn release_all(o: &Observed<'_>, plan: &mut Plan) {
    for (id, bid) in o.owner.bids.iter().filter(|(_, b)| b.open > 0) {
        plan.steps.push(Step::CancelBid { bid: id.clone(), market: bid.market.clone() });
    }
    for (id, allocation) in &o.owner.allocations {
        let starts = matches!(allocation.state, AllocationState::Matched | AllocationState::Provisioning);
        if starts || counts::view_of(o, id).is_none() {
            let note = format!("allocation {id} released: the BidNode is deleted");
            plan.steps.push(Step::ReleaseAllocation(Release {
                allocation: id.clone(),
                market: allocation.market.clone(),
                note,
                node: None,
                failed: false,
                draining_ms: None,
            }));
        }
    }
}

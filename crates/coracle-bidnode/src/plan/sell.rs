//! Cancellations and releases of what has the wrong type or exceeds the desired number.

use std::cmp::Reverse;

use coracle_auction::AllocationState;

use super::{
    counts,
    input::{NodeView, Observed},
    nodes,
    output::{Plan, Release, Step},
};
use crate::{ids::AllocationName, observe::bids::Allocation, settings::Settings};

/// Plans for bids and allocations of a type or region that is no longer requested. Open and starting ones end at once. Running
/// ones end when a replacement is Ready (make before break), within the disruption budget.
pub(super) fn release_outdated(o: &Observed<'_>, settings: &Settings, plan: &mut Plan) {
    let chosen = plan.facts.market.clone();
    for (id, bid) in o.owner.bids.iter().filter(|(_, b)| b.open > 0) {
        // If the chosen market does not exist, no bid is cancelled for it.
        let elsewhere = plan.facts.quote.is_some() && chosen.as_ref() != Some(&bid.market);
        if elsewhere {
            plan.steps.push(Step::CancelBid { bid: id.clone(), market: bid.market.clone() });
        }
    }
    if plan.facts.quote.is_none() {
        return;
    }
    for (id, allocation) in o.owner.allocations.iter().filter(|(_, u)| counts::is_outdated(o, &u.market)) {
        if matches!(allocation.state, AllocationState::Matched | AllocationState::Provisioning) {
            plan.steps.push(release(id, allocation, "the specification names another type or region"));
        }
    }
    let counts = plan.facts.counts;
    let spare = counts.active.saturating_sub(counts.desired).min(counts.outdated);
    drain_surplus(o, settings, spare, |allocation| counts::is_outdated(o, &allocation.market), plan);
}

/// Plans for more nodes than desired: open units end first, then matched and provisioning allocations, then nodes.
pub(super) fn release_excess(o: &Observed<'_>, settings: &Settings, plan: &mut Plan) {
    let counts = plan.facts.counts;
    let mut left = counts.have.saturating_sub(counts.desired);
    if left == 0 || plan.steps.iter().any(Step::is_trade) {
        return;
    }
    // Youngest bid first, so that the bid that has waited longest keeps its priority.
    for (id, bid) in o.owner.bids.iter().rev().filter(|(_, b)| b.open > 0) {
        let cut = bid.open.min(left);
        if cut == 0 {
            break;
        }
        left -= cut;
        let (bid_id, market) = (id.clone(), bid.market.clone());
        plan.steps.push(if cut == bid.open {
            Step::CancelBid { bid: bid_id, market }
        } else {
            let units = Some(bid.open - cut + bid.live() + bid.preempting);
            Step::AmendBid { bid: bid_id, market, limit: None, units }
        });
    }
    for state in [AllocationState::Matched, AllocationState::Provisioning] {
        let of = o.owner.allocations.iter().rev().filter(|(_, u)| u.state == state);
        for (id, allocation) in of.filter(|(_, u)| !counts::is_outdated(o, &u.market)) {
            if left == 0 {
                return;
            }
            left -= 1;
            plan.steps.push(release(id, allocation, "no longer needed"));
        }
    }
    drain_surplus(o, settings, left, |allocation| !counts::is_outdated(o, &allocation.market), plan);
}

fn release(id: &AllocationName, allocation: &Allocation, why: &str) -> Step {
    Step::ReleaseAllocation(Release {
        allocation: id.clone(),
        market: allocation.market.clone(),
        note: format!("allocation {id} released: {why}"),
        node: None,
        failed: false,
        draining_ms: None,
    })
}

/// Starts to drain up to `wanted` active nodes, idle and expensive ones first.
fn drain_surplus(
    o: &Observed<'_>,
    settings: &Settings,
    wanted: u32,
    which: impl Fn(&Allocation) -> bool,
    plan: &mut Plan,
) {
    let counts = plan.facts.counts;
    let emptied = o.nodes.iter().filter(|v| counts::is_draining(v) && !v.facts.is_tainted(nodes::NOTICE));
    let emptied = u32::try_from(emptied.count()).unwrap_or(u32::MAX);
    let begun = plan.steps.iter().filter(|s| matches!(s, Step::DrainNode(_))).count();
    let begun = u32::try_from(begun).unwrap_or(u32::MAX);
    let budget = settings.disruption.of(counts.active + emptied).saturating_sub(emptied + begun);
    let mut candidates: Vec<(&NodeView, &Allocation)> = o
        .nodes
        .iter()
        .filter(|view| counts::is_active(o, view) && view.pods.iter().all(|p| !p.keep || !p.is_workload()))
        .filter_map(|view| Some((view, o.owner.allocations.get(&view.facts.allocation)?)))
        .filter(|(_, allocation)| which(allocation))
        .collect();
    candidates.sort_by_key(|(view, allocation)| {
        let disruption: i64 = view.pods.iter().filter(|p| p.is_workload()).map(|p| p.cost).sum();
        let is_idle = view.idle_ms.is_some_and(|since| o.now_ms - since >= settings.idle_after_ms);
        (
            Reverse(is_idle),
            Reverse(allocation.price),
            Reverse(allocation.limit),
            disruption,
            Reverse(allocation.active_ms),
        )
    });
    let count = usize::try_from(wanted.min(budget)).unwrap_or(usize::MAX);
    let chosen = candidates.into_iter().take(count);
    plan.steps.extend(chosen.map(|(view, _)| Step::DrainNode(nodes::drain_change(&view.facts, o.now_ms))));
}

//! What is given back: of the wrong type, or too many.

use std::cmp::Reverse;

use super::{NodeView, Observed, Plan, Step, counts, is_trade, nodes};
use crate::{
    mirror::{Unit, UnitState},
    settings::Settings,
};

/// Bids and units of a type or region that is no longer asked for. What waits or boots goes at once; what runs goes when
/// a replacement is Ready (make before break), within the disruption budget.
pub(super) fn outdated(o: &Observed<'_>, settings: &Settings, plan: &mut Plan) {
    let chosen = plan.facts.market.clone();
    for (id, bid) in o.owner.bids.iter().filter(|(_, b)| b.open > 0) {
        // Nothing is taken back for a market that does not exist.
        let elsewhere = plan.facts.quote.is_some() && chosen.as_ref() != Some(&bid.market);
        if elsewhere {
            plan.steps.push(Step::Cancel { bid: id.clone(), market: bid.market.clone() });
        }
    }
    if plan.facts.quote.is_none() {
        return;
    }
    for (id, unit) in o.owner.units.iter().filter(|(_, u)| counts::is_outdated(o, &u.market)) {
        if matches!(unit.state, UnitState::Matched | UnitState::Provisioning) {
            plan.steps.push(release(id, unit, "another type or region is asked for"));
        }
    }
    let counts = plan.facts.counts;
    let spare = counts.active.saturating_sub(counts.desired).min(counts.outdated);
    empty(o, settings, spare, |unit| counts::is_outdated(o, &unit.market), plan);
}

/// More than is wanted: open units, then those that did not start, then those that boot, then nodes.
pub(super) fn excess(o: &Observed<'_>, settings: &Settings, plan: &mut Plan) {
    let counts = plan.facts.counts;
    let mut left = counts.have.saturating_sub(counts.desired);
    if left == 0 || plan.steps.iter().any(is_trade) {
        return;
    }
    // Youngest first: what waited longest keeps its place.
    for (id, bid) in o.owner.bids.iter().rev().filter(|(_, b)| b.open > 0) {
        let cut = bid.open.min(left);
        if cut == 0 {
            break;
        }
        left -= cut;
        let (bid_id, market) = (id.clone(), bid.market.clone());
        plan.steps.push(if cut == bid.open {
            Step::Cancel { bid: bid_id, market }
        } else {
            let units = Some(bid.open - cut + bid.live() + bid.preempting);
            Step::Amend { bid: bid_id, market, limit: None, units }
        });
    }
    for state in [UnitState::Matched, UnitState::Provisioning] {
        let of = o.owner.units.iter().rev().filter(|(_, u)| u.state == state);
        for (id, unit) in of.filter(|(_, u)| !counts::is_outdated(o, &u.market)) {
            if left == 0 {
                return;
            }
            left -= 1;
            plan.steps.push(release(id, unit, "no longer needed"));
        }
    }
    empty(o, settings, left, |unit| !counts::is_outdated(o, &unit.market), plan);
}

fn release(id: &str, unit: &Unit, why: &str) -> Step {
    let note = format!("unit {id} is given back: {why}");
    Step::Release { unit: id.to_owned(), market: unit.market.clone(), note, failed: false }
}

/// Begins to empty up to `wanted` active nodes, those first that cost least to lose.
fn empty(o: &Observed<'_>, settings: &Settings, wanted: u32, which: impl Fn(&Unit) -> bool, plan: &mut Plan) {
    let counts = plan.facts.counts;
    let emptied = o.nodes.iter().filter(|v| counts::is_draining(v) && !v.facts.is_tainted(nodes::NOTICE));
    let emptied = u32::try_from(emptied.count()).unwrap_or(u32::MAX);
    let begun = plan.steps.iter().filter(|s| matches!(s, Step::Drain(_))).count();
    let begun = u32::try_from(begun).unwrap_or(u32::MAX);
    let budget = settings.disruption.of(counts.active + emptied).saturating_sub(emptied + begun);
    let mut candidates: Vec<(&NodeView, &Unit)> = o
        .nodes
        .iter()
        .filter(|view| counts::is_active(o, view) && view.pods.iter().all(|p| !p.keep || !p.is_workload()))
        .filter_map(|view| Some((view, o.owner.units.get(&view.facts.allocation)?)))
        .filter(|(_, unit)| which(unit))
        .collect();
    candidates.sort_by_key(|(view, unit)| {
        let disruption: i64 = view.pods.iter().filter(|p| p.is_workload()).map(|p| p.cost).sum();
        let is_idle = view.idle_ms.is_some_and(|since| o.now_ms - since >= settings.idle_after_ms);
        (Reverse(is_idle), Reverse(unit.price), Reverse(unit.limit), disruption, Reverse(unit.active_ms))
    });
    let count = usize::try_from(wanted.min(budget)).unwrap_or(usize::MAX);
    let chosen = candidates.into_iter().take(count);
    plan.steps.extend(chosen.map(|(view, _)| Step::Drain(nodes::drain_change(&view.facts, o.now_ms))));
}

//! A BidNode that is deleted: everything that it has outside goes first, and the object last.

use coracle_api::bidnode::names;
use kube::ResourceExt as _;

use super::{
    Observed, Plan, Step, counts,
    drain::Haste,
    nodes::{drain_change, empty, orphan},
};
use crate::mirror::UnitState;

/// How long pods may take without a readable specification, in milliseconds.
const DRAIN_MS: i64 = 300_000;

pub(super) fn plan(o: &Observed<'_>, plan: &mut Plan) {
    if !o.object.finalizers().iter().any(|f| f == names::FINALIZER) {
        return;
    }
    if o.settings.is_ok_and(|s| s.force_delete) {
        let all = o
            .nodes
            .iter()
            .map(|v| Step::DeleteNode { name: v.facts.name.clone(), allocation: v.facts.allocation.clone() });
        plan.steps.extend(all);
        plan.steps.push(Step::LetGo { look: false });
        return;
    }
    if !o.synced {
        plan.facts.terminating =
            Some("the market does not answer, and it must take everything back".to_owned());
        plan.again = Some(o.times.retry);
        return;
    }
    if !o.owner.is_current() {
        plan.again = Some(o.times.wait);
        return;
    }
    plan.again = Some(o.times.evict);
    give_back(o, plan);
    let timeout = o.settings.map_or(DRAIN_MS, |s| s.drain_timeout_ms);
    for view in o.nodes {
        match o.owner.units.get(&view.facts.allocation) {
            None => orphan(o, view, 0, plan),
            Some(unit) if matches!(unit.state, UnitState::Active | UnitState::Preempting) => {
                match view.facts.draining_ms {
                    None => plan.steps.push(Step::Drain(drain_change(&view.facts, o.now_ms))),
                    Some(from_ms) => {
                        let notice = if unit.preempt_ms > 0 { unit.preempt_ms } else { i64::MAX };
                        let deadline_ms = (from_ms + timeout).min(notice);
                        empty(o, view, unit, Haste::By { deadline_ms, from_ms }, plan);
                    }
                }
            }
            Some(_) => {}
        }
    }
    let left = o.owner.bids.values().map(|b| b.open).sum::<u32>();
    if o.owner.units.is_empty() && left == 0 && o.nodes.is_empty() {
        plan.steps.push(Step::LetGo { look: true });
    } else {
        let (units, nodes) = (o.owner.units.len(), o.nodes.len());
        plan.facts.terminating = Some(format!("{left} open bids, {units} units and {nodes} Nodes are left"));
    }
}

/// What waits, boots, or runs without a Node.
fn give_back(o: &Observed<'_>, plan: &mut Plan) {
    for (id, bid) in o.owner.bids.iter().filter(|(_, b)| b.open > 0) {
        plan.steps.push(Step::Cancel { bid: id.clone(), market: bid.market.clone() });
    }
    for (id, unit) in &o.owner.units {
        let starts = matches!(unit.state, UnitState::Matched | UnitState::Provisioning);
        if starts || counts::view_of(o, id).is_none() {
            let note = format!("unit {id} is given back: the BidNode is deleted");
            plan.steps.push(Step::Release {
                unit: id.clone(),
                market: unit.market.clone(),
                note,
                failed: false,
            });
        }
    }
}

//! Nodes: labels and taints, notices, emptying, failures. Nothing here buys anything: a node that leaves stops counting,
//! and the ordinary shortfall buys its replacement.

use std::collections::BTreeMap;

use coracle_api::bidnode::names;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::{
    NodeChange, NodeView, Observed, Plan, Step,
    counts::{self, Health},
    drain::{self, Haste},
};
use crate::{
    demand::template,
    facts::NodeFacts,
    mirror::{Unit, UnitState},
    settings::{Settings, Taint},
};

/// Taint of a node under notice.
pub(super) const NOTICE: &str = names::PREEMPTING;
/// Longest wait for a replacement before pods are asked to go, in milliseconds.
const WAIT_MS: i64 = 30_000;

/// All nodes, and the units that have lost theirs.
pub(super) fn plan(o: &Observed<'_>, settings: &Settings, plan: &mut Plan) {
    if plan.facts.counts.is_degraded() {
        let c = plan.facts.counts;
        plan.facts.degraded =
            Some(format!("{} of {} nodes are not Ready: repairs are held", c.unhealthy, c.running));
    }
    for view in o.nodes {
        match o.owner.units.get(&view.facts.allocation) {
            Some(unit) if unit.state == UnitState::Preempting => leaving(o, view, unit, plan),
            Some(unit) => staying(o, settings, view, unit, plan),
            None => orphan(o, view, o.times.orphan_ms, plan),
        }
    }
    let lost = o
        .owner
        .units
        .iter()
        .filter(|(id, u)| u.state == UnitState::Active && counts::view_of(o, id).is_none());
    for (id, unit) in lost {
        failed(o, id, unit, None, plan);
    }
}

/// A Node whose unit is over: the machine is gone or going.
pub(super) fn orphan(o: &Observed<'_>, view: &NodeView, age_ms: i64, plan: &mut Plan) {
    if o.synced && o.owner.is_current() && o.now_ms - view.facts.created_ms >= age_ms {
        let (name, allocation) = (view.facts.name.clone(), view.facts.allocation.clone());
        plan.steps.push(Step::DeleteNode { name, allocation });
    } else {
        plan.again = Some(o.times.wait);
    }
}

/// A node that is to stay, or that we empty ourselves.
fn staying(o: &Observed<'_>, settings: &Settings, view: &NodeView, unit: &Unit, plan: &mut Plan) {
    if let Some(change) = shape(o, settings, &view.facts, unit) {
        plan.steps.push(Step::Shape(change));
    }
    if unit.state != UnitState::Active {
        return;
    }
    failed(o, &view.facts.allocation, unit, Some(view), plan);
    if counts::is_draining(view) {
        empty(o, view, unit, Haste::None, plan);
    }
}

/// Empties a node, and gives its unit back when that is done.
pub(super) fn empty(o: &Observed<'_>, view: &NodeView, unit: &Unit, haste: Haste, plan: &mut Plan) {
    plan.again = Some(plan.again.map_or(o.times.evict, |again| again.min(o.times.evict)));
    match drain::steps(view, haste, o.now_ms) {
        Some(steps) => plan.steps.extend(steps),
        None if o.synced && o.owner.is_current() => plan.steps.push(Step::Release {
            unit: view.facts.allocation.clone(),
            market: unit.market.clone(),
            note: format!("Node {} is empty and given back", view.facts.name),
            failed: false,
        }),
        None => {}
    }
}

/// Gives up a unit whose Node has not been Ready for too long, unless repairs are held.
fn failed(o: &Observed<'_>, id: &str, unit: &Unit, view: Option<&NodeView>, plan: &mut Plan) {
    let ill = counts::health(o, unit, view);
    let dead = ill == Health::Dead || view.is_none() && ill == Health::Lost;
    if !dead || plan.facts.counts.is_degraded() || !o.synced || !o.owner.is_current() {
        return;
    }
    let note = format!("Node {} is not Ready any more and is replaced", unit.node);
    let market = unit.market.clone();
    plan.steps.push(Step::Release { unit: id.to_owned(), market, note, failed: true });
}

/// A node under notice: tell, then empty it, and be gone before the deadline.
fn leaving(o: &Observed<'_>, view: &NodeView, unit: &Unit, plan: &mut Plan) {
    if !view.facts.is_tainted(NOTICE) {
        if let Some(other) = idle_sibling(o, view, unit) {
            let (unit_id, market) = (view.facts.allocation.clone(), unit.market.clone());
            plan.steps.push(Step::Substitute { unit: unit_id, other, market });
            return;
        }
        plan.steps.push(Step::Notice {
            change: notice_change(&view.facts, unit, o.now_ms),
            note: told(view, unit),
        });
        plan.again = Some(o.times.wait);
        return;
    }
    let began = view.facts.draining_ms.unwrap_or(o.now_ms);
    let wait = WAIT_MS.min((unit.preempt_ms - began) / 4);
    // No replacement in sight is no reason to wait.
    if plan.facts.counts.in_flight > 0 && o.now_ms - began < wait {
        plan.again = Some(o.times.wait);
        return;
    }
    empty(o, view, unit, Haste::By { deadline_ms: unit.preempt_ms, from_ms: began }, plan);
}

/// The sentence for people: the article's when the price did it.
fn told(view: &NodeView, unit: &Unit) -> String {
    let name = &view.facts.name;
    match unit.reason.as_str() {
        "" | "Preempted" => format!("Node {name} pre-empted due to price increase"),
        reason => format!("Node {name} reclaimed: {reason}"),
    }
}

/// A node of the same lot that nobody uses and that costs no more, to be given up instead of one in use.
fn idle_sibling(o: &Observed<'_>, view: &NodeView, unit: &Unit) -> Option<String> {
    if view.idle_ms.is_some() || unit.reason != "Preempted" || !o.synced || view.facts.draining_ms.is_some() {
        return None;
    }
    let is_idle =
        |id: &str| counts::view_of(o, id).is_some_and(|v| v.idle_ms.is_some() && !counts::is_draining(v));
    let fits =
        |other: &Unit| other.state == UnitState::Active && other.lot == unit.lot && other.limit <= unit.limit;
    let mut siblings = o.owner.units.iter().filter(|(id, other)| fits(other) && is_idle(id));
    siblings.next().map(|(id, _)| id.clone())
}

fn taints_json(taints: &[Taint]) -> Value {
    taints.iter().map(|t| json!({"key": t.key, "value": t.value, "effect": t.effect})).collect()
}

fn notice_change(node: &NodeFacts, unit: &Unit, now_ms: i64) -> NodeChange {
    let mut taints = node.taints.clone();
    taints.push(Taint {
        key: NOTICE.to_owned(),
        value: unit.preempt_ms.div_euclid(1000).to_string(),
        effect: "NoSchedule".to_owned(),
    });
    let patch = json!({
        "metadata": {
            "resourceVersion": node.version,
            "labels": {names::NO_BALANCER: "true"},
            "annotations": {names::DRAINING: now_ms.to_string()},
        },
        "spec": {"unschedulable": true, "taints": taints_json(&taints)},
    });
    NodeChange { name: node.name.clone(), patch }
}

/// No new pods, and the time from which on we empty it.
pub(super) fn drain_change(node: &NodeFacts, now_ms: i64) -> NodeChange {
    let patch = json!({
        "metadata": {
            "resourceVersion": node.version,
            "annotations": {names::DRAINING: now_ms.to_string()},
        },
        "spec": {"unschedulable": true},
    });
    NodeChange { name: node.name.clone(), patch }
}

/// What of a Node is ours by the specification, as it is stored on it.
#[derive(serde::Serialize, serde::Deserialize, Default)]
struct Given {
    labels: BTreeMap<String, String>,
    taints: Vec<(String, String)>,
}

/// The patch that gives a Node its labels and taints; `None`: it has them.
fn shape(o: &Observed<'_>, settings: &Settings, node: &NodeFacts, unit: &Unit) -> Option<NodeChange> {
    let (kind, region) = unit.market.split_once('/')?;
    let own = Settings { instance_type: kind.to_owned(), ..settings.clone() };
    let namespace = o.object.namespace().unwrap_or_default();
    let wanted = template(&namespace, &o.object.name_any(), &own, region);
    let given = Given {
        labels: settings.labels.clone(),
        taints: settings.taints.iter().map(|t| (t.key.clone(), t.effect.clone())).collect(),
    };
    let text = serde_json::to_string(&given).unwrap_or_default();
    let before: Given = serde_json::from_str(&node.given).unwrap_or_default();
    // Whoever else put a taint here keeps it; what we gave and no longer give goes.
    let is_ours = |t: &Taint| before.taints.contains(&(t.key.clone(), t.effect.clone()));
    let is_wanted = |t: &Taint| settings.taints.iter().any(|w| w.key == t.key && w.effect == t.effect);
    let mut taints: Vec<_> = node
        .taints
        .iter()
        .filter(|t| !is_ours(t) && !is_wanted(t) && (t.key != names::UNINITIALIZED || !node.ready))
        .cloned()
        .collect();
    taints.extend(settings.taints.iter().cloned());
    let mut labels: BTreeMap<String, Value> = wanted
        .iter()
        .filter(|(key, value)| node.labels.get(*key) != Some(value))
        .map(|(key, value)| (key.clone(), json!(value)))
        .collect();
    let dropped = before.labels.keys().filter(|k| !wanted.contains_key(*k) && node.labels.contains_key(*k));
    labels.extend(dropped.map(|key| (key.clone(), Value::Null)));
    let (mut have, mut want) = (node.taints.clone(), taints.clone());
    have.sort();
    want.sort();
    if labels.is_empty() && have == want && node.given == text {
        return None;
    }
    let patch = json!({
        "metadata": {
            "resourceVersion": node.version, "labels": labels, "annotations": {names::GIVEN: text},
        },
        "spec": {"taints": taints_json(&taints)},
    });
    Some(NodeChange { name: node.name.clone(), patch })
}

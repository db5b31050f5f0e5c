//! Steps for Nodes: labels and taints, notices, drains, failures. Nothing is bought here: a leaving node no longer counts, and
//! the resulting shortfall buys its replacement.

use std::collections::BTreeMap;

use coracle_api::bidnode::names;
use coracle_auction::AllocationState;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::{
    counts::{self, Health},
    demand::template,
    drain::{self, Haste},
    input::{NodeView, Observed},
    output::{NodeChange, Plan, Release, Step},
};
use crate::{
    ids::AllocationName,
    observe::{bids::Allocation, facts::NodeFacts},
    settings::{Settings, Taint},
};

/// Taint of a node under notice.
pub(super) const NOTICE: &str = names::PREEMPTING;
/// Finalizer of this controller's Nodes: a deletion waits for the drain.
pub(crate) const NODE_FINALIZER: &str = "kubebid.io/node";
/// Longest wait for a replacement before pods of a node under notice are evicted, in milliseconds.
const WAIT_MS: i64 = 30_000;

/// Plans the steps for all Nodes, and for allocations without a Node. Without settings, only notices, drains under way, and
/// Nodes whose allocation has ended are handled.
pub(super) fn plan(o: &Observed<'_>, settings: Option<&Settings>, plan: &mut Plan) {
    if plan.facts.counts.is_degraded() {
        let c = plan.facts.counts;
        let of = if c.fleet_unhealthy { ", and many of other BidNodes" } else { "" };
        plan.facts.degraded =
            Some(format!("{} of {} nodes are not Ready{of}: repairs are suspended", c.unhealthy, c.running));
    }
    for view in o.nodes {
        if o.owner.unknown.contains(&view.facts.allocation) {
            continue;
        }
        match o.owner.allocations.get(&view.facts.allocation) {
            Some(allocation) if allocation.state == AllocationState::Preempting => {
                plan_preempted_node(o, view, allocation, plan)
            }
            Some(allocation) => plan_staying_node(o, settings, view, allocation, plan),
            None => plan_orphan(o, view, o.times.orphan_ms, plan),
        }
    }
    let lost = o
        .owner
        .allocations
        .iter()
        .filter(|(id, u)| u.state == AllocationState::Active && counts::view_of(o, id).is_none());
    for (id, allocation) in lost.filter(|_| settings.is_some()) {
        release_failed(o, id, allocation, None, plan);
    }
    // The notices of all Nodes come before the evictions of any Node.
    plan.steps.sort_by_key(|step| match step {
        Step::AddFinalizer => 0,
        Step::NotifyPreemption { .. } => 1,
        _ => 2,
    });
}

/// Step that deletes a Node object.
pub(super) fn delete_node(view: &NodeView) -> Step {
    let facts = &view.facts;
    Step::DeleteNode {
        name: facts.name.clone(),
        allocation: facts.allocation.clone(),
        draining_ms: facts.draining_ms,
    }
}

/// Plans for a Node whose allocation has ended: its machine has ended or is ending.
pub(super) fn plan_orphan(o: &Observed<'_>, view: &NodeView, age_ms: i64, plan: &mut Plan) {
    if o.synced && o.owner.is_current() && o.now_ms - view.facts.created_ms >= age_ms {
        plan.steps.push(delete_node(view));
    } else {
        plan.again = Some(o.times.wait);
    }
}

/// Plans for a Node that stays, or that the controller drains.
fn plan_staying_node(
    o: &Observed<'_>,
    settings: Option<&Settings>,
    view: &NodeView,
    allocation: &Allocation,
    plan: &mut Plan,
) {
    if allocation.state == AllocationState::Active && view.facts.is_tainted(NOTICE) {
        // The market withdrew the notice and ends another allocation instead.
        plan.steps.push(Step::PatchNode(spared_change(&view.facts)));
        plan.again = Some(o.times.wait);
        return;
    }
    if let Some(settings) = settings
        && let Some(change) = shape(o, settings, &view.facts, allocation)
    {
        plan.steps.push(Step::PatchNode(change));
    }
    if allocation.state != AllocationState::Active {
        return;
    }
    if settings.is_some() {
        release_failed(o, &view.facts.allocation, allocation, Some(view), plan);
    }
    if view.facts.deleting && !counts::is_draining(view) {
        // `kubectl delete node` starts a drain: the finalizer keeps the object until the drain is complete.
        plan.steps.push(Step::DrainNode(drain_change(&view.facts, o.now_ms)));
        plan.again = Some(o.times.evict);
        return;
    }
    if counts::is_draining(view) {
        drain_node(o, view, allocation, Haste::None, plan);
    }
}

/// Drains a node, and releases its allocation when the drain is complete.
pub(super) fn drain_node(
    o: &Observed<'_>,
    view: &NodeView,
    allocation: &Allocation,
    haste: Haste,
    plan: &mut Plan,
) {
    plan.again = Some(plan.again.map_or(o.times.evict, |again| again.min(o.times.evict)));
    match drain::steps(view, haste, o.now_ms) {
        Some(steps) => plan.steps.extend(steps),
        None if o.synced && o.owner.is_current() => plan.steps.push(Step::ReleaseAllocation(Release {
            allocation: view.facts.allocation.clone(),
            market: allocation.market.clone(),
            note: format!("Node {} is drained and released", view.facts.name),
            node: Some(view.facts.name.clone()),
            failed: false,
            draining_ms: view.facts.draining_ms,
        })),
        None => {}
    }
}

/// Releases an allocation whose Node has not been Ready for too long, unless repairs are suspended.
fn release_failed(
    o: &Observed<'_>,
    id: &AllocationName,
    allocation: &Allocation,
    view: Option<&NodeView>,
    plan: &mut Plan,
) {
    let ill = counts::health(o, allocation, view);
    let dead = ill == Health::Dead || view.is_none() && ill == Health::Lost;
    if !dead || plan.facts.counts.is_degraded() || !o.synced || !o.owner.is_current() {
        return;
    }
    let note = format!("Node {} is not Ready any more and is replaced", allocation.node);
    plan.steps.push(Step::ReleaseAllocation(Release {
        allocation: id.clone(),
        market: allocation.market.clone(),
        note,
        node: view.map(|view| view.facts.name.clone()),
        failed: true,
        draining_ms: view.and_then(|view| view.facts.draining_ms),
    }));
}

/// Plans for a node under notice: emits the event, then drains the node before the deadline.
fn plan_preempted_node(o: &Observed<'_>, view: &NodeView, allocation: &Allocation, plan: &mut Plan) {
    if !view.facts.is_tainted(NOTICE) {
        // The notice is always handled: the substitution may be refused, or its reply lost.
        plan.steps.push(Step::NotifyPreemption {
            change: notice_change(&view.facts, allocation, o.now_ms),
            note: notice_message(view, allocation),
        });
        if let Some(other) = idle_sibling(o, view, allocation) {
            plan.steps.push(Step::SubstituteVictim { victim: view.facts.allocation.clone(), other });
        }
        plan.again = Some(o.times.wait);
        return;
    }
    let began = view.facts.draining_ms.unwrap_or(o.now_ms);
    let wait = WAIT_MS.min((allocation.preempt_ms - began) / 4);
    // Without a replacement in flight, waiting is pointless.
    if plan.facts.counts.in_flight > 0 && o.now_ms - began < wait {
        plan.again = Some(o.times.wait);
        return;
    }
    drain_node(o, view, allocation, Haste::By { deadline_ms: allocation.preempt_ms, from_ms: began }, plan);
}

/// Message of the preemption event; its text for a preemption by price is published.
fn notice_message(view: &NodeView, allocation: &Allocation) -> String {
    let name = &view.facts.name;
    match allocation.reason.as_str() {
        "" | "Preempted" => format!("Node {name} pre-empted due to price increase"),
        reason => format!("Node {name} reclaimed: {reason}"),
    }
}

/// Finds an idle node of the same lot, with a limit that is not higher, to be released instead of one in use.
fn idle_sibling(o: &Observed<'_>, view: &NodeView, allocation: &Allocation) -> Option<AllocationName> {
    if view.idle_ms.is_some()
        || allocation.reason != "Preempted"
        || !o.synced
        || view.facts.draining_ms.is_some()
    {
        return None;
    }
    let is_idle = |id: &AllocationName| {
        counts::view_of(o, id).is_some_and(|v| v.idle_ms.is_some() && !counts::is_draining(v))
    };
    let fits = |other: &Allocation| {
        other.state == AllocationState::Active
            && other.lot == allocation.lot
            && other.limit <= allocation.limit
    };
    let mut siblings = o.owner.allocations.iter().filter(|(id, other)| fits(other) && is_idle(id));
    siblings.next().map(|(id, _)| id.clone())
}

fn taints_json(taints: &[Taint]) -> Value {
    taints.iter().map(|t| json!({"key": t.key, "value": t.value, "effect": t.effect})).collect()
}

fn notice_change(node: &NodeFacts, allocation: &Allocation, now_ms: i64) -> NodeChange {
    let mut taints = node.taints.clone();
    taints.push(Taint {
        key: NOTICE.to_owned(),
        value: allocation.preempt_ms.div_euclid(1000).to_string(),
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

/// Patch that reverts a notice.
fn spared_change(node: &NodeFacts) -> NodeChange {
    let taints: Vec<_> = node.taints.iter().filter(|t| t.key != NOTICE).cloned().collect();
    let patch = json!({
        "metadata": {
            "resourceVersion": node.version,
            "labels": {names::NO_BALANCER: null},
            "annotations": {names::DRAINING: null},
        },
        "spec": {"unschedulable": false, "taints": taints_json(&taints)},
    });
    NodeChange { name: node.name.clone(), patch }
}

/// Patch that cordons a Node and stores the start of its drain.
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

/// Labels and taints that the specification put on a Node, as stored in its annotation.
#[derive(serde::Serialize, serde::Deserialize, Default)]
struct Given {
    labels: BTreeMap<String, String>,
    taints: Vec<(String, String)>,
}

/// Patch that gives a Node its labels, taints and finalizer; `None` if it has them.
fn shape(
    o: &Observed<'_>,
    settings: &Settings,
    node: &NodeFacts,
    allocation: &Allocation,
) -> Option<NodeChange> {
    let (kind, region) = allocation.market.parts();
    let own = Settings { instance_type: kind.to_owned(), ..settings.clone() };
    let namespace = o.object.namespace().unwrap_or_default();
    let wanted = template(&namespace, &o.object.name_any(), &own, region);
    let given = Given {
        labels: settings.labels.clone(),
        taints: settings.taints.iter().map(|t| (t.key.clone(), t.effect.clone())).collect(),
    };
    let text = serde_json::to_string(&given).unwrap_or_default();
    let before: Given = serde_json::from_str(&node.given).unwrap_or_default();
    // Taints of other writers stay; former taints of the specification are removed.
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
    let held = node.deleting || node.finalizers.iter().any(|f| f == NODE_FINALIZER);
    if labels.is_empty() && have == want && node.given == text && held {
        return None;
    }
    let mut patch = json!({
        "metadata": {
            "resourceVersion": node.version, "labels": labels, "annotations": {names::GIVEN: text},
        },
        "spec": {"taints": taints_json(&taints)},
    });
    if !held {
        let finalizers = node.finalizers.iter().map(String::as_str).chain([NODE_FINALIZER]);
        patch["metadata"]["finalizers"] = finalizers.collect();
    }
    Some(NodeChange { name: node.name.clone(), patch })
}

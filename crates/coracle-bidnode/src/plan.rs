//! What to do about a BidNode, from what is known. Pure: a snapshot and the time come in, steps and facts come out.
//!
//! ```text
//!   nodes (notice, drain, failure, labels)  ─┐
//!   market: give back what is not wanted    ─┼─▶ steps, in order
//!           follow the price, defend        ─┤
//!           buy what is missing, once       ─┘   only when the mirror has seen all that we were told
//! ```

mod counts;
mod drain;
mod ending;
mod nodes;
mod price;
mod region;
mod sell;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use coracle_api::bidnode::{BidNode, names};
use coracle_auction::Price;
use kube::ResourceExt as _;
use serde_json::Value;

use crate::{
    demand::Need,
    facts::{NodeFacts, PodFacts},
    mirror::{Owner, Quote},
    settings::Settings,
    times::Times,
};

pub(crate) use counts::is_active;
pub use counts::{Counts, Health};
pub use price::limit;

/// Most units of one bid, as the market has it.
const QUANTITY_MAX: u32 = 10_000;

/// A Node of the BidNode, and what is on it.
#[derive(Clone, Debug, Default)]
pub struct NodeView {
    /// The Node.
    pub facts: NodeFacts,
    /// Pods on it.
    pub pods: Vec<PodFacts>,
    /// Without workload since, in milliseconds since 1970; `None`: it has some.
    pub idle_ms: Option<i64>,
}

/// One BidNode and all that bears on it.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// The object.
    pub object: &'a BidNode,
    /// What it asks for; what is wrong with it.
    pub settings: Result<&'a Settings, &'a str>,
    /// Its bids and units.
    pub owner: &'a Owner,
    /// Markets of its type.
    pub quotes: &'a BTreeMap<String, Quote>,
    /// The market answers, and all of the above is as it was a moment ago.
    pub synced: bool,
    /// Region of BidNodes that name none.
    pub default_region: Option<&'a str>,
    /// Its Nodes.
    pub nodes: &'a [NodeView],
    /// What waiting pods ask of it.
    pub need: &'a Need,
    /// Now, in milliseconds since 1970.
    pub now_ms: i64,
    /// How long things take.
    pub times: &'a Times,
}

/// One effect, with every choice it needs.
#[expect(missing_docs, reason = "fields are named for what they are, and the variant says the rest")]
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Puts the finalizer on.
    Hold,
    /// Places a bid.
    Place { market: String, limit: Price, quantity: u32, min_fill: u32 },
    /// Changes limit and unfinished units of a bid.
    Amend { bid: String, market: String, limit: Option<Price>, units: Option<u32> },
    /// Takes the open units of a bid back.
    Cancel { bid: String, market: String },
    /// Gives a unit back.
    Release { unit: String, market: String, note: String, failed: bool },
    /// Gives up `other` instead of `unit`, which is under notice.
    Substitute { unit: String, other: String, market: String },
    /// Labels and taints of a Node.
    Shape(NodeChange),
    /// A Node is being taken: no new pods, and everybody is told.
    Notice { change: NodeChange, note: String },
    /// A Node is emptied on our own account.
    Drain(NodeChange),
    /// Asks for a pod to go; a disruption budget may refuse.
    Evict { namespace: String, name: String, uid: String },
    /// Ends a pod with its own grace, budget or not.
    End { namespace: String, name: String, uid: String, grace_s: i64 },
    /// Removes a Node object.
    DeleteNode { name: String, allocation: String },
    /// Takes the finalizer off, when a fresh look finds nothing left.
    LetGo { look: bool },
}

/// A merge patch of a Node at the version that was seen.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeChange {
    /// Its name.
    pub name: String,
    /// The patch.
    pub patch: Value,
}

/// What the pass knows, for status and metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Nodes by kind.
    pub counts: Counts,
    /// What is wrong with the specification.
    pub invalid: Option<String>,
    /// The market, once it is chosen.
    pub market: Option<String>,
    /// There is no such market; what there is.
    pub unknown_market: Option<String>,
    /// Its prices.
    pub quote: Option<Quote>,
    /// What is bid at that price.
    pub limit: Option<Price>,
    /// A cap of the BidNode stands in the way.
    pub over_budget: Option<String>,
    /// Repairs are held, and why.
    pub degraded: Option<String>,
    /// Why it is not gone yet.
    pub terminating: Option<String>,
}

/// What to do, what is known, when to look again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// In this order; the first that fails ends the pass.
    pub steps: Vec<Step>,
    /// For status and metrics.
    pub facts: Facts,
    /// Look again after so long; `None`: the ordinary poll.
    pub again: Option<std::time::Duration>,
}

/// Decides.
#[must_use]
pub fn plan(o: &Observed<'_>) -> Plan {
    let mut plan = Plan { facts: Facts { counts: counts::count(o), ..Facts::default() }, ..Plan::default() };
    if o.object.metadata.deletion_timestamp.is_some() {
        ending::plan(o, &mut plan);
        return plan;
    }
    let settings = match o.settings {
        Ok(settings) => settings,
        Err(why) => {
            plan.facts.invalid = Some(why.to_owned());
            return plan;
        }
    };
    choose_market(o, settings, &mut plan.facts);
    plan.facts.counts.desired = desired(o, settings, &plan.facts.counts);
    if settings.paused {
        return plan;
    }
    if !o.object.finalizers().iter().any(|f| f == names::FINALIZER) {
        plan.steps.push(Step::Hold);
    }
    nodes::plan(o, settings, &mut plan);
    if !o.synced {
        return plan;
    }
    if !o.owner.is_current() {
        plan.again = Some(o.times.wait);
        return plan;
    }
    trade(o, settings, &mut plan);
    plan
}

/// Everything that is said to the market, in the order that frees before it takes.
fn trade(o: &Observed<'_>, settings: &Settings, plan: &mut Plan) {
    let quote = plan.facts.quote.filter(|q| !q.halted);
    sell::outdated(o, settings, plan);
    sell::excess(o, settings, plan);
    let sells = plan.steps.iter().any(is_trade);
    let Some(quote) = quote else { return };
    price::follow_and_defend(o, settings, &quote, plan);
    // What was just taken back is not bought again before the stream shows it.
    if !sells && !plan.steps.iter().any(is_trade) {
        buy(o, settings, &quote, plan);
    }
}

fn is_trade(step: &Step) -> bool {
    matches!(step, Step::Place { .. } | Step::Amend { .. } | Step::Cancel { .. })
}

/// The market that a BidNode bids in.
#[must_use]
pub(crate) fn market_of(o: &Observed<'_>, settings: &Settings) -> Option<String> {
    region::choose(o, settings)
}

fn choose_market(o: &Observed<'_>, settings: &Settings, facts: &mut Facts) {
    let market = region::choose(o, settings);
    facts.quote = market.as_ref().and_then(|m| o.quotes.get(m)).copied();
    facts.limit = facts.quote.map(|q| price::limit(settings, &q));
    if o.synced && facts.quote.is_none() {
        let named = settings.region.as_deref().map(|r| format!(" in region {r}")).unwrap_or_default();
        let known: Vec<_> = o.quotes.keys().cloned().collect();
        let known = if known.is_empty() { "none of that type".to_owned() } else { known.join(", ") };
        let kind = &settings.instance_type;
        facts.unknown_market = Some(format!("no market for {kind}{named}; there is: {known}"));
    }
    facts.market = market;
}

/// How many nodes are wanted (the contract, §3.3).
fn desired(o: &Observed<'_>, settings: &Settings, counts: &Counts) -> u32 {
    let is_busy = |view: &&NodeView| {
        let since = view.idle_ms;
        since.is_none_or(|since| o.now_ms - since < settings.idle_after_ms)
            || o.need.used.contains(&view.facts.name)
    };
    let active: Vec<_> = o.nodes.iter().filter(|view| counts::is_active(o, view)).collect();
    // The packing is a moment old: what it saw in flight and is active now is not needed a second time.
    let arrived = active.iter().filter(|view| !o.need.active.contains(&view.facts.name)).count();
    let needed = o.need.nodes.saturating_sub(u32::try_from(arrived).unwrap_or(u32::MAX));
    let busy = u32::try_from(active.into_iter().filter(is_busy).count()).unwrap_or(u32::MAX);
    let wanted = settings.min.max(busy.saturating_add(needed));
    let floor = match settings.consolidation {
        crate::settings::Consolidation::Never => counts.active,
        _ => 0,
    };
    wanted.max(floor).clamp(settings.min, settings.max)
}

/// One bid for what is missing.
fn buy(o: &Observed<'_>, settings: &Settings, quote: &Quote, plan: &mut Plan) {
    let counts = plan.facts.counts;
    let missing = counts.desired.saturating_sub(counts.have);
    // Replacements may stand beside what they replace, within the disruption budget.
    let surge = if counts.outdated > 0 { settings.disruption.of(counts.active).max(1) } else { 0 };
    let room = (settings.max + surge).saturating_sub(counts.have + counts.outdated);
    let wanted = missing.min(room).min(QUANTITY_MAX);
    let limit = price::limit(settings, quote);
    if wanted == 0 || limit <= Price::ZERO {
        return;
    }
    let quantity = wanted.min(price::affordable(o, settings, limit));
    if quantity < wanted {
        plan.facts.over_budget = Some(price::over_budget(settings, wanted - quantity, limit));
    }
    let whole = settings.gang && quantity < wanted;
    let Some(market) = plan.facts.market.clone().filter(|_| quantity > 0 && !whole) else { return };
    let min_fill = if settings.gang { quantity } else { 1 };
    plan.steps.push(Step::Place { market, limit, quantity, min_fill });
}

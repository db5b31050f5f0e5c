//! Plan for a BidNode. Pure: snapshot and time as input, steps and facts as output.
//!
//! ```text
//!   nodes (notice, drain, failure, labels)  ─┐
//!   market: release what is not wanted      ─┼─▶ steps, in order
//!           follow the price, defend        ─┤
//!           buy what is missing, once       ─┘   only when the mirror has reached the versions of all replies
//! ```

mod binpack;
mod counts;
pub mod demand;
mod drain;
mod ending;
mod input;
mod nodes;
mod output;
mod price;
mod region;
mod sell;
#[cfg(test)]
mod tests;

use coracle_api::bidnode::names;
use coracle_auction::Price;
use kube::ResourceExt as _;

use crate::{ids::MarketName, observe::bids::Quote, settings::Settings};

pub(crate) use counts::is_active;
pub use counts::{Counts, Health};
pub use input::{NodeView, Observed};
pub(crate) use nodes::NODE_FINALIZER;
pub use output::{Facts, Group, NodeChange, Plan, Release, Step};
pub use price::limit;
pub(crate) use price::raises;

/// Most units of one bid, a limit of the market.
const QUANTITY_MAX: u32 = 10_000;

/// Plans one reconcile.
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
            // Notices are handled even if the specification is invalid.
            nodes::plan(o, None, &mut plan);
            return plan;
        }
    };
    choose_market(o, settings, &mut plan.facts);
    plan.facts.counts.desired = desired(o, settings, &plan.facts.counts);
    if settings.paused {
        nodes::plan(o, None, &mut plan);
        return plan;
    }
    if !o.object.finalizers().iter().any(|f| f == names::FINALIZER) {
        plan.steps.push(Step::AddFinalizer);
    }
    nodes::plan(o, Some(settings), &mut plan);
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

/// Plans the steps at the market; those that free capacity come first.
fn trade(o: &Observed<'_>, settings: &Settings, plan: &mut Plan) {
    let quote = plan.facts.quote.filter(|q| !q.halted);
    sell::release_outdated(o, settings, plan);
    sell::release_excess(o, settings, plan);
    let sells = plan.steps.iter().any(Step::is_trade);
    let Some(quote) = quote else { return };
    price::follow_and_defend(o, settings, &quote, plan);
    // Units that were just cancelled are bought again only after the stream has shown the cancellation.
    if !sells && !plan.steps.iter().any(Step::is_trade) {
        buy(o, settings, &quote, plan);
    }
}

/// Market that a BidNode bids in.
#[must_use]
pub(crate) fn market_of(o: &Observed<'_>, settings: &Settings) -> Option<MarketName> {
    region::choose(o, settings)
}

fn choose_market(o: &Observed<'_>, settings: &Settings, facts: &mut Facts) {
    let market = region::choose(o, settings);
    facts.quote = market.as_ref().and_then(|m| o.quotes.get(m)).copied();
    facts.limit = facts.quote.map(|q| price::limit(settings, &q));
    if o.synced && facts.quote.is_none() {
        let named = settings.region.as_deref().map(|r| format!(" in region {r}")).unwrap_or_default();
        let known: Vec<_> = o.quotes.keys().map(|name| &**name).collect();
        let known = if known.is_empty() { "none of that type".to_owned() } else { known.join(", ") };
        let kind = &settings.instance_type;
        facts.unknown_market = Some(format!("no market for {kind}{named}; there is: {known}"));
    }
    facts.market = market;
}

/// Number of desired nodes.
fn desired(o: &Observed<'_>, settings: &Settings, counts: &Counts) -> u32 {
    let is_busy = |view: &&NodeView| {
        let since = view.idle_ms;
        since.is_none_or(|since| o.now_ms - since < settings.idle_after_ms)
            || o.need.used.contains(&view.facts.name)
    };
    let active: Vec<_> = o.nodes.iter().filter(|view| counts::is_active(o, view)).collect();
    // The packing is older than the observed Nodes: a node that it counted as in flight may be active now.
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

/// Whether buying is suspended after launches that failed for good, whose cause may be the image, the token or the name.
fn waits_after_failures(o: &Observed<'_>, plan: &mut Plan) -> bool {
    let Some(doublings) = o.owner.failures.checked_sub(1) else { return false };
    let ms = |time: std::time::Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    let wait = ms(o.times.retry).saturating_mul(1 << doublings.min(16)).min(ms(o.times.retry_max));
    let left = o.owner.failed_ms.saturating_add(wait) - o.now_ms;
    let count = o.owner.failures;
    plan.facts.provision_failing =
        Some(format!("{count} allocations in a row failed to launch three times each"));
    if let Ok(left) = u64::try_from(left)
        && left > 0
    {
        let left = std::time::Duration::from_millis(left);
        plan.again = Some(plan.again.map_or(left, |again| again.min(left)));
        return true;
    }
    false
}

/// Plans one bid for the missing nodes.
fn buy(o: &Observed<'_>, settings: &Settings, quote: &Quote, plan: &mut Plan) {
    if waits_after_failures(o, plan) {
        return;
    }
    let counts = plan.facts.counts;
    let missing = counts.desired.saturating_sub(counts.have);
    // Replacements may exist beside the nodes that they replace, within the disruption budget.
    let surge = if counts.outdated > 0 { settings.disruption.of(counts.active).max(1) } else { 0 };
    let room = (settings.max + surge).saturating_sub(counts.have + counts.outdated);
    let wanted = missing.min(room).min(QUANTITY_MAX);
    let limit = price::limit(settings, quote);
    if wanted == 0 || limit <= Price::ZERO {
        return;
    }
    let quantity = wanted.min(price::affordable(o, settings, limit));
    if quantity < wanted {
        plan.facts.over_budget = Some(price::over_budget_message(settings, wanted - quantity, limit));
    }
    let whole = settings.gang && quantity < wanted;
    let Some(market) = plan.facts.market.clone().filter(|_| quantity > 0 && !whole) else { return };
    let min_fill = if settings.gang { quantity } else { 1 };
    plan.steps.push(Step::PlaceBid { market, limit, quantity, min_fill });
}

//! Status of a BidNode (pure), and events for its changes.

use coracle_api::bidnode::{
    BidNodeStatus, dollars,
    names::{condition, reason},
};
use coracle_auction::{AllocationState, Price};
use coracle_reconcile::{Desired, find, merge};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::{
    events::ObjectEvent,
    plan::{Counts, Facts, Observed},
};

/// Replies of the market to the steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MarketReply {
    /// Whether the market accepted a bid or a change of one.
    pub accepted: bool,
    /// Code and message of a refusal.
    pub refused: Option<(String, String)>,
    /// Time of the last change by the market's clock, in milliseconds since 1970.
    pub at_ms: i64,
}

/// Derives the complete status.
#[must_use]
pub fn derive(o: &Observed<'_>, facts: &Facts, outcome: &MarketReply) -> BidNodeStatus {
    let stored = o.object.status.clone().unwrap_or_default();
    let c = facts.counts;
    // Before the first connection to the market the number of pending bids is unknown.
    let known = o.synced || !o.owner.bids.is_empty();
    let count = |n: u32| Some(i32::try_from(n).unwrap_or(i32::MAX));
    let or_stored = |n: u32, stored: Option<i32>| if known { count(n) } else { stored.or(Some(0)) };
    let pending = or_stored(c.open + c.in_flight, stored.pending_bids);
    let phase = if c.active >= min_nodes(o) {
        "Running"
    } else if pending > Some(0) {
        "Bidding"
    } else {
        "Pending"
    };
    let price = |p: Price| dollars(p.as_micros());
    let now = Timestamp::from_millisecond(o.now_ms).unwrap_or_default();
    let generation = o.object.metadata.generation;
    let region = facts.market.as_ref().map(|market| market.region().to_owned());
    BidNodeStatus {
        phase: Some(phase.to_owned()),
        active_nodes: count(c.active),
        pending_bids: pending,
        average_price: average(o),
        last_bid_time: last_bid(o, outcome).or(stored.last_bid_time),
        conditions: merge(&stored.conditions, &conditions(o, facts, outcome), generation, now),
        observed_generation: generation,
        desired_nodes: if facts.invalid.is_some() { stored.desired_nodes } else { count(c.desired) },
        provisioning_nodes: or_stored(c.in_flight, stored.provisioning_nodes),
        preempting_nodes: or_stored(c.leaving, stored.preempting_nodes),
        market_price: facts.quote.map(|q| price(q.quote)).or(stored.market_price),
        bid_price: facts.limit.map(price).or(stored.bid_price),
        hourly_cost: if known { Some(hourly_cost(o)) } else { stored.hourly_cost },
        region: region.or(stored.region),
        raised_from: if o.synced { crate::plan::raises(o) } else { stored.raised_from },
    }
}

fn min_nodes(o: &Observed<'_>) -> u32 {
    o.settings.map_or_else(|_| u32::try_from(o.object.spec.min_nodes).unwrap_or(0), |s| s.min)
}

/// Time of the last bid or change that the market accepted, in whole seconds.
fn last_bid(o: &Observed<'_>, outcome: &MarketReply) -> Option<Time> {
    let placed = o.owner.bids.values().map(|b| b.placed_ms).max().unwrap_or(0);
    let stored = o.object.status.as_ref().and_then(|s| s.last_bid_time.as_ref()).map(|t| t.0.as_second());
    let heard = placed.max(o.owner.last_bid_ms).max(outcome.at_ms).div_euclid(1000);
    let latest = heard.max(stored.unwrap_or(0));
    (latest > 0).then(|| Time(Timestamp::from_second(latest).unwrap_or_default()))
}

/// Average price of the active nodes, half-even to four decimals; absent without an active node.
fn average(o: &Observed<'_>) -> Option<f64> {
    let prices = o.nodes.iter().filter_map(|view| {
        let allocation = o.owner.allocations.get(&view.facts.allocation)?;
        (allocation.state == AllocationState::Active && crate::plan::is_active(o, view))
            .then_some(allocation.price)
    });
    let (sum, n) =
        prices.fold((0i64, 0i64), |(sum, n), price| (sum.saturating_add(price.as_micros()), n + 1));
    (n > 0).then(|| dollars(half_even(sum, n * 100) * 100))
}

/// `a ÷ b`, rounded half to even.
fn half_even(a: i64, b: i64) -> i64 {
    let (whole, rest) = (a.div_euclid(b), a.rem_euclid(b));
    match (rest * 2).cmp(&b) {
        std::cmp::Ordering::Less => whole,
        std::cmp::Ordering::Greater => whole + 1,
        std::cmp::Ordering::Equal => whole + whole.rem_euclid(2),
    }
}

/// Current charge, in US$ per hour.
fn hourly_cost(o: &Observed<'_>) -> f64 {
    let pays = o
        .owner
        .allocations
        .values()
        .filter(|u| matches!(u.state, AllocationState::Active | AllocationState::Preempting));
    dollars(pays.map(|u| u.price.as_micros()).sum())
}

fn desired_condition(
    kind: &'static str,
    status: bool,
    reason: &'static str,
    message: impl Into<String>,
) -> Desired {
    Desired { kind, status: Some(status), reason, message: message.into() }
}

/// Conditions of the status. Ready always exists; the others exist from the first time that they are decided.
fn conditions(o: &Observed<'_>, facts: &Facts, outcome: &MarketReply) -> Vec<Desired> {
    let c = facts.counts;
    let stored = o.object.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    let had = |kind: &str| find(stored, kind).is_some();
    let mut all = vec![ready_condition(o, facts)];
    if o.synced {
        if had(condition::MARKET_REACHABLE) {
            all.push(desired_condition(condition::MARKET_REACHABLE, true, "Reachable", ""));
        }
        all.push(desired_condition(
            condition::ALLOCATED,
            c.open == 0,
            if c.open == 0 { "AllAllocated" } else { "UnitsOpen" },
            if c.open == 0 { String::new() } else { format!("{} units wait in the book", c.open) },
        ));
        all.push(desired_condition(
            condition::NODE_JOINED,
            c.in_flight == 0,
            if c.in_flight == 0 { "AllJoined" } else { "NodesBooting" },
            if c.in_flight == 0 { String::new() } else { format!("{} nodes are on their way", c.in_flight) },
        ));
    } else {
        let note = "the market does not answer: no bids are placed, running nodes stay";
        all.push(desired_condition(condition::MARKET_REACHABLE, false, reason::MARKET_UNREACHABLE, note));
    }
    all.extend(accepted_condition(outcome));
    all.extend(competitive_condition(o, facts));
    all.extend(preemption_conditions(o, &had));
    match &facts.over_budget {
        Some(why) => all.push(desired_condition(condition::WITHIN_BUDGET, false, "BudgetExceeded", why)),
        None if had(condition::WITHIN_BUDGET) && o.synced => {
            all.push(desired_condition(condition::WITHIN_BUDGET, true, "WithinBudget", ""));
        }
        None => {}
    }
    match &facts.degraded {
        None if facts.provision_failing.is_some() => {
            let why = facts.provision_failing.as_deref().unwrap_or_default();
            all.push(desired_condition(condition::DEGRADED, true, "ProvisionFailing", why));
        }
        Some(why) => all.push(desired_condition(condition::DEGRADED, true, reason::TOO_MANY_UNHEALTHY, why)),
        None if had(condition::DEGRADED) => {
            all.push(desired_condition(condition::DEGRADED, false, "Healthy", ""))
        }
        None => {}
    }
    if let Some(why) = &facts.terminating {
        let reason = if o.synced { "InProgress" } else { reason::MARKET_UNREACHABLE };
        all.push(desired_condition(condition::TERMINATING, true, reason, why));
    }
    all
}

fn ready_condition(o: &Observed<'_>, facts: &Facts) -> Desired {
    if let Some(why) = &facts.invalid {
        return desired_condition(condition::READY, false, reason::INVALID_SPEC, why);
    }
    if let Some(why) = &facts.unknown_market {
        return desired_condition(condition::READY, false, reason::UNKNOWN_MARKET, why);
    }
    let (active, min) = (facts.counts.active, min_nodes(o));
    let message = format!("{active}/{min} nodes active");
    let is_ready = active >= min;
    let reason = if is_ready { reason::NODES_AVAILABLE } else { reason::NODES_UNAVAILABLE };
    desired_condition(condition::READY, is_ready, reason, message)
}

fn accepted_condition(outcome: &MarketReply) -> Option<Desired> {
    if let Some((code, text)) = &outcome.refused {
        return Some(desired_condition(condition::BID_ACCEPTED, false, "Refused", format!("{code}: {text}")));
    }
    outcome.accepted.then(|| desired_condition(condition::BID_ACCEPTED, true, "Accepted", ""))
}

/// Whether the bid would win; otherwise the message names the price that would.
fn competitive_condition(o: &Observed<'_>, facts: &Facts) -> Option<Desired> {
    let (quote, limit) = (facts.quote?, facts.limit?);
    let open = o.owner.bids.values().filter(|b| b.open > 0);
    let (lowest, held) = open.fold((limit, false), |(low, held), b| (low.min(b.limit), held || b.held));
    let kind = condition::BID_COMPETITIVE;
    let at = |price: Price| format!("the bid of {lowest} would win at {price} or more");
    Some(if held {
        desired_condition(
            kind,
            false,
            reason::BUDGET_HOLD,
            "a cap of the tenant holds the bid: see coracle market budget",
        )
    } else if lowest < quote.reserve {
        desired_condition(kind, false, reason::BELOW_RESERVE, at(quote.reserve))
    } else if lowest < quote.clearing {
        desired_condition(kind, false, reason::BELOW_CLEARING_PRICE, at(quote.clearing))
    } else {
        desired_condition(kind, true, reason::COMPETITIVE, "")
    })
}

/// Conditions about nodes under notice and nodes at risk.
fn preemption_conditions(o: &Observed<'_>, had: &impl Fn(&str) -> bool) -> Vec<Desired> {
    let mut all = Vec::new();
    let going = o.owner.allocations.values().filter(|u| u.state == AllocationState::Preempting);
    let going: Vec<_> = going
        .map(|u| {
            let until = Timestamp::from_millisecond(u.preempt_ms).unwrap_or_default();
            format!("{} until {until:.0}", u.node)
        })
        .collect();
    if !going.is_empty() {
        all.push(desired_condition(condition::PREEMPTION_NOTICE, true, "Preempting", going.join(", ")));
    } else if had(condition::PREEMPTION_NOTICE) {
        all.push(desired_condition(condition::PREEMPTION_NOTICE, false, "None", ""));
    }
    let risk = o.owner.allocations.values().filter(|u| u.price_to_keep > Price::ZERO);
    let risk: Vec<_> = risk.map(|u| format!("{} needs {}", u.node, u.price_to_keep)).collect();
    if !risk.is_empty() {
        all.push(desired_condition(condition::AT_RISK, true, "BelowIndicativePrice", risk.join(", ")));
    } else if had(condition::AT_RISK) {
        all.push(desired_condition(condition::AT_RISK, false, "None", ""));
    }
    all
}

/// Events for conditions that changed.
#[must_use]
pub fn condition_events(before: &[Condition], after: &[Condition]) -> Vec<ObjectEvent> {
    let is_new = |c: &&Condition| {
        find(before, &c.type_).is_none_or(|old| old.status != c.status || old.reason != c.reason)
    };
    let event = |c: &Condition| {
        let reason = match (c.type_.as_str(), c.status.as_str(), c.reason.as_str()) {
            (condition::READY, "False", reason::INVALID_SPEC) => "InvalidSpec",
            (condition::READY, "False", reason::UNKNOWN_MARKET) => "UnknownMarket",
            (condition::BID_COMPETITIVE, "False", _) => "BidTooLow",
            (condition::WITHIN_BUDGET, "False", _) => "BudgetExceeded",
            (condition::MARKET_REACHABLE, "False", _) => "MarketUnreachable",
            (condition::AT_RISK, "True", _) => "NodeAtRisk",
            _ => return None,
        };
        Some(ObjectEvent { reason, text: c.message.clone(), warning: true })
    };
    after.iter().filter(is_new).filter_map(event).collect()
}

/// Values for the gauges of an object: `(class, strategy, counts, cost in micro-dollars)`.
#[must_use]
pub fn gauge_values(o: &Observed<'_>, facts: &Facts) -> (String, &'static str, Counts, i64) {
    let pays = o
        .owner
        .allocations
        .values()
        .filter(|u| matches!(u.state, AllocationState::Active | AllocationState::Preempting));
    let cost = pays.map(|u| u.price.as_micros()).sum();
    let class = facts
        .market
        .as_ref()
        .filter(|_| facts.quote.is_some())
        .map_or_else(|| "unknown".to_owned(), |m| m.to_string());
    (class, o.object.spec.bid_strategy.as_str(), facts.counts, cost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_rounds_half_to_even() {
        for (a, b, want) in [(5, 10, 0), (15, 10, 2), (25, 10, 2), (14, 10, 1), (16, 10, 2), (0, 3, 0)] {
            assert_eq!(half_even(a, b), want, "{a} / {b}");
        }
    }

    fn condition(kind: &str, status: &str, reason: &str) -> Condition {
        Condition {
            type_: kind.into(),
            status: status.into(),
            reason: reason.into(),
            message: "text".into(),
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
            observed_generation: None,
        }
    }

    #[test]
    fn news_table() {
        let low = || condition(condition::BID_COMPETITIVE, "False", reason::BELOW_RESERVE);
        let ready = || condition(condition::READY, "False", reason::NODES_UNAVAILABLE);
        for (why, before, after, want) in [
            ("a new problem is an event", vec![], vec![low()], vec!["BidTooLow"]),
            ("an old one is not", vec![low()], vec![low()], vec![]),
            (
                "another reason is an event again",
                vec![low()],
                vec![condition(condition::BID_COMPETITIVE, "False", reason::BELOW_CLEARING_PRICE)],
                vec!["BidTooLow"],
            ),
            ("waiting for nodes is normal", vec![], vec![ready()], vec![]),
            (
                "an invalid specification is an event",
                vec![ready()],
                vec![condition(condition::READY, "False", reason::INVALID_SPEC)],
                vec!["InvalidSpec"],
            ),
            (
                "a market that does not answer is an event",
                vec![condition(condition::MARKET_REACHABLE, "True", "Reachable")],
                vec![condition(condition::MARKET_REACHABLE, "False", reason::MARKET_UNREACHABLE)],
                vec!["MarketUnreachable"],
            ),
            (
                "recovery is not",
                vec![condition(condition::MARKET_REACHABLE, "False", reason::MARKET_UNREACHABLE)],
                vec![condition(condition::MARKET_REACHABLE, "True", "Reachable")],
                vec![],
            ),
            (
                "a risk is an event",
                vec![],
                vec![condition(condition::AT_RISK, "True", "x")],
                vec!["NodeAtRisk"],
            ),
        ] {
            let reasons: Vec<_> =
                condition_events(&before, &after).into_iter().map(|event| event.reason).collect();
            assert_eq!(reasons, want, "{why}");
        }
    }
}

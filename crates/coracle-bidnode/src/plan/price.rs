//! Limits of bids, and amendments of them.

use std::collections::BTreeMap;

use coracle_api::bidnode::{BidStrategy, dollars, micros};
use coracle_auction::{AllocationState, Price};

use super::{
    counts,
    input::Observed,
    output::{Plan, Step},
};
use crate::{
    ids::BidName,
    observe::bids::{Bid, Quote},
    settings::Settings,
};

/// Smallest difference between a limit and the quote for which the limit follows, in percent of the limit.
const FOLLOW_PERCENT: i64 = 2;

/// Limit of a new bid: `min(floor_tick(quote × share), floor_tick(maxBid))`, in whole micro-dollars.
#[must_use]
pub fn limit(settings: &Settings, quote: &Quote) -> Price {
    let share = quote.quote.percent(settings.strategy.percent()).floor_to(quote.tick);
    share.min(max_limit(settings, quote))
}

fn max_limit(settings: &Settings, quote: &Quote) -> Price {
    settings.max_bid.floor_to(quote.tick)
}

/// Sum of the limits of live and open units, in micro-dollars an hour.
pub(super) fn committed(o: &Observed<'_>) -> i128 {
    let of = |b: &Bid| i128::from(b.limit.as_micros()) * i128::from(b.open + b.live());
    o.owner.bids.values().map(of).sum()
}

/// Number of further units at the limit that the hourly cap of the BidNode allows.
pub(super) fn affordable(o: &Observed<'_>, settings: &Settings, limit: Price) -> u32 {
    let Some(cap) = settings.max_hourly_cost else { return u32::MAX };
    let left = i128::from(cap.as_micros()) - committed(o);
    u32::try_from((left / i128::from(limit.as_micros().max(1))).max(0)).unwrap_or(u32::MAX)
}

pub(super) fn over_budget_message(settings: &Settings, missing: u32, limit: Price) -> String {
    let cap = settings.max_hourly_cost.unwrap_or(Price::ZERO);
    format!("{missing} more nodes at {limit} would pass the cap of {cap} an hour")
}

/// Plans amendments: open bids follow the quote, and running nodes are kept as the strategy says.
pub(super) fn follow_and_defend(o: &Observed<'_>, settings: &Settings, quote: &Quote, plan: &mut Plan) {
    let market = plan.facts.market.clone().unwrap_or_default();
    let mut spare = settings.max_hourly_cost.map(|cap| i128::from(cap.as_micros()) - committed(o));
    for (id, bid) in o.owner.bids.iter().filter(|(_, b)| !counts::is_outdated(o, &b.market)) {
        let quote = if bid.market == market { Some(*quote) } else { o.quotes.get(&bid.market).copied() };
        let Some(quote) = quote.filter(|q| !q.halted) else { continue };
        let Some((wanted, units)) = change(o, settings, &quote, id, bid) else { continue };
        // A raise of the committed amount must fit the cap; a reduction always does.
        let kept = i128::from(units.unwrap_or(bid.open + bid.live()));
        let more = i128::from(wanted.as_micros()) * kept
            - i128::from(bid.limit.as_micros()) * i128::from(bid.open + bid.live());
        if let Some(left) = &mut spare {
            if more > (*left).max(0) {
                let cap = settings.max_hourly_cost.unwrap_or(Price::ZERO);
                plan.facts.over_budget =
                    Some(format!("a limit of {wanted} would pass the cap of {cap} an hour"));
                continue;
            }
            *left -= more;
        }
        let units = units.map(|live| live + bid.preempting);
        let limit = (wanted != bid.limit).then_some(wanted);
        plan.steps.push(Step::AmendBid { bid: id.clone(), market: bid.market.clone(), limit, units });
    }
}

/// New limit of a bid, and the number of its units that stay if the open ones are to be bid for again.
fn change(
    o: &Observed<'_>,
    settings: &Settings,
    quote: &Quote,
    id: &BidName,
    bid: &Bid,
) -> Option<(Price, Option<u32>)> {
    let most = max_limit(settings, quote);
    if bid.live() == 0 {
        return follow(o, settings, quote, id, bid).map(|limit| (limit, None));
    }
    let kept = defended_limit(o, settings, quote, id, bid).unwrap_or(bid.limit).min(most);
    // A bid has one limit. Open units that need another one are removed from the bid and bought again.
    let parts = bid.open > 0 && (kept != bid.limit || follow(o, settings, quote, id, bid).is_some());
    match (kept != bid.limit, parts) {
        (_, true) => Some((kept, Some(bid.live()))),
        (true, false) => Some((kept, None)),
        (false, false) => None,
    }
}

/// Limit that the open units should follow to. A limit above the maximum is replaced at once.
fn follow(o: &Observed<'_>, settings: &Settings, quote: &Quote, id: &BidName, bid: &Bid) -> Option<Price> {
    let wanted = limit(settings, quote);
    if bid.open == 0 || wanted == bid.limit || wanted <= Price::ZERO {
        return None;
    }
    let (old, new) = (bid.limit.as_micros(), wanted.as_micros());
    let far = i128::from((new - old).abs()) * 100 >= i128::from(old) * i128::from(FOLLOW_PERCENT);
    let last = o.owner.amended_ms.get(id).copied().unwrap_or(bid.placed_ms);
    let due = o.now_ms - last >= o.times.amend_ms;
    let too_high = bid.limit > max_limit(settings, quote);
    (too_high || far && due).then_some(wanted)
}

/// Limit to which a raise is reverted once the risk has been over for long enough: the previous limit, or what the last call
/// needs. Otherwise a challenger that comes and leaves would leave every limit raised, and the next challenger just below would
/// set the price.
fn reverted_limit(o: &Observed<'_>, quote: &Quote, id: &BidName, bid: &Bid) -> Option<Price> {
    let before = limit_before_raise(o, id, bid)?;
    let last =
        o.owner.amended_ms.get(id).copied().unwrap_or_else(|| bid.placed_ms.max(last_accepted_change(o)));
    let lower = before.max(quote.clearing.ceil_to(quote.tick));
    (o.now_ms - last >= o.times.calm_ms && lower < bid.limit).then_some(lower)
}

/// Limit of a bid before it was raised: as this process observed it, otherwise as the status records it.
fn limit_before_raise(o: &Observed<'_>, id: &BidName, bid: &Bid) -> Option<Price> {
    let noted = || {
        let noted = o.object.status.as_ref()?.raised_from.get(&**id)?;
        micros(*noted).ok().map(Price::micros)
    };
    o.owner.raised_from.get(id).copied().or_else(noted).filter(|before| *before < bid.limit)
}

/// Time of the last change that the market accepted, from the status, in milliseconds since 1970.
fn last_accepted_change(o: &Observed<'_>) -> i64 {
    let noted = o.object.status.as_ref().and_then(|status| status.last_bid_time.as_ref());
    noted.map_or(0, |time| time.0.as_millisecond())
}

/// Limits of raised bids before the raise, for the status, so that a later process knows them.
pub(crate) fn raises(o: &Observed<'_>) -> BTreeMap<String, f64> {
    let of = |(id, bid): (&BidName, &Bid)| {
        Some((id.to_string(), dollars(limit_before_raise(o, id, bid)?.as_micros())))
    };
    o.owner.bids.iter().filter_map(of).collect()
}

/// Limit that keeps the running units of a bid, if the strategy defends them and the limit suffices.
fn defended_limit(
    o: &Observed<'_>,
    settings: &Settings,
    quote: &Quote,
    id: &BidName,
    bid: &Bid,
) -> Option<Price> {
    if !settings.defend || bid.active == 0 {
        return None;
    }
    let most = max_limit(settings, quote);
    match settings.strategy {
        BidStrategy::CostOptimized => None,
        BidStrategy::AvailabilityOptimized => Some(most.max(bid.limit)),
        BidStrategy::Balanced => {
            let units =
                o.owner.allocations.values().filter(|u| u.bid == *id && u.state == AllocationState::Active);
            let keep = units.map(|u| u.price_to_keep).max().unwrap_or(Price::ZERO);
            if keep == Price::ZERO {
                return reverted_limit(o, quote, id, bid);
            }
            let keep = keep.ceil_to(quote.tick);
            (keep > bid.limit && keep <= quote.quote.min(most)).then_some(keep)
        }
    }
}

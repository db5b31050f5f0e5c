//! Explanation of why a bid won or lost.

use std::fmt;

use super::Market;
use super::simulate::Hypothetical;
use crate::{AllocationState, Bid, BidId, EndReason, Price, Time};

/// Standing of a bid, by the most specific reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The bid has ended.
    Over(Option<EndReason>),
    /// The bid is held back because the tenant's hourly cap does not cover it.
    Held,
    /// The limit is below the reserve.
    BelowReserve,
    /// The price suffices, but the block did not fit.
    SkippedGang,
    /// Other bids pay more.
    Outbid,
    /// The bid would win the next call.
    Winning,
    /// All units have a slot.
    Placed,
    /// The allocations are under notice until this time.
    Preempting(Time),
}

/// Standing of a bid, and the figures behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Explained bid.
    pub bid: BidId,
    /// Standing of the bid.
    pub standing: Standing,
    /// Rank of the first open unit among all units in demand, from 1; 0 if no unit is open.
    pub rank: u64,
    /// Number of units in demand: live and open ones.
    pub of: u64,
    /// Number of units that have a slot.
    pub sold: u64,
    /// Clearing price.
    pub clearing: Price,
    /// Whether a bid of another tenant set the clearing price. `None`: the reserve did.
    pub set_by_other: Option<bool>,
    /// Limit of the bid.
    pub limit: Price,
    /// Lowest limit that would win now.
    pub wins_at: Option<Price>,
    /// Number of the last call.
    pub call: u64,
}

impl Market {
    /// Explains a bid. Reads the whole book, so it is for queries and not for calls.
    #[must_use]
    pub fn explain(&self, id: BidId) -> Option<Explanation> {
        let place = self.bids.place(id.0)?;
        let bid = self.bids.at(place)?;
        let sold = self.live();
        let rank = self.rank(bid.limit, bid.seq);
        let worse = self.running.iter().take_while(|(running, _)| running.price < rank.price).count();
        let ahead = sold.saturating_sub(worse as u64) + self.book.better_than(rank);
        let clearing = self.history.current().price;
        let marginal = self.last_call.as_ref().and_then(|call| call.marginal).and_then(|id| self.bid(id));
        let set_by_other = (clearing > self.params.reserve)
            .then(|| marginal.is_none_or(|marginal| marginal.tenant != bid.tenant));
        let open = u32::from(bid.units.open);
        Some(Explanation {
            bid: id,
            standing: self.standing(place, bid),
            rank: if open > 0 { ahead + 1 } else { 0 },
            of: sold + self.book.units(),
            sold,
            clearing,
            set_by_other,
            limit: bid.limit,
            wins_at: if open > 0 { self.wins_at(&self.hypothetical(bid)) } else { None },
            call: self.calls,
        })
    }

    /// The same bid as a new one, because an amendment loses the time priority.
    fn hypothetical(&self, bid: &Bid) -> Hypothetical {
        let units = u32::from(bid.units.open);
        let tenant = self.tenants.at(bid.tenant).no;
        Hypothetical { tenant, limit: bid.limit, units, min_fill: bid.block(units) }
    }

    fn standing(&self, place: u32, bid: &Bid) -> Standing {
        let units = self.units_of(place);
        let states = || units.iter().filter_map(|place| self.allocations.at(*place));
        if bid.is_terminal() {
            return Standing::Over(states().filter_map(|allocation| allocation.reason).next_back());
        }
        if bid.units.open == 0 {
            let leaving = states().filter(|allocation| allocation.state == AllocationState::Preempting);
            return leaving
                .map(|allocation| allocation.preempt_at)
                .min()
                .map_or(Standing::Placed, Standing::Preempting);
        }
        if bid.held {
            return Standing::Held;
        }
        if bid.limit < self.params.reserve {
            return Standing::BelowReserve;
        }
        let decision = self.decide(None);
        if decision.skipped.contains(&place) {
            Standing::SkippedGang
        } else if decision.winners.iter().any(|(open, _)| open.entry.bid == place) {
            Standing::Winning
        } else {
            Standing::Outbid
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let setter = match self.set_by_other {
            None => "is the reserve",
            Some(true) => "set by another tenant",
            Some(false) => "set by your own bid",
        };
        if self.rank > 0 {
            write!(f, "rank {} of {}, ", self.rank, self.of)?;
        }
        write!(
            f,
            "{} units sold; clearing {} {setter}; your limit {}",
            self.sold, self.clearing, self.limit
        )?;
        match self.standing {
            Standing::SkippedGang => {
                f.write_str("; SKIPPED_GANG: price below your bid, block did not fit")?
            }
            Standing::Held => f.write_str("; BUDGET: your hourly cap does not cover it")?,
            _ => {}
        }
        match (self.rank, self.wins_at) {
            (0, _) => Ok(()),
            (_, Some(price)) => write!(f, "; would win now at ≥ {price}"),
            (_, None) => f.write_str("; no limit would win now"),
        }
    }
}

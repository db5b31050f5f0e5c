//! Copy of the market's state for this cluster, kept up to date by streams.
//!
//! Reconciles read this copy and send no query to the market. The version in a reply is stored here at once, and nothing more
//! is decided for that BidNode until the stream has reached it.

use std::collections::{BTreeMap, HashMap};

use coracle_api::bidnode::names;
use coracle_auction::{AllocationState, EndReason, Price};
use coracle_proto::market as pb;
use parking_lot::{Mutex, MutexGuard};
use pb::owner_frame::Frame;

use super::bids::{Allocation, Bid, Owner, Quote};
use crate::{
    events::ObjectEvent,
    ids::{AllocationName, BidName, MarketName},
};

/// BidNodes that a frame affects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// One BidNode, by UID; `urgent` changes are reconciled without a pause.
    Owner { uid: String, urgent: bool },
    /// Every BidNode of a market whose price changed.
    Market(MarketName),
    /// Every BidNode.
    Everyone,
}

#[derive(Debug, Default)]
struct State {
    owners: HashMap<String, Owner>,
    /// Owners that a new stream has sent so far; `None` once it is complete.
    coming: Option<HashMap<String, Owner>>,
    events: HashMap<String, Vec<ObjectEvent>>,
    /// Milestone of each allocation that is not ready yet.
    milestones: HashMap<AllocationName, Milestone>,
    /// Milestones reached since the last call of `take_reached`.
    reached: Vec<Reached>,
    markets: BTreeMap<MarketName, Quote>,
    /// Whether the stream of bids and allocations is open and complete.
    synced: bool,
    /// Whether the stream of prices is open and complete.
    priced: bool,
}

/// Progress of an allocation, for the metric of the time from bid to Node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Milestone {
    Matched,
    Launched,
    Registered,
    Ready,
}

impl Milestone {
    /// Value of the metric's label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Matched => "matched",
            Self::Launched => "launched",
            Self::Registered => "registered",
            Self::Ready => "ready",
        }
    }

    /// Milestone of an allocation; `None` if it is past all of them.
    fn of(state: AllocationState, stage: pb::AllocationStage) -> Option<Self> {
        Some(match (state, stage) {
            (AllocationState::Provisioning, pb::AllocationStage::Launched) => Self::Launched,
            (AllocationState::Provisioning, pb::AllocationStage::Registered) => Self::Registered,
            (AllocationState::Matched | AllocationState::Provisioning, _) => Self::Matched,
            (AllocationState::Active, _) => Self::Ready,
            (AllocationState::Preempting | AllocationState::Ended, _) => return None,
        })
    }
}

/// State of an allocation as a frame reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reported {
    Is(AllocationState),
    /// The launch failed, so the bid's unit is open again.
    Returned,
    /// The state is not known to this version.
    Unknown,
}

impl Reported {
    fn of(a: &pb::Allocation) -> Self {
        Self::Is(match pb::AllocationState::try_from(a.state) {
            Ok(pb::AllocationState::Matched) => AllocationState::Matched,
            Ok(pb::AllocationState::Provisioning) => AllocationState::Provisioning,
            Ok(pb::AllocationState::Active) => AllocationState::Active,
            Ok(pb::AllocationState::Preempting) => AllocationState::Preempting,
            Ok(pb::AllocationState::Ended) => AllocationState::Ended,
            Ok(pb::AllocationState::Returned) => return Self::Returned,
            Ok(pb::AllocationState::Unspecified) | Err(_) => return Self::Unknown,
        })
    }
}

/// Milestone that an allocation reached, with the time since its bid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reached {
    pub(crate) milestone: Milestone,
    pub(crate) took_ms: i64,
}

/// Copy of the market's state. One stream of owners and one of prices write to it.
#[derive(Debug, Default)]
pub struct Mirror(Mutex<State>);

/// Most events that wait for one BidNode; the oldest are dropped.
const EVENTS_MAX: usize = 32;

impl Mirror {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Whether both streams are open and complete.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        let state = self.state();
        state.synced && state.priced
    }

    /// Bids and allocations of a BidNode.
    #[must_use]
    pub fn owner(&self, uid: &str) -> Owner {
        self.state().owners.get(uid).cloned().unwrap_or_default()
    }

    /// Prices by market.
    #[must_use]
    pub fn quotes(&self) -> BTreeMap<MarketName, Quote> {
        self.state().markets.clone()
    }

    /// Prices in the markets of an instance type.
    #[must_use]
    pub fn quotes_of(&self, instance_type: &str) -> BTreeMap<MarketName, Quote> {
        let is_of = |name: &MarketName| name.contains('/') && name.instance_type() == instance_type;
        self.state().markets.iter().filter(|(name, _)| is_of(name)).map(|(n, q)| (n.clone(), *q)).collect()
    }

    /// BidNodes with bids or allocations that have not ended, by UID. Owners that are not BidNodes are left out.
    pub(crate) fn bidnodes(&self) -> Vec<(String, Owner)> {
        let state = self.state();
        let own = state.owners.iter().filter(|(_, o)| o.bidnode.is_some());
        let is_busy = |o: &Owner| !o.bids.is_empty() || !o.allocations.is_empty() || !o.unknown.is_empty();
        let busy = own.filter(|(_, o)| is_busy(o));
        busy.map(|(uid, owner)| (uid.clone(), owner.clone())).collect()
    }

    /// Whether the market has the allocation and it has not ended.
    pub(crate) fn has_allocation(&self, allocation: &AllocationName) -> bool {
        self.state().owners.values().any(|owner| owner.has(allocation))
    }

    /// Events of a BidNode's allocations since the last call.
    pub(crate) fn take_events(&self, uid: &str) -> Vec<ObjectEvent> {
        self.state().events.remove(uid).unwrap_or_default()
    }

    /// Milestones that were reached since the last call.
    pub(crate) fn take_reached(&self) -> Vec<Reached> {
        std::mem::take(&mut self.state().reached)
    }

    /// Stores the version of a reply. Nothing more is decided before the stream has reached it.
    pub(crate) fn record_reply(
        &self,
        uid: &str,
        market: &MarketName,
        version: u64,
        at_ms: i64,
        amended: Option<&BidName>,
    ) {
        let mut state = self.state();
        let owner = state.owners.entry(uid.to_owned()).or_default();
        let known = owner.expected.entry(market.clone()).or_default();
        *known = version.max(*known);
        owner.last_bid_ms = at_ms.max(owner.last_bid_ms);
        if let Some(bid) = amended {
            owner.amended_ms.insert(bid.clone(), at_ms);
        }
    }

    /// Removes a deleted BidNode.
    pub(crate) fn forget(&self, uid: &str) {
        let mut state = self.state();
        state.events.remove(uid);
        if state.owners.get(uid).is_some_and(Owner::is_over) {
            state.owners.remove(uid);
        }
    }

    /// Records that a stream ended. The data stays for status, but no step is based on it.
    pub(crate) fn on_stream_end(&self) -> Vec<Change> {
        let mut state = self.state();
        let was = state.synced && state.priced;
        (state.synced, state.priced, state.coming) = (false, false, None);
        if was { vec![Change::Everyone] } else { Vec::new() }
    }

    /// Stores a price frame.
    pub(crate) fn price(&self, frame: &pb::PriceFrame) -> Vec<Change> {
        let Some(p) = &frame.price else { return Vec::new() };
        let quote = Quote {
            quote: Price::micros(p.quote_micros),
            clearing: Price::micros(p.clearing_micros),
            reserve: Price::micros(p.reserve_micros),
            cap: Price::micros(p.cap_micros),
            tick: Price::micros(p.tick_micros),
            free: p.free,
            halted: p.halted,
            next_call_ms: p.next_call_ms,
        };
        let mut state = self.state();
        let old = state.markets.insert(frame.market.as_str().into(), quote);
        let mut changes = Vec::new();
        if frame.r#type == "call" {
            changes.extend(state.clear_risks(&frame.market));
        }
        let seen = |q: Quote| (q.quote, q.clearing, q.reserve, q.cap, q.halted);
        if old.is_none_or(|old| seen(old) != seen(quote)) {
            changes.push(Change::Market(frame.market.as_str().into()));
        }
        changes
    }

    /// Records that the prices of all markets are stored.
    pub(crate) fn set_prices_synced(&self) -> Vec<Change> {
        let mut state = self.state();
        let was = std::mem::replace(&mut state.priced, true);
        if !was && state.synced { vec![Change::Everyone] } else { Vec::new() }
    }

    /// Stores a frame of the owner stream: version, bid or allocation.
    pub(crate) fn frame(&self, frame: pb::OwnerFrame, now_ms: i64) -> Vec<Change> {
        let mut state = self.state();
        let change = |uid: String, urgent| vec![Change::Owner { uid, urgent }];
        match frame.frame {
            Some(Frame::Synced(false)) => {
                state.coming = Some(HashMap::new());
                Vec::new()
            }
            Some(Frame::Synced(true)) => state.begin(),
            Some(Frame::Owner(version)) => {
                let owner = state.entry(&version.owner_uid);
                owner.versions.insert(frame.market.into(), version.version);
                change(version.owner_uid, false)
            }
            Some(Frame::Bid(bid)) => {
                let uid = bid.owner_uid.clone();
                state.bid(bid);
                change(uid, false)
            }
            Some(Frame::Allocation(allocation)) => {
                state.track(&allocation, now_ms);
                state.allocation(allocation).map_or_else(Vec::new, |(uid, urgent)| change(uid, urgent))
            }
            None => Vec::new(),
        }
    }
}

impl State {
    fn entry(&mut self, uid: &str) -> &mut Owner {
        let owners = self.coming.as_mut().unwrap_or(&mut self.owners);
        owners.entry(uid.to_owned()).or_default()
    }

    /// Replaces the state once the new stream is complete: bids and allocations that it did not name have ended.
    fn begin(&mut self) -> Vec<Change> {
        let Some(mut coming) = self.coming.take() else { return Vec::new() };
        for (uid, old) in std::mem::take(&mut self.owners) {
            let new = coming.entry(uid).or_default();
            // The stream does not carry the times of replies. It has the versions of the replies, or gets them next; if not,
            // the market refuses the next change.
            (new.last_bid_ms, new.amended_ms) = (old.last_bid_ms, old.amended_ms);
            (new.failures, new.failed_ms) = (old.failures, old.failed_ms);
            let raised = old.raised_from.into_iter();
            let stays = |(bid, from): &(BidName, Price)| new.bids.get(bid).is_some_and(|b| b.limit > *from);
            new.raised_from = raised.filter(stays).collect();
            for (name, allocation) in old.allocations {
                if new.unknown.contains(&name) {
                    new.allocations.insert(name, allocation);
                }
            }
        }
        self.owners = coming;
        self.synced = true;
        vec![Change::Everyone]
    }

    fn bid(&mut self, b: pb::Bid) {
        let bid = Bid {
            market: b.market.into(),
            limit: Price::micros(b.limit_micros),
            open: b.open,
            matched: b.matched,
            provisioning: b.provisioning,
            active: b.active,
            preempting: b.preempting,
            held: !b.hold.is_empty(),
            placed_ms: b.placed_at_ms,
        };
        let label = |key: &str| b.labels.get(key).filter(|value| !value.is_empty());
        let bidnode =
            label(names::NAMESPACE).zip(label(names::BIDNODE)).map(|(ns, name)| format!("{ns}/{name}"));
        let owner = self.entry(&b.owner_uid);
        owner.tenant.clone_from(&b.tenant);
        owner.bidnode = bidnode.or_else(|| owner.bidnode.take());
        let name = BidName::from(b.bid.as_str());
        let before = owner.bids.get(&name).filter(|_| bid.active > 0).map(|old| old.limit);
        if let Some(before) = before.filter(|before| *before < bid.limit) {
            owner.raised_from.entry(name.clone()).or_insert(before);
        }
        if owner.raised_from.get(&name).is_some_and(|from| bid.limit <= *from) {
            owner.raised_from.remove(&name);
        }
        if bid.open + bid.live() + bid.preempting == 0 {
            owner.bids.remove(&name);
            owner.amended_ms.remove(&name);
            owner.raised_from.remove(&name);
        } else {
            owner.bids.insert(name, bid);
        }
    }

    /// Records milestones of an allocation. Bids precede their allocations in the stream, so the time of the bid is known.
    fn track(&mut self, a: &pb::Allocation, now_ms: i64) {
        let live = self.coming.is_none();
        let milestone = match Reported::of(a) {
            Reported::Is(state) => Milestone::of(state, a.stage()),
            Reported::Returned | Reported::Unknown => None,
        };
        let Some(milestone) = milestone else {
            self.milestones.remove(a.allocation.as_str());
            return;
        };
        let owner = self.owners.get(&a.owner_uid);
        let ran = owner
            .and_then(|o| o.allocations.get(a.allocation.as_str()))
            .is_some_and(|u| matches!(u.state, AllocationState::Active | AllocationState::Preempting));
        let before = self.milestones.get(a.allocation.as_str()).copied();
        if milestone == Milestone::Ready {
            self.milestones.remove(a.allocation.as_str());
        } else {
            self.milestones.insert(a.allocation.as_str().into(), milestone);
        }
        let placed = owner.and_then(|o| o.bids.get(a.bid.as_str())).map(|bid| bid.placed_ms);
        if let Some(placed) = placed.filter(|_| live && !ran && before < Some(milestone)) {
            let at = match milestone {
                Milestone::Matched => a.matched_at_ms,
                Milestone::Ready => a.active_at_ms,
                Milestone::Launched | Milestone::Registered => now_ms,
            };
            self.reached.push(Reached { milestone, took_ms: (at - placed).max(0) });
        }
    }

    /// Stores an allocation. Returns the UID of its BidNode, and whether the change is urgent.
    fn allocation(&mut self, a: pb::Allocation) -> Option<(String, bool)> {
        let state = match Reported::of(&a) {
            Reported::Is(AllocationState::Ended) | Reported::Returned => None,
            Reported::Is(state) => Some(state),
            Reported::Unknown => {
                // The state is of a newer market: keep what is known, and the Node.
                if !a.owner_uid.is_empty() {
                    self.entry(&a.owner_uid).unknown.insert(a.allocation.as_str().into());
                }
                return None;
            }
        };
        let live = self.coming.is_none();
        let uid = if a.owner_uid.is_empty() {
            // The frame of a failed launch has only the name of the allocation.
            let has = |o: &Owner| o.allocations.contains_key(a.allocation.as_str());
            self.owners.iter().find(|(_, o)| has(o))?.0.clone()
        } else {
            a.owner_uid.clone()
        };
        let owner = self.entry(&uid);
        let name = AllocationName::from(a.allocation.as_str());
        owner.unknown.remove(&name);
        let before = owner.allocations.get(&name).map(|u| u.state);
        if live && before.is_some() && state.is_none() && a.reason == EndReason::ProvisionFailed.as_str() {
            owner.failures = owner.failures.saturating_add(1);
            owner.failed_ms = a.ended_at_ms;
        } else if state == Some(AllocationState::Active) && before != state {
            owner.failures = 0;
        }
        match state {
            Some(state) => drop(owner.allocations.insert(name, allocation(&a, state))),
            None => drop(owner.allocations.remove(&name)),
        }
        let urgent = state == Some(AllocationState::Preempting) || a.price_to_keep_micros > 0;
        if live && before != state {
            let events = self.events.entry(uid.clone()).or_default();
            events.extend(event(state, &a));
            let over = events.len().saturating_sub(EVENTS_MAX);
            events.drain(..over);
        }
        Some((uid, urgent))
    }

    /// Clears the risks of a market's allocations after a call: each one stays, or is under notice.
    fn clear_risks(&mut self, market: &str) -> Vec<Change> {
        let mut changes = Vec::new();
        for (uid, owner) in &mut self.owners {
            let mut was = false;
            for allocation in owner.allocations.values_mut().filter(|u| &*u.market == market) {
                was |= std::mem::take(&mut allocation.price_to_keep) > Price::ZERO;
            }
            if was {
                changes.push(Change::Owner { uid: uid.clone(), urgent: false });
            }
        }
        changes
    }
}

fn allocation(a: &pb::Allocation, state: AllocationState) -> Allocation {
    Allocation {
        bid: a.bid.as_str().into(),
        market: a.market.as_str().into(),
        lot: a.lot.clone(),
        state,
        limit: Price::micros(a.limit_micros),
        price: Price::micros(a.price_micros),
        active_ms: a.active_at_ms,
        preempt_ms: a.preempt_at_ms,
        node: a.node.clone(),
        reason: a.reason.clone(),
        price_to_keep: Price::micros(a.price_to_keep_micros),
    }
}

/// Event about an allocation's new state; `state` is `None` after its end.
fn event(state: Option<AllocationState>, a: &pb::Allocation) -> Option<ObjectEvent> {
    let (allocation, node) = (&a.allocation, &a.node);
    let event = |reason, text, warning| Some(ObjectEvent { reason, text, warning });
    match (state, EndReason::from_name(&a.reason)) {
        (Some(AllocationState::Matched), _) => event("BidWon", format!("won allocation {allocation}"), false),
        (Some(AllocationState::Provisioning), _) => {
            event("NodeLaunched", format!("launching allocation {allocation}"), false)
        }
        (Some(AllocationState::Active), _) => event("NodeReady", format!("Node {node} is ready"), false),
        (Some(AllocationState::Preempting | AllocationState::Ended), _) => None,
        (None, Some(EndReason::NodeFailed)) => event("NodeFailed", format!("Node {node} failed"), true),
        (None, Some(EndReason::ProvisionFailed)) => {
            event("ProvisionFailed", format!("allocation {allocation} failed to launch three times"), true)
        }
        (None, _) => None,
    }
}

#[cfg(test)]
mod tests;

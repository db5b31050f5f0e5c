//! What the market says of this cluster's bids, units and prices, kept by its streams.
//!
//! A pass reads this and asks the market nothing. What a reply told us is here at once as the version that the stream
//! must reach before anything more is decided.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use coracle_auction::Price;
use coracle_proto::market as pb;
use pb::owner_frame::Frame;

use crate::metrics::Stage;

/// How far a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitState {
    /// Has a seat that is not free yet.
    Matched,
    /// Is being launched.
    Provisioning,
    /// Runs.
    Active,
    /// Runs out its notice.
    Preempting,
}

/// A bid that is not over.
#[derive(Clone, Debug, PartialEq)]
pub struct Bid {
    /// `<type>/<region>`.
    pub market: String,
    /// The most that it pays.
    pub limit: Price,
    /// Units by state.
    pub open: u32,
    /// Units with a seat.
    pub matched: u32,
    /// Units that are launched.
    pub provisioning: u32,
    /// Units that run.
    pub active: u32,
    /// Units under notice.
    pub preempting: u32,
    /// A cap of the tenant holds it.
    pub held: bool,
    /// When it was placed, in milliseconds since 1970.
    pub placed_ms: i64,
}

impl Bid {
    /// Matched, provisioning and active units.
    #[must_use]
    pub fn live(&self) -> u32 {
        self.matched + self.provisioning + self.active
    }
}

/// A unit that is not over.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// Its bid.
    pub bid: String,
    /// `<type>/<region>`.
    pub market: String,
    /// Where it runs.
    pub lot: String,
    /// How far it is.
    pub state: UnitState,
    /// The most that it pays.
    pub limit: Price,
    /// What it pays.
    pub price: Price,
    /// Since when it runs, in milliseconds since 1970.
    pub active_ms: i64,
    /// When it must be gone, in milliseconds since 1970.
    pub preempt_ms: i64,
    /// Its Node.
    pub node: String,
    /// Why it is under notice.
    pub reason: String,
    /// The lowest limit that keeps it; zero: not at risk.
    pub price_to_keep: Price,
}

/// Something that people may want to know.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// Reason of the event.
    pub reason: &'static str,
    /// For people.
    pub text: String,
    /// Someone should look.
    pub warning: bool,
}

/// All of one BidNode in the market.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Owner {
    /// Bids by id.
    pub bids: BTreeMap<String, Bid>,
    /// Units by id.
    pub units: BTreeMap<String, Unit>,
    /// Version by market, as the stream told.
    pub versions: BTreeMap<String, u64>,
    /// Version by market, as our last reply told.
    expected: BTreeMap<String, u64>,
    /// When the market took the last bid or change, in milliseconds since 1970.
    pub last_bid_ms: i64,
    /// When a bid's limit was changed last, in milliseconds since 1970.
    pub amended_ms: BTreeMap<String, i64>,
}

impl Owner {
    /// Did the stream tell all that our last replies told?
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.expected.iter().all(|(market, version)| self.version(market) >= *version)
    }

    /// The version in a market.
    #[must_use]
    pub fn version(&self, market: &str) -> u64 {
        self.versions.get(market).copied().unwrap_or(0)
    }

    fn is_over(&self) -> bool {
        self.bids.is_empty() && self.units.is_empty() && self.is_current()
    }
}

/// Prices of a market.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quote {
    /// What strategies take a share of.
    pub quote: Price,
    /// What the last call came to.
    pub clearing: Price,
    /// No unit is sold below it.
    pub reserve: Price,
    /// No unit costs more.
    pub cap: Price,
    /// Limits are multiples of it.
    pub tick: Price,
    /// Empty units.
    pub free: u64,
    /// Nothing is taken now.
    pub halted: bool,
    /// When the next call is, in milliseconds since 1970.
    pub next_call_ms: i64,
}

/// Who must look again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// One BidNode, by UID; at once, or when there is time.
    Owner { uid: String, urgent: bool },
    /// All of a market: its price changed.
    Market(String),
    /// All.
    Everyone,
}

#[derive(Debug, Default)]
struct State {
    owners: HashMap<String, Owner>,
    /// What a stream that begins has sent so far.
    coming: Option<HashMap<String, Owner>>,
    notes: HashMap<String, Vec<Note>>,
    /// How far units are that are not ready yet.
    stages: HashMap<String, Stage>,
    /// Stages that were reached since somebody asked.
    reached: Vec<Reached>,
    markets: BTreeMap<String, Quote>,
    /// Bids and units are known, and the stream lives.
    synced: bool,
    /// Prices are known, and their stream lives.
    priced: bool,
}

/// A unit came to a stage, so long after its bid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reached {
    pub(crate) stage: Stage,
    pub(crate) took_ms: i64,
}

/// The stage that a unit is shown in; `None`: it is past all of them.
fn stage_of(a: &pb::Allocation) -> Option<Stage> {
    match (a.state.as_str(), a.stage.as_str()) {
        ("provisioning", "launched") => Some(Stage::Launched),
        ("provisioning", "registered") => Some(Stage::Registered),
        ("matched" | "provisioning", _) => Some(Stage::Matched),
        ("active", _) => Some(Stage::Ready),
        _ => None,
    }
}

/// The mirror. One stream of owners and one of prices write it.
#[derive(Debug, Default)]
pub struct Mirror(Mutex<State>);

/// Notes that wait for an owner at most; the oldest go.
const NOTES_MAX: usize = 32;

impl Mirror {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Both streams live and have told everything.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        let state = self.state();
        state.synced && state.priced
    }

    /// All of a BidNode.
    #[must_use]
    pub fn owner(&self, uid: &str) -> Owner {
        self.state().owners.get(uid).cloned().unwrap_or_default()
    }

    /// Prices by market.
    #[must_use]
    pub fn quotes(&self) -> BTreeMap<String, Quote> {
        self.state().markets.clone()
    }

    /// Prices of the markets of a type.
    #[must_use]
    pub fn quotes_of(&self, instance_type: &str) -> BTreeMap<String, Quote> {
        let is_of = |name: &str| name.split_once('/').is_some_and(|(kind, _)| kind == instance_type);
        self.state().markets.iter().filter(|(name, _)| is_of(name)).map(|(n, q)| (n.clone(), *q)).collect()
    }

    /// What happened to a BidNode's units since this was asked last.
    pub(crate) fn take_notes(&self, uid: &str) -> Vec<Note> {
        self.state().notes.remove(uid).unwrap_or_default()
    }

    /// Stages that units reached since this was asked last.
    pub(crate) fn take_reached(&self) -> Vec<Reached> {
        std::mem::take(&mut self.state().reached)
    }

    /// Takes in what a reply told: nothing is decided before the stream has told it too.
    pub(crate) fn replied(&self, uid: &str, market: &str, version: u64, at_ms: i64, amended: Option<&str>) {
        let mut state = self.state();
        let owner = state.owners.entry(uid.to_owned()).or_default();
        let known = owner.expected.entry(market.to_owned()).or_default();
        *known = version.max(*known);
        owner.last_bid_ms = at_ms.max(owner.last_bid_ms);
        if let Some(bid) = amended {
            owner.amended_ms.insert(bid.to_owned(), at_ms);
        }
    }

    /// Forgets a BidNode that is gone.
    pub(crate) fn forget(&self, uid: &str) {
        let mut state = self.state();
        state.notes.remove(uid);
        if state.owners.get(uid).is_some_and(Owner::is_over) {
            state.owners.remove(uid);
        }
    }

    /// A stream ended. What is known stays, to be shown and not to be acted upon.
    pub(crate) fn lost(&self) -> Vec<Change> {
        let mut state = self.state();
        let was = state.synced && state.priced;
        (state.synced, state.priced, state.coming) = (false, false, None);
        if was { vec![Change::Everyone] } else { Vec::new() }
    }

    /// Takes in a frame of prices. The first of all markets come before any change, so one is enough to be priced when
    /// the caller says so.
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
        let old = state.markets.insert(frame.market.clone(), quote);
        let mut changes = Vec::new();
        if frame.r#type == "call" {
            changes.extend(state.call_over(&frame.market));
        }
        let seen = |q: Quote| (q.quote, q.clearing, q.reserve, q.cap, q.halted);
        if old.is_none_or(|old| seen(old) != seen(quote)) {
            changes.push(Change::Market(frame.market.clone()));
        }
        changes
    }

    /// All prices were told.
    pub(crate) fn priced(&self) -> Vec<Change> {
        let mut state = self.state();
        let was = std::mem::replace(&mut state.priced, true);
        if !was && state.synced { vec![Change::Everyone] } else { Vec::new() }
    }

    /// Takes in a frame of bids and units.
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
                owner.versions.insert(frame.market, version.version);
                change(version.owner_uid, false)
            }
            Some(Frame::Bid(bid)) => {
                let uid = bid.owner_uid.clone();
                state.bid(bid);
                change(uid, false)
            }
            Some(Frame::Allocation(unit)) => {
                state.staged(&unit, now_ms);
                state.unit(unit).map_or_else(Vec::new, |(uid, urgent)| change(uid, urgent))
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

    /// All that was there has been told: what it did not name is no more.
    fn begin(&mut self) -> Vec<Change> {
        let Some(mut coming) = self.coming.take() else { return Vec::new() };
        for (uid, old) in std::mem::take(&mut self.owners) {
            let new = coming.entry(uid).or_default();
            // Times of replies are ours. What replies told of versions is in what came, or comes next; if not, the
            // market refuses.
            (new.last_bid_ms, new.amended_ms) = (old.last_bid_ms, old.amended_ms);
        }
        self.owners = coming;
        self.synced = true;
        vec![Change::Everyone]
    }

    fn bid(&mut self, b: pb::Bid) {
        let bid = Bid {
            market: b.market,
            limit: Price::micros(b.limit_micros),
            open: b.open,
            matched: b.matched,
            provisioning: b.provisioning,
            active: b.active,
            preempting: b.preempting,
            held: !b.hold.is_empty(),
            placed_ms: b.placed_at_ms,
        };
        let owner = self.entry(&b.owner_uid);
        if bid.open + bid.live() + bid.preempting == 0 {
            owner.bids.remove(&b.bid);
            owner.amended_ms.remove(&b.bid);
        } else {
            owner.bids.insert(b.bid, bid);
        }
    }

    /// Notes how far a unit is. Bids come before their units, so the time of the bid is known.
    fn staged(&mut self, a: &pb::Allocation, now_ms: i64) {
        let live = self.coming.is_none();
        let Some(stage) = stage_of(a) else {
            self.stages.remove(&a.allocation);
            return;
        };
        let owner = self.owners.get(&a.owner_uid);
        let ran = owner
            .and_then(|o| o.units.get(&a.allocation))
            .is_some_and(|u| matches!(u.state, UnitState::Active | UnitState::Preempting));
        let before = self.stages.get(&a.allocation).copied();
        if stage == Stage::Ready {
            self.stages.remove(&a.allocation);
        } else {
            self.stages.insert(a.allocation.clone(), stage);
        }
        let placed = owner.and_then(|o| o.bids.get(&a.bid)).map(|bid| bid.placed_ms);
        if let Some(placed) = placed.filter(|_| live && !ran && before < Some(stage)) {
            let at = match stage {
                Stage::Matched => a.matched_at_ms,
                Stage::Ready => a.active_at_ms,
                Stage::Launched | Stage::Registered => now_ms,
            };
            self.reached.push(Reached { stage, took_ms: (at - placed).max(0) });
        }
    }

    /// Whose it is, and whether that one must look at once.
    fn unit(&mut self, a: pb::Allocation) -> Option<(String, bool)> {
        let state = match a.state.as_str() {
            "matched" => Some(UnitState::Matched),
            "provisioning" => Some(UnitState::Provisioning),
            "active" => Some(UnitState::Active),
            "preempting" => Some(UnitState::Preempting),
            _ => None,
        };
        let live = self.coming.is_none();
        let uid = if a.owner_uid.is_empty() {
            // A launch that came to nothing is named by its id alone.
            self.owners.iter().find(|(_, o)| o.units.contains_key(&a.allocation))?.0.clone()
        } else {
            a.owner_uid
        };
        let owner = self.entry(&uid);
        let before = owner.units.get(&a.allocation).map(|u| u.state);
        let node = a.node.clone();
        match state {
            Some(state) => {
                let unit = Unit {
                    bid: a.bid,
                    market: a.market,
                    lot: a.lot,
                    state,
                    limit: Price::micros(a.limit_micros),
                    price: Price::micros(a.price_micros),
                    active_ms: a.active_at_ms,
                    preempt_ms: a.preempt_at_ms,
                    node: a.node,
                    reason: a.reason.clone(),
                    price_to_keep: Price::micros(a.price_to_keep_micros),
                };
                owner.units.insert(a.allocation.clone(), unit);
            }
            None => {
                owner.units.remove(&a.allocation);
            }
        }
        let urgent = state == Some(UnitState::Preempting) || a.price_to_keep_micros > 0;
        if live && before != state {
            let note = note(state, &a.allocation, &node, &a.reason);
            let notes = self.notes.entry(uid.clone()).or_default();
            notes.extend(note);
            let over = notes.len().saturating_sub(NOTES_MAX);
            notes.drain(..over);
        }
        Some((uid, urgent))
    }

    /// A call was held: who was at risk is out of it, or under notice.
    fn call_over(&mut self, market: &str) -> Vec<Change> {
        let mut changes = Vec::new();
        for (uid, owner) in &mut self.owners {
            let mut was = false;
            for unit in owner.units.values_mut().filter(|u| u.market == market) {
                was |= std::mem::take(&mut unit.price_to_keep) > Price::ZERO;
            }
            if was {
                changes.push(Change::Owner { uid: uid.clone(), urgent: false });
            }
        }
        changes
    }
}

/// What a unit's new state means to people.
fn note(state: Option<UnitState>, unit: &str, node: &str, reason: &str) -> Option<Note> {
    let note = |reason, text, warning| Some(Note { reason, text, warning });
    match state {
        Some(UnitState::Matched) => note("BidWon", format!("unit {unit} is won"), false),
        Some(UnitState::Provisioning) => {
            note("NodeLaunched", format!("unit {unit} is being launched"), false)
        }
        Some(UnitState::Active) => note("NodeReady", format!("Node {node} is ready"), false),
        Some(UnitState::Preempting) => None,
        None if reason == "NodeFailed" => note("NodeFailed", format!("Node {node} failed"), true),
        None if reason == "ProvisionFailed" => {
            note("ProvisionFailed", format!("unit {unit} could not be launched three times"), true)
        }
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(frame: Frame) -> pb::OwnerFrame {
        pb::OwnerFrame { seq: 1, market: "t/r".into(), frame: Some(frame) }
    }

    fn bid(open: u32, active: u32) -> pb::Bid {
        let (bid, owner_uid, market) = ("b".into(), "u".into(), "t/r".into());
        pb::Bid { bid, owner_uid, market, open, active, ..pb::Bid::default() }
    }

    fn unit(state: &str) -> pb::Allocation {
        let (allocation, owner_uid) = ("a".into(), "u".into());
        pb::Allocation { allocation, owner_uid, state: state.into(), ..pb::Allocation::default() }
    }

    #[test]
    fn nothing_is_current_until_the_stream_tells_what_a_reply_told() {
        let mirror = Mirror::default();
        mirror.replied("u", "t/r", 1, 5, None);
        assert!(!mirror.owner("u").is_current());
        mirror.frame(frame(Frame::Bid(bid(2, 0))), 0);
        assert!(!mirror.owner("u").is_current());
        mirror.frame(frame(Frame::Owner(pb::OwnerVersion { owner_uid: "u".into(), version: 1 })), 0);
        let owner = mirror.owner("u");
        assert!(owner.is_current() && owner.bids["b"].open == 2 && owner.last_bid_ms == 5);
    }

    #[test]
    fn a_new_stream_replaces_what_the_old_one_told() {
        let mirror = Mirror::default();
        mirror.frame(frame(Frame::Bid(bid(2, 0))), 0);
        mirror.replied("u", "t/r", 9, 5, None);
        mirror.frame(frame(Frame::Synced(false)), 0);
        assert_eq!(mirror.owner("u").bids.len(), 1, "the old is shown until the new is whole");
        assert_eq!(mirror.frame(frame(Frame::Synced(true)), 0), [Change::Everyone]);
        let owner = mirror.owner("u");
        assert!(owner.bids.is_empty() && owner.is_current() && owner.last_bid_ms == 5);
        assert!(!mirror.is_synced(), "prices are not known yet");
        mirror.priced();
        assert!(mirror.is_synced());
        assert_eq!(mirror.lost(), [Change::Everyone]);
        assert!(!mirror.is_synced() && mirror.lost().is_empty());
    }

    #[test]
    fn a_notice_is_urgent_and_a_failed_launch_is_forgotten() {
        let mirror = Mirror::default();
        mirror.frame(frame(Frame::Allocation(unit("provisioning"))), 0);
        let gone = pb::Allocation { owner_uid: String::new(), ..unit("returned") };
        assert_eq!(
            mirror.frame(frame(Frame::Allocation(gone)), 0),
            [Change::Owner { uid: "u".into(), urgent: false }]
        );
        assert!(mirror.owner("u").units.is_empty());
        mirror.frame(frame(Frame::Allocation(unit("active"))), 0);
        assert_eq!(
            mirror.frame(frame(Frame::Allocation(unit("preempting"))), 0),
            [Change::Owner { uid: "u".into(), urgent: true }]
        );
        let notes: Vec<_> = mirror.take_notes("u").into_iter().map(|n| n.reason).collect();
        assert_eq!(notes, ["NodeLaunched", "NodeReady"]);
    }

    #[test]
    fn each_stage_is_told_once_and_none_of_a_stream_that_begins() {
        let mirror = Mirror::default();
        let placed = pb::Bid { placed_at_ms: 1_000, ..bid(0, 1) };
        mirror.frame(frame(Frame::Bid(placed.clone())), 0);
        let put = |state: &str, stage: &str, now_ms| {
            let (matched_at_ms, active_at_ms) = (1_500, 9_000);
            let unit = pb::Allocation { bid: "b".into(), stage: stage.into(), ..unit(state) };
            let unit = pb::Allocation { matched_at_ms, active_at_ms, ..unit };
            mirror.frame(frame(Frame::Allocation(unit)), now_ms);
        };
        put("provisioning", "ordered", 1_600);
        put("provisioning", "launched", 4_000);
        put("provisioning", "launched", 4_100);
        put("provisioning", "registered", 6_000);
        put("active", "", 9_100);
        put("active", "", 9_900);
        put("preempting", "", 9_950);
        let told: Vec<_> = mirror.take_reached().into_iter().map(|r| (r.stage, r.took_ms)).collect();
        let want = [
            (Stage::Matched, 500),
            (Stage::Launched, 3_000),
            (Stage::Registered, 5_000),
            (Stage::Ready, 8_000),
        ];
        assert_eq!(told, want);
        mirror.frame(frame(Frame::Synced(false)), 0);
        mirror.frame(frame(Frame::Bid(placed)), 0);
        put("provisioning", "launched", 9_990);
        mirror.frame(frame(Frame::Synced(true)), 0);
        assert_eq!(mirror.take_reached(), [], "what was before is no news");
    }
}

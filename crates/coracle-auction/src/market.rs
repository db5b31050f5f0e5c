//! The state machine of one market.

mod admit;
mod amend;
mod bill;
mod budget;
mod call;
mod clock;
pub(crate) mod desired;
pub(crate) mod explain;
mod fill;
mod launch;
mod leave;
pub(crate) mod simulate;
mod snapshot;
mod supply;
pub(crate) mod view;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::allocation::Allocation;
use crate::bid::{Bid, Owner};
use crate::book::{Book, Rank};
use crate::history::History;
use crate::keys::KeyTable;
use crate::lots::{FreeSlots, Lot};
use crate::slab::Slab;
use crate::tenants::Tenants;
use crate::timers::Timers;
use crate::{
    AllocationId, BidId, CallRecord, Command, Event, LotNo, OwnerKey, Params, Price, Rejection, Reply,
    SupplierNo, Time,
};

/// Sort key of a running allocation in the order of preemption: lowest limit first, then the newest match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Running {
    pub(crate) price: Price,
    pub(crate) match_no: Reverse<u64>,
}

/// One market: parameters, book, allocations, lots and prices.
///
/// Only [`Market::apply`] changes it.
#[derive(Clone, Debug)]
pub struct Market {
    pub(crate) params: Params,
    pub(crate) scheduled: Option<(Time, Params)>,
    pub(crate) halted: bool,
    pub(crate) now: Time,
    pub(crate) restarted_at: Time,
    pub(crate) next_call: Time,
    pub(crate) indicative_due: Time,
    pub(crate) next_seq: u64,
    pub(crate) next_match: u64,
    pub(crate) calls: u64,
    pub(crate) chain: [u8; 32],
    pub(crate) last_call: Option<CallRecord>,
    pub(crate) indicative: Price,
    pub(crate) history: History,
    pub(crate) tenants: Tenants,
    pub(crate) owners: Vec<Owner>,
    pub(crate) bids: Slab<Bid>,
    pub(crate) allocations: Slab<Allocation>,
    pub(crate) lots: BTreeMap<LotNo, Lot>,
    /// Version of the desired sets of all suppliers.
    pub(crate) epoch: u64,
    /// Allocations that lost in the last indicative calls: number of consecutive losses, and the price that keeps each.
    pub(crate) at_risk: BTreeMap<u32, (u8, Price)>,

    // Derived from the fields above; not in snapshots.
    pub(crate) owner_index: BTreeMap<(u32, OwnerKey), u32>,
    /// Owner of the last placement.
    pub(crate) last_owner: u32,
    pub(crate) book: Book,
    pub(crate) running: BTreeMap<Running, u32>,
    pub(crate) free_slots: FreeSlots,
    pub(crate) timers: Timers,
    /// Rows of each owner's bids; not sorted.
    pub(crate) by_owner: Vec<Vec<u32>>,
    /// Number of allocations that hold a slot.
    pub(crate) live: u64,
    pub(crate) by_supplier: BTreeSet<(SupplierNo, LotNo)>,
    pub(crate) keys: KeyTable,
    /// Tenants whose commitment decreased, so that held bids may enter the book.
    pub(crate) relieved: Vec<u32>,
    /// Allocations whose ceiling is above their limit until the next call.
    pub(crate) lowered: BTreeSet<u32>,
    /// Whether a call could change something: there was a change since the last call, or the last call made one.
    pub(crate) moved: bool,
    pub(crate) out: Vec<Event>,
}

impl Market {
    /// Creates an empty market whose first call is one interval after `at`.
    #[must_use]
    pub fn new(params: Params, at: Time) -> Self {
        Self {
            params,
            scheduled: None,
            halted: false,
            now: at,
            restarted_at: Time(0),
            next_call: at.plus_ms(params.call_interval_ms),
            indicative_due: at,
            next_seq: 1,
            next_match: 1,
            calls: 0,
            chain: [0; 32],
            last_call: None,
            indicative: params.reserve,
            history: History::starting_at(params.reserve),
            tenants: Tenants::default(),
            owners: Vec::new(),
            bids: Slab::new(),
            allocations: Slab::new(),
            lots: BTreeMap::new(),
            epoch: 0,
            at_risk: BTreeMap::new(),
            owner_index: BTreeMap::new(),
            last_owner: 0,
            book: Book::default(),
            running: BTreeMap::new(),
            free_slots: FreeSlots::default(),
            timers: Timers::default(),
            by_owner: Vec::new(),
            live: 0,
            by_supplier: BTreeSet::new(),
            keys: KeyTable::default(),
            relieved: Vec::new(),
            lowered: BTreeSet::new(),
            moved: true,
            out: Vec::new(),
        }
    }

    /// Advances the time to `at`, then applies the command. Appends events to `out`.
    ///
    /// Deterministic: the same commands at the same times give the same replies, events and bytes of [`Market::snapshot`]. A
    /// refused command changes only the time.
    pub fn apply(&mut self, at: Time, command: &Command, out: &mut Vec<Event>) -> Reply {
        std::mem::swap(&mut self.out, out);
        let at = at.max(self.now);
        if *command == Command::Restarted {
            // Set before the time advances: deadlines that passed while the service was down do not count.
            self.restarted_at = at;
        }
        self.advance(at);
        self.moved |= *command != Command::Tick;
        let reply = match self.perform(command) {
            Ok(reply) => reply,
            Err(refusal) => Reply::Refused(refusal),
        };
        self.fill();
        std::mem::swap(&mut self.out, out);
        reply
    }

    fn perform(&mut self, command: &Command) -> Result<Reply, Rejection> {
        match command {
            Command::Place { request } => return self.place(request),
            Command::Amend { amendment } => return self.amend(amendment),
            Command::Cancel { tenant, bid, if_owner_version } => {
                return self.cancel(*tenant, *bid, *if_owner_version);
            }
            Command::Release { tenant, allocation, if_owner_version, reason } => {
                return self.release(*tenant, *allocation, *if_owner_version, *reason);
            }
            Command::Tick => self.indicate(),
            Command::Restarted => {}
            Command::Configure { params, effective_at } => self.configure(*params, *effective_at)?,
            Command::Halt => self.set_halted(true),
            Command::Resume => self.set_halted(false),
            Command::Budget { tenant, cap } => self.set_cap(*tenant, *cap),
            Command::Substitute { tenant, victim, other } => self.substitute(*tenant, *victim, *other)?,
            Command::Renew { tenant, owner } => self.renew(*tenant, *owner)?,
            Command::PutLot { lot, supplier, slots, notice_ms } => {
                self.put_lot(*lot, *supplier, *slots, *notice_ms)?;
            }
            Command::DrainLot { lot } => self.drain_lot(*lot)?,
            Command::Heard { supplier } => self.wake_supplier(*supplier),
            Command::Silent { supplier } => self.silence_supplier(*supplier),
            Command::Lost { supplier } => self.lose_supplier(*supplier),
            Command::Gone { lot, slot, allocation } => self.on_machine_gone(*lot, *slot, *allocation)?,
            Command::Report { allocation, report } => self.report(*allocation, report)?,
        }
        Ok(Reply::Done)
    }

    fn set_halted(&mut self, halted: bool) {
        if self.halted != halted {
            self.halted = halted;
            self.next_call = self.now.plus_ms(self.params.call_interval_ms);
            self.out.push(Event::Halted { halted });
        }
    }

    fn bid_id(&self, place: u32) -> BidId {
        BidId(self.bids.id(place))
    }

    fn allocation_id(&self, place: u32) -> AllocationId {
        AllocationId(self.allocations.id(place))
    }

    /// Bid in row `place`, which the caller took from an index.
    fn row(&mut self, place: u32) -> &mut Bid {
        self.bids.at_mut(place).expect("rows of bids come from indexes that hold existing rows only")
    }

    /// Allocation in row `place`, which the caller took from an index.
    fn allocation_at(&mut self, place: u32) -> &mut Allocation {
        self.allocations
            .at_mut(place)
            .expect("rows of allocations come from indexes that hold existing rows only")
    }

    fn rank(&self, limit: Price, seq: u64) -> Rank {
        Rank { price: self.params.effective(limit), seq: Reverse(seq) }
    }

    fn emit_bid(&mut self, place: u32) {
        let bid = self.bid_id(place);
        self.out.push(Event::Bid { bid });
    }

    /// Emits an event for a changed entry of a supplier's desired set.
    fn emit_desired(&mut self, place: u32) {
        let row = self.allocation_at(place);
        let (lot, slot, matched_at) = (row.lot, row.slot, row.matched_at);
        let Some(supplier) = self.lots.get(&lot).map(|lot| lot.supplier) else { return };
        self.epoch += 1;
        let (allocation, epoch) = (self.allocation_id(place), self.epoch);
        self.out.push(Event::Desired { supplier, lot, slot, allocation, matched_at, epoch });
    }

    fn emit_allocation(&mut self, place: u32) {
        let bid = self.allocation_at(place).bid;
        let event = Event::Allocation { allocation: self.allocation_id(place), bid: self.bid_id(bid) };
        self.out.push(event);
    }
}

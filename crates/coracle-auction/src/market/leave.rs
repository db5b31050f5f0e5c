//! Units that lose or give up their seat.

use super::{Market, Running};
use crate::alloc::AllocState;
use crate::lots::LotState;
use crate::slab::Link;
use crate::timers::Timer;
use crate::{AllocId, EndReason, Event, RETENTION_MS, Refusal, Reply, TenantNo, Time};
use std::cmp::Reverse;

/// How long after the notice another unit may be offered, in milliseconds.
const SUBSTITUTE_MS: u64 = 15_000;

impl Market {
    /// From now on calls decide about this unit, if it is active, unprotected and its lot is open.
    pub(super) fn contest(&mut self, place: u32) {
        let now = self.now;
        let alloc = self.unit(place);
        if alloc.state != AllocState::Active || alloc.protected_until > now {
            return;
        }
        let (lot, limit, match_no) = (alloc.lot, alloc.limit, alloc.match_no);
        if self.lots.get(&lot).is_some_and(|lot| lot.state == LotState::Open) {
            let price = self.params.effective(limit);
            self.running.insert(Running { price, match_no: Reverse(match_no) }, place);
        }
    }

    pub(super) fn leave_contest(&mut self, place: u32) {
        let alloc = self.unit(place);
        let (limit, match_no) = (alloc.limit, alloc.match_no);
        let price = self.params.effective(limit);
        self.running.remove(&Running { price, match_no: Reverse(match_no) });
    }

    /// An active unit must go. It keeps its seat, and pays, until its notice is over.
    pub(super) fn preempt(&mut self, place: u32, reason: EndReason) {
        self.leave_contest(place);
        self.give_notice(place, reason);
    }

    /// The same for one that calls no longer decide about.
    pub(super) fn give_notice(&mut self, place: u32, reason: EndReason) {
        let now = self.now;
        let alloc = self.unit(place);
        let (lot, unit, bid) = (alloc.lot, alloc.unit, alloc.bid);
        let own = self.lots.get(&lot).map_or(u64::MAX, |lot| lot.notice_ms);
        let deadline = now.plus_ms(self.params.notice_ms.min(own));
        let alloc = self.unit(place);
        alloc.state = AllocState::Preempting;
        alloc.reason = Some(reason);
        alloc.noticed_at = now;
        alloc.preempt_at = deadline;
        self.live -= 1;
        self.wake(place, deadline);
        let units = &mut self.row(bid).units;
        units.active -= 1;
        units.preempting += 1;
        self.offer_seat(lot, unit);
        let alloc = self.alloc_id(place);
        self.out.push(Event::Reclaim { alloc, lot, deadline, reason });
        self.tell_unit(place);
    }

    /// A unit is over, now.
    pub(super) fn end(&mut self, place: u32, reason: EndReason) {
        self.leave_contest(place);
        self.close_account(place, reason);
        self.wake(place, Time::NEVER);
        let now = self.now;
        let alloc = self.unit(place);
        let (state, bid, tenant, lot, limit) = (alloc.state, alloc.bid, alloc.tenant, alloc.lot, alloc.limit);
        alloc.state = AllocState::Ended;
        alloc.reason = Some(reason);
        alloc.ended_at = now;
        let units = &mut self.row(bid).units;
        match state {
            AllocState::Matched => units.matched -= 1,
            AllocState::Provisioning => units.provisioning -= 1,
            AllocState::Active => units.active -= 1,
            AllocState::Preempting => units.preempting -= 1,
            AllocState::Ended => {}
        }
        units.ended += 1;
        self.live -=
            u64::from(matches!(state, AllocState::Matched | AllocState::Provisioning | AllocState::Active));
        self.leave_seat_of(place, state);
        let row = self.tenants.at_mut(tenant);
        row.committed -= i128::from(limit.as_micros());
        row.units -= 1;
        self.relieved.push(tenant);
        if matches!(state, AllocState::Provisioning | AllocState::Active) {
            let alloc = self.alloc_id(place);
            self.out.push(Event::Reclaim { alloc, lot, deadline: now, reason });
        }
        self.timers.set(now.plus_ms(RETENTION_MS), Timer::ForgetUnit(place));
        self.tell_unit(place);
        if self.finish_bid(bid) {
            self.tell_bid(bid);
        }
    }

    pub(super) fn forget_unit(&mut self, place: u32) {
        let Some(alloc) = self.allocs.at(place) else { return };
        let ended = alloc.ended_at;
        self.timers.unset(ended.plus_ms(RETENTION_MS), Timer::ForgetUnit(place));
        self.part(place);
        self.allocs.remove(place);
    }

    /// Puts a new unit in front of those of its bid.
    pub(super) fn join(&mut self, place: u32) {
        let bid = self.unit(place).bid;
        let older = std::mem::replace(&mut self.row(bid).newest, Link::to(place));
        self.unit(place).older = older;
        if let Some(older) = older.place() {
            self.unit(older).newer = Link::to(place);
        }
    }

    /// Takes a unit out of those of its bid.
    pub(super) fn part(&mut self, place: u32) {
        let alloc = self.unit(place);
        let (bid, newer, older) = (alloc.bid, alloc.newer, alloc.older);
        match newer.place() {
            Some(newer) => self.unit(newer).older = older,
            None => self.row(bid).newest = older,
        }
        if let Some(older) = older.place() {
            self.unit(older).newer = newer;
        }
    }

    pub(super) fn leave_seat(&mut self, place: u32) {
        let state = self.unit(place).state;
        self.leave_seat_of(place, state);
    }

    /// The seat goes to whom it was promised, back to the free ones, or away with its lot.
    fn leave_seat_of(&mut self, place: u32, state: AllocState) {
        let alloc = self.unit(place);
        let (no, unit, preempt_at) = (alloc.lot, alloc.unit, alloc.preempt_at);
        let Some(lot) = self.lots.get_mut(&no) else { return };
        let Some(seat) = lot.units.get_mut(unit as usize) else { return };
        if state == AllocState::Matched {
            seat.promised = None;
            return self.offer_seat(no, unit);
        }
        seat.occupant = None;
        if let Some(next) = seat.promised.take() {
            seat.occupant = Some(next);
            return self.launch(next);
        }
        if lot.state == LotState::Open {
            if !seat.retired {
                self.seats.free.insert((lot.strikes, no, unit));
            }
            self.seats.yielding.remove(&(preempt_at, no, unit));
        } else if lot.state == LotState::Draining {
            self.drop_if_empty(no);
        }
    }

    /// A seat whose occupant runs out its notice can be promised.
    pub(super) fn offer_seat(&mut self, no: crate::LotNo, unit: u32) {
        let Some(lot) = self.lots.get(&no) else { return };
        let Some(seat) = lot.units.get(unit as usize) else { return };
        if lot.state != LotState::Open || seat.retired || seat.promised.is_some() {
            return;
        }
        let occupant = seat.occupant.and_then(|occupant| self.allocs.at(occupant));
        if let Some(occupant) = occupant.filter(|occupant| occupant.state == AllocState::Preempting) {
            self.seats.yielding.insert((occupant.preempt_at, no, unit));
        }
    }

    /// The place of a unit of this tenant.
    fn own_unit(&self, tenant: TenantNo, alloc: AllocId) -> Result<u32, Refusal> {
        let place = self.allocs.place(alloc.0).ok_or(Refusal::NotFound)?;
        let row = self.allocs.at(place).ok_or(Refusal::NotFound)?;
        if self.tenants.at(row.tenant).no == tenant { Ok(place) } else { Err(Refusal::NotFound) }
    }

    pub(super) fn release(
        &mut self,
        tenant: TenantNo,
        alloc: AllocId,
        version: Option<u64>,
    ) -> Result<Reply, Refusal> {
        let place = self.own_unit(tenant, alloc)?;
        let unit = self.unit(place);
        let (bid, state, preempted) = (unit.bid, unit.state, unit.reason);
        let owner = self.row(bid).owner;
        if state == AllocState::Ended {
            return Err(Refusal::Terminal);
        }
        self.check_version(owner, version)?;
        // Who leaves early under notice was still preempted; the notice is not held against them.
        self.end(place, preempted.unwrap_or(EndReason::Released));
        let owner_version = self.raise_version(owner);
        Ok(Reply::Bid { bid: self.bid_id(bid), owner_version, replayed: false, below_reserve: false })
    }

    /// A tenant gives up `other` so that `victim` stays. The promise moves with the notice.
    pub(super) fn substitute(
        &mut self,
        tenant: TenantNo,
        victim: AllocId,
        other: AllocId,
    ) -> Result<(), Refusal> {
        let (victim, other) = (self.own_unit(tenant, victim)?, self.own_unit(tenant, other)?);
        let now = self.now;
        let (v, o) = (self.unit(victim).clone(), self.unit(other).clone());
        if v.state != AllocState::Preempting || v.reason != Some(EndReason::Preempted) {
            return Err(Refusal::Terminal);
        }
        if now > v.noticed_at.plus_ms(SUBSTITUTE_MS) {
            return Err(Refusal::TooLate);
        }
        if o.state != AllocState::Active || o.lot != v.lot || o.limit > v.limit {
            let range = "another active unit of the same lot with no higher limit";
            return Err(Refusal::Invalid { field: "other", range });
        }
        self.swap(victim, other, v.preempt_at);
        Ok(())
    }

    fn swap(&mut self, victim: u32, other: u32, deadline: Time) {
        self.leave_contest(other);
        let now = self.now;
        let (lot, unit, bid) = {
            let v = self.unit(victim);
            v.state = AllocState::Active;
            v.reason = None;
            v.preempt_at = Time::NEVER;
            v.noticed_at = Time::NEVER;
            (v.lot, v.unit, v.bid)
        };
        self.seats.yielding.remove(&(deadline, lot, unit));
        let promised = self.seat_at(lot, unit).promised.take();
        let units = &mut self.row(bid).units;
        units.preempting -= 1;
        units.active += 1;
        self.wake(victim, Time::NEVER);

        let o = self.unit(other);
        o.state = AllocState::Preempting;
        o.reason = Some(EndReason::Preempted);
        o.noticed_at = now;
        o.preempt_at = deadline;
        let (other_unit, other_bid) = (o.unit, o.bid);
        let units = &mut self.row(other_bid).units;
        units.active -= 1;
        units.preempting += 1;
        self.wake(other, deadline);
        self.seat_at(lot, other_unit).promised = promised;
        if let Some(promised) = promised {
            self.unit(promised).unit = other_unit;
        }
        self.offer_seat(lot, other_unit);
        self.contest(victim);
        let (spared, leaves) = (self.alloc_id(victim), self.alloc_id(other));
        self.out.push(Event::Spare { alloc: spared, lot });
        self.out.push(Event::Reclaim { alloc: leaves, lot, deadline, reason: EndReason::Preempted });
        self.tell_unit(victim);
        self.tell_unit(other);
    }
}

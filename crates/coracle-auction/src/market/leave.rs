//! Allocations that lose or give up their slot.

use super::{Market, Running};
use crate::allocation::AllocationState;
use crate::lots::{Leaving, LotState};
use crate::slab::Link;
use crate::timers::Timer;
use crate::{
    AllocationId, EndReason, Fault, LotNo, RETENTION_MS, Rejection, ReleaseReason, Reply, TenantNo, Time,
};
use std::cmp::Reverse;

/// Time after the notice within which another allocation may be offered, in milliseconds.
const SUBSTITUTE_MS: u64 = 15_000;

impl Market {
    /// Makes an allocation preemptible by calls, if it is active, unprotected and its lot is open.
    pub(super) fn make_preemptible(&mut self, place: u32) {
        let now = self.now;
        let allocation = self.allocation_at(place);
        if allocation.state != AllocationState::Active || allocation.protected_until > now {
            return;
        }
        let (lot, limit, match_no) = (allocation.lot, allocation.limit, allocation.match_no);
        if self.lots.get(&lot).is_some_and(|lot| lot.state == LotState::Open) {
            let price = self.params.effective(limit);
            self.running.insert(Running { price, match_no: Reverse(match_no) }, place);
        }
    }

    pub(super) fn clear_preemptible(&mut self, place: u32) {
        let allocation = self.allocation_at(place);
        let (limit, match_no) = (allocation.limit, allocation.match_no);
        let price = self.params.effective(limit);
        self.running.remove(&Running { price, match_no: Reverse(match_no) });
    }

    /// Puts an active allocation under notice. It keeps its slot, and pays, until the notice ends.
    pub(super) fn preempt(&mut self, place: u32, reason: EndReason) {
        self.clear_preemptible(place);
        self.give_notice(place, reason);
    }

    /// Like [`Market::preempt`], for an allocation that calls can no longer preempt.
    pub(super) fn give_notice(&mut self, place: u32, reason: EndReason) {
        let now = self.now;
        let allocation = self.allocation_at(place);
        let (lot, slot_no, bid) = (allocation.lot, allocation.slot, allocation.bid);
        let own = self.lots.get(&lot).map_or(u64::MAX, |lot| lot.notice_ms);
        let deadline = now.plus_ms(self.params.notice_ms.min(own));
        let allocation = self.allocation_at(place);
        allocation.state = AllocationState::Preempting;
        allocation.reason = Some(reason);
        allocation.noticed_at = now;
        allocation.preempt_at = deadline;
        self.live -= 1;
        self.wake(place, deadline);
        let units = &mut self.row(bid).units;
        units.active -= 1;
        units.preempting += 1;
        self.offer_slot(lot, slot_no);
        self.emit_desired(place);
        self.emit_allocation(place);
    }

    /// Ends an allocation now and stops its charge. The slot is free only after the supplier reports that the machine is gone.
    pub(super) fn end(&mut self, place: u32, reason: EndReason) {
        self.end_by(place, reason, None);
    }

    /// Like [`Market::end`], with the origin of the machine's end.
    pub(super) fn end_by(&mut self, place: u32, reason: EndReason, fault: Option<Fault>) {
        self.clear_preemptible(place);
        let fault = fault.or((reason == EndReason::CapacityLost).then_some(Fault::Host));
        self.close_account(place, reason, fault);
        self.lowered.remove(&place);
        self.wake(place, Time::NEVER);
        let now = self.now;
        let allocation = self.allocation_at(place);
        let (state, bid, tenant) = (allocation.state, allocation.bid, allocation.tenant);
        allocation.state = AllocationState::Ended;
        allocation.reason = Some(reason);
        allocation.ended_at = now;
        let units = &mut self.row(bid).units;
        match state {
            AllocationState::Matched => units.matched -= 1,
            AllocationState::Provisioning => units.provisioning -= 1,
            AllocationState::Active => units.active -= 1,
            AllocationState::Preempting => units.preempting -= 1,
            AllocationState::Ended => {}
        }
        units.ended += 1;
        self.live -= u64::from(matches!(
            state,
            AllocationState::Matched | AllocationState::Provisioning | AllocationState::Active
        ));
        self.vacate_slot_in_state(place, state);
        self.tenants.at_mut(tenant).units -= 1;
        self.relieved.push(tenant);
        self.timers.set(now.plus_ms(RETENTION_MS), Timer::ForgetAllocation(place));
        self.emit_allocation(place);
        if self.finish_bid(bid) {
            self.emit_bid(bid);
        }
    }

    pub(super) fn forget_allocation(&mut self, place: u32) {
        let Some(allocation) = self.allocations.at(place) else { return };
        let ended = allocation.ended_at;
        self.timers.unset(ended.plus_ms(RETENTION_MS), Timer::ForgetAllocation(place));
        self.unlink_from_bid(place);
        self.allocations.remove(place);
    }

    /// Puts a new allocation at the head of its bid's list.
    pub(super) fn link_to_bid(&mut self, place: u32) {
        let bid = self.allocation_at(place).bid;
        let older = std::mem::replace(&mut self.row(bid).newest, Link::to(place));
        self.allocation_at(place).older = older;
        if let Some(older) = older.place() {
            self.allocation_at(older).newer = Link::to(place);
        }
    }

    /// Removes an allocation from its bid's list.
    pub(super) fn unlink_from_bid(&mut self, place: u32) {
        let allocation = self.allocation_at(place);
        let (bid, newer, older) = (allocation.bid, allocation.newer, allocation.older);
        match newer.place() {
            Some(newer) => self.allocation_at(newer).older = older,
            None => self.row(bid).newest = older,
        }
        if let Some(older) = older.place() {
            self.allocation_at(older).newer = newer;
        }
    }

    pub(super) fn vacate_slot(&mut self, place: u32) {
        let state = self.allocation_at(place).state;
        self.vacate_slot_in_state(place, state);
    }

    /// Reverts the promise of a matched allocation, or makes the occupant leave. An allocation with the promise waits until the
    /// machine is gone.
    fn vacate_slot_in_state(&mut self, place: u32, state: AllocationState) {
        let (now, id) = (self.now, self.allocation_id(place));
        let allocation = self.allocation_at(place);
        let (no, slot_no, preempt_at) = (allocation.lot, allocation.slot, allocation.preempt_at);
        let matched_at = allocation.matched_at;
        let Some(slot) = self.lots.get_mut(&no).and_then(|lot| lot.slots.get_mut(slot_no as usize)) else {
            return;
        };
        if state == AllocationState::Matched {
            slot.promised = None;
            return self.offer_slot(no, slot_no);
        }
        slot.occupant = None;
        self.free_slots.yielding.remove(&(preempt_at, no, slot_no));
        self.emit_desired(place);
        let epoch = self.epoch;
        self.slot_at(no, slot_no).leaving = Some(Leaving { allocation: id, matched_at, since: now, epoch });
        self.offer_slot(no, slot_no);
    }

    /// Handles the supplier's report that the machine of an ended allocation is gone. The slot is given to the allocation with
    /// the promise, becomes free, or is removed with its lot.
    pub(super) fn on_machine_gone(
        &mut self,
        no: LotNo,
        slot_no: u32,
        allocation: AllocationId,
    ) -> Result<(), Rejection> {
        let lot = self.lots.get_mut(&no).ok_or(Rejection::NotFound)?;
        let (state, strikes) = (lot.state, lot.strikes);
        let slot = lot.slots.get_mut(slot_no as usize).ok_or(Rejection::NotFound)?;
        let leaving = slot.leaving.filter(|leaving| leaving.allocation == allocation);
        let Some(Leaving { since, .. }) = leaving else { return Err(Rejection::Terminal) };
        slot.leaving = None;
        let (retired, next) = (slot.retired, slot.promised.take());
        slot.occupant = next;
        self.free_slots.yielding.remove(&(since, no, slot_no));
        match next {
            Some(next) => self.launch(next),
            None if state == LotState::Open && !retired => {
                self.free_slots.free.insert((strikes, no, slot_no));
            }
            None => self.drop_if_empty(no),
        }
        Ok(())
    }

    /// Makes a slot whose occupant is under notice or leaving available for a promise.
    pub(super) fn offer_slot(&mut self, no: LotNo, slot_no: u32) {
        let Some(lot) = self.lots.get(&no) else { return };
        let Some(slot) = lot.slots.get(slot_no as usize) else { return };
        if lot.state != LotState::Open || slot.retired || slot.promised.is_some() {
            return;
        }
        let occupant = slot.occupant.and_then(|occupant| self.allocations.at(occupant));
        let occupant = occupant.filter(|occupant| occupant.state == AllocationState::Preempting);
        let free_at = occupant.map(|row| row.preempt_at).or(slot.leaving.map(|leaving| leaving.since));
        if let Some(free_at) = free_at {
            self.free_slots.yielding.insert((free_at, no, slot_no));
        }
    }

    /// Finds the row of an allocation of this tenant.
    fn own_allocation(&self, tenant: TenantNo, allocation: AllocationId) -> Result<u32, Rejection> {
        let place = self.allocations.place(allocation.0).ok_or(Rejection::NotFound)?;
        let row = self.allocations.at(place).ok_or(Rejection::NotFound)?;
        if self.tenants.at(row.tenant).no == tenant { Ok(place) } else { Err(Rejection::NotFound) }
    }

    pub(super) fn release(
        &mut self,
        tenant: TenantNo,
        allocation: AllocationId,
        version: Option<u64>,
        why: ReleaseReason,
    ) -> Result<Reply, Rejection> {
        let place = self.own_allocation(tenant, allocation)?;
        let row = self.allocation_at(place);
        let (bid, state, preempted, lot) = (row.bid, row.state, row.reason, row.lot);
        let owner = self.row(bid).owner;
        if state == AllocationState::Ended {
            return Err(Rejection::Terminal);
        }
        self.check_version(owner, version)?;
        // The tenant's statement moves the next launch elsewhere, but earns no refund.
        let released = match why {
            ReleaseReason::Unneeded => EndReason::Released,
            ReleaseReason::NodeFailed => {
                self.strike(lot);
                EndReason::NodeFailed
            }
        };
        // An allocation that is released under notice was still preempted.
        self.end(place, preempted.unwrap_or(released));
        let owner_version = self.raise_version(owner);
        Ok(Reply::Bid { bid: self.bid_id(bid), owner_version, replayed: false, below_reserve: false })
    }

    /// A tenant releases `other` instead of `victim`. Notice and promised slot move to `other`.
    pub(super) fn substitute(
        &mut self,
        tenant: TenantNo,
        victim: AllocationId,
        other: AllocationId,
    ) -> Result<(), Rejection> {
        let (victim, other) = (self.own_allocation(tenant, victim)?, self.own_allocation(tenant, other)?);
        let now = self.now;
        let (v, o) = (self.allocation_at(victim).clone(), self.allocation_at(other).clone());
        if v.state != AllocationState::Preempting || v.reason != Some(EndReason::Preempted) {
            return Err(Rejection::Terminal);
        }
        if now > v.noticed_at.plus_ms(SUBSTITUTE_MS) {
            return Err(Rejection::TooLate);
        }
        if o.state != AllocationState::Active || o.lot != v.lot || o.limit > v.limit {
            let range = "another active allocation of the same lot with no higher limit";
            return Err(Rejection::Invalid { field: "other", range });
        }
        let lot = self.lots.get(&v.lot).filter(|lot| lot.state == LotState::Open);
        if lot.and_then(|lot| lot.slots.get(v.slot as usize)).is_none_or(|slot| slot.retired) {
            // The slot is removed with the notice, so the victim cannot stay in it.
            return Err(Rejection::TooLate);
        }
        self.swap(victim, other, v.preempt_at);
        Ok(())
    }

    /// Applies the bid's limit to an allocation, unless the cap does not cover it. An amendment during the notice had not
    /// reached the allocation.
    fn take_bid_limit(&mut self, place: u32) {
        let row = self.allocation_at(place);
        let (bid, tenant, limit) = (row.bid, row.tenant, row.limit);
        let wanted = self.row(bid).limit;
        let more = i128::from(wanted.as_micros()) - i128::from(limit.as_micros());
        if more < 0 || more > 0 && self.covers(tenant, more, None) {
            self.take_limit(place, wanted);
        }
    }

    fn swap(&mut self, victim: u32, other: u32, deadline: Time) {
        self.clear_preemptible(other);
        let now = self.now;
        let (lot, slot_no, bid) = {
            let v = self.allocation_at(victim);
            v.state = AllocationState::Active;
            v.reason = None;
            v.preempt_at = Time::NEVER;
            v.noticed_at = Time::NEVER;
            (v.lot, v.slot, v.bid)
        };
        self.free_slots.yielding.remove(&(deadline, lot, slot_no));
        let promised = self.slot_at(lot, slot_no).promised.take();
        let units = &mut self.row(bid).units;
        units.preempting -= 1;
        units.active += 1;
        self.wake(victim, Time::NEVER);
        self.take_bid_limit(victim);

        let o = self.allocation_at(other);
        o.state = AllocationState::Preempting;
        o.reason = Some(EndReason::Preempted);
        o.noticed_at = now;
        o.preempt_at = deadline;
        let (other_slot, other_bid) = (o.slot, o.bid);
        let units = &mut self.row(other_bid).units;
        units.active -= 1;
        units.preempting += 1;
        self.wake(other, deadline);
        self.slot_at(lot, other_slot).promised = promised;
        if let Some(promised) = promised {
            self.allocation_at(promised).slot = other_slot;
        }
        self.offer_slot(lot, other_slot);
        self.make_preemptible(victim);
        self.emit_desired(victim);
        self.emit_desired(other);
        self.emit_allocation(victim);
        self.emit_allocation(other);
    }
}

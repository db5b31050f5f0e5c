//! Launches: a matched unit becomes a running node, or returns to the book.

use super::Market;
use crate::allocation::{Allocation, AllocationState, Stage};
use crate::book::{Entry, Open};
use crate::slab::Link;
use crate::timers::Timer;
use crate::{AllocationId, Charge, EndReason, Event, LotNo, Rejection, SupplierReport, Time};

/// Deadline for the machine to start, in milliseconds after the order.
const LAUNCH_MS: u64 = 60_000;
/// Deadline for the node to register, in milliseconds after the order.
const REGISTER_MS: u64 = 300_000;
/// Deadline for the node to be ready, in milliseconds after the order.
const READY_MS: u64 = 600_000;
/// Failed launches after which a unit is given up.
const FAILURES_MAX: u8 = 3;
const HOUR_MS: u64 = 3600 * 1000;

impl Market {
    /// Matches `units` of an entry of the book. The caller has checked that there are slots for them.
    pub(super) fn take(&mut self, open: Open, units: u32) {
        self.book.remove(open.tenant, open.rank, self.params.cap);
        let count = u16::try_from(units).unwrap_or(u16::MAX).min(open.entry.units);
        let (place, seq) = (open.entry.bid, open.rank.seq.0);
        let rest = open.entry.units - count;
        if rest > 0 {
            let entry = Entry { units: rest, ..open.entry };
            self.book.insert(open.tenant, open.rank, entry, self.params.cap);
        }
        let bid = self.row(place);
        bid.units.open -= count;
        bid.units.matched += count;
        let own = bid.seq == seq;
        let mut failures = Vec::new();
        if let Some(extra) = &mut bid.more {
            if !own {
                extra.segments.retain_mut(|(other, units)| {
                    *units = if *other == seq { rest } else { *units };
                    *units > 0
                });
            }
            // Units that failed before are matched first, so that none fails for ever.
            extra.failures.sort_unstable();
            let keep = extra.failures.len().saturating_sub(usize::from(count));
            failures = extra.failures.split_off(keep);
        }
        for n in 0..usize::from(count) {
            self.allocate(place, seq, failures.get(n).copied().unwrap_or(0));
        }
        self.emit_bid(place);
    }

    /// Creates an allocation for one unit, in the best slot.
    fn allocate(&mut self, bid: u32, seq: u64, failures: u8) {
        let row = self.row(bid);
        let (tenant, limit) = (row.tenant, row.limit);
        let match_no = self.next_match;
        self.next_match += 1;
        let free = self.free_slots.free.pop_first().map(|(_, lot, slot_no)| (lot, slot_no));
        let (slot, now) = match free {
            Some(slot) => (Some(slot), true),
            None => (self.free_slots.yielding.pop_first().map(|(_, lot, slot_no)| (lot, slot_no)), false),
        };
        let (lot, slot_no) = slot.expect("a match is decided only when there is a slot");
        let place = self.allocations.insert(Allocation {
            bid,
            tenant,
            lot,
            slot: slot_no,
            seq,
            match_no,
            limit,
            ceiling: limit,
            past_ceilings: Vec::new(),
            matched_at: self.now,
            ordered_at: Time::NEVER,
            active_at: Time::NEVER,
            protected_until: Time::NEVER,
            noticed_at: Time::NEVER,
            preempt_at: Time::NEVER,
            ended_at: Time::NEVER,
            settled_to: Time::NEVER,
            due: Time::NEVER,
            settle_due: Time::NEVER,
            charged: Charge::default(),
            state: AllocationState::Matched,
            stage: Stage::Ordered,
            reason: None,
            failures,
            node: None,
            newer: Link::default(),
            older: Link::default(),
        });
        self.live += 1;
        self.link_to_bid(place);
        let target = self.slot_at(lot, slot_no);
        if now {
            target.occupant = Some(place);
            self.launch(place);
        } else {
            target.promised = Some(place);
            self.emit_allocation(place);
        }
    }

    /// Orders the machine of an allocation whose slot is free.
    pub(super) fn launch(&mut self, place: u32) {
        let now = self.now;
        let allocation = self.allocation_at(place);
        allocation.state = AllocationState::Provisioning;
        allocation.stage = Stage::Ordered;
        allocation.ordered_at = now;
        let bid = allocation.bid;
        let deadline = self.launch_deadline(place);
        self.wake(place, deadline);
        let units = &mut self.row(bid).units;
        units.matched -= 1;
        units.provisioning += 1;
        self.emit_desired(place);
        self.emit_allocation(place);
    }

    /// Deadline of the present launch stage. Time in which the service was down does not count.
    pub(super) fn launch_deadline(&mut self, place: u32) -> Time {
        let restarted = self.restarted_at;
        let allocation = self.allocation_at(place);
        let wait = match allocation.stage {
            Stage::Ordered => LAUNCH_MS,
            Stage::Launched => REGISTER_MS,
            Stage::Registered => READY_MS,
        };
        allocation.ordered_at.max(restarted).plus_ms(wait)
    }

    /// Sets the single timer of an allocation.
    pub(super) fn wake(&mut self, place: u32, due: Time) {
        let old = std::mem::replace(&mut self.allocation_at(place).due, due);
        if old != Time::NEVER {
            self.timers.unset(old, Timer::Allocation(place));
        }
        if due != Time::NEVER {
            self.timers.set(due, Timer::Allocation(place));
        }
    }

    pub(super) fn report(
        &mut self,
        allocation: AllocationId,
        report: &SupplierReport,
    ) -> Result<(), Rejection> {
        let place = self.allocations.place(allocation.0).ok_or(Rejection::NotFound)?;
        let row = self.allocation_at(place);
        let (state, stage) = (row.state, row.stage);
        match (report, state) {
            (_, AllocationState::Ended) => return Err(Rejection::Terminal),
            (SupplierReport::Launched, AllocationState::Provisioning) if stage < Stage::Launched => {
                row.stage = Stage::Launched;
                let deadline = self.launch_deadline(place);
                self.wake(place, deadline);
                self.emit_allocation(place);
            }
            (SupplierReport::Registered { node }, AllocationState::Provisioning)
                if stage < Stage::Registered =>
            {
                row.stage = Stage::Registered;
                row.node = Some(node.clone());
                let deadline = self.launch_deadline(place);
                self.wake(place, deadline);
                self.emit_allocation(place);
            }
            (SupplierReport::Ready, AllocationState::Provisioning) => self.activate(place),
            (SupplierReport::Failed | SupplierReport::Died { .. }, AllocationState::Provisioning) => {
                self.launch_failed(place)
            }
            (SupplierReport::Died { by }, AllocationState::Active) => {
                self.end_by(place, EndReason::NodeFailed, Some(*by));
            }
            (SupplierReport::Died { by }, AllocationState::Preempting) => {
                let reason = self.allocation_at(place).reason.unwrap_or(EndReason::Preempted);
                self.end_by(place, reason, Some(*by));
            }
            // The report is repeated, or does not apply to this state.
            _ => {}
        }
        Ok(())
    }

    /// Activates an allocation whose node is ready: charge and protection start.
    fn activate(&mut self, place: u32) {
        let now = self.now;
        let protected_until = now.plus_ms(self.params.min_runtime_ms);
        let allocation = self.allocation_at(place);
        allocation.state = AllocationState::Active;
        allocation.active_at = now;
        allocation.settled_to = now;
        allocation.protected_until = protected_until;
        allocation.settle_due = now.plus_ms(HOUR_MS);
        let (bid, lot) = (allocation.bid, allocation.lot);
        self.timers.set(now.plus_ms(HOUR_MS), Timer::Settle(place));
        self.wake(place, if protected_until > now { protected_until } else { Time::NEVER });
        let units = &mut self.row(bid).units;
        units.provisioning -= 1;
        units.active += 1;
        self.set_strikes(lot, 0);
        self.make_preemptible(place);
        self.emit_allocation(place);
    }

    /// Handles a failed launch: the lot gets a strike, and the unit is launched again elsewhere, at most three times in all.
    pub(super) fn launch_failed(&mut self, place: u32) {
        let allocation = self.allocation_at(place);
        let (lot, failures) = (allocation.lot, allocation.failures.saturating_add(1));
        allocation.failures = failures;
        self.strike(lot);
        if failures >= FAILURES_MAX {
            return self.end(place, EndReason::ProvisionFailed);
        }
        self.return_unit_to_book(place);
    }

    /// Removes a matched or provisioning allocation from its slot and opens its unit again, with its original priority.
    pub(super) fn return_unit_to_book(&mut self, place: u32) {
        let id = self.allocation_id(place);
        self.wake(place, Time::NEVER);
        let allocation = self.allocation_at(place);
        let (bid, state, tenant) = (allocation.bid, allocation.state, allocation.tenant);
        let (own_seq, failures, matched_at) = (allocation.seq, allocation.failures, allocation.matched_at);
        self.vacate_slot(place);
        self.live -= 1;
        self.unlink_from_bid(place);
        self.lowered.remove(&place);
        self.allocations.remove(place);
        let bid_id = self.bid_id(bid);
        self.out.push(Event::Returned { allocation: id, bid: bid_id, matched_at });
        let row = self.row(bid);
        match state {
            AllocationState::Matched => row.units.matched -= 1,
            _ => row.units.provisioning -= 1,
        }
        if row.closed {
            row.units.cancelled += 1;
            self.tenants.at_mut(tenant).units -= 1;
            self.relieved.push(tenant);
            self.finish_bid(bid);
        } else {
            self.reopen(bid, own_seq, failures);
        }
        self.emit_bid(bid);
    }

    /// Opens one unit again, at `seq` unless a new limit gave the bid a later one.
    fn reopen(&mut self, place: u32, seq: u64, failures: u8) {
        let row = self.row(place);
        let (held, tenant) = (row.held, row.tenant);
        if !held {
            self.unlist(place);
        }
        let row = self.row(place);
        row.units.open += 1;
        if seq > row.seq && row.min_fill <= 1 {
            let segments = &mut row.extra().segments;
            match segments.iter_mut().find(|(other, _)| *other == seq) {
                Some((_, units)) => *units += 1,
                None => segments.push((seq, 1)),
            }
            segments.sort_unstable();
        }
        if failures > 0 {
            row.extra().failures.push(failures);
        }
        if held {
            self.relieved.push(tenant);
        } else {
            self.list(place);
        }
    }

    pub(super) fn slot_at(&mut self, lot: LotNo, slot_no: u32) -> &mut crate::lots::Slot {
        self.lots
            .get_mut(&lot)
            .and_then(|lot| lot.slots.get_mut(slot_no as usize))
            .expect("a lot stays while a slot of it is in use")
    }
}

//! A match becomes a running node, or comes back to the book.

use super::Market;
use crate::alloc::{Alloc, AllocState, Stage};
use crate::book::{Entry, Open};
use crate::slab::Link;
use crate::timers::Timer;
use crate::{AllocId, Charge, EndReason, Event, LotNo, Refusal, Report, Time};

/// The machine must run so long after the order, in milliseconds.
const LAUNCH_MS: u64 = 60_000;
/// The node must register so long after the order, in milliseconds.
const REGISTER_MS: u64 = 300_000;
/// The node must be ready so long after the order, in milliseconds.
const READY_MS: u64 = 600_000;
/// A unit whose launch failed so often is given up.
const FAILURES_MAX: u8 = 3;
const HOUR_MS: u64 = 3600 * 1000;

impl Market {
    /// Matches `units` of an entry of the book. There are seats for them.
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
            // Units that failed before go first, so that none fails for ever.
            extra.failures.sort_unstable();
            let keep = extra.failures.len().saturating_sub(usize::from(count));
            failures = extra.failures.split_off(keep);
        }
        for n in 0..usize::from(count) {
            self.seat_unit(place, seq, failures.get(n).copied().unwrap_or(0));
        }
        self.tell_bid(place);
    }

    /// Makes an allocation for one unit and gives it the best seat.
    fn seat_unit(&mut self, bid: u32, seq: u64, failures: u8) {
        let row = self.row(bid);
        let (tenant, limit) = (row.tenant, row.limit);
        let match_no = self.next_match;
        self.next_match += 1;
        let free = self.seats.free.pop_first().map(|(_, lot, unit)| (lot, unit));
        let (seat, now) = match free {
            Some(seat) => (Some(seat), true),
            None => (self.seats.yielding.pop_first().map(|(_, lot, unit)| (lot, unit)), false),
        };
        let (lot, unit) = seat.expect("a match is decided only when there is a seat");
        let place = self.allocs.insert(Alloc {
            bid,
            tenant,
            lot,
            unit,
            seq,
            match_no,
            limit,
            past_limits: Vec::new(),
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
            state: AllocState::Matched,
            stage: Stage::Ordered,
            reason: None,
            failures,
            node: None,
            newer: Link::default(),
            older: Link::default(),
        });
        self.live += 1;
        self.join(place);
        let target = self.seat_at(lot, unit);
        if now {
            target.occupant = Some(place);
            self.launch(place);
        } else {
            target.promised = Some(place);
            self.tell_unit(place);
        }
    }

    /// The seat is free: order the machine.
    pub(super) fn launch(&mut self, place: u32) {
        let now = self.now;
        let alloc = self.unit(place);
        alloc.state = AllocState::Provisioning;
        alloc.stage = Stage::Ordered;
        alloc.ordered_at = now;
        let (bid, lot) = (alloc.bid, alloc.lot);
        let deadline = self.launch_deadline(place);
        self.wake(place, deadline);
        let units = &mut self.row(bid).units;
        units.matched -= 1;
        units.provisioning += 1;
        let alloc = self.alloc_id(place);
        self.out.push(Event::Launch { alloc, lot, deadline });
        self.tell_unit(place);
    }

    /// By when the stage of a launch must be over. Time in which nobody could report does not count.
    pub(super) fn launch_deadline(&mut self, place: u32) -> Time {
        let restarted = self.restarted_at;
        let alloc = self.unit(place);
        let wait = match alloc.stage {
            Stage::Ordered => LAUNCH_MS,
            Stage::Launched => REGISTER_MS,
            Stage::Registered => READY_MS,
        };
        alloc.ordered_at.max(restarted).plus_ms(wait)
    }

    /// Sets the one timer of a unit.
    pub(super) fn wake(&mut self, place: u32, due: Time) {
        let old = std::mem::replace(&mut self.unit(place).due, due);
        if old != Time::NEVER {
            self.timers.unset(old, Timer::Unit(place));
        }
        if due != Time::NEVER {
            self.timers.set(due, Timer::Unit(place));
        }
    }

    pub(super) fn report(&mut self, alloc: AllocId, report: &Report) -> Result<(), Refusal> {
        let place = self.allocs.place(alloc.0).ok_or(Refusal::NotFound)?;
        let unit = self.unit(place);
        let (state, stage) = (unit.state, unit.stage);
        match (report, state) {
            (_, AllocState::Ended) => return Err(Refusal::Terminal),
            (Report::Launched, AllocState::Provisioning) if stage < Stage::Launched => {
                unit.stage = Stage::Launched;
                let deadline = self.launch_deadline(place);
                self.wake(place, deadline);
                self.tell_unit(place);
            }
            (Report::Registered { node }, AllocState::Provisioning) if stage < Stage::Registered => {
                unit.stage = Stage::Registered;
                unit.node = Some(node.clone());
                let deadline = self.launch_deadline(place);
                self.wake(place, deadline);
                self.tell_unit(place);
            }
            (Report::Ready, AllocState::Provisioning) => self.activate(place),
            (Report::Failed | Report::Died, AllocState::Provisioning) => self.launch_failed(place),
            (Report::Died, AllocState::Active) => self.end(place, EndReason::NodeFailed),
            (Report::Drained | Report::Died, AllocState::Preempting) => {
                let reason = self.unit(place).reason.unwrap_or(EndReason::Preempted);
                self.end(place, reason);
            }
            // Said before, or not of this state: nothing to do.
            _ => {}
        }
        Ok(())
    }

    /// The node is ready: the charge starts, and protection.
    fn activate(&mut self, place: u32) {
        let now = self.now;
        let protected_until = now.plus_ms(self.params.min_runtime_ms);
        let alloc = self.unit(place);
        alloc.state = AllocState::Active;
        alloc.active_at = now;
        alloc.settled_to = now;
        alloc.protected_until = protected_until;
        alloc.settle_due = now.plus_ms(HOUR_MS);
        let (bid, lot) = (alloc.bid, alloc.lot);
        self.timers.set(now.plus_ms(HOUR_MS), Timer::Settle(place));
        self.wake(place, if protected_until > now { protected_until } else { Time::NEVER });
        let units = &mut self.row(bid).units;
        units.provisioning -= 1;
        units.active += 1;
        self.set_strikes(lot, 0);
        self.contest(place);
        self.tell_unit(place);
    }

    /// A strike for the lot; the unit tries again elsewhere, three times in all.
    pub(super) fn launch_failed(&mut self, place: u32) {
        let alloc = self.unit(place);
        let (lot, failures) = (alloc.lot, alloc.failures.saturating_add(1));
        alloc.failures = failures;
        let strikes = self.lots.get(&lot).map_or(0, |lot| lot.strikes.saturating_add(1));
        self.set_strikes(lot, strikes);
        if failures >= FAILURES_MAX {
            return self.end(place, EndReason::ProvisionFailed);
        }
        self.come_back(place);
    }

    /// A matched or provisioning unit loses its seat and waits again, with its original priority.
    pub(super) fn come_back(&mut self, place: u32) {
        let id = self.alloc_id(place);
        self.wake(place, Time::NEVER);
        let alloc = self.unit(place);
        let (bid, lot, state, tenant) = (alloc.bid, alloc.lot, alloc.state, alloc.tenant);
        let (own_seq, failures, matched_at) = (alloc.seq, alloc.failures, alloc.matched_at);
        self.leave_seat(place);
        self.live -= 1;
        self.part(place);
        self.allocs.remove(place);
        let bid_id = self.bid_id(bid);
        if state == AllocState::Provisioning {
            let reason = EndReason::ProvisionFailed;
            self.out.push(Event::Reclaim { alloc: id, lot, deadline: self.now, reason });
        }
        self.out.push(Event::Returned { alloc: id, bid: bid_id, matched_at });
        let row = self.row(bid);
        match state {
            AllocState::Matched => row.units.matched -= 1,
            _ => row.units.provisioning -= 1,
        }
        let cost = i128::from(row.limit.as_micros());
        if row.closed {
            row.units.cancelled += 1;
            self.tenants.at_mut(tenant).units -= 1;
            self.tenants.at_mut(tenant).committed -= cost;
            self.relieved.push(tenant);
            self.finish_bid(bid);
        } else {
            self.reopen(bid, own_seq, failures);
        }
        self.tell_bid(bid);
    }

    /// One unit is open again, at `seq` unless the bid got a later one by a new limit.
    fn reopen(&mut self, place: u32, seq: u64, failures: u8) {
        let row = self.row(place);
        let (held, tenant, cost) = (row.held, row.tenant, i128::from(row.limit.as_micros()));
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
            self.tenants.at_mut(tenant).committed -= cost;
            self.relieved.push(tenant);
        } else {
            self.list(place);
        }
    }

    pub(super) fn seat_at(&mut self, lot: LotNo, unit: u32) -> &mut crate::lots::Unit {
        self.lots
            .get_mut(&lot)
            .and_then(|lot| lot.units.get_mut(unit as usize))
            .expect("a lot stays while a unit of it is in use")
    }
}

//! Capacity coming, going, falling silent. What goes takes its own units along: a machine
//! elsewhere cannot be freed by ending one here.

use std::cmp::Reverse;

use super::Market;
use super::clock::SILENT_MS;
use crate::alloc::AllocState;
use crate::lots::{Lot, LotState, Unit};
use crate::timers::Timer;
use crate::{EndReason, Event, LotNo, Refusal, SupplierNo};

/// Most units of one lot.
const LOT_UNITS_MAX: u32 = 100_000;

impl Market {
    pub(super) fn put_lot(
        &mut self,
        no: LotNo,
        supplier: SupplierNo,
        units: u32,
        notice_ms: u64,
    ) -> Result<(), Refusal> {
        if units > LOT_UNITS_MAX {
            return Err(Refusal::Invalid { field: "units", range: "at most 100000" });
        }
        if notice_ms == 0 {
            return Err(Refusal::Invalid { field: "notice", range: "above 0" });
        }
        let (now, due) = (self.now, self.now.plus_ms(SILENT_MS));
        match self.lots.get_mut(&no) {
            Some(lot) if lot.supplier != supplier => return Err(Refusal::NotFound),
            Some(lot) => lot.notice_ms = notice_ms,
            None => {
                let lot = Lot {
                    supplier,
                    units: Vec::new(),
                    notice_ms,
                    state: LotState::Open,
                    last_seen: now,
                    silent_due: due,
                    strikes: 0,
                };
                self.lots.insert(no, lot);
                self.by_supplier.insert((supplier, no));
                self.timers.set(due, Timer::Silent(no.0));
            }
        }
        self.wake_lot(no);
        self.resize(no, units as usize);
        self.out.push(Event::Lot { lot: no });
        Ok(())
    }

    pub(super) fn heartbeat(&mut self, supplier: SupplierNo) {
        let lots: Vec<_> = self
            .by_supplier
            .range((supplier, LotNo(0))..=(supplier, LotNo(u32::MAX)))
            .map(|(_, lot)| *lot)
            .collect();
        for no in lots {
            if self.lots.get(&no).is_some_and(|lot| lot.state == LotState::Draining) {
                let now = self.now;
                if let Some(lot) = self.lots.get_mut(&no) {
                    lot.last_seen = now;
                }
            } else {
                self.wake_lot(no);
            }
        }
    }

    /// A sign of life: a silent or draining lot is open again.
    fn wake_lot(&mut self, no: LotNo) {
        let now = self.now;
        let Some(lot) = self.lots.get_mut(&no) else { return };
        lot.last_seen = now;
        let before = std::mem::replace(&mut lot.state, LotState::Open);
        if before == LotState::Open {
            return;
        }
        for (unit, seat) in self.seats_of(no) {
            match seat.occupant {
                None if !seat.retired => {
                    let strikes = self.lots.get(&no).map_or(0, |lot| lot.strikes);
                    self.seats.free.insert((strikes, no, unit));
                }
                None => {}
                Some(occupant) => {
                    self.contest(occupant);
                    self.offer_seat(no, unit);
                }
            }
        }
        self.out.push(Event::Lot { lot: no });
    }

    fn seats_of(&self, no: LotNo) -> Vec<(u32, Unit)> {
        self.lots.get(&no).map_or_else(Vec::new, |lot| (0u32..).zip(lot.units.iter().copied()).collect())
    }

    /// Grows by new or revived units; shrinks by empty ones, then by those that leave anyway,
    /// then by the worst.
    fn resize(&mut self, no: LotNo, wanted: usize) {
        let Some(lot) = self.lots.get_mut(&no) else { return };
        let strikes = lot.strikes;
        let mut size = lot.size();
        let mut revived = Vec::new();
        for (unit, seat) in (0u32..).zip(&mut lot.units) {
            if size < wanted && seat.retired {
                seat.retired = false;
                size += 1;
                revived.push((unit, seat.occupant.is_none()));
            }
        }
        while size < wanted {
            revived.push((u32::try_from(lot.units.len()).unwrap_or(u32::MAX), true));
            lot.units.push(Unit::default());
            size += 1;
        }
        for (unit, empty) in revived {
            if empty {
                self.seats.free.insert((strikes, no, unit));
            } else {
                self.offer_seat(no, unit);
            }
        }
        if size > wanted {
            self.retire(no, size - wanted);
        }
    }

    fn retire(&mut self, no: LotNo, count: usize) {
        let mut seats: Vec<_> = self
            .seats_of(no)
            .into_iter()
            .filter(|(_, seat)| !seat.retired)
            .map(|(unit, seat)| {
                let occupant = seat.occupant.and_then(|occupant| self.allocs.at(occupant));
                let worth = occupant.map(|alloc| match alloc.state {
                    AllocState::Preempting => (0, alloc.limit, Reverse(alloc.match_no)),
                    AllocState::Active => (2, alloc.limit, Reverse(alloc.match_no)),
                    _ => (1, alloc.limit, Reverse(alloc.match_no)),
                });
                (worth, Reverse(unit), unit, seat)
            })
            .collect();
        seats.sort_unstable_by_key(|(worth, last, ..)| (*worth, *last));
        for (_, _, unit, seat) in seats.into_iter().take(count) {
            self.seat_at(no, unit).retired = true;
            let strikes = self.lots.get(&no).map_or(0, |lot| lot.strikes);
            self.seats.free.remove(&(strikes, no, unit));
            self.evict(no, unit, seat);
        }
    }

    /// Whoever is on this seat, or waits for it, must go.
    fn evict(&mut self, no: LotNo, unit: u32, seat: Unit) {
        if let Some(promised) = seat.promised {
            self.come_back(promised);
        }
        let Some(occupant) = seat.occupant else { return };
        let alloc = self.unit(occupant);
        let (state, preempt_at) = (alloc.state, alloc.preempt_at);
        match state {
            AllocState::Preempting => {
                self.seats.yielding.remove(&(preempt_at, no, unit));
            }
            AllocState::Active => self.preempt(occupant, EndReason::CapacityLost),
            _ => self.come_back(occupant),
        }
    }

    pub(super) fn drain_lot(&mut self, no: LotNo) -> Result<(), Refusal> {
        let lot = self.lots.get_mut(&no).ok_or(Refusal::NotFound)?;
        if lot.state == LotState::Draining {
            return Ok(());
        }
        lot.state = LotState::Draining;
        let strikes = lot.strikes;
        for (unit, seat) in self.seats_of(no) {
            self.seats.free.remove(&(strikes, no, unit));
            self.evict(no, unit, seat);
        }
        self.out.push(Event::Lot { lot: no });
        self.drop_if_empty(no);
        Ok(())
    }

    /// Nothing new is put on a silent lot, and calls leave alone what runs there.
    pub(super) fn silence_lot(&mut self, no: LotNo) {
        let Some(lot) = self.lots.get_mut(&no) else { return };
        lot.state = LotState::Silent;
        let strikes = lot.strikes;
        for (unit, seat) in self.seats_of(no) {
            self.seats.free.remove(&(strikes, no, unit));
            if let Some(promised) = seat.promised {
                self.come_back(promised);
            }
            if let Some(occupant) = seat.occupant {
                self.leave_contest(occupant);
                let preempt_at = self.unit(occupant).preempt_at;
                self.seats.yielding.remove(&(preempt_at, no, unit));
            }
        }
        self.out.push(Event::Lot { lot: no });
    }

    /// A lot that was silent too long is gone, and what ran there with it.
    pub(super) fn lose_lot(&mut self, no: LotNo) {
        for (_, seat) in self.seats_of(no) {
            if let Some(promised) = seat.promised {
                self.come_back(promised);
            }
            let Some(occupant) = seat.occupant else { continue };
            let alloc = self.unit(occupant);
            match alloc.state {
                AllocState::Provisioning | AllocState::Matched => self.come_back(occupant),
                AllocState::Active | AllocState::Preempting => {
                    self.end(occupant, EndReason::CapacityLost);
                }
                AllocState::Ended => {}
            }
        }
        self.remove_lot(no);
        self.out.push(Event::Lot { lot: no });
    }

    /// A draining lot goes when its last unit is gone.
    pub(super) fn drop_if_empty(&mut self, no: LotNo) {
        let empty = self.lots.get(&no).is_some_and(|lot| {
            lot.state == LotState::Draining && lot.units.iter().all(|unit| unit.occupant.is_none())
        });
        if empty {
            self.remove_lot(no);
            self.out.push(Event::Lot { lot: no });
        }
    }

    fn remove_lot(&mut self, no: LotNo) {
        if let Some(lot) = self.lots.remove(&no) {
            self.by_supplier.remove(&(lot.supplier, no));
            self.timers.unset(lot.silent_due, Timer::Silent(no.0));
        }
    }

    /// Free units of lots with failed launches are taken last.
    pub(super) fn set_strikes(&mut self, no: LotNo, strikes: u8) {
        let Some(lot) = self.lots.get_mut(&no) else { return };
        let before = std::mem::replace(&mut lot.strikes, strikes);
        if before == strikes {
            return;
        }
        let own: Vec<_> = self.seats.free.range((before, no, 0)..=(before, no, u32::MAX)).copied().collect();
        for seat in own {
            self.seats.free.remove(&seat);
            self.seats.free.insert((strikes, seat.1, seat.2));
        }
    }

    /// Prices of the book and of running units again from limits, after the cap changed.
    pub(super) fn rebuild_order(&mut self) {
        self.book = crate::book::Book::default();
        self.running.clear();
        let listed: Vec<_> = self.bids.iter().filter(|(_, bid)| !bid.held).map(|(place, _)| place).collect();
        for place in listed {
            self.list(place);
        }
        let active: Vec<_> = self.allocs.iter().map(|(place, _)| place).collect();
        for place in active {
            self.contest(place);
        }
    }
}

//! Changes of capacity, and silent suppliers. A lot that shrinks ends allocations of its own: ending one of another lot would
//! not free a machine of this lot.

use std::cmp::Reverse;

use super::Market;
use crate::allocation::AllocationState;
use crate::lots::{Lot, LotState, Slot};
use crate::{EndReason, Event, LotNo, Rejection, SupplierNo};

/// Most slots of one lot.
const LOT_SLOTS_MAX: u32 = 100_000;

impl Market {
    pub(super) fn put_lot(
        &mut self,
        no: LotNo,
        supplier: SupplierNo,
        slots: u32,
        notice_ms: u64,
    ) -> Result<(), Rejection> {
        if slots > LOT_SLOTS_MAX {
            return Err(Rejection::Invalid { field: "units", range: "at most 100000" });
        }
        if notice_ms == 0 {
            return Err(Rejection::Invalid { field: "notice", range: "above 0" });
        }
        match self.lots.get_mut(&no) {
            Some(lot) if lot.supplier != supplier => return Err(Rejection::NotFound),
            Some(lot) => lot.notice_ms = notice_ms,
            None => {
                let lot = Lot { supplier, slots: Vec::new(), notice_ms, state: LotState::Open, strikes: 0 };
                self.lots.insert(no, lot);
                self.by_supplier.insert((supplier, no));
            }
        }
        self.wake_lot(no);
        self.resize(no, slots as usize);
        self.out.push(Event::Lot { lot: no });
        Ok(())
    }

    fn lots_of(&self, supplier: SupplierNo) -> Vec<LotNo> {
        let own = self.by_supplier.range((supplier, LotNo(0))..=(supplier, LotNo(u32::MAX)));
        own.map(|(_, lot)| *lot).collect()
    }

    fn lot_state(&self, no: LotNo) -> Option<LotState> {
        self.lots.get(&no).map(|lot| lot.state)
    }

    /// Opens the silent and lost lots of a supplier that reports again.
    pub(super) fn wake_supplier(&mut self, supplier: SupplierNo) {
        for no in self.lots_of(supplier) {
            if matches!(self.lot_state(no), Some(LotState::Silent | LotState::Lost)) {
                self.wake_lot(no);
            }
        }
    }

    /// Stops new allocations in the lots of a silent supplier.
    pub(super) fn silence_supplier(&mut self, supplier: SupplierNo) {
        for no in self.lots_of(supplier) {
            if self.lot_state(no) == Some(LotState::Open) {
                self.silence_lot(no);
            }
        }
    }

    /// Ends the allocations of a supplier that was silent for too long.
    pub(super) fn lose_supplier(&mut self, supplier: SupplierNo) {
        for no in self.lots_of(supplier) {
            match self.lot_state(no) {
                Some(LotState::Open) => {
                    self.silence_lot(no);
                    self.lose_lot(no);
                }
                Some(LotState::Silent | LotState::Draining) => self.lose_lot(no),
                Some(LotState::Lost) | None => {}
            }
        }
    }

    /// Opens a silent, lost or draining lot again.
    fn wake_lot(&mut self, no: LotNo) {
        let Some(lot) = self.lots.get_mut(&no) else { return };
        let before = std::mem::replace(&mut lot.state, LotState::Open);
        if before == LotState::Open {
            return;
        }
        for (slot_no, slot) in self.slots_of(no) {
            match slot.occupant {
                None if slot.is_empty() && !slot.retired => {
                    let strikes = self.lots.get(&no).map_or(0, |lot| lot.strikes);
                    self.free_slots.free.insert((strikes, no, slot_no));
                }
                None => self.offer_slot(no, slot_no),
                Some(occupant) => {
                    self.make_preemptible(occupant);
                    self.offer_slot(no, slot_no);
                }
            }
        }
        self.out.push(Event::Lot { lot: no });
    }

    fn slots_of(&self, no: LotNo) -> Vec<(u32, Slot)> {
        self.lots.get(&no).map_or_else(Vec::new, |lot| (0u32..).zip(lot.slots.iter().copied()).collect())
    }

    /// Resizes a lot. Growth adds new or revived slots. Shrinking removes empty slots first, then those that are being vacated
    /// anyway, then the ones with the lowest limits.
    fn resize(&mut self, no: LotNo, wanted: usize) {
        let Some(lot) = self.lots.get_mut(&no) else { return };
        let strikes = lot.strikes;
        let mut size = lot.size();
        let mut revived = Vec::new();
        for (slot_no, slot) in (0u32..).zip(&mut lot.slots) {
            if size < wanted && slot.retired {
                slot.retired = false;
                size += 1;
                revived.push((slot_no, slot.is_empty()));
            }
        }
        while size < wanted {
            revived.push((u32::try_from(lot.slots.len()).unwrap_or(u32::MAX), true));
            lot.slots.push(Slot::default());
            size += 1;
        }
        for (slot_no, empty) in revived {
            if empty {
                self.free_slots.free.insert((strikes, no, slot_no));
            } else {
                self.offer_slot(no, slot_no);
            }
        }
        if size > wanted {
            self.retire(no, size - wanted);
        }
    }

    fn retire(&mut self, no: LotNo, count: usize) {
        let mut slots: Vec<_> = self
            .slots_of(no)
            .into_iter()
            .filter(|(_, slot)| !slot.retired)
            .map(|(slot_no, slot)| {
                let occupant = slot.occupant.and_then(|occupant| self.allocations.at(occupant));
                let leaves = slot.leaving.map(|_| (0, crate::Price::ZERO, Reverse(0)));
                let worth = occupant.map(|allocation| match allocation.state {
                    AllocationState::Preempting => (0, allocation.limit, Reverse(allocation.match_no)),
                    AllocationState::Active => (2, allocation.limit, Reverse(allocation.match_no)),
                    _ => (1, allocation.limit, Reverse(allocation.match_no)),
                });
                (worth.or(leaves), Reverse(slot_no), slot_no, slot)
            })
            .collect();
        slots.sort_unstable_by_key(|(worth, last, ..)| (*worth, *last));
        for (_, _, slot_no, slot) in slots.into_iter().take(count) {
            self.slot_at(no, slot_no).retired = true;
            let strikes = self.lots.get(&no).map_or(0, |lot| lot.strikes);
            self.free_slots.free.remove(&(strikes, no, slot_no));
            self.evict(no, slot_no, slot);
        }
    }

    /// Vacates a slot: an active allocation gets notice; a starting or promised one returns to the book.
    fn evict(&mut self, no: LotNo, slot_no: u32, slot: Slot) {
        if let Some(promised) = slot.promised {
            self.return_unit_to_book(promised);
        }
        if let Some(leaving) = slot.leaving {
            self.free_slots.yielding.remove(&(leaving.since, no, slot_no));
        }
        let Some(occupant) = slot.occupant else { return };
        let allocation = self.allocation_at(occupant);
        let (state, preempt_at) = (allocation.state, allocation.preempt_at);
        match state {
            AllocationState::Preempting => {
                self.free_slots.yielding.remove(&(preempt_at, no, slot_no));
            }
            AllocationState::Active => self.preempt(occupant, EndReason::CapacityLost),
            _ => self.return_unit_to_book(occupant),
        }
    }

    pub(super) fn drain_lot(&mut self, no: LotNo) -> Result<(), Rejection> {
        let lot = self.lots.get_mut(&no).ok_or(Rejection::NotFound)?;
        if lot.state == LotState::Draining {
            return Ok(());
        }
        lot.state = LotState::Draining;
        let strikes = lot.strikes;
        for (slot_no, slot) in self.slots_of(no) {
            self.free_slots.free.remove(&(strikes, no, slot_no));
            self.evict(no, slot_no, slot);
        }
        self.out.push(Event::Lot { lot: no });
        self.drop_if_empty(no);
        Ok(())
    }

    /// Makes a lot silent: it gets no new allocations, and calls do not preempt those that run in it.
    fn silence_lot(&mut self, no: LotNo) {
        let Some(lot) = self.lots.get_mut(&no) else { return };
        lot.state = LotState::Silent;
        let strikes = lot.strikes;
        for (slot_no, slot) in self.slots_of(no) {
            self.free_slots.free.remove(&(strikes, no, slot_no));
            if let Some(promised) = slot.promised {
                self.return_unit_to_book(promised);
            }
            if let Some(leaving) = slot.leaving {
                self.free_slots.yielding.remove(&(leaving.since, no, slot_no));
            }
            if let Some(occupant) = slot.occupant {
                self.clear_preemptible(occupant);
                let preempt_at = self.allocation_at(occupant).preempt_at;
                self.free_slots.yielding.remove(&(preempt_at, no, slot_no));
            }
        }
        self.out.push(Event::Lot { lot: no });
    }

    /// Ends the allocations of a lot that was silent for too long. The lot stays, because machines may still exist in it.
    fn lose_lot(&mut self, no: LotNo) {
        if let Some(lot) = self.lots.get_mut(&no).filter(|lot| lot.state != LotState::Draining) {
            lot.state = LotState::Lost;
        }
        for (_, slot) in self.slots_of(no) {
            if let Some(promised) = slot.promised {
                self.return_unit_to_book(promised);
            }
            let Some(occupant) = slot.occupant else { continue };
            let allocation = self.allocation_at(occupant);
            match allocation.state {
                AllocationState::Provisioning | AllocationState::Matched => {
                    self.return_unit_to_book(occupant)
                }
                AllocationState::Active | AllocationState::Preempting => {
                    self.end(occupant, EndReason::CapacityLost);
                }
                AllocationState::Ended => {}
            }
        }
        self.out.push(Event::Lot { lot: no });
    }

    /// Removes a draining lot once its last slot is empty.
    pub(super) fn drop_if_empty(&mut self, no: LotNo) {
        let empty = self
            .lots
            .get(&no)
            .is_some_and(|lot| lot.state == LotState::Draining && lot.slots.iter().all(Slot::is_empty));
        if empty {
            self.remove_lot(no);
            self.out.push(Event::Lot { lot: no });
        }
    }

    fn remove_lot(&mut self, no: LotNo) {
        if let Some(lot) = self.lots.remove(&no) {
            self.by_supplier.remove(&(lot.supplier, no));
        }
    }

    /// Adds a strike to a lot.
    pub(super) fn strike(&mut self, no: LotNo) {
        let strikes = self.lots.get(&no).map_or(0, |lot| lot.strikes.saturating_add(1));
        self.set_strikes(no, strikes);
    }

    /// Sets the strikes of a lot. Free slots of lots with strikes are used last.
    pub(super) fn set_strikes(&mut self, no: LotNo, strikes: u16) {
        let Some(lot) = self.lots.get_mut(&no) else { return };
        let before = std::mem::replace(&mut lot.strikes, strikes);
        if before == strikes {
            return;
        }
        let own: Vec<_> =
            self.free_slots.free.range((before, no, 0)..=(before, no, u32::MAX)).copied().collect();
        for slot in own {
            self.free_slots.free.remove(&slot);
            self.free_slots.free.insert((strikes, slot.1, slot.2));
        }
    }

    /// Recomputes the prices of the book and of running allocations from their limits, after the cap changed.
    pub(super) fn rebuild_order(&mut self) {
        self.book = crate::book::Book::default();
        self.running.clear();
        let listed: Vec<_> = self.bids.iter().filter(|(_, bid)| !bid.held).map(|(place, _)| place).collect();
        for place in listed {
            self.list(place);
        }
        let active: Vec<_> = self.allocations.iter().map(|(place, _)| place).collect();
        for place in active {
            self.make_preemptible(place);
        }
    }
}

//! Capacity: lots, their slots, and the slots that can be allocated.

use std::collections::BTreeSet;

use crate::codec::{codec_enum, codec_struct};
use crate::{LotNo, SupplierNo, Time};

/// Whether a lot takes new allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LotState {
    /// Takes new allocations.
    Open,
    /// Its supplier sends no heartbeats: no new allocations; the running ones stay.
    Silent,
    /// Takes none; the running ones are under notice.
    Draining,
}

/// One place of a lot's supply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Allocation that uses it.
    pub(crate) occupant: Option<u32>,
    /// Allocation that gets it when the occupant ends.
    pub(crate) promised: Option<u32>,
    /// Removed when the occupant ends.
    pub(crate) retired: bool,
}

/// Equal slots of one supplier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lot {
    pub(crate) supplier: SupplierNo,
    pub(crate) slots: Vec<Slot>,
    pub(crate) notice_ms: u64,
    pub(crate) state: LotState,
    pub(crate) last_seen: Time,
    pub(crate) silent_due: Time,
    pub(crate) strikes: u8,
}

impl Lot {
    /// Its supplier.
    #[must_use]
    pub fn supplier(&self) -> SupplierNo {
        self.supplier
    }

    /// Open, silent or draining.
    #[must_use]
    pub fn state(&self) -> LotState {
        self.state
    }

    /// Slots that count as capacity.
    #[must_use]
    pub fn size(&self) -> usize {
        self.slots.iter().filter(|slot| !slot.retired).count()
    }

    /// Slots with an occupant.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.slots.iter().filter(|slot| slot.occupant.is_some()).count()
    }

    /// Consecutive failed launches in this lot.
    #[must_use]
    pub fn strikes(&self) -> u8 {
        self.strikes
    }
}

/// Slots that a match can take.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeSlots {
    /// Empty slots of open lots; lots with failed launches last.
    pub(crate) free: BTreeSet<(u8, LotNo, u32)>,
    /// Slots of open lots whose occupant is under notice and that are not promised yet.
    pub(crate) yielding: BTreeSet<(Time, LotNo, u32)>,
}

impl FreeSlots {
    /// Number of possible matches.
    pub(crate) fn len(&self) -> usize {
        self.free.len() + self.yielding.len()
    }
}

codec_enum!(LotState { 0 Open, 1 Silent, 2 Draining });
codec_struct!(Slot { occupant, promised, retired });
codec_struct!(Lot { supplier, slots, notice_ms, state, last_seen, silent_due, strikes });

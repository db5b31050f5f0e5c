//! Capacity: lots, their slots, and the slots that can be allocated.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{AllocationId, LotNo, SupplierNo, Time};

/// State of a lot, which decides whether it accepts new allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LotState {
    /// The lot accepts new allocations.
    Open,
    /// The supplier is silent: no new allocations are accepted, and the running ones stay.
    Silent,
    /// No new allocations are accepted, and the running ones are under notice.
    Draining,
    /// The supplier was silent for too long, and the allocations ended. Machines may still exist, so the slots are not free
    /// until the supplier is back and reports that they are gone.
    Lost,
}

/// Ended allocation whose machine may still exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leaving {
    /// Former occupant of the slot.
    pub(crate) allocation: AllocationId,
    /// Time of its match, which is part of its public name.
    pub(crate) matched_at: Time,
    /// Time of its end.
    pub(crate) since: Time,
    /// First version of the desired set without this allocation.
    pub(crate) epoch: u64,
}

/// Place for one machine in a lot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Slot {
    /// Allocation that uses the slot.
    pub(crate) occupant: Option<u32>,
    /// Former occupant whose machine the supplier has not reported gone. Never set together with an occupant.
    pub(crate) leaving: Option<Leaving>,
    /// Allocation that gets the slot when the occupant is gone.
    pub(crate) promised: Option<u32>,
    /// Whether the slot is removed when its occupant ends.
    pub(crate) retired: bool,
}

/// Equal slots of one supplier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lot {
    pub(crate) supplier: SupplierNo,
    pub(crate) slots: Vec<Slot>,
    pub(crate) notice_ms: u64,
    pub(crate) state: LotState,
    pub(crate) strikes: u16,
}

impl Slot {
    /// Whether the slot has neither a machine nor one that is expected.
    pub(crate) fn is_empty(&self) -> bool {
        self.occupant.is_none() && self.leaving.is_none()
    }
}

impl Lot {
    /// Supplier of the lot.
    #[must_use]
    pub fn supplier(&self) -> SupplierNo {
        self.supplier
    }

    /// State of the lot.
    #[must_use]
    pub fn state(&self) -> LotState {
        self.state
    }

    /// Number of slots that count as capacity.
    #[must_use]
    pub fn size(&self) -> usize {
        self.slots.iter().filter(|slot| !slot.retired).count()
    }

    /// Number of slots with an occupant, or with a machine that is not gone yet.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.slots.iter().filter(|slot| !slot.is_empty()).count()
    }

    /// Whether a slot has an occupant.
    #[must_use]
    pub fn is_occupied(&self) -> bool {
        self.slots.iter().any(|slot| slot.occupant.is_some())
    }

    /// Consecutive failed launches in this lot.
    #[must_use]
    pub fn strikes(&self) -> u16 {
        self.strikes
    }
}

/// Slots that a match can use.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeSlots {
    /// Empty slots of open lots; lots with failed launches last.
    pub(crate) free: BTreeSet<(u16, LotNo, u32)>,
    /// Slots of open lots whose occupant is under notice or leaving, and that are not promised yet.
    pub(crate) yielding: BTreeSet<(Time, LotNo, u32)>,
}

impl FreeSlots {
    /// Number of possible matches.
    pub(crate) fn len(&self) -> usize {
        self.free.len() + self.yielding.len()
    }
}

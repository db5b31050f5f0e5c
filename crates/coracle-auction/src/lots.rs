//! Capacity: lots, their slots, and the slots that can be allocated.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{AllocationId, LotNo, SupplierNo, Time};

/// Whether a lot takes new allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LotState {
    /// Takes new allocations.
    Open,
    /// Its supplier is silent: no new allocations; the running ones stay.
    Silent,
    /// Takes none; the running ones are under notice.
    Draining,
    /// Its supplier was silent for too long: its allocations ended. Machines may be left, so its slots are not free
    /// before the supplier is back and says that they are gone.
    Lost,
}

/// Ended allocation whose machine may still exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leaving {
    /// The former occupant.
    pub(crate) allocation: AllocationId,
    /// When that was matched: part of the name that it is known by.
    pub(crate) matched_at: Time,
    /// Since when.
    pub(crate) since: Time,
    /// Version of the desired set from which on it is missing there.
    pub(crate) epoch: u64,
}

/// One place of a lot's supply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Slot {
    /// Allocation that uses it.
    pub(crate) occupant: Option<u32>,
    /// Former occupant whose machine the supplier has not reported gone. Never beside an occupant.
    pub(crate) leaving: Option<Leaving>,
    /// Allocation that gets it when the occupant is gone.
    pub(crate) promised: Option<u32>,
    /// Removed when the occupant ends.
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
    /// No machine and none to come.
    pub(crate) fn is_empty(&self) -> bool {
        self.occupant.is_none() && self.leaving.is_none()
    }
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

    /// Slots with an occupant, or with a machine that is not gone yet.
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

/// Slots that a match can take.
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

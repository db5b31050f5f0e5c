//! Capacity: lots, their units, and which of them can be given away.

use std::collections::BTreeSet;

use crate::wire::{wire_enum, wire_struct};
use crate::{LotNo, SupplierNo, Time};

/// May new units be put here?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LotState {
    /// Yes.
    Open,
    /// Its supplier is silent; what runs, runs.
    Silent,
    /// No; what runs is under notice.
    Draining,
}

/// One unit of a lot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unit {
    /// The allocation that is on it.
    pub(crate) occupant: Option<u32>,
    /// The allocation that gets it when the occupant is gone.
    pub(crate) promised: Option<u32>,
    /// Gone when the occupant is.
    pub(crate) retired: bool,
}

/// Equal units of one supplier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lot {
    pub(crate) supplier: SupplierNo,
    pub(crate) units: Vec<Unit>,
    pub(crate) notice_ms: u64,
    pub(crate) state: LotState,
    pub(crate) last_seen: Time,
    pub(crate) silent_due: Time,
    pub(crate) strikes: u8,
}

impl Lot {
    /// Whose it is.
    #[must_use]
    pub fn supplier(&self) -> SupplierNo {
        self.supplier
    }

    /// Open, silent or draining.
    #[must_use]
    pub fn state(&self) -> LotState {
        self.state
    }

    /// Units that count as capacity.
    #[must_use]
    pub fn size(&self) -> usize {
        self.units.iter().filter(|unit| !unit.retired).count()
    }

    /// Units that something is on.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.units.iter().filter(|unit| unit.occupant.is_some()).count()
    }

    /// Launches in a row that failed here.
    #[must_use]
    pub fn strikes(&self) -> u8 {
        self.strikes
    }
}

/// Seats that a match can take.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seats {
    /// Empty units of open lots; lots with failed launches last.
    pub(crate) free: BTreeSet<(u8, LotNo, u32)>,
    /// Units of open lots whose occupant runs out its notice and that are promised to nobody.
    pub(crate) yielding: BTreeSet<(Time, LotNo, u32)>,
}

impl Seats {
    /// How many matches can be made.
    pub(crate) fn len(&self) -> usize {
        self.free.len() + self.yielding.len()
    }
}

wire_enum!(LotState { 0 Open, 1 Silent, 2 Draining });
wire_struct!(Unit { occupant, promised, retired });
wire_struct!(Lot { supplier, units, notice_ms, state, last_seen, silent_due, strikes });

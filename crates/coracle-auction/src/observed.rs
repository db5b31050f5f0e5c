//! Desired machines of a supplier, and what it observes.

use crate::{AllocationId, EndReason, Fault, LotNo, Time};

/// One entry of a supplier's desired set: a machine that must run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Desired {
    /// The lot.
    pub lot: LotNo,
    /// Index of the slot.
    pub slot: u32,
    /// The allocation that the machine is for.
    pub allocation: AllocationId,
    /// When it must be gone at the latest; `None`: it stays.
    pub until: Option<Time>,
    /// Why it must go.
    pub reason: Option<EndReason>,
}

/// State of a machine, as its supplier observes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineState {
    /// It is being started.
    Starting,
    /// It runs.
    Running,
    /// Its node registered under this name.
    Registered {
        /// Its name.
        node: Box<str>,
    },
    /// Its node is ready.
    Ready {
        /// Its name.
        node: Box<str>,
    },
    /// It could not be started.
    Failed,
    /// It ended by itself.
    Died {
        /// Whose fault it was.
        by: Fault,
    },
    /// It is being ended.
    Stopping,
    /// A state that this version does not know: the machine exists, nothing else is concluded.
    Unknown,
}

/// A machine, or its remains, at a supplier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The lot.
    pub lot: LotNo,
    /// Index of the slot.
    pub slot: u32,
    /// The allocation that it is for.
    pub allocation: AllocationId,
    /// Its state.
    pub state: MachineState,
}

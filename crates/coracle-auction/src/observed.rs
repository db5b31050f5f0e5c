//! Desired machines of a supplier, and its observations of them.

use crate::{AllocationId, EndReason, Fault, LotNo, Time};

/// Entry of a supplier's desired set: a machine that must run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Desired {
    /// The lot.
    pub lot: LotNo,
    /// Index of the slot.
    pub slot: u32,
    /// Allocation of the machine.
    pub allocation: AllocationId,
    /// Time by which the machine must be gone; `None`: it stays.
    pub until: Option<Time>,
    /// Why the machine must end.
    pub reason: Option<EndReason>,
}

/// State of a machine as its supplier observes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineState {
    /// The machine is being started.
    Starting,
    /// The machine runs.
    Running,
    /// The node of the machine has registered.
    Registered {
        /// Name of the node.
        node: Box<str>,
    },
    /// The node of the machine is ready.
    Ready {
        /// Name of the node.
        node: Box<str>,
    },
    /// The machine could not be started.
    Failed,
    /// The machine ended by itself.
    Died {
        /// Origin of the end.
        by: Fault,
    },
    /// The machine is being stopped.
    Stopping,
    /// The state is not known to this version. The machine exists; nothing else is concluded.
    Unknown,
}

/// Machine, or its remains, at a supplier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The lot.
    pub lot: LotNo,
    /// Index of the slot.
    pub slot: u32,
    /// Allocation of the machine.
    pub allocation: AllocationId,
    /// State of the machine.
    pub state: MachineState,
}

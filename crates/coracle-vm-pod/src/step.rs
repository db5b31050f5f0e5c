//! What a plan may ask for, one at a time.

use coracle_api::cocoon::LifecycleState;

/// Why a VM is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It sleeps until it is woken: tag `hibernate`.
    Hibernation,
    /// Its pod ends: tag `latest`.
    Deletion,
}

/// One step. Each is idempotent: after a crash the next plan may ask for it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Asks the registry for the saved state.
    FindSaved,
    /// Brings the image to this node.
    PullImage,
    /// Lays out a new VM of it, and starts it.
    Run,
    /// Brings the snapshot to clone to this node.
    PullSnapshot,
    /// Takes the snapshot to clone from a directory of this node.
    ImportExported,
    /// Makes the VM from the snapshot.
    Clone,
    /// Copies the VM that a fork is made of.
    SaveForkSource,
    /// Makes the VM from that copy.
    Fork,
    /// Starts a VM that is off.
    Start,
    /// Loads the memory of a VM that sleeps on this node.
    Resume,
    /// Saves the memory of the VM and ends its VMM. The guest does nothing more from here on.
    Hibernate,
    /// Copies the sleeping VM into a snapshot of this node, in the place of an older one.
    Copy(Purpose),
    /// Sends that snapshot to the registry.
    Push(Purpose),
    /// Brings the saved state to this node, in the place of an older one.
    Import,
    /// Makes the VM from it, under the identity that it had.
    Wake,
    /// Removes the saved state from the registry.
    DropSaved,
    /// Removes the VM, and the snapshots of this node that were made on the way.
    RemoveVm {
        /// The snapshot of a deletion stays.
        keep_copy: bool,
    },
    /// Writes annotations of the pod.
    Note(Note),
    /// Nothing is left to do: the object goes.
    Finish(Finish),
}

/// What is written on the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// How far it is.
    pub state: LifecycleState,
    /// Id and address of its VM; `None`: it has none.
    pub vm: Option<(String, Option<String>)>,
    /// More about it; empty: nothing.
    pub message: String,
}

/// How a pod ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// There was no VM of its own.
    NoVm,
    /// Its VM is removed.
    Removed,
    /// Its VM is left alone: it is not this node's to remove.
    LeftAlone,
    /// Its VM could not be saved and was kept.
    Kept,
}

//! Steps of a plan, of which one is executed at a time.

use coracle_api::cocoon::LifecycleState;

/// Purpose of saving a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Hibernation until the VM is woken: tag `hibernate`.
    Hibernation,
    /// Deletion of the pod: tag `latest`.
    Deletion,
}

/// Step of a plan. Each step is idempotent: after a crash the next plan may contain it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Queries the registry for the saved state.
    FindSaved,
    /// Pulls the image to this node.
    PullImage,
    /// Creates a VM from the image and starts it.
    Run,
    /// Pulls the snapshot to clone to this node.
    PullSnapshot,
    /// Imports the snapshot to clone from a directory of this node.
    ImportExported,
    /// Creates the VM from the snapshot.
    Clone,
    /// Copies the source VM of a fork into a snapshot.
    SaveForkSource,
    /// Creates the VM from that copy.
    Fork,
    /// Starts a VM that is off.
    Start,
    /// Loads the memory of a VM that is hibernated on this node.
    Resume,
    /// Saves the memory of the VM and ends its VMM. The guest does not run from here on.
    Hibernate,
    /// Copies the hibernated VM into a snapshot of this node. Replaces an older one.
    Copy(Purpose),
    /// Pushes that snapshot to the registry.
    Push(Purpose),
    /// Pulls the saved state to this node. Replaces an older import.
    Import,
    /// Creates the VM from the saved state, under its previous identity.
    Wake,
    /// Removes the saved state from the registry.
    DropSaved,
    /// Removes the VM, and the snapshots of this node that hibernation and forks created.
    RemoveVm {
        /// Whether the snapshot of the deletion is kept.
        keep_copy: bool,
    },
    /// Writes annotations of the pod.
    Note(Note),
    /// Removes the object: nothing else is left to do.
    Finish(Finish),
}

/// Annotations that are written to the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Lifecycle state.
    pub state: LifecycleState,
    /// Id and address of the VM; `None`: the pod has none.
    pub vm: Option<(String, Option<String>)>,
    /// Message about the state; may be empty.
    pub message: String,
}

/// Result of ending a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The pod had no VM of its own.
    NoVm,
    /// The VM was removed.
    Removed,
    /// The VM was left unchanged, because this node does not manage it.
    LeftAlone,
    /// The VM could not be saved and was kept.
    Kept,
}

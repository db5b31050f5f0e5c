//! Input of a plan: the pod, its VM, and its saved states. Data only.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use coracle_api::cocoon::{LifecycleState, Mode};
use coracle_host::Exit;
use coracle_types::{UnixMillis, VmId, VmName, VmState};

use crate::step::{Purpose, Step};

/// State of a pod, from its object.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts {
    /// Specification of the pod's VM, or the reason why it is invalid.
    pub wanted: Result<Wanted, String>,
    /// The object is being deleted, or is gone.
    pub ending: bool,
    /// The phase of the pod is terminal.
    pub ended: bool,
    /// This node accepted the pod before.
    pub begun: bool,
    /// Annotations that this node wrote.
    pub noted: Noted,
    /// Restart policy of the VM.
    pub restart: Restart,
    /// The node refuses the pod, with this reason and message.
    pub refused: Option<(String, String)>,
}

/// Desired state of a pod's VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// Name of its VM.
    pub vm: VmName,
    /// Source of the VM.
    pub source: Source,
    /// This node manages the lifecycle of the VM; else the VM is adopted and left unchanged.
    pub is_managed: bool,
    /// Whether the VM is saved before it is removed.
    pub saves_on_delete: bool,
    /// Whether the saved copy on this node is kept, too.
    pub keeps_local_copy: bool,
    /// Whether the VM is to be hibernated.
    pub hibernate: bool,
    /// Whether a new pod continues from the saved state.
    pub restore: bool,
    /// Port that accepts connections when the VM is ready; `None`: see [`crate::probe`].
    pub probe_port: Option<u16>,
    /// Generation of the set that created the pod.
    pub generation: Option<i64>,
}

/// Source of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A copy of a snapshot, on this node or in a registry.
    Clone {
        /// `repo[:tag]`.
        snapshot: String,
    },
    /// A copy of a snapshot that was exported into a directory of this node.
    Exported {
        /// Absolute path of the directory.
        dir: PathBuf,
    },
    /// A copy of a VM on this node.
    Fork {
        /// Name of the source VM.
        from: VmName,
    },
    /// A new VM from an image.
    Run {
        /// Reference of a container image or a disk image.
        image: String,
    },
    /// An existing VM.
    Static {
        /// Id of the VM.
        id: String,
        /// Address of the VM.
        ip: IpAddr,
    },
}

impl Source {
    /// Returns the mode of the source. Every copy counts as a clone.
    #[must_use]
    pub fn mode(&self) -> Mode {
        match self {
            Self::Clone { .. } | Self::Exported { .. } | Self::Fork { .. } => Mode::Clone,
            Self::Run { .. } => Mode::Run,
            Self::Static { .. } => Mode::Static,
        }
    }
}

/// Annotations that this node writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// Id of the VM.
    pub id: Option<String>,
    /// Address of the VM.
    pub ip: Option<String>,
    /// Lifecycle state.
    pub state: Option<LifecycleState>,
    /// Generation for which the state was noted.
    pub generation: Option<i64>,
    /// Message about the state.
    pub message: Option<String>,
}

/// Restart policy of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// Restart a VM that is off.
    Always,
    /// Restart a VM whose workload failed.
    OnFailure,
    /// Never restart the VM.
    Never,
}

/// State of the pod's VM in the host core.
#[derive(Clone, Debug, PartialEq)]
pub struct VmFacts {
    /// Id of the VM.
    pub id: VmId,
    /// State of the VM.
    pub state: VmState,
    /// Reason of the state, one line.
    pub message: String,
    /// Owner of the VM, as this pod sees it.
    pub owner: VmOwner,
    /// The VM was woken from a hibernation. Its saved state stays in the registry until the VM runs.
    pub is_woken: bool,
    /// Addresses of the VM, one of each family. The first one is probed.
    pub ips: Vec<IpAddr>,
    /// The guest agent is connected.
    pub has_agent: bool,
    /// Exit of the workload.
    pub exit: Option<Exit>,
    /// The workload was killed because the guest ran out of memory.
    pub oom_killed: bool,
    /// Start of the current or last run.
    pub started_at: Option<UnixMillis>,
    /// End of the last run.
    pub finished_at: Option<UnixMillis>,
    /// Number of starts.
    pub boots: u32,
}

/// Owner of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmOwner {
    /// This pod.
    ThisPod,
    /// An earlier pod of the same namespace, which is gone.
    GonePod,
    /// Another pod, another namespace, or no pod at all.
    Other(String),
}

/// Saved state of a hibernation in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Saved {
    /// The registry was not asked yet.
    Unknown,
    /// The registry has none.
    Absent,
    /// The state of this pod, or of an earlier pod of the same name.
    Own {
        /// The state was saved by this pod itself.
        same_pod: bool,
    },
    /// The state belongs to another namespace or another program.
    Foreign(String),
}

/// Source of a fork.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForkSource {
    /// The pod is not a fork.
    None,
    /// There is neither the source VM nor a snapshot of it.
    Absent,
    /// The source VM belongs to another namespace.
    Foreign,
    /// The source VM exists and cannot be copied in this state.
    Waiting(VmState),
    /// The source VM can be copied, and has no current snapshot.
    Live,
    /// A current snapshot of the source VM is on this node.
    Saved,
}

/// Memory of a pod's task between two observations. A restart loses it; plans are safe without it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The pod had no annotations of this node when it was first seen, and has had no VM since: it has no saved state.
    pub is_new: bool,
    /// Purpose of the snapshot on this node that contains the state of the hibernated VM.
    pub copied: Option<Purpose>,
    /// Purpose of the snapshot that was pushed to the registry.
    pub pushed: Option<Purpose>,
    /// The VM is removed, and the pod ends.
    pub is_removed: bool,
    /// The registry does not accept the snapshot, and the pod ends.
    pub push_given_up: bool,
    /// The state cannot be saved, and the pod ends.
    pub save_given_up: bool,
    /// The image is on this node.
    pub has_image: bool,
    /// The saved state is imported as a snapshot of this node.
    pub is_imported: bool,
    /// Last failure; reset when a step succeeds.
    pub failure: Option<Failure>,
}

/// Failure of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Failed step.
    pub step: Step,
    /// Reason for the pod's status.
    pub reason: &'static str,
    /// Error message.
    pub message: String,
    /// Number of consecutive failures.
    pub times: u32,
    /// Time until the step is retried.
    pub rest: Duration,
}

/// Complete input of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// State of the pod.
    pub pod: PodFacts,
    /// State of the VM with the pod's VM name.
    pub vm: Option<VmFacts>,
    /// Saved state of the VM.
    pub saved: Saved,
    /// The node has a registry for saved states.
    pub has_registry: bool,
    /// The snapshot to clone is on this node.
    pub has_clone_source: bool,
    /// Source of a fork.
    pub fork: ForkSource,
    /// Memory of the task.
    pub memory: Memory,
    /// The probed port of the VM accepts connections, or its agent is connected.
    pub is_answering: bool,
    /// Wall-clock time.
    pub now: UnixMillis,
}

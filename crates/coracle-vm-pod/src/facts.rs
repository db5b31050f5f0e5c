//! What a plan looks at: the pod, its VM, and its saved states. Data only.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use coracle_api::cocoon::{LifecycleState, Mode};
use coracle_host::Exit;
use coracle_types::{UnixMillis, VmId, VmName, VmState};

use crate::step::{Purpose, Step};

/// A pod, as its object says.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts {
    /// What it asks for, or why that cannot be had.
    pub wanted: Result<Wanted, String>,
    /// Its object is being deleted, or is gone.
    pub ending: bool,
    /// It has ended, as its phase says.
    pub ended: bool,
    /// This node has taken it before.
    pub begun: bool,
    /// What this node wrote on it.
    pub noted: Noted,
    /// What happens when its VM is off.
    pub restart: Restart,
    /// The node does not take it: reason and message.
    pub refused: Option<(String, String)>,
}

/// What a pod asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// Name of its VM.
    pub vm: VmName,
    /// How the VM comes to be.
    pub source: Source,
    /// This node owns the life of the VM; else the VM is adopted and left alone.
    pub is_managed: bool,
    /// The VM is saved before it is removed.
    pub saves_on_delete: bool,
    /// The saved copy on this node stays, too.
    pub keeps_local_copy: bool,
    /// It shall be hibernated.
    pub hibernate: bool,
    /// A new pod continues from the saved state.
    pub restore: bool,
    /// Port that answers when the VM is ready; `None`: see [`crate::probe`].
    pub probe_port: Option<u16>,
    /// Generation of the set that made the pod.
    pub generation: Option<i64>,
}

/// Where a VM comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A copy of a snapshot, of this node or of a registry.
    Clone {
        /// `repo[:tag]`.
        snapshot: String,
    },
    /// A copy of a snapshot that was exported into a directory of this node.
    Exported {
        /// Its absolute path.
        dir: PathBuf,
    },
    /// A copy of a VM of this node.
    Fork {
        /// Name of that VM.
        from: VmName,
    },
    /// A new VM of an image.
    Run {
        /// Reference of a container image or a disk image.
        image: String,
    },
    /// A VM that exists.
    Static {
        /// Its id.
        id: String,
        /// Its address.
        ip: IpAddr,
    },
}

impl Source {
    /// The mode that it belongs to. Every copy is a clone.
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
    /// Id of its VM.
    pub id: Option<String>,
    /// Address of its VM.
    pub ip: Option<String>,
    /// How far it is.
    pub state: Option<LifecycleState>,
    /// Generation that this is true of.
    pub generation: Option<i64>,
    /// More about it.
    pub message: Option<String>,
}

/// The pod's restart policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// A VM that is off is started again.
    Always,
    /// When its workload failed.
    OnFailure,
    /// Never.
    Never,
}

/// The VM of that name in the host core.
#[derive(Clone, Debug, PartialEq)]
pub struct VmFacts {
    /// Its id.
    pub id: VmId,
    /// What it does.
    pub state: VmState,
    /// Why, one line.
    pub message: String,
    /// Whose it is to this pod.
    pub belongs: Belongs,
    /// It continues from the saved state of a hibernation, which is in the registry until it runs.
    pub is_woken: bool,
    /// Its addresses, one of each family; it is probed at the first.
    pub ips: Vec<IpAddr>,
    /// The guest agent answers.
    pub has_agent: bool,
    /// How its workload ended.
    pub exit: Option<Exit>,
    /// It was killed, in a guest that was out of memory.
    pub oom_killed: bool,
    /// When its present or last run began.
    pub started_at: Option<UnixMillis>,
    /// When its last run ended.
    pub finished_at: Option<UnixMillis>,
    /// Starts so far.
    pub boots: u32,
}

/// Whose VM it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Belongs {
    /// This pod's.
    Here,
    /// An earlier pod's of the same namespace, which is gone.
    Left,
    /// Another pod's, another namespace's, or a VM that no pod made.
    Elsewhere(String),
}

/// The saved state of a hibernation in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Saved {
    /// Not looked for yet.
    Unknown,
    /// There is none.
    Absent,
    /// Of this pod, or of an earlier one of the same name.
    Own {
        /// Of this very pod.
        same_pod: bool,
    },
    /// Of another namespace, or of another program.
    Foreign(String),
}

/// Where a fork comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForkSource {
    /// The pod is not a fork.
    None,
    /// There is neither the VM nor a snapshot of it.
    Absent,
    /// The VM belongs to another namespace.
    Foreign,
    /// The VM exists and cannot be copied yet.
    Waits(VmState),
    /// The VM can be copied, and no snapshot of it is as new as the VM.
    Live,
    /// A snapshot of it is here.
    Saved,
}

/// What the task of a pod remembers between two looks. A restart forgets it, and a plan without it does no harm.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Nothing was noted of the pod when it was first seen, and it had no VM since: it has no saved state.
    pub is_new: bool,
    /// The state of the VM, which is at rest, is in a snapshot of this node.
    pub copied: Option<Purpose>,
    /// That snapshot is in the registry.
    pub pushed: Option<Purpose>,
    /// The VM is removed, and the pod ends.
    pub is_removed: bool,
    /// The registry does not take it, and the pod shall end.
    pub push_given_up: bool,
    /// The state cannot be saved, and the pod shall end.
    pub save_given_up: bool,
    /// The image is on this node.
    pub has_image: bool,
    /// The saved state is in a snapshot of this node.
    pub is_imported: bool,
    /// The last failure, until a step succeeds.
    pub failure: Option<Failure>,
}

/// A step that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The step.
    pub step: Step,
    /// Reason in the pod's status.
    pub reason: &'static str,
    /// What went wrong.
    pub message: String,
    /// How often in a row.
    pub times: u32,
    /// Time left until the step is tried again.
    pub rest: Duration,
}

/// Everything that a plan looks at.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The pod.
    pub pod: PodFacts,
    /// The VM of that name.
    pub vm: Option<VmFacts>,
    /// Its saved state.
    pub saved: Saved,
    /// There is a registry for saved states.
    pub has_registry: bool,
    /// The snapshot to clone is here.
    pub has_clone_source: bool,
    /// Where a fork comes from.
    pub fork: ForkSource,
    /// Remembered.
    pub memory: Memory,
    /// The VM answers at its port, or its agent does.
    pub is_answering: bool,
    /// Wall clock.
    pub now: UnixMillis,
}

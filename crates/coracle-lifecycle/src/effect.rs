//! What the task of a VM has done about an input.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::{Disk, ProcessId};
use coracle_oci::Reference;
use coracle_proto::guest as pb;
use coracle_record::{ContainerRecord, Record, SavedMemory, Volume};

use super::input::{JobId, SessionId, Ticket};
use crate::Hook;
use crate::events::EventKind;
use crate::volume::VolumeSource;
use crate::{ContainerId, Exit, HostError};

/// What is said to a caller.
#[derive(Debug)]
pub enum Answer {
    /// It is done; callers get the record as it is now.
    Done,
    Container(Arc<ContainerRecord>),
    Copied(Box<SavedMemory>),
    Failed(HostError),
}

/// Number of a write. A file is never overwritten with what an earlier one has.
pub type WriteId = u64;

/// Where memory is saved, and what with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveTo {
    /// The VM's own directory: it continues from there.
    Own,
    /// The directory of a copy, which gets the VM's disk as well.
    Copy(PathBuf),
}

/// One action of a job. Each has a limit of its own (`effects.rs`).
#[derive(Debug)]
pub enum Action {
    /// As this action, but a failure is only logged.
    Try(Box<Action>),
    /// As this action, with another limit.
    Within(Duration, Box<Action>),
    SaveRecord(WriteId, Box<Record>),
    SaveContainer(WriteId, Arc<ContainerRecord>),
    /// Logs of the containers that a restart of the daemon finds.
    OpenLogs(Vec<Arc<ContainerRecord>>),
    OpenLog(Arc<ContainerRecord>),
    RemoveContainerFiles(WriteId, ContainerId),
    /// Looks for the VMM that the record names.
    Find,
    /// Connects a VMM that runs.
    RestoreNetwork,
    Pause,
    Resume,
    /// Ends the jobs of the run, and then every instance of the VM.
    EndVmm,
    /// No packet of a VMM that does not end passes.
    CutOff,
    /// Removes what the VM's network has of it alone. What is left is collected when the daemon starts.
    RemoveNetwork,
    /// Removes all files of the VM.
    Erase,
    /// Removes memory that no guest needs.
    RemoveSavedMemory,
    Claim(Box<Volume>, Box<VolumeSource>),
    /// `absent`: slots that the machine has nothing in yet.
    AttachDisk {
        disk: Disk,
        absent: Vec<usize>,
    },
    DetachDisk {
        slot: usize,
    },
    OpenSharedDir(Box<Volume>),
    RemoveNodeTable(String),
    Mount(Box<Volume>),
    Unmount(String),
    /// Asks a system whether it started anew by itself.
    InspectSystem,
    /// Configures a guest that has rebooted by itself.
    ConfigureAgain,
    /// Starts the command of such a guest.
    StartCommand,
    AskToPowerOff {
        grace: Duration,
    },
    RunHook(Hook),
    CreateContainer(Box<pb::CreateContainerRequest>),
    StartContainer(ContainerId),
    StopContainer(ContainerId, Duration),
    KillContainer(ContainerId, i32),
    UpdateContainer(ContainerId, Box<pb::CgroupLimits>),
    RemoveContainer(ContainerId),
    ListContainers,
    AskAgentVersion,
    /// Time in which the guest sees that its session has ended.
    AwaitHangup,
    ReserveMemory(SaveTo),
    SaveMemory(SaveTo),
    /// Waits until a copy is on disk.
    SyncCopy(PathBuf),
    /// Hard links to memory that is never written again, and a copy of the disk.
    CopySaved(PathBuf),
}

/// What a job belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Ends with the run.
    Run,
    /// Outlives it.
    Vm,
}

#[derive(Debug)]
pub enum Effect {
    /// Carries the actions out in order, up to the first that fails, and reports.
    Job(JobId, Scope, Vec<Action>),
    /// Ends a job, whose result is of no use any more.
    Cancel(JobId),
    /// From "start" to a guest that runs its workload. Reports by itself.
    Boot,
    /// The record that a loaded VMM waits for is written.
    LetLoadedRun,
    /// Watches a VMM for its end, and pumps its console.
    Watch(ProcessId),
    /// Stays in touch with the guest.
    Follow(Option<SessionId>),
    StopFollowing,
    /// Makes an image of what the workload left, and pushes it.
    Commit(Exit, Reference),
    StopCommit,
    /// Runs the post-snapshot hook, and reports when the session ended first.
    PostSnapshotHook(SessionId),
    ServeSharedDir(String),
    CloseSharedDir(String),
    CloseSharedDirs,
    /// Ends the session, so that the guest waits for the next one.
    CloseSession,
    /// Gives up sessions up to this one; none: all.
    ForgetSession(Option<SessionId>),
    /// No call waits for a guest while its vCPUs are paused.
    SetPaused(bool),
    Publish(EventKind),
    Answer(Ticket, Answer),
    ReleaseClaim(String),
    /// Nothing is left. `vmm_left`: a VMM of it has not ended yet, and keeps its volumes until it has.
    Gone {
        vmm_left: bool,
    },
}

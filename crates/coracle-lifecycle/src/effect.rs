//! Effects that the task of a VM has executed after an input.

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

/// Answer to a caller.
#[derive(Debug)]
pub enum Answer {
    /// Success; callers get the present record.
    Done,
    Container(Arc<ContainerRecord>),
    Copied(Box<SavedMemory>),
    Failed(HostError),
}

/// Sequence number of a write. A later write of a file is never overwritten by an earlier one.
pub type WriteId = u64;

/// Destination of saved memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveTo {
    /// The VM's own directory, from which it continues.
    Own,
    /// The directory of a copy, which also gets the VM's disk.
    Copy(PathBuf),
}

/// Action of a job. Each has a time limit of its own (`effects.rs`).
#[derive(Debug)]
pub enum Action {
    /// Carries out the action; a failure is only logged.
    Try(Box<Action>),
    /// Carries out the action with another time limit.
    Within(Duration, Box<Action>),
    SaveRecord(WriteId, Box<Record>),
    SaveContainer(WriteId, Arc<ContainerRecord>),
    /// Opens the logs of the containers that exist at a restart of the daemon.
    OpenLogs(Vec<Arc<ContainerRecord>>),
    OpenLog(Arc<ContainerRecord>),
    RemoveContainerFiles(WriteId, ContainerId),
    /// Finds the VMM that the record names.
    Find,
    /// Restores the network of a running VMM.
    RestoreNetwork,
    Pause,
    Resume,
    /// Ends the jobs of the run, and then every instance of the VM.
    EndVmm,
    /// Drops all packets of a VMM that does not end.
    CutOff,
    /// Removes the part of the network that belongs to this VM alone. Remains are collected when the daemon starts.
    RemoveNetwork,
    /// Removes all files of the VM.
    Erase,
    /// Removes saved memory that no guest needs.
    RemoveSavedMemory,
    Claim(Box<Volume>, Box<VolumeSource>),
    /// Attaches a disk. `absent`: slots of the VM that are still empty.
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
    /// Asks the agent of a disk image VM whether the guest has rebooted by itself.
    InspectSystem,
    /// Configures a guest that has rebooted by itself.
    ConfigureAgain,
    /// Starts the command of a guest that has rebooted by itself.
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
    /// Waits until the guest has noticed the end of its session.
    AwaitHangup,
    ReserveMemory(SaveTo),
    SaveMemory(SaveTo),
    /// Syncs a copy to disk.
    SyncCopy(PathBuf),
    /// Makes hard links to the saved memory, which is never written again, and copies the disk.
    CopySaved(PathBuf),
}

/// Lifetime of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The job ends with the run.
    Run,
    /// The job outlives the run.
    Vm,
}

#[derive(Debug)]
pub enum Effect {
    /// Carries out the actions in order, up to the first that fails, and reports the result.
    Job(JobId, Scope, Vec<Action>),
    /// Cancels a job whose result is no longer needed.
    Cancel(JobId),
    /// Boots the VM, up to a guest that runs its workload. Reports by itself.
    Boot,
    /// Allows the restored VMM to continue, because the record that it waits for is written.
    ResumeRestored,
    /// Watches for the end of a VMM, and copies its console.
    Watch(ProcessId),
    /// Follows the guest: its output, heartbeat and exit.
    Follow(Option<SessionId>),
    StopFollowing,
    /// Makes an image of the workload's root file system, and pushes it.
    Commit(Exit, Reference),
    StopCommit,
    /// Runs the post-snapshot hook, and reports if the session ended first.
    PostSnapshotHook(SessionId),
    ServeSharedDir(String),
    CloseSharedDir(String),
    CloseSharedDirs,
    /// Closes the session, so that the guest waits for the next one.
    CloseSession,
    /// Forgets sessions up to this one; `None`: all.
    ForgetSession(Option<SessionId>),
    /// Tells guest calls whether the vCPUs are paused, so that none waits for a paused guest.
    SetPaused(bool),
    Publish(EventKind),
    Answer(Ticket, Answer),
    ReleaseClaim(String),
    /// The VM is gone. `vmm_left`: a VMM of it still runs, and keeps its volumes until it ends.
    Gone {
        vmm_left: bool,
    },
}

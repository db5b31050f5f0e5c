//! Inputs of the task of a VM.

use std::path::PathBuf;
use std::time::Duration;

use coracle_hypervisor::{Accelerator, ProcessId};
use coracle_oci::Digest;
use coracle_proto::guest as pb;
use coracle_record::{ProcessUser, SavedMemory};
use coracle_types::{InstanceId, Op, UnixMillis};
use tokio::time::Instant;

use crate::container_request::{ContainerEnd, ContainerRequest};
use crate::volume::{VolumeRequest, VolumeSource};
use crate::{ContainerId, Exit, Fence, HostError, TemplateKey};

/// Time at which an input is handled, by both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic clock, for time limits.
    pub at: Instant,
    /// Wall clock, for records.
    pub time: UnixMillis,
}

/// Caller that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Job that reports its result when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// Session with the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// Request to the task of a VM.
#[derive(Debug)]
pub enum Call {
    /// Answered when the guest runs.
    Start { fence: Option<Fence> },
    /// Answered when the guest is powered off.
    Stop { grace: Duration, fence: Option<Fence> },
    /// [`Op::Pause`], [`Op::Resume`] or [`Op::Hibernate`]; answered when the operation is done.
    Suspend { op: Op, fence: Option<Fence> },
    /// Answered when the directory contains a copy of memory and disk. The task creates the directory.
    Snapshot { dir: PathBuf },
    /// Answered when the volume is attached.
    Attach { request: VolumeRequest, found: VolumeSource, fence: Option<Fence> },
    /// Answered when the volume is detached.
    Detach { volume: String, fence: Option<Fence> },
    /// Answered as described at [`ContainerRequest`].
    Container(ContainerRequest),
    /// Answered when the VM is gone.
    Delete { force: bool, fence: Option<Fence> },
}

impl Call {
    /// Returns the operation that the state of the VM must admit, and the fence of the caller.
    pub(super) fn subject(&self) -> (Op, Option<&Fence>) {
        match self {
            Self::Start { fence } => (Op::Start, fence.as_ref()),
            Self::Stop { fence, .. } => (Op::Stop, fence.as_ref()),
            Self::Suspend { op, fence } => (*op, fence.as_ref()),
            Self::Snapshot { .. } => (Op::Snapshot, None),
            Self::Attach { fence, .. } | Self::Detach { fence, .. } => (Op::Volume, fence.as_ref()),
            Self::Container(_) => (Op::Guest, None),
            Self::Delete { force, fence } => (Op::Delete { force: *force }, fence.as_ref()),
        }
    }
}

/// Source of a run.
#[derive(Clone, Debug, Default)]
pub struct StartedFrom {
    /// `None`: cold boot.
    pub template: Option<TemplateKey>,
    /// Whether the guest of the template had the VM's own disk mounted.
    pub premounted: bool,
    /// Whether the clone came from the warm pool.
    pub pooled: bool,
}

/// Running VMM with its actual properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningVmm {
    pub instance: InstanceId,
    pub process: ProcessId,
    pub accelerator: Accelerator,
}

/// Guest that runs its workload.
#[derive(Clone, Copy, Debug)]
pub struct Up {
    /// `None`: the start does not wait for the guest agent.
    pub session: Option<SessionId>,
    /// Time until the guest had its identity: entropy, clock, names, network, disks.
    pub identity: Duration,
    /// Time from then until the workload was started.
    pub workload: Duration,
}

/// Result of making an image of the workload; `None`: the command has failed, and no image was made.
pub type Committed = Result<Option<Digest>, String>;

/// End of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadEnd {
    /// Exit status.
    pub exit: Exit,
    /// Whether the workload was killed in a guest that was out of memory.
    pub oom_killed: bool,
}

/// Report of a job of a run, before the job ends.
#[derive(Debug)]
pub enum RunEvent {
    /// A VMM was started.
    Spawned(RunningVmm, StartedFrom),
    /// A VMM has loaded the saved memory and is paused. Once the guest is resumed, the saved memory is obsolete.
    Loaded(RunningVmm),
    /// The guest acknowledged its configuration and started the workload, or the boot failed.
    Booted(Result<Up, HostError>),
    /// This session ended before the guest acknowledged its post-snapshot hook.
    HookInterrupted(SessionId),
    /// A session began, or the session ended.
    Session(Option<SessionId>),
    /// The workload ended; some output may still arrive.
    Exited(WorkloadEnd),
    /// All output of the workload has been read.
    Drained,
    /// The process of a container runs.
    ContainerStarted(ContainerId),
    /// The process of a container ended, and its output is in the log.
    ContainerExited(ContainerEnd),
    /// The image of the workload was made and pushed, or not.
    Committed(Committed),
    /// The VMM has ended; the end of its console output.
    VmmGone { last_words: String },
}

/// Result of the actions of a job.
#[derive(Debug, Default)]
pub enum JobOutcome {
    /// Success without a value.
    #[default]
    Done,
    /// VMM that the record names, if it runs.
    Found(Option<RunningVmm>),
    /// User of a container's process, if the guest reports it.
    User(Option<ProcessUser>),
    /// Reason why the process of a container could not run.
    NotRun(Option<Exit>),
    /// Containers of the guest.
    Containers(Vec<pb::ContainerStatus>),
    /// Version of the guest agent; empty: not reported.
    Agent(String),
    /// State of the agent in a disk image VM, and the end of its command's output.
    System { configured: bool, has_command: bool, output_end: u64 },
    /// Saved memory.
    Saved(Box<SavedMemory>),
}

/// First action of a job that failed. Later actions were not started.
#[derive(Debug)]
pub struct Failure {
    /// Number of actions that were carried out.
    pub done: usize,
    pub error: HostError,
}

/// Result of a job.
pub type JobResult = Result<JobOutcome, Failure>;

/// Input of the task of a VM.
#[derive(Debug)]
pub enum Input {
    /// The task begins: adopts the VM after a start of the daemon.
    Begin,
    /// A request of a caller.
    Call(Ticket, Call),
    /// A report of a job of the run with this number.
    Run(u64, RunEvent),
    /// A job has ended.
    Done(JobId, JobResult),
    /// The time [`super::State::kill_at`] has been reached.
    Timer,
}

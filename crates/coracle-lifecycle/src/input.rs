//! What the task of a VM hears of.

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

/// When an input is handled, by both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// For limits.
    pub at: Instant,
    /// For records.
    pub time: UnixMillis,
}

/// A caller that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A job that reports when it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// A session with the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// What can be asked of a VM's task.
#[derive(Debug)]
pub enum Call {
    /// Answered when the guest runs.
    Start { fence: Option<Fence> },
    /// Answered when the guest is off.
    Stop { grace: Duration, fence: Option<Fence> },
    /// [`Op::Pause`], [`Op::Resume`] or [`Op::Hibernate`]; answered when it is done.
    Suspend { op: Op, fence: Option<Fence> },
    /// Answered when a copy of memory and disk is in the directory, which it makes.
    Snapshot { dir: PathBuf },
    /// Answered when the volume is the VM's.
    Attach { request: VolumeRequest, found: VolumeSource, fence: Option<Fence> },
    /// Answered when the volume is not the VM's any more.
    Detach { volume: String, fence: Option<Fence> },
    /// Answered as [`ContainerRequest`] says.
    Container(ContainerRequest),
    /// Answered when nothing is left.
    Delete { force: bool, fence: Option<Fence> },
}

impl Call {
    /// What the state of the VM must admit, and for whom the caller speaks.
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

/// What a run began with.
#[derive(Clone, Debug, Default)]
pub struct StartedFrom {
    /// None: it booted.
    pub template: Option<TemplateKey>,
    /// The guest of the template had the VM's own disk mounted.
    pub premounted: bool,
    /// Its clone came from the warm pool.
    pub pooled: bool,
}

/// A VMM that runs, and what it really runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningVmm {
    pub instance: InstanceId,
    pub process: ProcessId,
    pub accelerator: Accelerator,
}

/// A guest that runs its workload.
#[derive(Clone, Copy, Debug)]
pub struct Up {
    /// `None`: its agent is not waited for.
    pub session: Option<SessionId>,
    /// What it took to become who it is: entropy, clock, names, network, disks.
    pub identity: Duration,
    /// And then to start what it is for.
    pub workload: Duration,
}

/// What came of an image of the workload; `None`: the command has failed, and nothing was made.
pub type Committed = Result<Option<Digest>, String>;

/// How a workload ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadEnd {
    /// Its status.
    pub exit: Exit,
    /// It was killed, in a guest that was out of memory.
    pub oom_killed: bool,
}

/// What the jobs of a run report while they last.
#[derive(Debug)]
pub enum RunEvent {
    /// A VMM runs.
    Spawned(RunningVmm, StartedFrom),
    /// A VMM has loaded the saved memory and is paused. Once it is resumed, the saved memory is used up.
    Loaded(RunningVmm),
    /// The guest acknowledged its configuration and started the workload, or not.
    Booted(Result<Up, HostError>),
    /// This session ended before the guest acknowledged its post-snapshot hook.
    HookInterrupted(SessionId),
    /// There is a session, or none any more.
    Session(Option<SessionId>),
    /// The workload ended; some output may still be on its way.
    Exited(WorkloadEnd),
    /// All of its output has been read.
    Drained,
    /// The process of a container runs.
    ContainerStarted(ContainerId),
    /// The process of a container ended, and its output is in the log.
    ContainerExited(ContainerEnd),
    /// Its image is made and pushed, or not.
    Committed(Committed),
    /// The VMM is gone; the end of its console.
    VmmGone { last_words: String },
}

/// What the actions of a job found out.
#[derive(Debug, Default)]
pub enum JobOutcome {
    /// They did what they should.
    #[default]
    Done,
    /// The VMM that the record names, if it runs.
    Found(Option<RunningVmm>),
    /// Who the process of a container runs as, if the guest can tell.
    User(Option<ProcessUser>),
    /// Why the process of a container could not run.
    NotRun(Option<Exit>),
    /// The containers that the guest has.
    Containers(Vec<pb::ContainerStatus>),
    /// What the agent calls itself; empty: it did not say.
    Agent(String),
    /// What the agent of a system knows, and where the output of its command ends.
    System { configured: bool, has_command: bool, output_end: u64 },
    /// Memory in its file.
    Saved(Box<SavedMemory>),
}

/// The first action of a job that failed. Those after it were not begun.
#[derive(Debug)]
pub struct Failure {
    /// Actions that were carried out.
    pub done: usize,
    pub error: HostError,
}

/// How a job ended.
pub type JobResult = Result<JobOutcome, Failure>;

/// One thing that happens to a VM.
#[derive(Debug)]
pub enum Input {
    /// The task begins: what a restart of the daemon calls for.
    Begin,
    /// A caller asks for something.
    Call(Ticket, Call),
    /// Jobs of a run report, with its number.
    Run(u64, RunEvent),
    /// A job has ended.
    Done(JobId, JobResult),
    /// [`super::State::kill_at`] has come.
    Timer,
}

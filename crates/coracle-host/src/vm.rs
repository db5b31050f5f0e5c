//! One task per VM. It alone changes the record; everybody else reads a copy.

mod actor;
mod boot;
mod container_table;
mod follow;
mod hooks;
mod launch;
mod session;
mod shared_dirs;
mod text;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::ProcessId;
use coracle_types::{InstanceId, Op, VmId};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

pub(crate) use actor::{Commit, spawn};
pub(crate) use container_table::{ContainerImage, ContainerRequest};

use crate::memory_images::MemoryImages;
use crate::node::Node;
use crate::templates::Templates;
use crate::volumes::{Claims, VolumeRequest, VolumeSource};
use crate::warm_pool::WarmPool;
use crate::{ConsoleHandle, Exit, Fence, GuestClient, HostError, HostEvent, Record, TemplateKey};
use container_table::{ContainerEnd, ContainerLogs, ContainerReply};
use coracle_guest_client::GuestError;
use coracle_proto::guest as pb;
use coracle_record::{ContainerId, ContainerRecord, SavedMemory};

/// What all VMs of a host share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) node: Arc<Node>,
    pub(crate) events: broadcast::Sender<HostEvent>,
    pub(crate) templates: Arc<Templates>,
    pub(crate) warm_pool: Arc<WarmPool>,
    /// Memory that copies of one snapshot share.
    pub(crate) memory_images: Arc<MemoryImages>,
    /// Files that are in use as volumes.
    pub(crate) claims: Claims,
}

/// A VM as readers see it.
#[derive(Clone, Debug)]
pub struct View {
    /// Its record.
    pub record: Record,
    /// The session with its guest, while there is one.
    pub guest: Option<GuestClient>,
    /// Its containers, by id.
    pub containers: Arc<BTreeMap<ContainerId, ContainerRecord>>,
}

/// How the rest of the host reaches a VM's task.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(crate) id: VmId,
    pub(crate) requests: mpsc::Sender<Request>,
    pub(crate) view: watch::Receiver<Arc<View>>,
    pub(crate) console: ConsoleHandle,
    /// Changes when the workload printed something.
    pub(crate) printed: watch::Receiver<u64>,
    /// Logs of its containers.
    pub(crate) container_logs: ContainerLogs,
    /// The latest statistics of its containers.
    pub(crate) statistics: watch::Receiver<Option<Arc<pb::Statistics>>>,
}

pub(crate) type Reply = oneshot::Sender<Result<Record, HostError>>;

/// What was copied of a VM.
#[derive(Debug)]
pub(crate) struct VmCopy {
    pub(crate) record: Record,
    pub(crate) containers: Arc<BTreeMap<ContainerId, ContainerRecord>>,
    pub(crate) saved: SavedMemory,
}

pub(crate) type Copied = oneshot::Sender<Result<VmCopy, HostError>>;

/// What can be asked of a VM's task.
#[derive(Debug)]
pub(crate) enum Request {
    /// Answers when the guest runs.
    Start { fence: Option<Fence>, reply: Reply },
    /// Answers when the guest is off.
    Stop { grace: Duration, fence: Option<Fence>, reply: Reply },
    /// [`Op::Pause`], [`Op::Resume`] or [`Op::Hibernate`]; answers when it is done.
    Suspend { op: Op, fence: Option<Fence>, reply: Reply },
    /// Answers when a copy of memory and disk is in the directory, which it makes.
    Snapshot { dir: PathBuf, reply: Copied },
    /// Answers when the volume is the VM's.
    Attach { request: VolumeRequest, found: VolumeSource, fence: Option<Fence>, reply: Reply },
    /// Answers when the volume is not the VM's any more.
    Detach { volume: String, fence: Option<Fence>, reply: Reply },
    /// Answers as [`ContainerRequest`] says.
    Container { request: ContainerRequest, reply: ContainerReply },
    /// Answers when nothing is left.
    Delete { force: bool, fence: Option<Fence>, reply: Reply },
}

/// What a VM's jobs report to its task. Each carries the boot that it belongs to.
#[derive(Debug)]
pub(crate) struct JobEvent {
    boot: u32,
    kind: JobEventKind,
}

/// A guest that runs its workload.
#[derive(Debug)]
struct Up {
    guest: GuestClient,
    /// What it took to become who it is: entropy, clock, names, network, disks.
    identity: Duration,
    /// And then to start what it is for.
    workload: Duration,
}

/// What a run began with.
#[derive(Clone, Debug, Default)]
struct StartedFrom {
    /// None: it booted.
    template: Option<TemplateKey>,
    /// The guest of the template had the VM's own disk mounted.
    premounted: bool,
    /// Its clone came from the warm pool.
    pooled: bool,
}

#[derive(Debug)]
enum JobEventKind {
    /// A VMM runs.
    Spawned { instance: InstanceId, vmm: ProcessId, from: StartedFrom },
    /// A VMM has loaded the saved memory and is paused. Once it is resumed, the saved memory is used up.
    Loaded { instance: InstanceId, vmm: ProcessId, go: oneshot::Sender<()> },
    /// The guest acknowledged its configuration and started the workload, or not.
    Booted(Result<Up, HostError>),
    /// This session ended before the guest acknowledged its post-snapshot hook.
    HookInterrupted(GuestClient),
    /// There is a session, or none any more.
    Session(Option<GuestClient>),
    /// The workload ended; some output may still be on its way.
    Exited(Exit),
    /// All of its output has been read.
    Drained,
    /// The process of a container runs.
    ContainerStarted(ContainerId),
    /// The process of a container ended, and its output is in the log.
    ContainerExited(ContainerEnd),
    /// The guest did not end a container.
    ContainerStopFailed(ContainerId, GuestError),
    /// Its image is made and pushed, or not.
    Committed(actor::Committed),
    /// The VMM is gone.
    VmmGone,
}

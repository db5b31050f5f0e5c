//! One task per VM. It alone changes the record; everybody else reads a copy.

mod boot;
mod container_table;
mod effects;
mod follow;
mod guest_configuration;
mod hooks;
mod kernel_panic;
mod launch;
mod reports;
mod session;
mod shared_dirs;
mod task;
mod text;

use std::sync::Arc;

use coracle_types::VmId;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

pub(crate) use container_table::ContainerReply;
pub(crate) use coracle_lifecycle::{Call, ContainerImage, ContainerRequest};
pub(crate) use task::{Commit, spawn};

use crate::memory_images::MemoryImages;
use crate::node::Node;
use crate::templates::Templates;
use crate::volumes::Claims;
use crate::warm_pool::WarmPool;
use crate::{ConsoleHandle, GuestClient, HostError, HostEvent, Record};
use container_table::ContainerLogs;
use coracle_proto::guest as pb;
use coracle_record::{ContainerRecords, SavedMemory};

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
    pub record: Arc<Record>,
    /// The session with its guest, while there is one.
    pub guest: Option<GuestClient>,
    /// Its containers, by id.
    pub containers: Arc<ContainerRecords>,
}

/// How the rest of the host reaches a VM's task.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(crate) id: VmId,
    pub(crate) requests: mpsc::Sender<Box<Request>>,
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
    pub(crate) containers: Arc<ContainerRecords>,
    pub(crate) saved: SavedMemory,
}

pub(crate) type Copied = oneshot::Sender<Result<VmCopy, HostError>>;

/// A call of a VM's task, and who waits for the answer.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) call: Call,
    pub(crate) reply: ReplyTo,
    /// Of the caller; what is done for it is a part of it.
    pub(crate) span: tracing::Span,
}

impl Request {
    /// In the caller's span.
    pub(crate) fn new(call: Call, reply: ReplyTo) -> Self {
        Self { call, reply, span: tracing::Span::current() }
    }
}

/// Where an answer goes, by what it has.
#[derive(Debug)]
pub(crate) enum ReplyTo {
    Record(Reply),
    Copy(Copied),
    Container(ContainerReply),
}

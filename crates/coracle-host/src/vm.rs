//! Tasks of VMs, one per VM. Only the task changes the record; all others read a copy.

mod boot;
mod container_table;
mod early;
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
mod workload;

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

/// State that all VMs of a host share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) node: Arc<Node>,
    pub(crate) events: broadcast::Sender<HostEvent>,
    pub(crate) templates: Arc<Templates>,
    pub(crate) warm_pool: Arc<WarmPool>,
    /// Memory shared by the VMs that were restored from one snapshot.
    pub(crate) memory_images: Arc<MemoryImages>,
    /// Files in use as volumes.
    pub(crate) claims: Claims,
}

/// View of a VM for readers.
#[derive(Clone, Debug)]
pub struct View {
    /// Record of the VM.
    pub record: Arc<Record>,
    /// Session with the guest, while there is one.
    pub guest: Option<GuestClient>,
    /// Containers of the VM, by id.
    pub containers: Arc<ContainerRecords>,
}

/// Handle by which the host core reaches a VM's task.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(crate) id: VmId,
    pub(crate) requests: mpsc::Sender<Box<Request>>,
    pub(crate) view: watch::Receiver<Arc<View>>,
    pub(crate) console: ConsoleHandle,
    /// Receiver that changes with new output of the workload.
    pub(crate) printed: watch::Receiver<u64>,
    /// Logs of the VM's containers.
    pub(crate) container_logs: ContainerLogs,
    /// Latest statistics of the VM's containers.
    pub(crate) statistics: watch::Receiver<Option<Arc<pb::Statistics>>>,
}

pub(crate) type Reply = oneshot::Sender<Result<Record, HostError>>;

/// Record and memory of a VM that was copied for a snapshot.
#[derive(Debug)]
pub(crate) struct VmCopy {
    pub(crate) record: Record,
    pub(crate) containers: Arc<ContainerRecords>,
    pub(crate) saved: SavedMemory,
}

pub(crate) type Copied = oneshot::Sender<Result<VmCopy, HostError>>;

/// Call of a VM's task, and where to send the answer.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) call: Call,
    pub(crate) reply: ReplyTo,
    /// Span of the caller, parent of the spans of the work.
    pub(crate) span: tracing::Span,
}

impl Request {
    /// Makes a request in the caller's span.
    pub(crate) fn new(call: Call, reply: ReplyTo) -> Self {
        Self { call, reply, span: tracing::Span::current() }
    }
}

/// Channel for the answer, by its type.
#[derive(Debug)]
pub(crate) enum ReplyTo {
    Record(Reply),
    Copy(Copied),
    Container(ContainerReply),
}

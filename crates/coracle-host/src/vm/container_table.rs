//! Requests to containers, their logs, and their ends.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_logs::{CriLog, LogStream};
use coracle_proto::guest as pb;
use coracle_record::{ContainerId, ContainerRecord, ContainerSpec, Resources};
use tokio::sync::oneshot;

use crate::{Exit, HostError};

/// The record of the container that was asked about.
pub(crate) type ContainerReply = oneshot::Sender<Result<ContainerRecord, HostError>>;

/// An image of this node that a container needs.
#[derive(Clone, Debug)]
pub(crate) struct ContainerImage {
    /// Digest of its manifest.
    pub(crate) digest: String,
    /// Its root file system.
    pub(crate) rootfs: PathBuf,
}

/// What can be asked of a container.
#[derive(Debug)]
pub(crate) enum ContainerRequest {
    /// Answers when it is made.
    Create { id: ContainerId, spec: Box<ContainerSpec>, image: ContainerImage, mounted: Vec<ContainerImage> },
    /// Answers when its process runs, or could not.
    Start { id: ContainerId },
    /// Answers when it has ended and its output is in the log.
    Stop { id: ContainerId, grace: Duration },
    /// Answers when the signal is sent.
    Kill { id: ContainerId, signal: i32 },
    /// Answers when the limits are set.
    Update { id: ContainerId, resources: Resources, metadata: BTreeMap<String, String> },
    /// Answers with its last record when nothing is left of it.
    Remove { id: ContainerId },
}

/// Logs of the containers that exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct ContainerLogs(Arc<Mutex<BTreeMap<ContainerId, CriLog>>>);

impl ContainerLogs {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<ContainerId, CriLog>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the output of each continues.
    pub(super) fn next_offsets(&self) -> BTreeMap<String, u64> {
        self.lock().iter().map(|(id, log)| (id.to_string(), log.next_offset())).collect()
    }

    pub(super) fn append(&self, output: &pb::ContainerOutput) {
        let Ok(id) = output.container.parse::<ContainerId>() else { return };
        let stream = match output.stream() {
            pb::Stream::Stderr => LogStream::Stderr,
            pb::Stream::Stdout | pb::Stream::Unspecified => LogStream::Stdout,
        };
        let mut logs = self.lock();
        let Some(log) = logs.get_mut(&id) else { return };
        if let Err(error) = log.append(stream, output.offset, output.time_unix_ns, &output.data) {
            tracing::warn!(container = %id, dropped = log.dropped_bytes(), %error, "write container log failed");
        }
    }

    pub(super) fn finish(&self, id: &ContainerId, time_ns: i64) {
        if let Some(Err(error)) = self.lock().get_mut(id).map(|log| log.finish(time_ns)) {
            tracing::warn!(container = %id, %error, "write container log failed");
        }
    }
}

/// The end of a container, cleaned of what a hostile guest could put into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerEnd {
    pub(crate) id: ContainerId,
    pub(crate) exit: Exit,
    pub(crate) oom_killed: bool,
}

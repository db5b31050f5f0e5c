//! Logs of containers, and replies to container requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_logs::{CriLog, LogStream};
use coracle_proto::guest as pb;
use coracle_record::{ContainerId, ContainerRecord};
use tokio::sync::oneshot;

use crate::HostError;

/// Reply with the record of a container.
pub(crate) type ContainerReply = oneshot::Sender<Result<ContainerRecord, HostError>>;

/// Logs of existing containers. Boxed, because a map allocates space for eleven entries at once.
#[derive(Clone, Debug, Default)]
pub(crate) struct ContainerLogs(Arc<Mutex<BTreeMap<ContainerId, Box<CriLog>>>>);

impl ContainerLogs {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<ContainerId, Box<CriLog>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offset at which the output of each container continues.
    pub(super) fn next_offsets(&self) -> BTreeMap<String, u64> {
        self.lock().iter().map(|(id, log)| (id.to_string(), log.next_offset())).collect()
    }

    /// Writes output to the log of an existing container. Returns the offset before which all output is stored.
    pub(super) fn append(&self, output: &pb::ContainerOutput) -> Option<u64> {
        let id = output.container.parse::<ContainerId>().ok()?;
        let stream = match output.stream() {
            pb::Stream::Stderr => LogStream::Stderr,
            pb::Stream::Stdout | pb::Stream::Unspecified => LogStream::Stdout,
        };
        let mut logs = self.lock();
        let log = logs.get_mut(&id)?;
        if let Err(error) = log.append(stream, output.offset, output.time_unix_ns, &output.data) {
            tracing::warn!(container = %id, dropped = log.dropped_bytes(), %error, "write container log failed");
        }
        Some(log.next_offset())
    }

    pub(super) fn finish(&self, id: &ContainerId, time_ns: i64) {
        if let Some(Err(error)) = self.lock().get_mut(id).map(|log| log.finish(time_ns)) {
            tracing::warn!(container = %id, %error, "write container log failed");
        }
    }
}

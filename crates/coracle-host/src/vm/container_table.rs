//! Logs of containers, and who waits for them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_logs::{CriLog, LogStream};
use coracle_proto::guest as pb;
use coracle_record::{ContainerId, ContainerRecord};
use tokio::sync::oneshot;

use crate::HostError;

/// The record of the container that was asked about.
pub(crate) type ContainerReply = oneshot::Sender<Result<ContainerRecord, HostError>>;

/// Logs of the containers that exist. Boxed: a map has room for eleven from the first on.
#[derive(Clone, Debug, Default)]
pub(crate) struct ContainerLogs(Arc<Mutex<BTreeMap<ContainerId, Box<CriLog>>>>);

impl ContainerLogs {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<ContainerId, Box<CriLog>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the output of each continues.
    pub(super) fn next_offsets(&self) -> BTreeMap<String, u64> {
        self.lock().iter().map(|(id, log)| (id.to_string(), log.next_offset())).collect()
    }

    /// Writes output of a container that exists; gives the offset before which all of it is kept.
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

//! Output and end of a workload, as its guest reports them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle_lifecycle::WorkloadEnd;
use coracle_logs::LogWriter;
use coracle_proto::guest as pb;

use super::effects::lock;
use super::text::sanitise_text;
use crate::{Exit, LogEntry, LogStream};

/// Interval of heartbeats. The session is lost after two that were not answered.
pub(super) const PULSE: Duration = Duration::from_secs(15);

/// Log of the workload's output in one boot.
pub(super) struct WorkloadLog {
    pub(super) writer: Arc<Mutex<LogWriter>>,
    pub(super) boot: u32,
    /// Length of the output before the guest restarted by itself.
    pub(super) before: u64,
}

impl WorkloadLog {
    /// Appends output of the guest, unless the log has it already. Blocking, short.
    pub(super) fn append(&self, chunk: pb::LogChunk) {
        let stream = match chunk.stream() {
            pb::Stream::Stderr => LogStream::Stderr,
            pb::Stream::Stdout | pb::Stream::Unspecified => LogStream::Stdout,
        };
        let entry = LogEntry {
            boot: self.boot,
            // An offset that overflows is refused by the log.
            offset: chunk.offset.saturating_add(self.before),
            time_ns: chunk.time_unix_ns,
            stream,
            data: chunk.data,
        };
        if let Err(error) = lock(&self.writer).append(&entry) {
            tracing::warn!(%error, "workload output not kept");
        }
    }
}

/// End of the workload in a report of the guest; `None` if the report has no exit status.
pub(super) fn workload_end(end: pb::WaitWorkloadResponse) -> Option<WorkloadEnd> {
    let exit = end.exit?;
    let exit = Exit { code: exit.code, signal: exit.signal, error: sanitise_text(exit.error) };
    Some(WorkloadEnd { exit, oom_killed: end.oom_killed })
}

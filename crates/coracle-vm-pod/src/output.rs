//! The output of a VM's workload as logs of a container: one file in CRI format for each start of the VM.

use std::io;
use std::path::{Path, PathBuf};

use coracle_host::{Host, LogEntry};
use coracle_logs::CriLog;
use coracle_types::{Clock, VmName};

/// The log of a start of a VM. The first start is 1.
#[must_use]
pub fn log_path(dir: &Path, boot: u32) -> PathBuf {
    dir.join(format!("{boot}.log"))
}

/// Copies what the VM prints into files below `dir`, in each of its lives. Never ends; cancel-safe: a later call continues
/// where the files end.
pub async fn keep(host: Host, vm: VmName, dir: PathBuf) {
    let mut events = host.events();
    loop {
        if let Ok(mut follower) = host.follow_logs(vm.as_str()) {
            let mut log = Log { dir: dir.clone(), clock: host.clock().clone(), open: None };
            while let Some(entries) = follower.next().await {
                log = log.append(entries).await;
            }
            log.finish().await;
        }
        // Off, or not there; an event of any VM may be the one that changes it.
        let is_off = || host.get(vm.as_str()).map_or(true, |view| !view.record.state.has_vmm());
        while is_off() {
            if let Err(tokio::sync::broadcast::error::RecvError::Closed) = events.recv().await {
                return std::future::pending().await;
            }
        }
    }
}

struct Log {
    dir: PathBuf,
    clock: Clock,
    open: Option<(u32, CriLog)>,
}

impl Log {
    /// Appends entries. Those that cannot be written are dropped: a VM does not wait for the disk of its node.
    async fn append(mut self, entries: Vec<LogEntry>) -> Self {
        let (dir, clock) = (self.dir.clone(), self.clock.clone());
        let written = tokio::task::spawn_blocking(move || {
            for entry in &entries {
                if let Err(error) = self.write(entry) {
                    tracing::warn!(dir = %self.dir.display(), %error, "output not kept");
                }
            }
            self
        });
        written.await.unwrap_or(Self { dir, clock, open: None })
    }

    fn write(&mut self, entry: &LogEntry) -> io::Result<()> {
        if self.open.as_ref().is_none_or(|(boot, _)| *boot != entry.boot) {
            self.end_line()?;
            std::fs::create_dir_all(&self.dir)?;
            let path = log_path(&self.dir, entry.boot);
            let log = CriLog::open(&path, &path.with_extension("position"), None)?;
            self.open = Some((entry.boot, log));
        }
        match &mut self.open {
            Some((_, log)) => log.append(entry.stream, entry.offset, entry.time_ns, &entry.data),
            None => Ok(()),
        }
    }

    fn end_line(&mut self) -> io::Result<()> {
        let now = self.clock.now().0.saturating_mul(1_000_000);
        self.open.take().map_or(Ok(()), |(_, mut log)| log.finish(now))
    }

    async fn finish(mut self) {
        let ended = tokio::task::spawn_blocking(move || self.end_line());
        if let Ok(Err(error)) = ended.await {
            tracing::warn!(%error, "log not finished");
        }
    }
}

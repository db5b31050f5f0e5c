//! The output of a VM's workload as logs of a container: one file in CRI format for each start of the VM.

use std::io;
use std::path::{Path, PathBuf};

use coracle_host::{Host, LogEntry};
use coracle_logs::CriLog;
use coracle_types::{Clock, VmId};
use tokio::sync::watch;

/// Returns the path of the log of a VM's start. The first start is 1.
#[must_use]
pub fn log_path(dir: &Path, boot: u32) -> PathBuf {
    dir.join(format!("{boot}.log"))
}

/// Copies the output of the VM whose id `vm` contains to files in `dir`, across its restarts. Nothing is read without an id,
/// because a VM of the same name may belong to another pod. Ends when the sender of `vm` is dropped. Cancel-safe: a later call
/// continues where the files end.
pub async fn keep(host: Host, mut vm: watch::Receiver<Option<VmId>>, dir: PathBuf) {
    loop {
        let Ok(id) = vm.wait_for(Option::is_some).await.map(|id| id.clone()) else { return };
        let id = id.map(|id| id.to_string()).unwrap_or_default();
        if let Ok(mut follower) = host.follow_logs(&id) {
            let mut log = Log { dir: dir.clone(), clock: host.clock().clone(), open: None };
            while let Some(entries) = follower.next().await {
                log = log.append(entries).await;
            }
            log.finish().await;
        }
        // The VM is off or gone: wait for its next start or another id.
        let starts = async {
            match host.observe(&id) {
                Ok(mut view) => drop(view.wait_for(|view| view.record.state.has_vmm()).await),
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            () = starts => {}
            changed = vm.changed() => if changed.is_err() { return },
        }
    }
}

struct Log {
    dir: PathBuf,
    clock: Clock,
    open: Option<(u32, CriLog)>,
}

impl Log {
    /// Appends entries. Entries that cannot be written are dropped: a VM does not wait for the disk of its node.
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

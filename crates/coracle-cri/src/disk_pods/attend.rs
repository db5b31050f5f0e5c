//! Task that attends the VM of a disk container: its command, its log, its statistics.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_host::{COMMIT_ANNOTATION, Record};
use coracle_logs::CriLog;
use coracle_pod::events::PodEvent;
use coracle_pod::host::PodId;
use coracle_proto::guest::{ContainerStatistics, MetricsRequest, MetricsResponse, Statistics};
use coracle_types::VmState;

use crate::facts::{self, ContainerFacts, SandboxFacts};
use crate::server::CriServer;
use crate::status::nanoseconds;
use crate::table::{Attended, ContainerEntry};

/// Interval between samples of the guest's resource usage.
const CADENCE: Duration = Duration::from_secs(10);
/// Reasons of events.
const AGENT_READY: &str = "AgentReady";
const VM_FAILED: &str = "VMFailed";
const IMAGE_PUSHED: &str = "ImagePushed";
const IMAGE_NOT_PUSHED: &str = "ImageNotPushed";
/// Time limit of a sample.
const METRICS_LIMIT: Duration = Duration::from_secs(5);

impl CriServer {
    /// Attends all VMs of disk containers that were started. Called when the server starts, to continue the work of the
    /// previous daemon.
    pub(crate) fn attend_all(&self) {
        for pod in self.0.table.pods(&self.0.host).iter().filter(|pod| pod.facts.disk) {
            for (container, vm) in pod.containers.iter().zip(&pod.vms) {
                if vm.view.record.state != VmState::Created {
                    self.attend(container, false);
                }
            }
        }
    }

    /// Starts a task that attends the VM of a container; with `start`, the task starts the VM. The container is reported as
    /// running until the task is done. Idempotent.
    pub(crate) fn attend(&self, container: &ContainerEntry, start: bool) {
        let (id, spec) = (container.entry.id.clone(), &container.record.spec);
        let log = spec.log_path.as_ref().and_then(|path| match self.open_log(&id, path) {
            Ok(log) => Some(Arc::new(Mutex::new(log))),
            Err(error) => {
                tracing::warn!(container = id, %error, "open log failed");
                None
            }
        });
        let new = self.0.table.attend(&id, Attended { log: log.clone(), statistics: None });
        if !new {
            return;
        }
        let (server, stopping) = (self.clone(), self.0.stopping.clone());
        self.0.tasks.spawn(async move {
            let attended = tokio::select! {
                () = server.follow(&id, log, start) => true,
                () = stopping.cancelled() => false,
            };
            // When the server stops, the next one continues to attend the VM.
            if attended {
                server.0.table.detach_task(&id);
            }
        });
    }

    fn open_log(&self, id: &str, path: &std::path::Path) -> std::io::Result<CriLog> {
        let view = self.0.host.get(id).map_err(std::io::Error::other)?;
        let dir = self.0.host.config().state_dir.join("vms").join(view.record.id.as_str());
        CriLog::open(path, &dir.join("cri.position"), None)
    }

    /// Runs until the VM is off and its output is in the log.
    async fn follow(&self, id: &str, log: Option<Arc<Mutex<CriLog>>>, start: bool) {
        tokio::select! {
            () = self.copy_output(id, log) => {}
            () = self.run_command(id, start) => {}
            () = self.sample(id) => {}
        }
    }

    /// Starts the VM, or waits until it has booted, and starts its command. Returns only if the VM was never started.
    async fn run_command(&self, id: &str, start: bool) {
        let host = &self.0.host;
        let begun = async {
            if start {
                let began = tokio::time::Instant::now();
                host.start(id, None).await?;
                self.record_event(id, |_| PodEvent::normal(AGENT_READY, None, agent_ready(began.elapsed())));
                return Ok(());
            }
            let mut view = host.observe(id)?;
            let booted = view.wait_for(|view| view.record.state != VmState::Starting).await;
            let runs = booted.is_ok_and(|view| view.record.state == VmState::Running);
            if runs { host.start_command(id).await } else { Ok(()) }
        };
        if let Err(error) = begun.await {
            tracing::warn!(container = id, error = error.chain(), "start VM of a container failed");
            self.record_event(id, |_| PodEvent::warning(VM_FAILED, None, error.chain()));
            if host.get(id).is_ok_and(|view| view.record.state == VmState::Created) {
                return;
            }
        }
        std::future::pending::<()>().await;
    }

    async fn copy_output(&self, id: &str, log: Option<Arc<Mutex<CriLog>>>) {
        let Ok(mut view) = self.0.host.observe(id) else { return };
        if view.wait_for(|view| view.record.state != VmState::Created).await.is_err() {
            return;
        }
        let Ok(mut follower) = self.0.host.follow_logs(id) else { return };
        while let Some(entries) = follower.next().await {
            let Some(log) = log.clone() else { continue };
            let written = tokio::task::spawn_blocking(move || {
                let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                let append = |e: &coracle_host::LogEntry| log.append(e.stream, e.offset, e.time_ns, &e.data);
                entries.iter().map(append).fold(Ok(()), Result::and)
            });
            if let Ok(Err(error)) = written.await {
                tracing::warn!(container = id, %error, "output not kept");
            }
        }
        self.record_image_event(id);
        let now = nanoseconds(self.0.host.clock().now());
        let finish =
            move |log: Arc<Mutex<CriLog>>| log.lock().unwrap_or_else(PoisonError::into_inner).finish(now);
        if let Some(log) = log
            && let Ok(Err(error)) = tokio::task::spawn_blocking(move || finish(log)).await
        {
            tracing::warn!(container = id, %error, "log not finished");
        }
    }

    /// Reports whether the image was pushed that an annotation asks for.
    fn record_image_event(&self, id: &str) {
        let Ok(view) = self.0.host.get(id) else { return };
        let Some(reference) = view.record.metadata.get(COMMIT_ANNOTATION) else { return };
        self.record_event(id, |record| match &record.committed {
            Some(digest) => {
                PodEvent::normal(IMAGE_PUSHED, None, format!("Pushed the disk as {reference}@{digest}"))
            }
            None => PodEvent::warning(IMAGE_NOT_PUSHED, None, record.message.clone()),
        });
    }

    /// Reports an event of a container's VM as an event of its pod.
    pub(super) fn record_event(&self, id: &str, event: impl FnOnce(&Record) -> PodEvent) {
        let Ok(view) = self.0.host.get(id) else { return };
        let of = |record: &Record| {
            let sandbox = self.0.host.get(facts::pod_of(record)?).ok()?;
            let metadata = SandboxFacts::of(&sandbox.record)?.config.metadata?;
            Some(PodId { namespace: metadata.namespace, name: metadata.name, uid: metadata.uid })
        };
        let Some(pod) = of(&view.record) else { return };
        let name = ContainerFacts::of_metadata(&view.record.metadata)
            .and_then(|facts| facts.config.metadata)
            .map(|metadata| metadata.name);
        self.0.options.events.take(&pod, PodEvent { container: name, ..event(&view.record) });
    }

    /// Samples the resource usage of the guest. Never returns.
    async fn sample(&self, id: &str) {
        loop {
            if let Ok(view) = self.0.host.get(id)
                && let Some(guest) = view.guest.clone()
                && let Ok(Ok(metrics)) =
                    tokio::time::timeout(METRICS_LIMIT, guest.rpc().metrics(MetricsRequest {})).await
            {
                let now = nanoseconds(self.0.host.clock().now());
                let disk = self.disk_bytes(view.record.clone()).await;
                self.0.table.report(id, Arc::new(statistics(id, metrics.into_inner(), disk, now)));
            }
            tokio::time::sleep(CADENCE).await;
        }
    }

    async fn disk_bytes(&self, record: Arc<Record>) -> u64 {
        let host = self.0.host.clone();
        tokio::task::spawn_blocking(move || host.disk_bytes(&record)).await.unwrap_or(0)
    }
}

fn agent_ready(took: Duration) -> String {
    format!("The system has booted, and its guest agent answers, after {:.1} s", took.as_secs_f64())
}

/// Returns the resource usage of a VM as that of a container. The whole guest counts, and the disk usage is the difference to
/// the image.
fn statistics(id: &str, metrics: MetricsResponse, disk_bytes: u64, time_unix_ns: i64) -> Statistics {
    let used = metrics.memory_total_bytes.saturating_sub(metrics.memory_available_bytes);
    let container = ContainerStatistics {
        container: id.to_owned(),
        cpu_usage_ns: metrics.cpu_user_ns.saturating_add(metrics.cpu_system_ns),
        cpu_user_ns: metrics.cpu_user_ns,
        cpu_system_ns: metrics.cpu_system_ns,
        memory_usage_bytes: used,
        memory_working_set_bytes: used,
        memory_rss_bytes: used,
        processes: metrics.processes.into(),
        filesystem_used_bytes: disk_bytes,
        filesystem_inodes: metrics.overlay_inodes.saturating_sub(metrics.overlay_inodes_free),
        ..ContainerStatistics::default()
    };
    Statistics { time_unix_ns, containers: vec![container], sandbox: Some(metrics) }
}

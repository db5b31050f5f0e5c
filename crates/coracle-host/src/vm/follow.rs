//! Staying in touch with a guest that runs: its output, its end, its pulse.
//! A lost session is opened again for as long as the VMM lives.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle_guest_client::{Backoff, Budget, GuestClient, GuestErrorKind};
use coracle_hypervisor::VmmConfig;
use coracle_proto::guest as pb;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::container_table::ContainerLogs;
use super::effects::lock;
use super::reports::Reports;
use super::text::bounded;
use super::{Shared, session};
use crate::{Exit, LogEntry, LogStream};
use coracle_lifecycle::{RunEvent, WorkloadEnd};
use coracle_logs::LogWriter;

/// Between two pulses. A guest that answers none of two is without a session.
const PULSE: Duration = Duration::from_secs(15);

/// How long one try for a session may take before the next.
const OPEN_LIMIT: Duration = Duration::from_secs(20);

/// A session that lasted so long was a good one.
const STEADY: Duration = Duration::from_secs(30);

/// How long output may trickle in after the workload has ended.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Output of the workload in one boot.
pub(super) struct WorkloadLog {
    pub(super) writer: Arc<Mutex<LogWriter>>,
    pub(super) boot: u32,
    /// What it printed before its guest started anew by itself.
    pub(super) before: u64,
}

/// Where the guest's output goes.
pub(super) struct Outputs {
    /// That of the workload.
    pub(super) log: WorkloadLog,
    /// Logs and statistics of containers, for a guest that has them instead of a workload.
    pub(super) containers: Option<(ContainerLogs, watch::Sender<Option<Arc<pb::Statistics>>>)>,
}

/// Follows one boot until its workload has ended.
pub(super) async fn run(
    shared: Arc<Shared>,
    vmm_config: Box<VmmConfig>,
    outputs: Outputs,
    first: Option<GuestClient>,
    mut paused: watch::Receiver<bool>,
    reports: Reports,
) {
    let log = outputs.log;
    let (mut session, mut backoff) = (first, Backoff::new());
    let mut budget = Budget::new();
    loop {
        // A paused guest sends no hello.
        if paused.wait_for(|paused| !paused).await.is_err() {
            return;
        }
        let client = match session.take() {
            Some(client) => client,
            // Boxed: the follower of a guest that answers has no room for it.
            None => match Box::pin(open(&shared, &vmm_config)).await {
                Ok(client) => client,
                Err(error) => {
                    tracing::debug!(vm = %vmm_config.id, %error, "guest does not answer");
                    sleep(backoff.pause()).await;
                    continue;
                }
            },
        };
        let began = Instant::now();
        reports.send(RunEvent::Session(Some(reports.session(&client)))).await;
        let end = match &outputs.containers {
            Some((logs, statistics)) => {
                tokio::select! {
                    () = session::follow(&client, logs, statistics, &shared.node.clock, &reports, &mut budget) => {}
                    () = pulse(&client, &paused) => {}
                }
                None
            }
            None => Box::pin(follow_session(&client, &log, &paused, &mut budget)).await,
        };
        if let Some(end) = end {
            reports.send(RunEvent::Exited(end)).await;
            let _late = timeout(DRAIN_LIMIT, Box::pin(pump_logs(&client, &log, &mut budget))).await;
            reports.send(RunEvent::Drained).await;
            return;
        }
        reports.send(RunEvent::Session(None)).await;
        drop(client);
        // Each session costs the host events and the VM's task work: a guest that breaks one after the other waits.
        if began.elapsed() >= STEADY {
            backoff = Backoff::new();
        }
        sleep(backoff.pause()).await;
    }
}

async fn open(shared: &Shared, vmm_config: &VmmConfig) -> std::io::Result<GuestClient> {
    GuestClient::open(&shared.node.driver, vmm_config, OPEN_LIMIT, None).await
}

/// Returns how the workload ended, or `None` when the session is lost.
async fn follow_session(
    client: &GuestClient,
    log: &WorkloadLog,
    paused: &watch::Receiver<bool>,
    budget: &mut Budget,
) -> Option<WorkloadEnd> {
    let wait = async {
        let end = client.wait_workload().await.ok()?;
        let exit = end.exit?;
        let exit = Exit { code: exit.code, signal: exit.signal, error: bounded(exit.error) };
        Some(WorkloadEnd { exit, oom_killed: end.oom_killed })
    };
    let output = async {
        if pump_logs(client, log, budget).await {
            std::future::pending::<()>().await; // all read; the exit follows
        }
    };
    tokio::select! {
        end = wait => end,
        () = output => None,
        () = pulse(client, paused) => None,
    }
}

/// Resolves when the guest stopped answering, though its CPUs run.
async fn pulse(client: &GuestClient, paused: &watch::Receiver<bool>) {
    let mut missed = 0;
    while missed < 2 {
        sleep(PULSE).await;
        if *paused.borrow() {
            missed = 0;
            continue;
        }
        missed = if Box::pin(client.status()).await.is_ok() { 0 } else { missed + 1 };
    }
}

/// Copies output into the log from where it ends. True when the guest said that
/// this was all, false when the session broke.
async fn pump_logs(client: &GuestClient, log: &WorkloadLog, budget: &mut Budget) -> bool {
    let WorkloadLog { writer, boot, before } = log;
    let from = lock(writer).resume_offset(*boot).saturating_sub(*before);
    // Boxed: while output is waited for, the call that opened its stream has no room.
    let mut chunks = match Box::pin(client.logs(from)).await {
        Ok(chunks) => chunks,
        // The guest started anew by itself: the VM's task sees it, too, and ends this.
        Err(error) if error.kind() == GuestErrorKind::OutOfRange => std::future::pending().await,
        Err(_) => return false,
    };
    loop {
        match chunks.message().await {
            Ok(Some(chunk)) => {
                budget.output(chunk.data.len()).await;
                let stream = match chunk.stream() {
                    pb::Stream::Stderr => LogStream::Stderr,
                    pb::Stream::Stdout | pb::Stream::Unspecified => LogStream::Stdout,
                };
                let entry = LogEntry {
                    boot: *boot,
                    // Too large an offset has no end, and is refused.
                    offset: chunk.offset.saturating_add(*before),
                    time_ns: chunk.time_unix_ns,
                    stream,
                    data: chunk.data,
                };
                let written = lock(writer).append(&entry);
                if let Err(error) = written {
                    tracing::warn!(%error, "workload output not kept");
                }
            }
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

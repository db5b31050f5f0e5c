//! Follows a running guest: its output, its exit, its heartbeat. A lost session is opened again for as long as the VMM runs.

use std::sync::Arc;
use std::time::Duration;

use coracle_guest_client::{Backoff, Budget, GuestClient, GuestErrorKind, NewSession};
use coracle_hypervisor::VmmConfig;
use coracle_proto::guest as pb;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::container_table::ContainerLogs;
use super::early::{self, EarlyEnd};
use super::effects::lock;
use super::reports::Reports;
use super::workload::{PULSE, WorkloadLog, workload_end};
use super::{Shared, session};
use coracle_lifecycle::{RunEvent, WorkloadEnd};

/// Time limit of one try to open a session.
const OPEN_LIMIT: Duration = Duration::from_secs(20);

/// Duration after which a session counts as stable, which resets the backoff.
const STEADY: Duration = Duration::from_secs(30);

/// Time limit to read the remaining output after the workload has ended.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Destinations of the guest's output.
pub(super) struct Outputs {
    /// Output of the workload.
    pub(super) log: WorkloadLog,
    /// Logs and statistics of containers, for a guest with containers instead of a workload.
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
            // Boxed, so that the follower of a connected guest needs no memory for the call.
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
                    () = wait_until_unresponsive(&client, &paused) => {}
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
        // Each session costs events of the host and work of the VM's task: a guest that keeps losing sessions must wait.
        if began.elapsed() >= STEADY {
            backoff = Backoff::new();
        }
        sleep(backoff.pause()).await;
    }
}

async fn open(shared: &Shared, vmm_config: &VmmConfig) -> std::io::Result<GuestClient> {
    NewSession::open(&shared.node.driver, vmm_config, OPEN_LIMIT, None).await?.http2().await
}

/// Returns how the workload ended, or `None` if the session is lost.
async fn follow_session(
    client: &GuestClient,
    log: &WorkloadLog,
    paused: &watch::Receiver<bool>,
    budget: &mut Budget,
) -> Option<WorkloadEnd> {
    match early::follow(client, log, paused, budget).await {
        EarlyEnd::Http2 => {}
        EarlyEnd::Exited(end) => return Some(end),
        EarlyEnd::Lost => return None,
    }
    let wait = async { workload_end(client.wait_workload().await.ok()?) };
    let output = async {
        if pump_logs(client, log, budget).await {
            std::future::pending::<()>().await; // all read; the exit follows
        }
    };
    tokio::select! {
        end = wait => end,
        () = output => None,
        () = wait_until_unresponsive(client, paused) => None,
    }
}

/// Returns when the guest has stopped answering although its vCPUs run.
async fn wait_until_unresponsive(client: &GuestClient, paused: &watch::Receiver<bool>) {
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

/// Copies output to the log, from the end of the log on. Returns true when the guest has sent everything, false when the
/// session is lost.
async fn pump_logs(client: &GuestClient, log: &WorkloadLog, budget: &mut Budget) -> bool {
    let from = lock(&log.writer).resume_offset(log.boot).saturating_sub(log.before);
    // Boxed, so that waiting for output needs no memory for the call that opened the stream.
    let mut chunks = match Box::pin(client.logs(from)).await {
        Ok(chunks) => chunks,
        // The guest has restarted by itself: the VM's task notices it as well and ends this job.
        Err(error) if error.kind() == GuestErrorKind::OutOfRange => std::future::pending().await,
        Err(_) => return false,
    };
    loop {
        match chunks.message().await {
            Ok(Some(chunk)) => {
                budget.output(chunk.data.len()).await;
                log.append(chunk);
            }
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

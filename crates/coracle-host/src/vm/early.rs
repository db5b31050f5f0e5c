//! Follows a guest whose agent has not begun HTTP/2: its output, its exit, its heartbeat.

use coracle_guest_client::{Budget, GuestClient};
use coracle_lifecycle::WorkloadEnd;
use coracle_proto::guest::early_report::Report;
use tokio::sync::watch;
use tokio::time::timeout;

use super::workload::{PULSE, WorkloadLog, workload_end};

/// End of the reports before HTTP/2.
pub(super) enum EarlyEnd {
    /// HTTP/2 has begun, or a call waits for it.
    Http2,
    /// The workload has ended.
    Exited(WorkloadEnd),
    /// The session is lost.
    Lost,
}

/// Follows the reports before HTTP/2. The session is lost after two questions that the agent did not answer.
pub(super) async fn follow(
    client: &GuestClient,
    log: &WorkloadLog,
    paused: &watch::Receiver<bool>,
    budget: &mut Budget,
) -> EarlyEnd {
    let mut unanswered = 0;
    loop {
        let report = match timeout(PULSE, client.early_report()).await {
            Ok(Ok(Some(report))) => report,
            Ok(Ok(None)) => return EarlyEnd::Http2,
            Ok(Err(_)) => return EarlyEnd::Lost,
            Err(_) => {
                // A paused guest cannot answer.
                unanswered = if *paused.borrow() { 0 } else { unanswered + 1 };
                if unanswered > 2 || client.ask_alive().await.is_err() {
                    return EarlyEnd::Lost;
                }
                continue;
            }
        };
        unanswered = 0;
        match report {
            Report::Output(chunk) => {
                budget.output(chunk.data.len()).await;
                log.append(chunk);
            }
            Report::Exited(end) => return workload_end(end).map_or(EarlyEnd::Lost, EarlyEnd::Exited),
            Report::Alive(_) | Report::Upgraded(_) | Report::Reset(_) => budget.event().await,
        }
    }
}

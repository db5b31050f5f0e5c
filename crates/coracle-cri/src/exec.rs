//! Commands in containers whose output is the reply.

use std::time::Duration;

use coracle_guest_client::GuestError;
use coracle_host::HostError;
use coracle_proto::cri::{ExecSyncRequest, ExecSyncResponse};
use coracle_proto::guest::{self, ExitStatus, exec_response::Message};
use tokio::time::Instant;
use tonic::{Status, Streaming};

use crate::refusal::{Refusal, of_host};
use crate::server::CriServer;

/// Most bytes that are kept of each stream.
const OUTPUT_MAX: usize = 16 << 20;
/// Additional time for the guest to report the end of a command after its timeout.
const REPORT_LIMIT: Duration = Duration::from_secs(10);
const KILLED: i32 = 9;

impl CriServer {
    /// Runs a command and returns its output and exit code. At the timeout, all processes that it started are killed.
    pub(crate) async fn exec_sync(&self, request: ExecSyncRequest) -> Result<ExecSyncResponse, Status> {
        let ExecSyncRequest { container_id, cmd, timeout } = request;
        if cmd.is_empty() {
            return Err(Refusal::invalid("command", "it is empty").into());
        }
        let (pod, container) = self.0.table.container(&self.0.host, &container_id)?;
        let limit = u64::try_from(timeout).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs);
        let vm = pod.vm(&container);
        if pod.facts.disk {
            self.await_boot(vm, limit).await;
        }
        let process = self.0.host.container_process(vm, &container.record.id, cmd);
        let mut process = process.map_err(|e| of_host(&e))?;
        process.timeout_ms = limit.map_or(0, |limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX));
        let guest = self.0.host.guest(vm).await.map_err(|e| of_host(&e))?;
        let began = Instant::now();
        let run = async {
            let replies = guest.exec(process).await?;
            collect(replies).await
        };
        let ended = match limit {
            None => run.await,
            Some(limit) => match tokio::time::timeout(limit + REPORT_LIMIT, run).await {
                Ok(ended) => ended,
                Err(_) => return Err(Refusal::ExecTimeout(timeout).into()),
            },
        };
        let failed =
            |source| of_host(&HostError::Guest { name: vm.to_owned(), operation: "run a command", source });
        let (response, exit) = ended.map_err(failed)?;
        if exit.signal == KILLED && limit.is_some_and(|limit| began.elapsed() >= limit) {
            return Err(Refusal::ExecTimeout(timeout).into());
        }
        Ok(response)
    }
}

/// Reads the output to its end, and the exit status. If the command could not run, its standard error contains the reason.
async fn collect(
    mut replies: Streaming<guest::ExecResponse>,
) -> Result<(ExecSyncResponse, ExitStatus), GuestError> {
    let mut response = ExecSyncResponse::default();
    while let Some(reply) = replies.message().await? {
        match reply.message {
            Some(Message::Stdout(data)) => append(&mut response.stdout, &data),
            Some(Message::Stderr(data)) => append(&mut response.stderr, &data),
            Some(Message::Exit(exit)) => {
                append(&mut response.stderr, exit.error.as_bytes());
                response.exit_code = exit.code;
                return Ok((response, exit));
            }
            Some(Message::Started(_)) | None => {}
        }
    }
    Err(GuestError::unavailable("the session ended before the command did"))
}

fn append(output: &mut Vec<u8>, data: &[u8]) {
    let room = OUTPUT_MAX.saturating_sub(output.len());
    output.extend_from_slice(data.get(..room.min(data.len())).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_cut_at_its_limit() {
        let mut output = vec![0; OUTPUT_MAX - 1];
        append(&mut output, b"abc");
        append(&mut output, b"d");
        assert_eq!((output.len(), output.last()), (OUTPUT_MAX, Some(&b'a')));
    }
}

//! `/run`: runs a command in a container and responds with its output.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll};
use std::time::Duration;

use axum::extract::{Path, RawQuery, State};
use coracle_streaming::{Session, SessionOutcome, Streams};
use parking_lot::Mutex;
use tokio::io::AsyncWrite;
use tokio::sync::mpsc;

use super::context::Context;
use super::guests;
use super::http_failure::HttpFailure;
use super::query::{first, pairs};
use super::target::ContainerTarget;

/// Most bytes of output that are kept; the rest is discarded.
const OUTPUT_MAX: usize = 16 << 20;
/// Time limit of a command.
const LIMIT: Duration = Duration::from_secs(4 * 60 * 60);

/// Handles a command. `cmd` is split at spaces. The command ends when the client disconnects.
pub(super) async fn run(
    State(context): State<Context>,
    Path(target): Path<ContainerTarget>,
    RawQuery(query): RawQuery,
) -> Result<Vec<u8>, HttpFailure> {
    let query = pairs(query.as_deref());
    let command = first(&query, "cmd").unwrap_or_default();
    let command: Vec<_> = command.split(' ').map(str::to_owned).collect();
    target.find_pod(&context.pods)?;
    if command.iter().all(String::is_empty) {
        return Err(HttpFailure::bad_request("invalid cmd: it is empty"));
    }
    let streams = Streams { stdout: true, stderr: true, ..Streams::default() };
    let session = guests::exec(&context, &target, command, streams)?;
    let output = Output::default();
    let (_none, resize) = mpsc::channel(1);
    let (stdout, stderr) = (output.clone(), output.clone());
    let streams =
        Session { stdin: None, stdout: Some(Box::new(stdout)), stderr: Some(Box::new(stderr)), resize };
    let outcome = tokio::time::timeout(LIMIT, session.run(streams)).await;
    let output = std::mem::take(&mut *output.0.lock());
    match outcome {
        Ok(SessionOutcome::Exited(0)) => Ok(output),
        Ok(SessionOutcome::Exited(code)) => {
            let output = String::from_utf8_lossy(&output);
            Err(HttpFailure::internal(format!("{output}command terminated with exit code {code}")))
        }
        Ok(SessionOutcome::Failed(why)) => Err(HttpFailure::internal(why)),
        Err(_) => Err(HttpFailure::internal("the command takes too long")),
    }
}

/// Buffer of output, up to a limit.
#[derive(Clone, Debug, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl AsyncWrite for Output {
    fn poll_write(self: Pin<&mut Self>, _: &mut Task<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let mut kept = self.0.lock();
        let room = OUTPUT_MAX.saturating_sub(kept.len());
        kept.extend_from_slice(data.get(..room).unwrap_or(data));
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Task<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Task<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

//! Attachments to running containers: their output from now on, and their input.

use std::sync::Arc;

use coracle_proto::guest::attach_request::Message as In;
use coracle_proto::guest::exec_response::Message as Out;
use coracle_proto::guest::{AttachRequest, AttachStart, ExecResponse, Stream};
use futures_util::StreamExt;
use tonic::Status;

use super::Containers;
use crate::error::Error;
use crate::exit::exit_status;
use crate::process;
use crate::task_stream::{Outbox, TaskStream};
use crate::workload::{Workload, WorkloadPhase};

impl Containers {
    /// Attaches to the streams of a running container. Dropping the attachment does not end the container.
    ///
    /// # Errors
    /// The container does not exist, does not run, or has no input.
    pub(crate) fn attach<S>(&self, start: &AttachStart, input: S) -> Result<TaskStream<ExecResponse>, Error>
    where
        S: futures_util::Stream<Item = Result<AttachRequest, Status>> + Send + Unpin + 'static,
    {
        let container = self.get(&start.container)?;
        if !matches!(container.workload.progress(), WorkloadPhase::Running(_)) {
            return Err(Error::State(format!("container {} is not running", start.container)));
        }
        if start.stdin && !container.plan.process.stdin {
            return Err(Error::State(format!("container {} has no input", start.container)));
        }
        let once = start.stdin && container.plan.stdin_once;
        Ok(streams(container.workload.clone(), input, Input { wanted: start.stdin, once }))
    }
}

/// Attaches to the output of the guest's own command, from now on.
///
/// # Errors
/// The command does not run.
pub(crate) fn attach_workload<S>(
    workload: &Arc<Workload>,
    input: S,
) -> Result<TaskStream<ExecResponse>, Error>
where
    S: futures_util::Stream<Item = Result<AttachRequest, Status>> + Send + Unpin + 'static,
{
    if !matches!(workload.progress(), WorkloadPhase::Running(_)) {
        return Err(Error::State("the command is not running".into()));
    }
    Ok(streams(workload.clone(), input, Input::default()))
}

/// Input of an attachment.
#[derive(Clone, Copy, Default)]
struct Input {
    wanted: bool,
    /// Whether the process has its input for one attachment only.
    once: bool,
}

fn streams<S>(workload: Arc<Workload>, input: S, wants: Input) -> TaskStream<ExecResponse>
where
    S: futures_util::Stream<Item = Result<AttachRequest, Status>> + Send + Unpin + 'static,
{
    TaskStream::new(|outbox, tasks| {
        tasks.spawn(async move {
            let typing = forward(&workload, input, wants);
            let printing = print(&workload, &outbox);
            tokio::pin!(typing, printing);
            tokio::select! {
                () = &mut printing => return,
                () = &mut typing => {}
            }
            printing.await;
        });
    })
}

/// Closes the input of a container that has it for one attachment only.
struct CloseInput(Option<Arc<Workload>>);

impl Drop for CloseInput {
    fn drop(&mut self) {
        if let Some(workload) = &self.0 {
            workload.close_stdin();
        }
    }
}

/// Processes all messages of the client.
async fn forward<S>(workload: &Arc<Workload>, mut input: S, Input { wanted, once }: Input)
where
    S: futures_util::Stream<Item = Result<AttachRequest, Status>> + Unpin,
{
    let _closed_with_this = CloseInput(once.then(|| workload.clone()));
    while let Some(Ok(request)) = input.next().await {
        let streams = workload.input();
        match request.message {
            Some(In::Stdin(bytes)) if wanted => {
                if let Some(stdin) = streams.stdin {
                    let _it_closed_its_input = stdin.write_all(&bytes).await;
                }
            }
            Some(In::CloseStdin(true)) if once => workload.close_stdin(),
            Some(In::Resize(to)) => {
                if let Some(terminal) = streams.terminal {
                    let (rows, columns) = process::dimensions(to.rows, to.cols);
                    let _it_has_ended = terminal.resize(rows, columns);
                }
            }
            Some(In::Stdin(_) | In::CloseStdin(_) | In::Start(_)) | None => {}
        }
    }
}

/// Sends the output of the process from now on, and then its exit status.
async fn print(workload: &Workload, outbox: &Outbox<ExecResponse>) {
    let logs = workload.logs();
    let Ok(output) = logs.follow(logs.end()) else { return };
    let mut output = Box::pin(output);
    while let Some(Ok(chunk)) = output.next().await {
        let message = match chunk.stream() {
            Stream::Stderr => Out::Stderr(chunk.data),
            Stream::Stdout | Stream::Unspecified => Out::Stdout(chunk.data),
        };
        if outbox.send(Ok(ExecResponse { message: Some(message) })).await.is_err() {
            return;
        }
    }
    let exit = workload.wait_exit().await;
    let message = Some(Out::Exit(exit_status(exit)));
    let _client_gone = outbox.send(Ok(ExecResponse { message })).await;
}

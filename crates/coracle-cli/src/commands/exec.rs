//! `coracle exec`.

use std::io::Write;

use coracle_api::subresources::Subresource;
use coracle_proto::host as pb;
use pb::exec_request::Message as To;
use pb::exec_response::Message as From;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::terminal::{self, RawMode};
use crate::cli::{ExecArgs, Global};
use crate::client::{NameMatch, reach};
use crate::error::{Failure, exit};
use crate::output::write_bytes;

/// Runs a command in a VM and returns the command's exit code.
pub async fn run(global: &Global, args: ExecArgs) -> miette::Result<u8> {
    let ours = |failure: Failure| failure.exit(exit::OURS);
    let reached = reach(global, &args.vm, NameMatch::Exact, Subresource::Exec).await.map_err(ours)?;
    let mut client = reached.node;
    let (rows, cols) = terminal::size().unwrap_or((24, 80));
    let start = pb::ExecStart {
        vm: reached.vm,
        argv: args.command,
        env: args.env,
        user: args.user,
        cwd: args.workdir,
        tty: args.tty,
        stdin: args.interactive,
        rows,
        cols,
    };
    let (requests, stream) = mpsc::channel(8);
    let send = async |message| requests.send(pb::ExecRequest { message: Some(message) }).await.is_ok();
    send(To::Start(start)).await;
    let replies = client.exec(ReceiverStream::new(stream)).await.map_err(|s| ours(s.into()))?;
    let mut replies = replies.into_inner();
    let raw = args.tty.then(RawMode::enter);
    let mut keys = args.interactive.then(terminal::stdin_chunks);
    let mut resized = signal(SignalKind::window_change()).ok().filter(|_| args.tty);
    loop {
        tokio::select! {
            reply = replies.message() => match reply.map_err(|s| ours(s.into()))?.and_then(|r| r.message) {
                Some(From::Stdout(data)) => write_bytes(&data)?,
                Some(From::Stderr(data)) => {
                    let _stderr_gone = std::io::stderr().write_all(&data);
                }
                Some(From::Exit(status)) => {
                    drop(raw);
                    if !status.error.is_empty() {
                        eprintln!("error: {}", crate::error::printable(&status.error));
                    }
                    return Ok(u8::try_from(status.code).unwrap_or(u8::MAX));
                }
                None => return Err(ours(Failure::new("COR-GST-004", "the session ended without an exit code")).into()),
            },
            typed = async { keys.as_mut()?.recv().await }, if keys.is_some() => match typed {
                Some(data) => { send(To::Stdin(data)).await; }
                None => { keys = None; send(To::CloseStdin(true)).await; }
            },
            Some(()) = async { resized.as_mut()?.recv().await }, if resized.is_some() => {
                if let Some((rows, cols)) = terminal::size() {
                    send(To::Resize(pb::Resize { rows, cols })).await;
                }
            }
        }
    }
}

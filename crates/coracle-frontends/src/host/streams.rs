//! Streaming calls: exec, logs, console, port-forward, display, copy.
//!
//! Flow control couples the guest's stream to the caller's; nothing is buffered here. A stream ends when either side ends.

use bytes::Bytes;
use coracle_host::{Host, LogEntry, LogStream};
use coracle_proto::{guest, host as pb};
use futures_util::stream;
use futures_util::{Stream, StreamExt};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

use super::{Replies, Reply};
use crate::status::OrStatus as _;

fn unexpected_message(first: &'static str) -> Status {
    Status::invalid_argument(format!("the first message must be {first}"))
}

/// Forwards a caller's messages; an error ends the stream.
fn forward<T, U>(first: U, rest: Streaming<T>, convert: fn(T) -> Option<U>) -> impl Stream<Item = U>
where
    T: 'static,
{
    let rest = rest
        .take_while(|m| std::future::ready(m.is_ok()))
        .filter_map(move |message| async move { message.ok().and_then(convert) });
    stream::once(std::future::ready(first)).chain(rest)
}

pub(super) async fn exec(host: &Host, mut input: Streaming<pb::ExecRequest>) -> Replies<pb::ExecResponse> {
    use guest::exec_request::Message as To;
    use pb::exec_request::Message as From;
    let Some(From::Start(start)) = input.message().await?.and_then(|m| m.message) else {
        return Err(unexpected_message("start"));
    };
    let client = host.guest(&start.vm).await.or_status()?;
    let first = guest::ExecRequest {
        message: Some(To::Start(guest::Process {
            argv: start.argv,
            env: start.env,
            user: start.user,
            cwd: start.cwd,
            tty: start.tty,
            rows: start.rows,
            cols: start.cols,
            stdin: start.stdin,
            ..Default::default()
        })),
    };
    let messages = forward(first, input, |m: pb::ExecRequest| {
        let message = match m.message? {
            From::Start(_) => return None,
            From::Stdin(data) => To::Stdin(data),
            From::CloseStdin(close) => To::CloseStdin(close),
            From::Resize(size) => To::Resize(guest::Resize { rows: size.rows, cols: size.cols }),
            From::Signal(signal) => To::Signal(signal),
        };
        Some(guest::ExecRequest { message: Some(message) })
    });
    let replies = client.rpc().exec(messages).await?.into_inner();
    let replies = replies.filter_map(|reply| async {
        use guest::exec_response::Message as From;
        use pb::exec_response::Message as To;
        let message = match reply {
            Err(status) => return Some(Err(status)),
            Ok(reply) => match reply.message? {
                From::Started(_) => return None,
                From::Stdout(data) => To::Stdout(data),
                From::Stderr(data) => To::Stderr(data),
                From::Exit(e) => To::Exit(pb::ExitStatus { code: e.code, signal: e.signal, error: e.error }),
            },
        };
        Some(Ok(pb::ExecResponse { message: Some(message) }))
    });
    let keep = client;
    Ok(Response::new(Box::pin(replies.inspect(move |_| {
        let _session_lives_as_long_as_the_stream = &keep;
    }))))
}

pub(super) async fn port_forward(
    host: &Host,
    mut input: Streaming<pb::PortForwardRequest>,
) -> Replies<pb::PortForwardResponse> {
    use guest::port_forward_request::Message as To;
    use pb::port_forward_request::Message as From;
    let Some(From::Start(start)) = input.message().await?.and_then(|m| m.message) else {
        return Err(unexpected_message("start"));
    };
    let client = host.guest(&start.vm).await.or_status()?;
    let header = guest::PortForwardHeader { port: start.port, host: String::new() };
    let first = guest::PortForwardRequest { message: Some(To::Header(header)) };
    let messages = forward(first, input, |m: pb::PortForwardRequest| {
        let message = match m.message? {
            From::Start(_) => return None,
            From::Data(data) => To::Data(data),
            From::CloseWrite(close) => To::CloseWrite(close),
        };
        Some(guest::PortForwardRequest { message: Some(message) })
    });
    let replies = client.rpc().port_forward(messages).await?.into_inner();
    let keep = client;
    Ok(Response::new(Box::pin(replies.map(move |reply| {
        let _session_lives_as_long_as_the_stream = &keep;
        reply.map(|chunk| pb::PortForwardResponse { data: chunk.data })
    }))))
}

pub(super) async fn copy_in(
    host: &Host,
    mut input: Streaming<pb::CopyInRequest>,
) -> Reply<pb::CopyInResponse> {
    use guest::copy_in_request::Message as To;
    use pb::copy_in_request::Message as From;
    let Some(From::Start(start)) = input.message().await?.and_then(|m| m.message) else {
        return Err(unexpected_message("start"));
    };
    let client = host.guest(&start.vm).await.or_status()?;
    let header = guest::CopyInHeader { path: start.path, ..Default::default() };
    let first = guest::CopyInRequest { message: Some(To::Header(header)) };
    let messages = forward(first, input, |m: pb::CopyInRequest| match m.message? {
        From::Start(_) => None,
        From::Data(data) => Some(guest::CopyInRequest { message: Some(To::Data(data)) }),
    });
    let reply = client.rpc().copy_in(messages).await?.into_inner();
    Ok(Response::new(pb::CopyInResponse { entries: reply.entries, bytes: reply.bytes }))
}

pub(super) async fn copy_out(host: &Host, request: pb::CopyOutRequest) -> Replies<pb::CopyOutResponse> {
    let client = host.guest(&request.vm).await.or_status()?;
    let chunks = client
        .rpc()
        .copy_out(guest::CopyOutRequest { path: request.path, ..Default::default() })
        .await?
        .into_inner();
    let keep = client;
    Ok(Response::new(Box::pin(chunks.map(move |chunk| {
        let _session_lives_as_long_as_the_stream = &keep;
        chunk.map(|c| pb::CopyOutResponse { data: c.data })
    }))))
}

pub(super) async fn logs(host: &Host, request: pb::LogsRequest) -> Replies<pb::LogsResponse> {
    let mut follower = host.follow_logs(&request.vm).or_status()?;
    let wanted = select(follower.read().await.or_status()?, request.since_unix_ms, request.tail);
    let history = stream::iter(wanted.into_iter().map(|e| Ok(response(e))));
    if !request.follow {
        return Ok(Response::new(Box::pin(history)));
    }
    let state = (follower, host.stopping());
    let more = stream::unfold(state, |(mut follower, stop)| async move {
        let batch = stop.run_until_cancelled(follower.next()).await??;
        Some((stream::iter(batch.into_iter().map(|e| Ok(response(e)))), (follower, stop)))
    });
    Ok(Response::new(Box::pin(history.chain(more.flatten()))))
}

/// Selects the entries after a time, and of these the last `tail` lines.
fn select(entries: Vec<LogEntry>, since_ms: i64, tail: Option<u32>) -> Vec<LogEntry> {
    let since_ns = since_ms.saturating_mul(1_000_000);
    let mut entries: Vec<_> = entries.into_iter().filter(|e| since_ms == 0 || e.time_ns > since_ns).collect();
    let Some(tail) = tail else { return entries };
    let mut left = u64::from(tail);
    let mut newest = true;
    for at in (0..entries.len()).rev() {
        let Some(entry) = entries.get_mut(at) else { break };
        for i in (0..entry.data.len()).rev() {
            let ends_line = entry.data.get(i) == Some(&b'\n');
            if ends_line && !newest {
                left = left.saturating_sub(1);
            }
            if left == 0 {
                entry.data.drain(..=i);
                return entries.split_off(at).into_iter().filter(|e| !e.data.is_empty()).collect();
            }
            newest = false;
        }
    }
    if tail == 0 { vec![] } else { entries }
}

fn response(entry: LogEntry) -> pb::LogsResponse {
    let stream = match entry.stream {
        LogStream::Stdout => pb::logs_response::Stream::Stdout,
        LogStream::Stderr => pb::logs_response::Stream::Stderr,
    };
    pb::LogsResponse { stream: stream.into(), data: entry.data, time_unix_ns: entry.time_ns }
}

pub(super) async fn console(
    host: &Host,
    mut input: Streaming<pb::ConsoleRequest>,
) -> Replies<pb::ConsoleResponse> {
    use pb::console_request::Message;
    let Some(Message::Start(start)) = input.message().await?.and_then(|m| m.message) else {
        return Err(unexpected_message("start"));
    };
    let console = host.console(&start.vm).or_status()?;
    let (history, mut live) = console
        .attach()
        .map_err(|e| Status::internal(format!("read the console history of {}: {e}", start.vm)))?;
    let (to_caller, replies) = mpsc::channel(16);
    let mut view = host.observe(&start.vm).or_status()?;
    // The VM may be off already.
    view.mark_changed();
    let stop = host.stopping();
    let serve = async move {
        let send =
            async |data: Bytes| to_caller.send(Ok(pb::ConsoleResponse { data: data.to_vec() })).await.is_ok();
        for chunk in history.chunks(32 * 1024) {
            if !send(Bytes::copy_from_slice(chunk)).await {
                return;
            }
        }
        if !start.follow {
            return;
        }
        loop {
            tokio::select! {
                said = live.recv() => match said {
                    Ok(data) => if !send(data).await { return },
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return,
                },
                typed = input.message() => match typed {
                    Ok(Some(pb::ConsoleRequest { message: Some(Message::Data(keys)) })) => {
                        console.type_in(keys.into()).await;
                    }
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => return,
                },
                changed = view.changed() => if changed.is_err() || !view.borrow().record.state.has_vmm() { return },
                () = stop.cancelled() => return,
            }
        }
    };
    Ok(Response::new(Box::pin(drive_stream(serve, replies))))
}

/// Copies bytes between the caller and the VMM's display until either ends.
pub(super) async fn display(
    host: &Host,
    mut input: Streaming<pb::DisplayRequest>,
) -> Replies<pb::DisplayResponse> {
    use pb::display_request::Message;
    let Some(Message::Start(start)) = input.message().await?.and_then(|m| m.message) else {
        return Err(unexpected_message("start"));
    };
    let (mut shown, mut typed) = host.display(&start.vm).await.or_status()?.into_split();
    let stop = host.stopping();
    let upload = async move {
        while let Ok(Some(pb::DisplayRequest { message: Some(Message::Data(data)) })) = input.message().await
        {
            if typed.write_all(&data).await.is_err() {
                return;
            }
        }
    };
    let (to_caller, replies) = mpsc::channel(16);
    let download = async move {
        let mut buffer = vec![0; 32 * 1024];
        while let Ok(read @ 1..) = shown.read(&mut buffer).await {
            let data = buffer.get(..read).unwrap_or_default().to_vec();
            if to_caller.send(Ok(pb::DisplayResponse { data })).await.is_err() {
                return;
            }
        }
    };
    let serve = async move {
        tokio::select! {
            () = upload => {}
            () = download => {}
            () = stop.cancelled() => {}
        }
    };
    Ok(Response::new(Box::pin(drive_stream(serve, replies))))
}

/// Stream of the replies that `work` sends. Polling the stream also polls `work`, so that it needs no task.
pub(super) fn drive_stream<T: Send + 'static>(
    work: impl Future<Output = ()> + Send + 'static,
    replies: mpsc::Receiver<T>,
) -> impl Stream<Item = T> + Send {
    let work = stream::once(work).filter_map(|()| async { None::<T> });
    stream::select(ReceiverStream::new(replies), work)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(offset: u64, time_ns: i64, text: &str) -> LogEntry {
        LogEntry { boot: 1, offset, time_ns, stream: LogStream::Stdout, data: text.into() }
    }

    #[test]
    fn tail_counts_lines_over_entries() {
        let all = || vec![entry(0, 1, "a\nb\n"), entry(4, 2, "c\nd"), entry(7, 3, "e\n")];
        let text = |entries: Vec<LogEntry>| {
            entries.into_iter().map(|e| String::from_utf8(e.data).unwrap()).collect::<String>()
        };
        for (tail, want) in [(0, ""), (1, "de\n"), (2, "c\nde\n"), (3, "b\nc\nde\n"), (9, "a\nb\nc\nde\n")] {
            assert_eq!(text(select(all(), 0, Some(tail))), want, "tail {tail}");
        }
        assert_eq!(text(select(all(), 0, None)), "a\nb\nc\nde\n");
    }
}

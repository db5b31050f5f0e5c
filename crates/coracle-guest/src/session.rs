//! Session: HTTP/2 on one open channel, from the hello to the end. Only the agent's own state outlives it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_proto::guest::guest_server::GuestServer;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::task::JoinSet;

use crate::agent::Agent;
use crate::channel::{self, Port};
use crate::console::say;
use crate::start;

/// Maximum size of a message in either direction, bytes.
pub const MESSAGE_MAX: usize = 1024 * 1024;
const STREAMS_MAX: u32 = 64;
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;
const FRAME_MAX: u32 = 32 * 1024;
const HEADERS_MAX: u32 = 16 * 1024;
/// Maximum of unsent bytes of one stream.
const SEND_BUFFER: usize = 64 * 1024;
/// Time for the host to receive the remaining data at power-off.
const CLOSING: Duration = Duration::from_millis(300);

/// Serves one open port, from the wait for a host until the host has gone.
///
/// # Errors
/// When the port cannot be watched.
pub async fn serve_port(fd: OwnedFd, number: u64, agent: &Arc<Agent>) -> io::Result<()> {
    let _kept = channel::wait_for_host(&fd).await?;
    let mut port = Port::new(fd)?;
    if port.write_all(&channel::hello(number)).await.is_ok() {
        let first = tokio::select! {
            first = start::serve(&mut port, agent) => first,
            () = agent.closed() => Err(io::ErrorKind::UnexpectedEof.into()),
        };
        match first {
            Ok(first) => {
                let from_first = io::Cursor::new(first).chain(port.clone());
                serve(tokio::io::join(from_first, port.clone()), agent).await;
            }
            // The host has gone, or the guest goes off.
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(e) => say!("session {number}: {e}"),
        }
    }
    if !agent.is_closing() {
        port.discard_until_hang_up().await;
    }
    Ok(())
}

/// Serves the agent's calls on `io` until the end of the stream, an error, or the shutdown. Ends all calls in flight.
pub async fn serve(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, agent: &Arc<Agent>) {
    let service = GuestServer::from_arc(Arc::clone(agent))
        .max_decoding_message_size(MESSAGE_MAX)
        .max_encoding_message_size(MESSAGE_MAX);
    let calls = Calls::default();
    let mut http2 = http2::Builder::new(calls.clone());
    http2
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(STREAMS_MAX)
        .max_frame_size(FRAME_MAX)
        .max_header_list_size(HEADERS_MAX)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(None);
    let connection = http2.serve_connection(TokioIo::new(io), TowerToHyperService::new(service));
    tokio::pin!(connection);
    tokio::select! {
        _ = &mut connection => {}
        () = agent.closed() => {
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(CLOSING, connection).await;
        }
    }
    calls.end().await;
}

/// Owner of the tasks that hyper spawns, one per call.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Calls {
    fn execute(&self, call: F) {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while calls.try_join_next().is_some() {}
        calls.spawn(call);
    }
}

impl Calls {
    async fn end(&self) {
        let mut calls = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        calls.shutdown().await;
    }
}

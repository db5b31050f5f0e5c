//! Connections to ports of a pod: the guest agent dials them, so that servers on 127.0.0.1 are reachable, too.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use coracle_host::{GuestClient, Host};
use coracle_proto::guest::port_forward_request::Message;
use coracle_proto::guest::{PortForwardChunk, PortForwardHeader, PortForwardRequest};
use coracle_streaming::{Connection, Dial};
use futures_util::{Stream, TryStreamExt as _};
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf, ReadHalf, WriteHalf,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::copy::{QUEUED, truncate_text};

/// Buffer between client and guest, in bytes for each direction.
const BUFFER: usize = 64 << 10;
/// Bytes in one message.
const CHUNK: usize = 32 << 10;
/// Limit for the guest to connect.
const DIAL_LIMIT: Duration = Duration::from_secs(20);

/// Dialer for ports of one pod, on the loopback address of its VM.
#[derive(Debug)]
pub struct PortDialer {
    host: Host,
    vm: String,
    tasks: TaskTracker,
}

impl PortDialer {
    /// Returns a dialer for ports of the VM `vm`. `tasks` owns a task for each open connection, which ends when the connection
    /// is dropped.
    #[must_use]
    pub fn new(host: Host, vm: &str, tasks: TaskTracker) -> Self {
        Self { host, vm: vm.to_owned(), tasks }
    }
}

#[async_trait]
impl Dial for PortDialer {
    async fn dial(&self, port: u16) -> Result<Connection, String> {
        let guest = self.host.guest(&self.vm).await.map_err(|error| error.chain())?;
        let (to_guest, requests) = mpsc::channel(QUEUED);
        let header = PortForwardHeader { port: port.into(), host: String::new() };
        let first = PortForwardRequest { message: Some(Message::Header(header)) };
        let _room_for_one = to_guest.send(first).await;
        let call = async { guest.rpc().port_forward(ReceiverStream::new(requests)).await };
        let replies = match tokio::time::timeout(DIAL_LIMIT, call).await {
            Ok(Ok(replies)) => replies.into_inner(),
            Ok(Err(status)) => return Err(truncate_text(status.message())),
            Err(_) => return Err("the guest does not answer".to_owned()),
        };
        let (near, far) = tokio::io::duplex(BUFFER);
        let dropped = CancellationToken::new();
        let connection = Forwarded { near, _dropped: dropped.clone().drop_guard() };
        self.tasks.spawn(dropped.run_until_cancelled_owned(copy(guest, far, to_guest, replies)));
        Ok(Box::new(connection))
    }
}

/// Client end of a connection. Dropping it closes the connection in the guest, even a half-open one.
struct Forwarded {
    near: DuplexStream,
    _dropped: DropGuard,
}

impl AsyncRead for Forwarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_read(cx, into)
    }
}

impl AsyncWrite for Forwarded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.near).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_shutdown(cx)
    }
}

/// Copies in both directions until both are closed. `guest` keeps its session open meanwhile.
async fn copy<E>(
    _guest: GuestClient,
    far: DuplexStream,
    to_guest: mpsc::Sender<PortForwardRequest>,
    replies: impl Stream<Item = Result<PortForwardChunk, E>> + Unpin,
) {
    let (reader, writer) = tokio::io::split(far);
    tokio::join!(send(reader, to_guest), receive(replies, writer));
}

async fn send(mut reader: ReadHalf<DuplexStream>, to_guest: mpsc::Sender<PortForwardRequest>) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let read = reader.read(&mut buffer).await.unwrap_or(0);
        let message = match buffer.get(..read) {
            Some(data) if read > 0 => Message::Data(data.to_vec()),
            _ => Message::CloseWrite(true),
        };
        let sent = to_guest.send(PortForwardRequest { message: Some(message) }).await;
        if sent.is_err() || read == 0 {
            return;
        }
    }
}

async fn receive<E>(
    mut replies: impl Stream<Item = Result<PortForwardChunk, E>> + Unpin,
    mut writer: WriteHalf<DuplexStream>,
) {
    while let Ok(Some(chunk)) = replies.try_next().await {
        if writer.write_all(&chunk.data).await.is_err() {
            return;
        }
    }
    let _client_gone = writer.shutdown().await;
}

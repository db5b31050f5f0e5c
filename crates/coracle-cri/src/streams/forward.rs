//! Connections to ports of a pod: the guest agent dials them, so that what listens on 127.0.0.1 is reached, too.

use std::time::Duration;

use async_trait::async_trait;
use coracle_guest_client::GuestClient;
use coracle_host::Host;
use coracle_proto::guest::port_forward_request::Message;
use coracle_proto::guest::{PortForwardChunk, PortForwardHeader, PortForwardRequest};
use coracle_streaming::{Connection, Dial};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::Streaming;

/// Bytes between client and guest.
const BUFFER: usize = 64 * 1024;
/// Bytes in one message.
const CHUNK: usize = 32 * 1024;
/// Messages that wait for the guest.
const QUEUED: usize = 4;
/// For the guest to connect.
const DIAL_LIMIT: Duration = Duration::from_secs(20);

/// Ports of one pod.
pub(super) struct PodDial {
    pub(super) host: Host,
    pub(super) sandbox: String,
    /// Owner of the tasks that copy.
    pub(super) tasks: TaskTracker,
}

#[async_trait]
impl Dial for PodDial {
    async fn dial(&self, port: u16) -> Result<Connection, String> {
        let guest = self.host.guest(&self.sandbox).await.map_err(|e| e.chain())?;
        let (to_guest, requests) = mpsc::channel(QUEUED);
        let header = PortForwardHeader { port: port.into(), host: String::new() };
        let _room_for_one =
            to_guest.send(PortForwardRequest { message: Some(Message::Header(header)) }).await;
        let call = async { guest.rpc().port_forward(ReceiverStream::new(requests)).await };
        let replies = match tokio::time::timeout(DIAL_LIMIT, call).await {
            Ok(Ok(replies)) => replies.into_inner(),
            Ok(Err(status)) => return Err(status.message().to_owned()),
            Err(_) => return Err("the guest does not answer".to_owned()),
        };
        let (ours, theirs) = tokio::io::duplex(BUFFER);
        self.tasks.spawn(copy(guest, theirs, to_guest, replies));
        Ok(Box::new(ours))
    }
}

/// Copies both ways until both halves are closed, or the client has gone. `guest` keeps its session open meanwhile.
async fn copy(
    _guest: GuestClient,
    stream: DuplexStream,
    to_guest: mpsc::Sender<PortForwardRequest>,
    mut replies: Streaming<PortForwardChunk>,
) {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let sending = async {
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
    };
    let receiving = async {
        while let Ok(Some(chunk)) = replies.message().await {
            if writer.write_all(&chunk.data).await.is_err() {
                return;
            }
        }
        let _client_gone = writer.shutdown().await;
    };
    tokio::join!(sending, receiving);
}

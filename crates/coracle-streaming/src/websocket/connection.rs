//! WebSocket connection with channels: reads messages into inputs, writes the queue of its outputs, and closes in order.

use std::time::Duration;

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, DuplexStream};
use tokio::time::{sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message, Role};
use tokio_util::sync::CancellationToken;

use super::channel::{CLOSE, Coding, NotBase64};
use super::config;
use crate::activity::Activity;
use crate::limits::Limits;
use crate::outbox::{self, Outbox, Queue};

/// Error that ends a connection before its session.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("cannot read message")]
    Read(#[from] Error),
    #[error(transparent)]
    Data(#[from] NotBase64),
}

/// Receivers of the client's messages.
pub(crate) struct Inputs {
    pub(crate) coding: Coding,
    /// Whether the client can close a channel.
    pub(crate) half_close: bool,
    /// Channels that accept data, until they are closed. Data of other channels are discarded.
    pub(crate) open: Vec<(u8, DuplexStream)>,
}

/// Serves a connection after its handshake. The future of `session` is dropped when the client disconnects; it must return soon
/// after [`Activity::wait_for_interruption`], and the client gets the close code 1000.
pub(crate) async fn serve<C, F>(
    connection: C,
    inputs: Inputs,
    limits: &Limits,
    stop: CancellationToken,
    session: impl FnOnce(Outbox<Message>, Activity) -> F,
) where
    C: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = ()>,
{
    let (sink, stream) =
        WebSocketStream::from_raw_socket(connection, Role::Server, Some(config())).await.split();
    let (outbox, queue) = outbox::channel();
    let activity = Activity::new(limits.idle, stop);
    let (pong, last) = (limits.pong, limits.last_message);
    let reader = Reader { inputs, outbox: outbox.clone(), activity: activity.clone(), pong, last };
    let mut reader = std::pin::pin!(reader.run(stream));
    let mut writer = std::pin::pin!(write_all(queue, sink, &activity));
    let (reading, code) = tokio::select! {
        result = &mut reader => match result {
            // The client disconnected.
            Ok(()) | Err(ConnectionError::Read(Error::Io(_) | Error::ConnectionClosed)) => return,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "WebSocket connection failed");
                (false, error.code())
            }
        },
        _failed = &mut writer => return,
        () = session(outbox.clone(), activity.clone()) => (true, CloseCode::Normal),
    };
    outbox.control(Message::Close(Some(CloseFrame { code, reason: "".into() })));
    outbox.close();
    // Reading continues until the client closes as well, as RFC 6455, section 7.1.1 requires.
    let closed = async {
        if reading {
            let _either = reader.await;
        } else {
            std::future::pending::<()>().await;
        }
    };
    let written = async {
        if let Ok(Ok(())) = timeout(limits.last_message, writer).await
            && reading
        {
            activity.linger_until_quiet(limits.linger).await;
        }
    };
    tokio::select! {
        () = closed => {}
        () = written => {}
    }
}

impl ConnectionError {
    fn code(&self) -> CloseCode {
        match self {
            Self::Read(Error::Capacity(_)) => CloseCode::Size,
            Self::Read(_) => CloseCode::Protocol,
            Self::Data(_) => CloseCode::Invalid,
        }
    }
}

/// Writes the queue until its end.
async fn write_all<C: AsyncRead + AsyncWrite + Unpin>(
    mut queue: Queue<Message>,
    mut sink: SplitSink<WebSocketStream<C>, Message>,
    activity: &Activity,
) -> Result<(), Error> {
    while let Some(messages) = queue.next().await {
        for message in messages {
            sink.feed(message).await?;
        }
        sink.flush().await?;
        activity.touch();
    }
    Ok(())
}

/// Reader of a connection.
struct Reader {
    inputs: Inputs,
    outbox: Outbox<Message>,
    activity: Activity,
    pong: Duration,
    last: Duration,
}

impl Reader {
    /// Reads until the client closes the connection. Reading pauses while an input buffer is full.
    async fn run<C: AsyncRead + AsyncWrite + Unpin>(
        mut self,
        mut stream: SplitStream<WebSocketStream<C>>,
    ) -> Result<(), ConnectionError> {
        while let Some(message) = stream.next().await {
            self.activity.touch();
            match message? {
                message @ (Message::Binary(_) | Message::Text(_)) => {
                    if let Some((channel, data)) = self.inputs.coding.decode(message.into_data())? {
                        self.take(channel, &data).await;
                    }
                }
                // The library answers pings when the next message is polled.
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
                Message::Close(_) => {
                    // This poll makes the library answer the close message as well.
                    let _either = timeout(self.last, stream.next()).await;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    async fn take(&mut self, channel: u8, data: &[u8]) {
        let open = &mut self.inputs.open;
        if self.inputs.half_close && channel == CLOSE {
            open.retain(|(channel, _)| data.first() != Some(channel));
        } else if let Some((_, input)) = open.iter_mut().find(|(known, _)| *known == channel) {
            let mut writing = std::pin::pin!(input.write_all(data));
            loop {
                tokio::select! {
                    biased;
                    // Data of an input without a reader are discarded.
                    _either = &mut writing => return,
                    // Pongs are sent meanwhile, because the client's pings are queued behind its data.
                    () = sleep(self.pong) => {
                        if self.outbox.check().is_ok() {
                            self.outbox.control(Message::Pong(Default::default()));
                        }
                    }
                }
            }
        }
    }
}

//! A WebSocket connection with channels: reads messages into inputs, writes what its outputs queue, and ends in order.

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

/// Why a connection ended before its session did.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("cannot read message")]
    Read(#[from] Error),
    #[error(transparent)]
    Data(#[from] NotBase64),
}

/// What the client's messages are for.
pub(crate) struct Inputs {
    pub(crate) coding: Coding,
    /// The client can close a channel.
    pub(crate) half_close: bool,
    /// Channels that take data, until they are closed. Those of others are discarded.
    pub(crate) open: Vec<(u8, DuplexStream)>,
}

/// Serves a connection after its handshake. The future of `session` is dropped when the client is gone; it returns soon
/// after [`Activity::interrupted`], and the client gets the close code 1000.
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
            // The client is gone.
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
    // Reading continues until the client closes, too, as RFC 6455, section 7.1.1 asks.
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
            activity.lingered(limits.linger).await;
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

/// Writes the queue, and returns at its end.
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

/// Reads a connection.
struct Reader {
    inputs: Inputs,
    outbox: Outbox<Message>,
    activity: Activity,
    pong: Duration,
    last: Duration,
}

impl Reader {
    /// Reads until the client closes the connection. An input that is full stops it until there is room.
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
                // The library answers pings when it is asked for the next message.
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
                Message::Close(_) => {
                    // So it answers the close, too.
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
                    // Without a reader of the input its data are discarded.
                    _either = &mut writing => return,
                    // The client's pings wait behind its data.
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

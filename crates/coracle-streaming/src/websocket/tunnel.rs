//! Byte stream inside WebSocket messages, which split it at any position.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::{Sink as _, Stream as _};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message, Role};

use super::config;

/// Byte stream inside WebSocket messages. It ends with the connection; shutting it down sends the close code 1000.
#[derive(Debug)]
pub struct Tunnel<C> {
    socket: WebSocketStream<C>,
    /// Remaining data of the last message.
    message: Bytes,
    closing: bool,
}

impl<C: AsyncRead + AsyncWrite + Unpin> Tunnel<C> {
    /// Returns the server end of a connection after its handshake.
    pub(crate) async fn server(connection: C) -> Self {
        Self::new(connection, Role::Server).await
    }

    /// Returns the client end of a connection after its handshake; see [`Handshake`](crate::Handshake).
    pub async fn client(connection: C) -> Self {
        Self::new(connection, Role::Client).await
    }

    async fn new(connection: C, role: Role) -> Self {
        let socket = WebSocketStream::from_raw_socket(connection, role, Some(config())).await;
        Self { socket, message: Bytes::new(), closing: false }
    }
}

fn io_error(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        error => io::Error::other(error),
    }
}

impl<C: AsyncRead + AsyncWrite + Unpin> AsyncRead for Tunnel<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.message.is_empty() {
            match ready!(Pin::new(&mut self.socket).poll_next(cx)) {
                Some(Ok(Message::Binary(data))) => self.message = data,
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Close(_))) => {
                    // The library has queued the answer to the close message.
                    let _either = Pin::new(&mut self.socket).poll_flush(cx);
                    return Poll::Ready(Ok(()));
                }
                None => return Poll::Ready(Ok(())),
                Some(Ok(Message::Text(_))) => {
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, "a text message")));
                }
                Some(Err(error)) => return Poll::Ready(Err(io_error(error))),
            }
        }
        let length = self.message.len().min(buf.remaining());
        buf.put_slice(&self.message.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl<C: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Tunnel<C> {
    /// Sends one message for each call.
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(Pin::new(&mut self.socket).poll_ready(cx)).map_err(io_error)?;
        let message = Message::Binary(Bytes::copy_from_slice(bytes));
        Pin::new(&mut self.socket).start_send(message).map_err(io_error)?;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx).map_err(io_error)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.closing {
            ready!(Pin::new(&mut self.socket).poll_ready(cx)).map_err(io_error)?;
            let close = CloseFrame { code: CloseCode::Normal, reason: "".into() };
            Pin::new(&mut self.socket).start_send(Message::Close(Some(close))).map_err(io_error)?;
            self.closing = true;
        }
        Pin::new(&mut self.socket).poll_flush(cx).map_err(io_error)
    }
}

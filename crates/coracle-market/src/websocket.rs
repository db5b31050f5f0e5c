//! Prices over a WebSocket (RFC 6455): one text message per frame. Messages from the reader are ignored.

use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use coracle_proto::market as pb;
use futures_util::{SinkExt as _, Stream, StreamExt as _};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::time::{MissedTickBehavior, interval};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Message, Role, WebSocketConfig};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::RequestError;
use crate::http::HEARTBEAT;
use crate::json;

/// Longest message that a reader may send.
const SAID_MAX: usize = 4096;
/// Most bytes that are buffered for a slow reader; beyond that its connection is closed.
const UNSENT_MAX: usize = 1 << 20;

/// Request for an upgrade to a WebSocket.
#[derive(Debug)]
pub(crate) struct Upgrade {
    connection: OnUpgrade,
    accept: HeaderValue,
}

fn names(headers: &HeaderMap, header: header::HeaderName, word: &str) -> bool {
    let value = headers.get(header).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(',').any(|part| part.trim().eq_ignore_ascii_case(word))
}

impl<S: Sync> axum::extract::OptionalFromRequestParts<S> for Upgrade {
    type Rejection = RequestError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, RequestError> {
        if !names(&parts.headers, header::UPGRADE, "websocket") {
            return Ok(None);
        }
        let key = parts.headers.get(header::SEC_WEBSOCKET_KEY).map(|key| derive_accept_key(key.as_bytes()));
        let version = parts.headers.get(header::SEC_WEBSOCKET_VERSION).is_some_and(|v| v == "13");
        let asked = names(&parts.headers, header::CONNECTION, "upgrade") && version;
        let accept = key.and_then(|key| HeaderValue::from_str(&key).ok()).filter(|_| asked);
        match (accept, parts.extensions.remove::<OnUpgrade>()) {
            (Some(accept), Some(connection)) => Ok(Some(Self { connection, accept })),
            _ => Err(RequestError::invalid("no handshake of a WebSocket of version 13")),
        }
    }
}

impl Upgrade {
    /// Answers the handshake; the connection runs in `tasks` until `stop`.
    pub(crate) fn serve(
        self,
        frames: impl Stream<Item = pb::PriceFrame> + Send + 'static,
        tasks: &TaskTracker,
        stop: CancellationToken,
    ) -> Response {
        let connection = self.connection;
        tasks.spawn(async move {
            let upgraded = match stop.run_until_cancelled(connection).await {
                Some(Ok(upgraded)) => upgraded,
                // The client disconnected before the answer was sent.
                Some(Err(_)) | None => return,
            };
            let config = WebSocketConfig::default()
                .max_message_size(Some(SAID_MAX))
                .max_frame_size(Some(SAID_MAX))
                .max_write_buffer_size(UNSENT_MAX);
            let io = TokioIo::new(upgraded);
            let socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await;
            if let Err(error) = pump(socket, frames, &stop).await {
                tracing::debug!(%error, "reader of prices disconnected");
            }
        });
        let headers = [
            (header::CONNECTION, HeaderValue::from_static("upgrade")),
            (header::UPGRADE, HeaderValue::from_static("websocket")),
            (header::SEC_WEBSOCKET_ACCEPT, self.accept),
        ];
        (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
    }
}

/// Sends frames and keep-alive messages until the reader closes or `stop`.
async fn pump<S>(
    mut socket: WebSocketStream<S>,
    frames: impl Stream<Item = pb::PriceFrame>,
    stop: &CancellationToken,
) -> Result<(), tokio_tungstenite::tungstenite::Error>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let mut frames = std::pin::pin!(frames);
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    heartbeat.tick().await;
    loop {
        let message = tokio::select! {
            () = stop.cancelled() => return socket.close(None).await,
            said = socket.next() => match said {
                None | Some(Ok(Message::Close(_))) => return Ok(()),
                Some(Ok(_)) => continue,
                Some(Err(error)) => return Err(error),
            },
            _ = heartbeat.tick() => Message::Ping(Default::default()),
            frame = frames.next() => match frame {
                Some(frame) => Message::text(json::price_frame(&frame).to_string()),
                None => return socket.close(None).await,
            },
        };
        socket.send(message).await?;
    }
}

//! Client side of the handshake of a tunnel (RFC 6455, section 4.1).

use http::header::{
    CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION,
    UPGRADE,
};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

/// Handshake that the client has begun.
#[derive(Debug)]
pub struct Handshake {
    protocol: &'static str,
    key: String,
}

impl Handshake {
    /// Begins a handshake for a tunnel of `protocol`.
    #[must_use]
    pub fn new(protocol: &'static str) -> Self {
        Self { protocol, key: generate_key() }
    }

    /// Returns the headers of the request, which must be a GET.
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        let key = HeaderValue::try_from(&self.key).unwrap_or(HeaderValue::from_static(""));
        HeaderMap::from_iter([
            (CONNECTION, HeaderValue::from_static("Upgrade")),
            (UPGRADE, HeaderValue::from_static("websocket")),
            (SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13")),
            (SEC_WEBSOCKET_KEY, key),
            (SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(self.protocol)),
        ])
    }

    /// Returns whether the server has accepted this handshake and chosen the protocol.
    #[must_use]
    pub fn is_accepted<B>(&self, response: &Response<B>) -> bool {
        let has = |name, value: &str| response.headers().get(name).is_some_and(|found| found == value);
        response.status() == StatusCode::SWITCHING_PROTOCOLS
            && has(SEC_WEBSOCKET_ACCEPT, &derive_accept_key(self.key.as_bytes()))
            && has(SEC_WEBSOCKET_PROTOCOL, self.protocol)
    }
}

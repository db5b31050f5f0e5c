//! Chooses the protocol of a request and the response to its handshake. Pure.

use http::header::{
    CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION,
    UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version};

use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use crate::spdy::session::Version as SpdyVersion;
use crate::status::Form;
use crate::websocket::channel::{Coding, Variant};

/// Header with the versions that a SPDY client offers, and in the response with the chosen one.
const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");
/// Header with the versions that the server supports, if it supports none of those offered.
const ACCEPTED: HeaderName = HeaderName::from_static("x-accepted-stream-protocol-versions");

/// Versions of exec and attach over SPDY. v5 is not included: clients offer it, but it requires a WebSocket.
const SPDY_SESSION: [(&str, SpdyVersion); 4] = [
    ("v4.channel.k8s.io", SpdyVersion::V4),
    ("v3.channel.k8s.io", SpdyVersion::V3),
    ("v2.channel.k8s.io", SpdyVersion::V2),
    ("channel.k8s.io", SpdyVersion::V1),
];
const SPDY_PORT_FORWARD: [(&str, PortForward); 1] = [("portforward.k8s.io", PortForward::Spdy)];

/// Variants of exec and attach over WebSocket. The first one is for clients that name none.
const WEBSOCKET_SESSION: [(&str, Variant); 5] = [
    ("channel.k8s.io", Variant { coding: Coding::Binary, form: Form::Text, half_close: false }),
    ("base64.channel.k8s.io", Variant { coding: Coding::Base64, form: Form::Text, half_close: false }),
    ("v4.channel.k8s.io", Variant { coding: Coding::Binary, form: Form::Json, half_close: false }),
    ("v4.base64.channel.k8s.io", Variant { coding: Coding::Base64, form: Form::Json, half_close: false }),
    ("v5.channel.k8s.io", Variant { coding: Coding::Binary, form: Form::Json, half_close: true }),
];
/// Variants of port-forward over WebSocket. The first one is for clients that name none.
const WEBSOCKET_PORT_FORWARD: [(&str, PortForward); 6] = [
    ("v4.channel.k8s.io", PortForward::WebSocket(Coding::Binary)),
    ("v4.base64.channel.k8s.io", PortForward::WebSocket(Coding::Base64)),
    ("channel.k8s.io", PortForward::WebSocket(Coding::Binary)),
    ("base64.channel.k8s.io", PortForward::WebSocket(Coding::Base64)),
    ("portforward.k8s.io", PortForward::WebSocket(Coding::Binary)),
    ("SPDY/3.1+portforward.k8s.io", PortForward::Tunnel),
];

/// Accepted handshake: the chosen protocol, and the headers of the response 101.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Accepted<T> {
    pub(crate) protocol: T,
    pub(crate) headers: HeaderMap,
}

/// Refused handshake.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) status: StatusCode,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) reason: &'static str,
}

/// Protocol of an exec or attach session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Session {
    Spdy(SpdyVersion),
    WebSocket(Variant),
}

/// Protocol of port-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortForward {
    Spdy,
    /// SPDY inside WebSocket messages.
    Tunnel,
    /// A pair of channels for each port.
    WebSocket(Coding),
}

/// Parts of a request that matter for a handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) method: &'a Method,
    pub(crate) version: Version,
    pub(crate) headers: &'a HeaderMap,
}

/// Chooses the protocol of an exec or attach session.
///
/// # Errors
/// The refusal: 400 for a request without an upgrade, 403 without a common protocol.
pub(crate) fn session(asked: Asked<'_>) -> Result<Accepted<Session>, Refused> {
    let spdy = SPDY_SESSION.map(|(name, version)| (name, Session::Spdy(version)));
    let websocket = WEBSOCKET_SESSION.map(|(name, variant)| (name, Session::WebSocket(variant)));
    choose(asked, &spdy, &websocket)
}

/// Chooses the protocol of port-forward.
///
/// # Errors
/// Errors of [`session`].
pub(crate) fn port_forward(asked: Asked<'_>) -> Result<Accepted<PortForward>, Refused> {
    choose(asked, &SPDY_PORT_FORWARD, &WEBSOCKET_PORT_FORWARD)
}

/// Accepts a tunnel of one protocol, which the client must name.
///
/// # Errors
/// Errors of [`session`].
pub(crate) fn tunnel(asked: Asked<'_>, protocol: &'static str) -> Result<Accepted<()>, Refused> {
    if values(asked.headers, &SEC_WEBSOCKET_PROTOCOL).next().is_none() {
        return Err(refusal("invalid request: header \"Sec-WebSocket-Protocol\" not found"));
    }
    choose(asked, &[], &[(protocol, ())])
}

fn choose<T: Copy>(
    asked: Asked<'_>,
    spdy: &[(&'static str, T)],
    websocket: &[(&'static str, T)],
) -> Result<Accepted<T>, Refused> {
    let Asked { method, version, headers } = asked;
    let upgrade = values(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    let to = |name: &str| values(headers, &UPGRADE).any(|token| token.eq_ignore_ascii_case(name));
    if !upgrade || version != Version::HTTP_11 {
        return Err(refusal("invalid request: not an upgrade of HTTP/1.1"));
    }
    if to("websocket") {
        by_websocket(method, headers, websocket)
    } else if to("SPDY/3.1") {
        by_spdy(headers, spdy)
    } else {
        Err(refusal("invalid header \"Upgrade\": neither SPDY/3.1 nor websocket"))
    }
}

fn by_spdy<T: Copy>(headers: &HeaderMap, known: &[(&'static str, T)]) -> Result<Accepted<T>, Refused> {
    if !headers.contains_key(STREAM_PROTOCOL) {
        return Err(refusal("invalid request: header \"X-Stream-Protocol-Version\" not found"));
    }
    let Some((name, protocol)) = first_known(headers, &STREAM_PROTOCOL, known) else {
        let accepted = known.iter().map(|(name, _)| (ACCEPTED, HeaderValue::from_static(name)));
        return Err(Refused { status: StatusCode::FORBIDDEN, headers: accepted.collect(), reason: NONE });
    };
    let headers = [
        (CONNECTION, HeaderValue::from_static("Upgrade")),
        (UPGRADE, HeaderValue::from_static("SPDY/3.1")),
        (STREAM_PROTOCOL, HeaderValue::from_static(name)),
    ];
    Ok(Accepted { protocol, headers: HeaderMap::from_iter(headers) })
}

fn by_websocket<T: Copy>(
    method: &Method,
    headers: &HeaderMap,
    known: &[(&'static str, T)],
) -> Result<Accepted<T>, Refused> {
    let key = headers.get(SEC_WEBSOCKET_KEY).map(|key| derive_accept_key(key.as_bytes()));
    let key = key.and_then(|key| HeaderValue::try_from(key).ok());
    let version = headers.get(SEC_WEBSOCKET_VERSION).is_some_and(|version| version == "13");
    let (Some(key), true, &Method::GET) = (key, version, method) else {
        let mut refused = refusal("invalid request: not a handshake of WebSocket version 13");
        refused.headers.push((SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13")));
        return Err(refused);
    };
    let mut answer = HeaderMap::from_iter([
        (CONNECTION, HeaderValue::from_static("Upgrade")),
        (UPGRADE, HeaderValue::from_static("websocket")),
        (SEC_WEBSOCKET_ACCEPT, key),
    ]);
    let chosen = if values(headers, &SEC_WEBSOCKET_PROTOCOL).next().is_none() {
        known.first().map(|(_, protocol)| *protocol)
    } else {
        first_known(headers, &SEC_WEBSOCKET_PROTOCOL, known).map(|(name, protocol)| {
            answer.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(name));
            protocol
        })
    };
    match chosen {
        Some(protocol) => Ok(Accepted { protocol, headers: answer }),
        None => Err(Refused { status: StatusCode::FORBIDDEN, headers: Vec::new(), reason: NONE }),
    }
}

const NONE: &str = "cannot upgrade connection: none of the protocol versions is supported";

/// Returns a refusal with status 400.
pub(crate) fn refusal(reason: &'static str) -> Refused {
    Refused { status: StatusCode::BAD_REQUEST, headers: Vec::new(), reason }
}

/// Returns the first known protocol in the client's order. Names are compared case-sensitively, as in the reference
/// implementation.
fn first_known<T: Copy>(
    headers: &HeaderMap,
    header: &HeaderName,
    known: &[(&'static str, T)],
) -> Option<(&'static str, T)> {
    values(headers, header).find_map(|offered| known.iter().find(|(name, _)| *name == offered)).copied()
}

/// Returns the values of a header that may be repeated and contain lists.
fn values<'a>(headers: &'a HeaderMap, header: &HeaderName) -> impl Iterator<Item = &'a str> {
    let lists = headers.get_all(header).into_iter().filter_map(|value| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).map(str::trim).filter(|value| !value.is_empty())
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;

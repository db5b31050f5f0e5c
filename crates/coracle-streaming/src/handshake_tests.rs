use super::*;

fn headers(text: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in text.split('\n').filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(": ").unwrap();
        headers.append(HeaderName::try_from(name).unwrap(), value.parse().unwrap());
    }
    headers
}

/// Returns the response in one line: status, protocol, and the value of the header with versions.
fn answer<T: std::fmt::Debug>(result: Result<Accepted<T>, Refused>) -> String {
    let names = |headers: &HeaderMap| {
        let all: Vec<_> = [STREAM_PROTOCOL, ACCEPTED, SEC_WEBSOCKET_PROTOCOL]
            .iter()
            .flat_map(|header| values(headers, header).map(str::to_owned).collect::<Vec<_>>())
            .collect();
        all.join(",")
    };
    match result {
        Ok(Accepted { protocol, headers }) => format!("101 {protocol:?} {}", names(&headers)),
        Err(Refused { status, headers, .. }) => {
            let mut all = HeaderMap::new();
            for (name, value) in headers {
                all.append(name, value);
            }
            format!("{} {}", status.as_u16(), names(&all))
        }
    }
}

fn negotiate<T: std::fmt::Debug>(
    choose: fn(Asked<'_>) -> Result<Accepted<T>, Refused>,
    method: &Method,
    version: Version,
    text: &str,
) -> String {
    answer(choose(Asked { method, version, headers: &headers(text) }))
}

const SPDY: &str = "Connection: Upgrade\nUpgrade: SPDY/3.1\n";
const WEBSOCKET: &str = "Connection: keep-alive, Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\n";

#[test]
fn spdy_handshake_table() {
    let all = "v4.channel.k8s.io,v3.channel.k8s.io,v2.channel.k8s.io,channel.k8s.io";
    for (why, text, want) in [
        (
            "kubectl offers v5, too",
            format!(
                "{SPDY}X-Stream-Protocol-Version: v5.channel.k8s.io\nX-Stream-Protocol-Version: v4.channel.k8s.io"
            ),
            "101 Spdy(V4) v4.channel.k8s.io".to_owned(),
        ),
        (
            "the client's order, in a list",
            format!(
                "{SPDY}X-Stream-Protocol-Version: v9.channel.k8s.io, v2.channel.k8s.io,v4.channel.k8s.io"
            ),
            "101 Spdy(V2) v2.channel.k8s.io".into(),
        ),
        (
            "header names and tokens have no case",
            "connection: upgrade\nupgrade: spdy/3.1\nx-stream-protocol-version: channel.k8s.io".into(),
            "101 Spdy(V1) channel.k8s.io".into(),
        ),
        ("only v5", format!("{SPDY}X-Stream-Protocol-Version: v5.channel.k8s.io"), format!("403 {all}")),
        ("empty header", format!("{SPDY}X-Stream-Protocol-Version: "), format!("403 {all}")),
        ("no version", SPDY.into(), "400 ".into()),
        ("no upgrade", "X-Stream-Protocol-Version: v4.channel.k8s.io".into(), "400 ".into()),
        (
            "another protocol",
            "Connection: Upgrade\nUpgrade: h2c\nX-Stream-Protocol-Version: v4.channel.k8s.io".into(),
            "400 ".into(),
        ),
    ] {
        assert_eq!(negotiate(session, &Method::POST, Version::HTTP_11, &text), want, "{why}");
    }
    let h2 = format!("{SPDY}X-Stream-Protocol-Version: v4.channel.k8s.io");
    assert_eq!(negotiate(session, &Method::POST, Version::HTTP_2, &h2), "400 ", "HTTP/2 has no upgrade");
}

#[test]
fn websocket_handshake_table() {
    let with = |protocol: &str| format!("{WEBSOCKET}Sec-WebSocket-Protocol: {protocol}");
    let spoken = |coding, form, half_close, name| {
        format!(
            "101 WebSocket(Variant {{ coding: {coding}, form: {form}, half_close: {half_close} }}) {name}"
        )
    };
    for (why, text, want) in [
        ("kubectl", with("v5.channel.k8s.io"), spoken("Binary", "Json", true, "v5.channel.k8s.io")),
        ("Python", with("v4.channel.k8s.io"), spoken("Binary", "Json", false, "v4.channel.k8s.io")),
        (
            "a browser",
            with("unknown, v4.base64.channel.k8s.io"),
            spoken("Base64", "Json", false, "v4.base64.channel.k8s.io"),
        ),
        ("v1", with("channel.k8s.io"), spoken("Binary", "Text", false, "channel.k8s.io")),
        (
            "v1 in base64",
            with("base64.channel.k8s.io"),
            spoken("Base64", "Text", false, "base64.channel.k8s.io"),
        ),
        ("none is v1", WEBSOCKET.into(), spoken("Binary", "Text", false, "")),
        ("only unknown ones", with("v6.channel.k8s.io"), "403 ".into()),
        ("the tunnel is for ports", with("SPDY/3.1+portforward.k8s.io"), "403 ".into()),
        ("another version", WEBSOCKET.replace("13", "8"), "400 ".into()),
        ("no key", WEBSOCKET.replace("Sec-WebSocket-Key", "X-Key"), "400 ".into()),
    ] {
        assert_eq!(negotiate(session, &Method::GET, Version::HTTP_11, &text), want, "{why}");
    }
    assert_eq!(negotiate(session, &Method::POST, Version::HTTP_11, &with("v5.channel.k8s.io")), "400 ");
    let accepted = session(Asked {
        method: &Method::GET,
        version: Version::HTTP_11,
        headers: &headers(&with("v5.channel.k8s.io")),
    });
    let headers = accepted.unwrap().headers;
    assert_eq!(headers[SEC_WEBSOCKET_ACCEPT], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", "RFC 6455, section 1.3");
}

#[test]
fn port_forward_handshake_table() {
    let websocket = |protocol: &str| format!("{WEBSOCKET}Sec-WebSocket-Protocol: {protocol}");
    for (why, text, want) in [
        (
            "SPDY",
            format!("{SPDY}X-Stream-Protocol-Version: portforward.k8s.io"),
            "101 Spdy portforward.k8s.io",
        ),
        (
            "no version of exec",
            format!("{SPDY}X-Stream-Protocol-Version: v4.channel.k8s.io"),
            "403 portforward.k8s.io",
        ),
        ("tunnel", websocket("SPDY/3.1+portforward.k8s.io"), "101 Tunnel SPDY/3.1+portforward.k8s.io"),
        ("old clients", websocket("v4.channel.k8s.io"), "101 WebSocket(Binary) v4.channel.k8s.io"),
        (
            "old clients in base64",
            websocket("v4.base64.channel.k8s.io"),
            "101 WebSocket(Base64) v4.base64.channel.k8s.io",
        ),
        ("by its name", websocket("portforward.k8s.io"), "101 WebSocket(Binary) portforward.k8s.io"),
        ("none", WEBSOCKET.into(), "101 WebSocket(Binary) "),
        ("v5 is for sessions", websocket("v5.channel.k8s.io"), "403 "),
    ] {
        assert_eq!(negotiate(port_forward, &Method::GET, Version::HTTP_11, &text), want, "{why}");
    }
}

//! Upgrades requests, and serves the session that they ask for.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use crate::forward::Dial;
use crate::handshake::{self, Accepted, Asked, PortForward, Refused};
use crate::limits::Limits;
use crate::session::{RunSession, Streams};
use crate::spdy;
use crate::tasks::Tasks;
use crate::websocket;
use crate::websocket::port_forward::channels;
use crate::websocket::tunnel::Tunnel;

/// Body of the responses: empty, or the reason of a refusal.
pub type Body = Full<Bytes>;

/// Upgrades a request to the protocol in its headers, and runs the session in a task of `tasks`; or responds with 400 or 403.
/// The request must come from an HTTP/1.1 server that allows upgrades. `streams` are decided by the server: the parameters of
/// the request are not read. A terminal has no standard error.
pub fn serve_session<B>(
    request: Request<B>,
    streams: Streams,
    run: Box<dyn RunSession>,
    limits: &Limits,
    tasks: &Tasks,
) -> Response<Body> {
    let (accepted, connection) = match upgrade(request, handshake::session) {
        Ok(upgrade) => upgrade,
        Err(refused) => return refusal_response(refused),
    };
    let limits = limits.clone();
    tasks.spawn(async move |stop: CancellationToken| {
        let Some(connection) = wait_for_upgrade(connection, &limits, &stop).await else { return };
        match accepted.protocol {
            handshake::Session::Spdy(version) => {
                let time = limits.stream_creation;
                let request = spdy::session::Request { streams, version, process: run, time };
                spdy::serve(connection, &limits, stop, async |incoming, outbox, activity| {
                    spdy::session::serve(request, incoming, outbox, activity).await;
                })
                .await;
            }
            handshake::Session::WebSocket(variant) => {
                websocket::session::serve(connection, variant, streams, run, &limits, stop).await;
            }
        }
    });
    switching_protocols(accepted.headers)
}

/// Upgrades a request to the protocol in its headers, and forwards connections to ports that `dial` reaches, in a task of
/// `tasks`; or responds with 400 or 403. `ports` are those of the request, for old WebSocket clients that cannot name them
/// otherwise; may be empty.
pub fn serve_port_forward<B>(
    request: Request<B>,
    ports: &[u16],
    dial: Arc<dyn Dial>,
    limits: &Limits,
    tasks: &Tasks,
) -> Response<Body> {
    let (accepted, connection) = match upgrade(request, handshake::port_forward) {
        Ok(upgrade) => upgrade,
        Err(refused) => return refusal_response(refused),
    };
    let channels = match accepted.protocol {
        PortForward::WebSocket(coding) => channels(ports, coding),
        PortForward::Spdy | PortForward::Tunnel => Some(Vec::new()),
    };
    let Some(channels) = channels else {
        return refusal_response(handshake::refusal(
            "invalid parameter \"port\": none, 0, or more than there are channels",
        ));
    };
    let limits = limits.clone();
    tasks.spawn(async move |stop: CancellationToken| {
        let Some(connection) = wait_for_upgrade(connection, &limits, &stop).await else { return };
        match accepted.protocol {
            PortForward::Spdy => forward_by_spdy(connection, dial, &limits, stop).await,
            PortForward::Tunnel => {
                forward_by_spdy(Tunnel::server(connection).await, dial, &limits, stop).await;
            }
            PortForward::WebSocket(coding) => {
                websocket::port_forward::serve(connection, coding, channels, dial, &limits, stop).await;
            }
        }
    });
    switching_protocols(accepted.headers)
}

/// Upgrades a WebSocket request for `protocol`, and runs `serve` on the byte stream inside its messages in a task of `tasks`;
/// or responds with 400 or 403. The task must end soon after its token is cancelled.
pub fn serve_tunnel<B, F>(
    request: Request<B>,
    protocol: &'static str,
    limits: &Limits,
    tasks: &Tasks,
    serve: impl FnOnce(Tunnel<TokioIo<Upgraded>>, CancellationToken) -> F + Send + 'static,
) -> Response<Body>
where
    F: Future<Output = ()> + Send,
{
    let (accepted, connection) = match upgrade(request, |asked| handshake::tunnel(asked, protocol)) {
        Ok(upgrade) => upgrade,
        Err(refused) => return refusal_response(refused),
    };
    let limits = limits.clone();
    tasks.spawn(async move |stop: CancellationToken| {
        let Some(connection) = wait_for_upgrade(connection, &limits, &stop).await else { return };
        serve(Tunnel::server(connection).await, stop).await;
    });
    switching_protocols(accepted.headers)
}

async fn forward_by_spdy<C: AsyncRead + AsyncWrite>(
    connection: C,
    dial: Arc<dyn Dial>,
    limits: &Limits,
    stop: CancellationToken,
) {
    spdy::serve(connection, limits, stop, async |incoming, _outbox, activity| {
        spdy::port_forward::serve(dial, limits.stream_creation, incoming, activity).await;
    })
    .await;
}

/// Returns the chosen protocol of a request, and its connection.
fn upgrade<B, T>(
    mut request: Request<B>,
    choose: impl FnOnce(Asked<'_>) -> Result<Accepted<T>, Refused>,
) -> Result<(Accepted<T>, OnUpgrade), Refused> {
    let connection = request.extensions_mut().remove::<OnUpgrade>();
    let asked = Asked { method: request.method(), version: request.version(), headers: request.headers() };
    let accepted = choose(asked)?;
    let connection = connection.ok_or_else(|| Refused {
        status: StatusCode::BAD_REQUEST,
        headers: Vec::new(),
        reason: "cannot upgrade connection: the server does not allow it",
    })?;
    Ok((accepted, connection))
}

/// Returns the connection after the response was sent. It includes data that the client sent directly after its request.
async fn wait_for_upgrade(
    connection: OnUpgrade,
    limits: &Limits,
    stop: &CancellationToken,
) -> Option<TokioIo<Upgraded>> {
    let connection = tokio::time::timeout(limits.stream_creation, connection);
    match stop.run_until_cancelled(connection).await {
        Some(Ok(Ok(upgraded))) => Some(TokioIo::new(upgraded)),
        // The client disconnected before the response, or the server stops.
        Some(Ok(Err(_)) | Err(_)) | None => None,
    }
}

fn switching_protocols(headers: HeaderMap) -> Response<Body> {
    let mut response = Response::new(Body::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *response.headers_mut() = headers;
    response
}

fn refusal_response(refused: Refused) -> Response<Body> {
    let mut response = Response::new(Body::from(format!("{}\n", refused.reason)));
    *response.status_mut() = refused.status;
    for (name, value) in refused.headers {
        response.headers_mut().append(name, value);
    }
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, text);
    response
}

//! Session of a user with one VM: an HTTP/2 connection inside a WebSocket, whose calls are forwarded to the VM's node.

use std::time::Duration;

use axum::Extension;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse as _, Response};
use bytes::{Bytes, BytesMut};
use coracle_access::User;
use coracle_api::subresources::{PROTOCOL, Subresource};
use coracle_reconcile::WallTime as _;
use coracle_streaming::serve_tunnel;
use futures_util::{StreamExt as _, stream};
use http::{HeaderValue, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, BodyStream, StreamBody};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::ServiceExt as _;

use crate::call;
use crate::failure::Failure;
use crate::guard::Object;
use crate::target::{self, Target};
use crate::{SubresourceApi, log};

/// Largest number of concurrent sessions.
const SESSIONS_MAX: usize = 1024;
/// Largest number of concurrent calls in one session: each connection to a forwarded port is one call.
const CALLS_MAX: u32 = 256;
/// Interval of pings, which detect a client that lost power.
const PING: Duration = Duration::from_secs(30);
/// Largest first message, which has the arguments and the environment of a process.
const FIRST_MESSAGE_MAX: usize = 4 << 20;
/// Time limit for the first message of a call.
const FIRST_MESSAGE: Duration = Duration::from_secs(30);
/// HTTP/2 flow control windows, in bytes: of one call, and of the whole session.
const CALL_WINDOW: u32 = 1 << 20;
const SESSION_WINDOW: u32 = 4 << 20;
/// Length of the prefix of each message: flags and size (gRPC over HTTP/2).
const PREFIX: usize = 5;

/// Handles a request for a subresource.
pub(crate) async fn open(
    State(api): State<SubresourceApi>,
    Extension(user): Extension<User>,
    Path((namespace, name, subresource)): Path<(String, String, String)>,
    request: Request,
) -> Result<Response, Failure> {
    let subresource = Subresource::of_name(&subresource)
        .ok_or_else(|| Failure::not_found(format!("mikromvms have no subresource {subresource}")))?;
    let object = Object { namespace, name, subresource };
    api.guard.authorize(user, &object).await?;
    let is_upgrade = request.headers().contains_key(header::UPGRADE);
    if !is_upgrade && subresource != Subresource::Log {
        return Err(Failure::bad_request(format!("{} needs a WebSocket", subresource.name())));
    }
    if api.tasks.open() >= SESSIONS_MAX {
        return Err(Failure::unavailable("too many sessions"));
    }
    let target = target::find(&api, &object).await?;
    if !is_upgrade {
        let query = request.uri().query().unwrap_or_default();
        return log::read(target, query, api.clock.timestamp()).await;
    }
    let answer = serve_tunnel(request, PROTOCOL, &api.limits, &api.tasks, move |tunnel, stop| {
        serve(tunnel, subresource, target, stop)
    });
    Ok(answer.into_response())
}

/// Serves calls until the client closes the connection, or `stop`.
async fn serve<C>(connection: C, subresource: Subresource, target: Target, stop: CancellationToken)
where
    C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = hyper::service::service_fn(move |request| {
        let target = target.clone();
        async move {
            let passed = pass(request, subresource, &target).await;
            Ok::<_, std::convert::Infallible>(passed.unwrap_or_else(Status::into_http))
        }
    });
    let mut server = http2::Builder::new(TokioExecutor::new());
    server.timer(TokioTimer::new()).keep_alive_interval(PING).max_concurrent_streams(CALLS_MAX);
    server.initial_stream_window_size(CALL_WINDOW).initial_connection_window_size(SESSION_WINDOW);
    let served = server.serve_connection(TokioIo::new(connection), service);
    if let Some(Err(error)) = stop.run_until_cancelled(served).await {
        tracing::debug!(%error, "session failed");
    }
}

/// Forwards one call to the node, for the session's VM.
async fn pass(
    request: http::Request<Incoming>,
    subresource: Subresource,
    target: &Target,
) -> Result<http::Response<Body>, Status> {
    let call = call::allowed_call(request.uri().path(), subresource)
        .map_err(|refused| Status::permission_denied(refused.to_string()))?;
    let (parts, body) = request.into_parts();
    let first = tokio::time::timeout(FIRST_MESSAGE, first_message(body)).await;
    let (message, rest, body) = first.map_err(|_| Status::deadline_exceeded("no message"))??;
    let message = call::bind_vm(call, &message, &target.vm)
        .map_err(|refused| Status::invalid_argument(refused.to_string()))?;
    let read = stream::iter([frame_message(&message), rest].map(|data| Ok(Frame::data(data))));
    let body = StreamBody::new(read.chain(BodyStream::new(body)));
    let mut request = http::Request::new(Body::new(body));
    *request.uri_mut() = parts.uri.path().parse().map_err(|_| Status::internal("invalid path"))?;
    *request.method_mut() = http::Method::POST;
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    if let Some(timeout) = parts.headers.get("grpc-timeout") {
        headers.insert("grpc-timeout", timeout.clone());
    }
    let answer = target.channel.clone().oneshot(request).await;
    answer.map_err(|error| Status::unavailable(format!("the node does not answer: {error}")))
}

/// Returns the first message of a body, the bytes after it, and the rest of the body.
async fn first_message(mut body: Incoming) -> Result<(Bytes, Bytes, Incoming), Status> {
    let mut read = BytesMut::new();
    loop {
        if let Some(length) = length(&read)?
            && read.len() >= PREFIX + length
        {
            let mut message = read.split_to(PREFIX + length).freeze();
            return Ok((message.split_off(PREFIX), read.freeze(), body));
        }
        match body.frame().await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    read.extend_from_slice(&data);
                }
            }
            Some(Err(error)) => return Err(Status::new(Code::Cancelled, error.to_string())),
            None => return Err(Status::invalid_argument("the call has no message")),
        }
    }
}

/// Returns the length of the message whose prefix was read.
fn length(read: &[u8]) -> Result<Option<usize>, Status> {
    let Some((&[compressed, ref length @ ..], _)) = read.split_first_chunk::<PREFIX>() else {
        return Ok(None);
    };
    if compressed != 0 {
        return Err(Status::unimplemented("compressed messages are not supported"));
    }
    let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
    if length > FIRST_MESSAGE_MAX {
        return Err(Status::resource_exhausted("the first message is too long"));
    }
    Ok(Some(length))
}

/// Returns a message with its prefix.
fn frame_message(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[0], length.to_be_bytes().as_slice(), message].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_messages_table() {
        for (why, read, want) in [
            ("half a prefix", [0, 0, 0, 0].as_slice(), Ok(None)),
            ("a prefix", &[0, 0, 0, 1, 2], Ok(Some(258))),
            ("more", &[0, 0, 0, 0, 1, 9, 9], Ok(Some(1))),
            ("compressed", &[1, 0, 0, 0, 1], Err(Code::Unimplemented)),
            ("too long", &[0, 255, 255, 255, 255], Err(Code::ResourceExhausted)),
        ] {
            assert_eq!(length(read).map_err(|status| status.code()), want, "{why}");
        }
        assert_eq!(frame_message(b"ab").as_ref(), [0, 0, 0, 0, 2, b'a', b'b']);
    }
}

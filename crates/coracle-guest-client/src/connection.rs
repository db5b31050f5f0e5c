//! HTTP/2 to a guest agent, on the one stream that there is. A channel of tonic would connect again when it ends and queue
//! calls meanwhile; a node has thousands of sessions, and each would have room for that.
//!
//! h2 is used as it is: hyper would keep a queue of 8 KiB for each session, and has nothing for it that gRPC needs.

mod body;

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Either, select};
use h2::Reason;
use h2::client::{Builder, SendRequest};
use http::{Request, Response};
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::Service;

pub use self::body::ResponseBody;
use crate::shared_stream::SharedStream;

/// HTTP/2 flow control, bytes.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// Longest list of headers that is taken from an agent, bytes.
const HEADERS_MAX: u32 = 16 * 1024;

/// Requests of HTTP/2 need a scheme and an authority; the agent looks at neither.
pub(crate) const ORIGIN: &str = "http://guest";

/// An open connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Connection {
    requests: SendRequest<Bytes>,
    /// What reads and writes the stream. It ends with the stream, or with the last clone.
    _task: Arc<JoinSet<()>>,
}

impl Connection {
    /// Begins HTTP/2 on a stream.
    pub(crate) async fn over(stream: SharedStream) -> Result<Self, h2::Error> {
        let mut builder = Builder::new();
        builder
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(HEADERS_MAX)
            .enable_push(false);
        let (requests, connection) = builder.handshake(stream).await?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            // Callers see it: what is under way fails, and what comes later.
            if let Err(error) = connection.await {
                tracing::debug!(%error, "session with a guest ended");
            }
        });
        Ok(Self { requests, _task: Arc::new(task) })
    }
}

impl Service<Request<Body>> for Connection {
    type Response = Response<ResponseBody>;
    type Error = Status;
    type Future = BoxFuture<'static, Result<Self::Response, Status>>;

    /// Always: a call waits for its turn itself, and of a connection that ended it says so with its code.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let call = call(self.requests.clone(), request);
        Box::pin(call.map(|response| response.map_err(|error| failed(&error))))
    }
}

/// Sends a request and waits for the headers of its response. The rest of its body is sent beside the response:
/// only calls that stream have a task. Dropped, it ends the call.
async fn call(
    requests: SendRequest<Bytes>,
    request: Request<Body>,
) -> Result<Response<ResponseBody>, h2::Error> {
    // While the agent has as many streams open as it allows.
    let mut requests = requests.ready().await?;
    let (head, body) = request.into_parts();
    let (response, stream) = requests.send_request(Request::from_parts(head, ()), false)?;
    drop(requests);
    let (response, rest) = match select(response, body::send(body, stream).boxed()).await {
        Either::Left((response, rest)) => (response?, Some(rest)),
        Either::Right(((), response)) => (response.await?, None),
    };
    Ok(response.map(|received| ResponseBody::new(received, rest)))
}

/// A stream that the agent reset has the code that gRPC gives it (gRPC over HTTP/2, "Errors"). Anything else is the end of the
/// session.
fn failed(error: &h2::Error) -> Status {
    let Some(reason) = error.reason().filter(|_| error.is_reset() && error.is_remote()) else {
        return Status::unavailable(format!("the session ended: {error}"));
    };
    let code = match reason {
        Reason::REFUSED_STREAM => Code::Unavailable,
        Reason::CANCEL => Code::Cancelled,
        Reason::ENHANCE_YOUR_CALM => Code::ResourceExhausted,
        Reason::INADEQUATE_SECURITY => Code::PermissionDenied,
        _ => Code::Internal,
    };
    Status::new(code, format!("the agent ended the call: {error}"))
}

#[cfg(test)]
mod tests;

//! HTTP/2 to a guest agent, over the only stream that there is. A channel of tonic would reconnect when the stream ends and
//! queue calls meanwhile; with the thousands of sessions of a node, each would need memory for that.
//!
//! h2 is used directly: hyper would keep a queue of 8 KiB per session, and gRPC needs nothing else from it.

mod body;

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Either, select};
use h2::Reason;
use h2::client::{Builder, SendRequest};
use http::{Request, Response};
use tokio::sync::OnceCell;
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::Service;

pub use self::body::ResponseBody;
use crate::early::EarlySession;
use crate::shared_stream::SharedStream;

/// HTTP/2 flow control windows, bytes.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// Maximum size of a header list from an agent, bytes.
const HEADERS_MAX: u32 = 16 * 1024;

/// Scheme and authority, which HTTP/2 requests need; the agent ignores both.
pub(crate) const ORIGIN: &str = "http://guest";

/// Open connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Connection(Arc<Session>);

#[derive(Debug)]
struct Session {
    http2: OnceCell<Http2>,
    /// Session before HTTP/2, which the first call ends.
    early: Option<Box<EarlySession>>,
}

#[derive(Debug)]
struct Http2 {
    requests: SendRequest<Bytes>,
    /// Task that reads and writes the stream. It ends with the stream, or with the connection.
    _task: JoinSet<()>,
}

impl Connection {
    /// Starts HTTP/2 on a stream.
    pub(crate) async fn handshake(stream: SharedStream) -> Result<Self, h2::Error> {
        let http2 = OnceCell::new_with(Some(Http2::handshake(stream).await?));
        Ok(Self(Arc::new(Session { http2, early: None })))
    }

    /// Makes a connection whose agent sends reports until the first call, with which HTTP/2 starts.
    pub(crate) fn early(stream: SharedStream) -> Self {
        let early = Some(Box::new(EarlySession::new(stream)));
        Self(Arc::new(Session { http2: OnceCell::new(), early }))
    }

    /// Session before HTTP/2, if the connection began with one.
    pub(crate) fn before_http2(&self) -> Option<&EarlySession> {
        self.0.early.as_deref()
    }
}

impl Session {
    /// Returns the sender of requests, and begins HTTP/2 if it has not begun. Has the deadline of the call: the guest may be paused.
    async fn requests(&self) -> Result<SendRequest<Bytes>, Status> {
        let start = || async {
            let early = self.early.as_deref().ok_or_else(|| Status::unavailable("no session"))?;
            let ended =
                |error: &dyn std::error::Error| Status::unavailable(format!("the session ended: {error}"));
            let upgraded = early.upgrade().await.map_err(|e| ended(&e))?;
            Http2::handshake(upgraded).await.map_err(|e| ended(&e))
        };
        Ok(self.http2.get_or_try_init(start).await?.requests.clone())
    }
}

impl Http2 {
    async fn handshake(stream: SharedStream) -> Result<Self, h2::Error> {
        let mut builder = Builder::new();
        builder
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(HEADERS_MAX)
            .enable_push(false);
        let (requests, connection) = builder.handshake(stream).await?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            // Callers see the error as well: pending and later calls fail.
            if let Err(error) = connection.await {
                tracing::debug!(%error, "session with a guest ended");
            }
        });
        Ok(Self { requests, _task: task })
    }
}

impl Service<Request<Body>> for Connection {
    type Response = Response<ResponseBody>;
    type Error = Status;
    type Future = BoxFuture<'static, Result<Self::Response, Status>>;

    /// Always ready: a call waits itself until a stream is available, and returns the status of a connection that has ended.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let session = Arc::clone(&self.0);
        Box::pin(async move {
            let requests = session.requests().await?;
            call(requests, request).await.map_err(|error| to_status(&error))
        })
    }
}

/// Sends a request and waits for the headers of its response. The rest of the request body is sent concurrently with the
/// response: only streaming calls have a task. Dropping the future ends the call.
async fn call(
    requests: SendRequest<Bytes>,
    request: Request<Body>,
) -> Result<Response<ResponseBody>, h2::Error> {
    // Waits while the agent has its maximum number of streams open.
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

/// Converts an error to a status. A stream reset by the agent gets the code that gRPC defines for it (gRPC over HTTP/2,
/// "Errors"). Any other error ends the session.
fn to_status(error: &h2::Error) -> Status {
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

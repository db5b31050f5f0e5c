//! HTTP/2 to a guest agent, on the one stream that there is. A channel of tonic would connect again when it ends and queue
//! calls meanwhile; a node has thousands of sessions, and each would have room for that.

use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::Service;

use crate::shared_stream::SharedStream;

/// HTTP/2 flow control, bytes.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;

/// Requests of HTTP/2 need a scheme and an authority; the agent looks at neither.
pub(crate) const ORIGIN: &str = "http://guest";

/// An open connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Connection {
    requests: SendRequest<Body>,
    /// What reads and writes the stream. It ends with the stream, or with the last clone.
    _task: Arc<JoinSet<()>>,
}

impl Connection {
    /// Begins HTTP/2 on a stream.
    pub(crate) async fn over(stream: SharedStream) -> hyper::Result<Self> {
        let mut builder = Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
        let (requests, connection) = builder.handshake(TokioIo::new(stream)).await?;
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
    type Response = Response<Incoming>;
    type Error = Status;
    type Future = BoxFuture<'static, Result<Self::Response, Status>>;

    /// Always: HTTP/2 has no queue to wait for, and of a connection that ended the call says so with its code.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let response = self.requests.send_request(request);
        Box::pin(async { response.await.map_err(failed) })
    }
}

/// A stream that the agent reset has the code that gRPC gives it. Anything else is the end of the session.
fn failed(error: hyper::Error) -> Status {
    let ended = format!("the session ended: {error}");
    let status = Status::from_error(Box::new(error));
    if status.code() == Code::Unknown { Status::unavailable(ended) } else { status }
}

#[cfg(test)]
mod tests {
    use coracle_proto::guest::StatusRequest;
    use coracle_proto::guest::guest_client::GuestClient;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    use super::*;
    use crate::shared_stream::share;
    use crate::{GuestError, GuestErrorKind};

    #[tokio::test]
    async fn calls_of_a_session_that_ends_are_unavailable() {
        for why in ["the agent is gone", "the host hung up"] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let (stream, hangup) = share(ours);
            let connection = Connection::over(stream).await.unwrap();
            let mut client = GuestClient::with_origin(connection, http::Uri::from_static(ORIGIN));
            let mut asking = client.clone();
            let end = async {
                theirs.read_u8().await.unwrap();
                match why {
                    "the agent is gone" => drop(theirs),
                    _ => hangup.hang_up(),
                }
            };
            let (under_way, ()) = tokio::join!(asking.status(StatusRequest {}), end);
            let under_way = under_way.unwrap_err();
            let later = client.status(StatusRequest {}).await.unwrap_err();
            for status in [under_way, later] {
                assert_eq!(GuestError::from(status).kind(), GuestErrorKind::Unavailable, "{why}");
            }
        }
    }
}

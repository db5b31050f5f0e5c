//! Request and response bodies as HTTP/2 streams.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::future::{BoxFuture, Either, select};
use h2::{Reason, RecvStream, SendStream};
use http_body::Frame;
use http_body_util::BodyExt as _;
use tokio::task::JoinSet;
use tonic::Status;
use tonic::body::Body;

use super::to_status;

/// Sends the whole body of a request, or stops when the agent refuses more; the response then has the reason. Dropped before
/// the end of the body, this resets the stream.
pub(super) async fn send(mut body: Body, mut stream: SendStream<Bytes>) {
    while let Some(frame) = next(&mut body, &mut stream).await {
        let Ok(frame) = frame else { return stream.send_reset(Reason::CANCEL) };
        // gRPC has no trailers in requests (gRPC over HTTP/2, "Requests").
        let Ok(data) = frame.into_data() else { continue };
        if !has_room(&mut stream).await || stream.send_data(data, false).is_err() {
            return;
        }
    }
    // Fails if the stream is already closed.
    let _closed = stream.send_data(Bytes::new(), true);
}

/// Next frame of a body; `None` after the last one, and when the agent resets the stream.
async fn next(body: &mut Body, stream: &mut SendStream<Bytes>) -> Option<Result<Frame<Bytes>, Status>> {
    match select(pin!(poll_fn(|cx| stream.poll_reset(cx))), body.frame()).await {
        Either::Left(_) => None,
        Either::Right((frame, _)) => frame,
    }
}

/// Waits for capacity in the flow control windows. HTTP/2 buffers the part of the next frame that exceeds it. Returns false
/// when the stream is closed.
async fn has_room(stream: &mut SendStream<Bytes>) -> bool {
    // One byte: capacity reserved for a whole message, and not used at once, would be missing on other streams.
    stream.reserve_capacity(1);
    while stream.capacity() == 0 {
        if !matches!(poll_fn(|cx| stream.poll_capacity(cx)).await, Some(Ok(_))) {
            return false;
        }
    }
    true
}

/// Body of a response. Dropping it ends the call.
#[derive(Debug)]
pub struct ResponseBody {
    received: RecvStream,
    progress: Progress,
    /// Task that sends the rest of the request.
    _request: JoinSet<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Data,
    Trailers,
    End,
}

impl ResponseBody {
    /// Makes the body from the stream behind the response headers, and the future that sends the rest of the request.
    pub(super) fn new(received: RecvStream, rest: Option<BoxFuture<'static, ()>>) -> Self {
        let mut request = JoinSet::new();
        if let Some(rest) = rest {
            request.spawn(rest);
        }
        Self { received, progress: Progress::Data, _request: request }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if self.progress == Progress::Data {
            if let Some(data) = ready!(self.received.poll_data(cx)) {
                let data = data?;
                self.received.flow_control().release_capacity(data.len())?;
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            self.progress = Progress::Trailers;
        }
        if self.progress == Progress::Trailers {
            let trailers = ready!(self.received.poll_trailers(cx))?;
            self.progress = Progress::End;
            return Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))));
        }
        Poll::Ready(None)
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let next = ready!(self.poll_next(cx));
        if matches!(next, Some(Err(_))) {
            self.progress = Progress::End;
        }
        Poll::Ready(next.map(|frame| frame.map_err(|error| to_status(&error))))
    }

    fn is_end_stream(&self) -> bool {
        self.progress == Progress::End
    }
}

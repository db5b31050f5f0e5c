//! Bodies of requests and responses, as streams of HTTP/2.

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

use super::failed;

/// Sends the body of a request to its end, or until the agent wants no more of it: the response says why. A stream whose body
/// was not sent whole is reset when this is dropped.
pub(super) async fn send(mut body: Body, mut stream: SendStream<Bytes>) {
    while let Some(frame) = next(&mut body, &mut stream).await {
        let Ok(frame) = frame else { return stream.send_reset(Reason::CANCEL) };
        // gRPC has no trailers in requests (gRPC over HTTP/2, "Requests").
        let Ok(data) = frame.into_data() else { continue };
        if !has_room(&mut stream).await || stream.send_data(data, false).is_err() {
            return;
        }
    }
    // Fails for a stream that is closed already.
    let _closed = stream.send_data(Bytes::new(), true);
}

/// The next frame of a body; `None` after the last one, and when the agent resets the stream.
async fn next(body: &mut Body, stream: &mut SendStream<Bytes>) -> Option<Result<Frame<Bytes>, Status>> {
    match select(pin!(poll_fn(|cx| stream.poll_reset(cx))), body.frame()).await {
        Either::Left(_) => None,
        Either::Right((frame, _)) => frame,
    }
}

/// Waits for room in the windows of flow control; of what is sent then, HTTP/2 keeps the part that has none. False when the
/// stream is closed.
async fn has_room(stream: &mut SendStream<Bytes>) -> bool {
    // One byte: room for a whole message that is not used at once would be missing elsewhere.
    stream.reserve_capacity(1);
    while stream.capacity() == 0 {
        if !matches!(poll_fn(|cx| stream.poll_capacity(cx)).await, Some(Ok(_))) {
            return false;
        }
    }
    true
}

/// The body of a response. The call ends when it is dropped.
#[derive(Debug)]
pub struct ResponseBody {
    received: RecvStream,
    progress: Progress,
    /// Sends the rest of the request.
    _request: JoinSet<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Data,
    Trailers,
    End,
}

impl ResponseBody {
    /// What comes after the headers of a response, and what was not sent of its request yet.
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
        Poll::Ready(next.map(|frame| frame.map_err(|error| failed(&error))))
    }

    fn is_end_stream(&self) -> bool {
        self.progress == Progress::End
    }
}

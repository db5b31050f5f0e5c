use std::convert::Infallible;
use std::future::poll_fn;
use std::time::Duration;

use coracle_proto::guest::guest_client::GuestClient;
use coracle_proto::guest::{self, StatusRequest};
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue};
use http_body_util::{BodyExt as _, StreamBody};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use super::*;
use crate::shared_stream::{Hangup, share};
use crate::{GuestError, GuestErrorKind};

/// Exceeds the default windows of an h2 server (65,535 bytes).
const LONG: usize = 300_000;
const LIMIT: Duration = Duration::from_secs(10);

type Agent = h2::server::Connection<UnixStream, Bytes>;

/// A connection and the HTTP/2 server at its other end.
async fn pair() -> (Connection, Hangup, Agent) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (stream, hangup) = share(ours);
    let (connection, agent) = tokio::join!(Connection::handshake(stream), h2::server::handshake(theirs));
    (connection.unwrap(), hangup, agent.unwrap())
}

/// Makes `agent` answer one call with `answer`, while its connection is polled.
async fn serve<T>(agent: &mut Agent, answer: impl AsyncFnOnce(RecvStream, SendResponse<Bytes>) -> T) -> T {
    let (request, respond) = agent.accept().await.unwrap().unwrap();
    tokio::select! {
        answered = answer(request.into_body(), respond) => answered,
        end = poll_fn(|cx| agent.poll_closed(cx)) => panic!("the connection ended: {end:?}"),
    }
}

/// A request whose body is read from the channel.
fn request() -> (mpsc::Sender<Bytes>, Request<Body>) {
    let (sender, receiver) = mpsc::channel(1);
    let frames = ReceiverStream::new(receiver).map(|data| Ok::<_, Infallible>(http_body::Frame::data(data)));
    (sender, Request::post(format!("{ORIGIN}/call")).body(Body::new(StreamBody::new(frames))).unwrap())
}

async fn read(body: &mut RecvStream) -> usize {
    let mut length = 0;
    while let Some(data) = body.data().await {
        let data = data.unwrap();
        length += data.len();
        body.flow_control().release_capacity(data.len()).unwrap();
    }
    length
}

#[tokio::test]
async fn calls_of_a_session_that_ends_are_unavailable() {
    for why in ["the agent is gone", "the host hung up"] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (stream, hangup) = share(ours);
        let connection = Connection::handshake(stream).await.unwrap();
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

#[tokio::test]
async fn http2_reset_maps_to_the_grpc_status_code() {
    for (reason, code) in [
        (Reason::REFUSED_STREAM, Code::Unavailable),
        (Reason::CANCEL, Code::Cancelled),
        (Reason::ENHANCE_YOUR_CALM, Code::ResourceExhausted),
        (Reason::INADEQUATE_SECURITY, Code::PermissionDenied),
        (Reason::NO_ERROR, Code::Internal),
        (Reason::PROTOCOL_ERROR, Code::Internal),
    ] {
        for answers_first in [false, true] {
            let (mut connection, _hangup, mut agent) = pair().await;
            let (_sender, request) = request();
            let reset = serve(&mut agent, async |_, mut respond| {
                if answers_first {
                    respond.send_response(Response::new(()), false).unwrap().send_reset(reason);
                } else {
                    respond.send_reset(reason);
                }
                std::future::pending::<()>().await;
            });
            let ended = async {
                match connection.call(request).await {
                    Err(status) => status,
                    Ok(response) => response.into_body().collect().await.unwrap_err(),
                }
            };
            let status = tokio::select! {
                status = timeout(LIMIT, ended) => status.unwrap(),
                () = reset => unreachable!(),
            };
            assert_eq!(status.code(), code, "{reason:?}, answers first: {answers_first}");
        }
    }
}

#[tokio::test]
async fn bodies_beyond_the_flow_control_window_are_exchanged() {
    let (mut connection, _hangup, mut agent) = pair().await;
    let (sender, request) = request();
    let whole = Notify::new();
    let send = async {
        for _ in 0..2 {
            sender.send(Bytes::from(vec![1; LONG])).await.unwrap();
        }
        drop(sender);
    };
    let receive = async {
        let response = connection.call(request).await.unwrap();
        let received = response.into_body().collect().await.unwrap();
        whole.notify_one();
        received
    };
    let answer = serve(&mut agent, async |mut body, mut respond| {
        let mut response = respond.send_response(Response::new(()), false).unwrap();
        let length = read(&mut body).await;
        response.send_data(Bytes::from(vec![2; LONG]), false).unwrap();
        let trailers = HeaderMap::from_iter([(http::header::ETAG, HeaderValue::from_static("end"))]);
        response.send_trailers(trailers).unwrap();
        whole.notified().await;
        length
    });
    let exchanged = async { tokio::join!(send, receive, answer) };
    let ((), received, sent) = timeout(LIMIT, exchanged).await.unwrap();
    assert_eq!(sent, 2 * LONG);
    assert_eq!(received.trailers().unwrap()["etag"], "end");
    assert_eq!(received.to_bytes().len(), LONG);
}

#[tokio::test]
async fn dropped_response_cancels_the_call() {
    for answered in [false, true] {
        let (mut connection, _hangup, mut agent) = pair().await;
        let (sender, request) = request();
        let (seen, mut begun) = mpsc::channel(1);
        let ask = async {
            let mut call = connection.call(request);
            sender.send(Bytes::from_static(b"begin")).await.unwrap();
            let response = tokio::select! {
                response = &mut call => Some(response.unwrap()),
                _ = begun.recv() => None,
            };
            assert_eq!(response.is_some(), answered);
        };
        let reset = serve(&mut agent, async |mut body, mut respond| {
            body.data().await.unwrap().unwrap();
            if answered {
                let mut response = respond.send_response(Response::new(()), false).unwrap();
                poll_fn(|cx| response.poll_reset(cx)).await.unwrap()
            } else {
                seen.send(()).await.unwrap();
                poll_fn(|cx| respond.poll_reset(cx)).await.unwrap()
            }
        });
        let ends = async { tokio::join!(ask, reset) };
        let ((), reason) = timeout(LIMIT, ends).await.unwrap();
        assert_eq!(reason, Reason::CANCEL, "answered: {answered}");
        assert!(sender.is_closed(), "the body of the request is dropped");
    }
}

#[tokio::test]
async fn first_call_upgrades_the_session_to_http2() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (stream, _hangup) = share(ours);
    let connection = Connection::early(stream);
    let mut client = GuestClient::with_origin(connection.clone(), http::Uri::from_static(ORIGIN));
    let mut second = client.clone();
    let calls = async { tokio::join!(client.status(StatusRequest {}), second.status(StatusRequest {})) };
    let answer = async {
        let mut request = [0; 8];
        theirs.read_exact(&mut request).await.unwrap();
        assert_eq!(request, guest::UPGRADE_MAGIC);
        let report = Some(guest::early_report::Report::Upgraded(guest::Upgraded {}));
        theirs.write_all(&guest::frame(&guest::EarlyReport { report })).await.unwrap();
        let mut agent = h2::server::handshake(theirs).await.unwrap();
        for _ in 0..2 {
            serve(&mut agent, async |_, mut respond| respond.send_reset(Reason::REFUSED_STREAM)).await;
        }
        poll_fn(|cx| agent.poll_closed(cx)).await
    };
    let (one, two) = tokio::select! {
        calls = timeout(LIMIT, calls) => calls.unwrap(),
        end = answer => panic!("the connection ended: {end:?}"),
    };
    for refused in [one, two] {
        assert!(refused.unwrap_err().message().contains("the agent ended the call"));
    }
}

#[tokio::test]
async fn call_cancelled_before_http2_upgrade_keeps_the_session() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (stream, _hangup) = share(ours);
    let mut client = GuestClient::with_origin(Connection::early(stream), http::Uri::from_static(ORIGIN));
    // The agent does not answer, as while its guest is paused.
    let given_up = timeout(Duration::from_millis(20), client.status(StatusRequest {})).await;
    assert!(given_up.is_err());
    let mut request = [0; 8];
    theirs.read_exact(&mut request).await.unwrap();
    assert_eq!(request, guest::UPGRADE_MAGIC);
    let report = Some(guest::early_report::Report::Upgraded(guest::Upgraded {}));
    theirs.write_all(&guest::frame(&guest::EarlyReport { report })).await.unwrap();
    let answer = async {
        let mut agent = h2::server::handshake(theirs).await.unwrap();
        serve(&mut agent, async |_, mut respond| respond.send_reset(Reason::REFUSED_STREAM)).await;
        poll_fn(|cx| agent.poll_closed(cx)).await
    };
    let status = tokio::select! {
        status = timeout(LIMIT, client.status(StatusRequest {})) => status.unwrap().unwrap_err(),
        end = answer => panic!("the connection ended: {end:?}"),
    };
    assert!(status.message().contains("the agent ended the call"));
}

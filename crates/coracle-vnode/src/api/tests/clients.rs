//! Clients of the API: plain requests, and a proxy for clients that cannot present a certificate.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Stdio;

use axum::body::Body;
use coracle_testkit::tools;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::world::{DEADLINE, Leaf, World, connect};

/// Response: status and body.
pub(super) type Answer = (u16, String);

/// Sends a request on a connection of its own. The connection lives as long as `tasks`.
pub(super) async fn begin(
    world: &World,
    leaf: Option<Leaf>,
    request: Request<Body>,
    tasks: &mut JoinSet<()>,
) -> Response<Incoming> {
    let stream = world.connect(leaf, b"http/1.1").await;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tasks.spawn(async move { drop(connection.await) });
    timeout(DEADLINE, sender.send_request(request)).await.expect("no answer").unwrap()
}

/// Sends a request and reads the whole response.
pub(super) async fn send(world: &World, leaf: Option<Leaf>, request: Request<Body>) -> Answer {
    let mut tasks = JoinSet::new();
    let response = begin(world, leaf, request, &mut tasks).await;
    let status = response.status().as_u16();
    let body = timeout(DEADLINE, response.into_body().collect()).await.expect("no end").unwrap();
    (status, String::from_utf8_lossy(&body.to_bytes()).into_owned())
}

/// Like [`send`], over HTTP/2.
pub(super) async fn send_http2(world: &World, leaf: Option<Leaf>, request: Request<Body>) -> Answer {
    let stream = world.connect(leaf, b"h2").await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let mut tasks = JoinSet::new();
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tasks.spawn(async move { drop(connection.await) });
    let response = timeout(DEADLINE, sender.send_request(request)).await.expect("no answer").unwrap();
    let status = response.status().as_u16();
    let body = timeout(DEADLINE, response.into_body().collect()).await.expect("no end").unwrap();
    (status, String::from_utf8_lossy(&body.to_bytes()).into_owned())
}

/// Returns a request without a body.
pub(super) fn request(method: &str, path: &str) -> Request<Body> {
    Request::builder().method(method).uri(path).header("host", "node").body(Body::empty()).unwrap()
}

/// Proxy that forwards plain connections to the API with a client certificate.
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Proxy {
    pub(super) async fn new(world: &World, name: &'static str, group: &'static str) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (api, leaf) = (world.address, world.ca.leaf(name, group));
        let ca = world.ca.copy();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut plain, _)) = listener.accept().await {
                let leaf = (leaf.0.clone(), leaf.1.clone_key());
                let mut tls = connect(api, &ca, Some(leaf), b"http/1.1").await.unwrap();
                connections
                    .spawn(async move { drop(tokio::io::copy_bidirectional(&mut plain, &mut tls).await) });
            }
        });
        Self { address, _tasks: tasks }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

/// Starts the streaming client of client-go; `None` if it is not installed.
pub(super) fn streaming_client(args: &[&str]) -> Option<Child> {
    let [client] = tools::require(["streaming-client"])?;
    Some(spawn(Command::new(client).args(args)))
}

pub(super) fn spawn(command: &mut Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.spawn().unwrap()
}

/// Returns exit code, output and errors of a client that gets `input`.
pub(super) async fn finish(mut child: Child, input: &[u8]) -> (Option<i32>, String, String) {
    let mut stdin = child.stdin.take().unwrap();
    let writing = async {
        let _the_client_may_end_first = stdin.write_all(input).await;
        drop(stdin);
    };
    let ending = async { tokio::join!(writing, child.wait_with_output()).1.unwrap() };
    let output = timeout(DEADLINE, ending).await.expect("the client does not end");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

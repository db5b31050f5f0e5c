//! Blob of many parts, on an object store behind a slow link.
//!
//! `CORACLE_BLOB_BYTES` is the size of the blob, `CORACLE_WIRE_BYTES` the rate of the link in bytes per second.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::header::TRANSFER_ENCODING;
use axum::http::{Method, StatusCode};
use axum::response::Response;
use coracle_registry::S3Config;
use coracle_testkit::elapse;
use coracle_testkit::s3::{ACCESS_KEY, BUCKET, S3Server, SECRET_KEY};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::common::{Registry, digest, noise, start_with};

/// Delay of a request, in addition to the time for its bytes.
const LATENCY: Duration = Duration::from_millis(20);

/// Limit of bytes on the link in addition to the blob: lists and responses count, headers do not.
const BYTES_BESIDE: u64 = 256 << 10;

/// Request that passed over the link.
#[derive(Debug)]
struct Passed {
    method: Method,
    query: String,
    bytes: u64,
}

/// Requests to answer with 403, each as often as it is listed.
type Refusals = Vec<(Method, &'static str)>;

/// Object store behind a link that delays and counts.
struct SlowStore {
    url: String,
    passed: Arc<Mutex<Vec<Passed>>>,
    refusals: Arc<Mutex<Refusals>>,
    /// POST requests whose response is lost once.
    losses: Arc<Mutex<Refusals>>,
    _tasks: JoinSet<()>,
    _store: S3Server,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

impl SlowStore {
    async fn start() -> Option<Self> {
        let store = S3Server::start().unwrap()?;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (passed, refusals, losses) = (Arc::default(), Arc::default(), Arc::default());
        let link = Link {
            to: store.url().to_owned(),
            http: reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap(),
            rate: number("CORACLE_WIRE_BYTES", 8 << 20),
            turn: tokio::sync::Mutex::default(),
            passed: Arc::clone(&passed),
            refusals: Arc::clone(&refusals),
            losses: Arc::clone(&losses),
        };
        let link = Arc::new(link);
        let router = axum::Router::new().fallback(move |request| {
            let link = Arc::clone(&link);
            async move { link.pass(request).await }
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Some(Self { url, passed, refusals, losses, _tasks: tasks, _store: store })
    }

    fn config(&self) -> S3Config {
        S3Config {
            endpoint: self.url.clone(),
            region: "us-east-1".into(),
            bucket: BUCKET.into(),
            prefix: "epoch/".into(),
            access_key: ACCESS_KEY.into(),
            secret_key: SECRET_KEY.into(),
        }
    }

    async fn registry(&self) -> Registry {
        let s3 = self.config();
        start_with(move |c| c.s3 = Some(s3)).await
    }

    fn take(&self) -> Vec<Passed> {
        std::mem::take(&mut self.passed.lock().unwrap())
    }

    fn refuse(&self, refusals: &[(Method, &'static str)]) {
        self.refusals.lock().unwrap().extend_from_slice(refusals);
    }
}

struct Link {
    to: String,
    http: reqwest::Client,
    rate: u64,
    turn: tokio::sync::Mutex<()>,
    passed: Arc<Mutex<Vec<Passed>>>,
    refusals: Arc<Mutex<Refusals>>,
    losses: Arc<Mutex<Refusals>>,
}

impl Link {
    async fn pass(&self, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap();
        let query = parts.uri.query().unwrap_or_default().to_owned();
        // The delay of a slow link is the subject of the test.
        elapse(LATENCY).await;
        self.carry(&body).await;
        let is_lost = take_refusal(&self.losses, &parts.method, &query);
        if take_refusal(&self.refusals, &parts.method, &query) {
            return Response::builder().status(403).body(Body::empty()).unwrap();
        }
        let up = body.len() as u64;
        let url = format!("{}{}", self.to, parts.uri.path_and_query().unwrap());
        let sent = self.http.request(parts.method.clone(), url).headers(parts.headers).body(body);
        let answer = sent.send().await.unwrap();
        let (status, mut headers) = (answer.status(), answer.headers().clone());
        // A long list comes in chunks, and is forwarded as a whole.
        headers.remove(TRANSFER_ENCODING);
        let body = answer.bytes().await.unwrap();
        self.carry(&body).await;
        let bytes = up + body.len() as u64;
        self.passed.lock().unwrap().push(Passed { method: parts.method, query, bytes });
        let status = if is_lost { StatusCode::SERVICE_UNAVAILABLE } else { status };
        let mut response = Response::builder().status(status).body(Body::from(body)).unwrap();
        *response.headers_mut() = headers;
        response
    }

    /// One link for all requests: bytes wait for earlier ones.
    async fn carry(&self, bytes: &Bytes) {
        let _turn = self.turn.lock().await;
        elapse(Duration::from_secs_f64(bytes.len() as f64 / self.rate as f64)).await;
    }
}

/// Removes a request from the list. True when it was listed.
fn take_refusal(list: &Mutex<Refusals>, method: &Method, query: &str) -> bool {
    let mut list = list.lock().unwrap();
    let found = list.iter().position(|(m, part)| m == method && query.contains(part));
    found.map(|at| list.remove(at)).is_some()
}

fn blob() -> Bytes {
    noise(7, usize::try_from(number("CORACLE_BLOB_BYTES", 12_000_000)).unwrap()).into()
}

fn bytes(passed: &[Passed]) -> u64 {
    passed.iter().map(|p| p.bytes).sum()
}

/// Number of multipart uploads that were begun, but neither completed nor aborted.
fn open_joins(passed: &[Passed]) -> i64 {
    let ends = |p: &&Passed| p.query.starts_with("uploadId=") && p.method != Method::PUT;
    let begun = passed.iter().filter(|p| p.method == Method::POST && p.query.starts_with("uploads")).count();
    i64::try_from(begun).unwrap() - i64::try_from(passed.iter().filter(ends).count()).unwrap()
}

async fn upload_chunk(registry: &Registry, bytes: Bytes) -> String {
    let at = registry.begin("a").await;
    let http = reqwest::Client::new();
    let patch = http.patch(format!("{}{at}", registry.url)).bearer_auth(&registry.token).body(bytes);
    assert_eq!(patch.send().await.unwrap().status(), 202);
    at
}

async fn finish(registry: &Registry, at: &str, named: &str) -> u16 {
    let http = reqwest::Client::new();
    let put = http.put(format!("{}{at}?digest={named}", registry.url)).bearer_auth(&registry.token);
    put.send().await.unwrap().status().as_u16()
}

#[tokio::test]
async fn large_blob_on_s3_moves_once() {
    let Some(store) = SlowStore::start().await else { return };
    let registry = store.registry().await;
    let blob = blob();
    let named = digest(&blob);
    let size = blob.len() as u64;
    let pieces = size.div_ceil(5 << 20);
    store.take();
    let at = upload_chunk(&registry, blob.clone()).await;
    let written = store.take();
    assert!(bytes(&written) <= size + BYTES_BESIDE, "{} bytes for {size}", bytes(&written));
    assert!(written.len() as u64 <= pieces + 8, "{} requests for {pieces} pieces", written.len());
    assert_eq!(finish(&registry, &at, &named).await, 201);
    let sealed = store.take();
    assert!(bytes(&sealed) <= BYTES_BESIDE + pieces * 512, "{} bytes moved again", bytes(&sealed));
    assert!(sealed.len() as u64 <= pieces + 16, "{} requests for {pieces} pieces", sealed.len());
    assert_eq!(open_joins(&sealed), 0);
    let http = reqwest::Client::new();
    let got = http.get(format!("{}/v2/a/blobs/{named}", registry.url)).send().await.unwrap();
    assert!(got.bytes().await.unwrap() == blob);
}

#[tokio::test]
async fn failed_join_is_aborted_and_retried() {
    let Some(store) = SlowStore::start().await else { return };
    let registry = store.registry().await;
    let blob = Bytes::from(noise(3, 11_000_000));
    let named = digest(&blob);
    let at = upload_chunk(&registry, blob.clone()).await;
    store.refuse(&[(Method::PUT, "partNumber=2")]);
    assert_eq!(finish(&registry, &at, &named).await, 500);
    assert_eq!(open_joins(&store.take()), 0, "the join is aborted");
    assert_eq!(finish(&registry, &at, &named).await, 201);
    assert!(registry.get(&format!("/v2/a/blobs/{named}")).await.body == blob);
    assert_eq!(open_joins(&store.take()), 0);
}

#[tokio::test]
async fn join_left_open_is_aborted_with_its_upload() {
    let Some(store) = SlowStore::start().await else { return };
    let registry = store.registry().await;
    let blob = Bytes::from(noise(5, 11_000_000));
    let at = upload_chunk(&registry, blob.clone()).await;
    // Simulates a kill of the registry during the join: nothing is aborted.
    store.refuse(&[(Method::PUT, "partNumber=2"), (Method::DELETE, "uploadId=")]);
    assert_eq!(finish(&registry, &at, &digest(&blob)).await, 500);
    assert_eq!(open_joins(&store.passed.lock().unwrap()), 1);
    assert_eq!(registry.call("DELETE", &at, &[], "").await.status, 204);
    assert_eq!(open_joins(&store.take()), 0, "its multipart upload goes with it");
}

#[tokio::test]
async fn small_chunks_on_s3_become_one_blob() {
    let Some(store) = SlowStore::start().await else { return };
    let registry = store.registry().await;
    let blob = noise(11, 13_000_000);
    let named = digest(&blob);
    let at = registry.begin("a").await;
    // Chunks end in the middle of parts: no part of an object except the last may be smaller than 5 MiB.
    let cuts = [0, 1, 3_000_000, 6_000_000, 6_000_001, 12_000_000, 13_000_000];
    for cut in cuts.windows(2) {
        let took = registry.call("PATCH", &at, &[], &blob[cut[0]..cut[1]]).await;
        assert_eq!(took.status, 202, "{}", String::from_utf8_lossy(&took.body));
    }
    store.take();
    assert_eq!(finish(&registry, &at, &named).await, 201);
    let sealed = store.take();
    assert!(bytes(&sealed) <= BYTES_BESIDE, "{} bytes moved again", bytes(&sealed));
    assert!(registry.get(&format!("/v2/a/blobs/{named}")).await.body == blob);
}

#[tokio::test]
async fn join_with_a_lost_response_succeeds() {
    let Some(store) = SlowStore::start().await else { return };
    let registry = store.registry().await;
    let blob = Bytes::from(noise(13, 11_000_000));
    let named = digest(&blob);
    let at = upload_chunk(&registry, blob.clone()).await;
    store.losses.lock().unwrap().push((Method::POST, "uploadId="));
    assert_eq!(finish(&registry, &at, &named).await, 201);
    assert!(registry.get(&format!("/v2/a/blobs/{named}")).await.body == blob);
}

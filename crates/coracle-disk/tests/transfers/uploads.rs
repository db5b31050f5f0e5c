//! Uploads to a registry whose tokens are valid for one request, or whose responses are lost.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use coracle_disk::{DiskOptions, pull_disk, push_disk};
use coracle_image::{PushOptions, StoreOptions};
use coracle_oci::{Credentials, Digest, Reference, Secret, Timeouts};
use tokio::task::JoinSet;

use crate::common::{Bench, Layer, Parts, Stored, noise, options, progress};

/// Fault in the first upload of each blob.
#[derive(Clone, Copy, Default, PartialEq)]
enum Fault {
    #[default]
    None,
    /// Each token expires after one request.
    ShortTokens,
    /// All bytes arrive, and the connection ends before the upload is finished.
    LostBeforeEnd,
    /// The upload is finished, and the connection ends before the response.
    LostAfterEnd,
}

#[derive(Default)]
struct State_ {
    blobs: BTreeMap<Digest, Vec<u8>>,
    manifests: BTreeMap<String, Vec<u8>>,
    uploads: BTreeMap<usize, Vec<u8>>,
    begun: usize,
    tokens: usize,
    good: String,
    /// Requests so far, as `METHOD what`.
    seen: Vec<String>,
}

struct Server {
    fault: Fault,
    address: SocketAddr,
    state: Mutex<State_>,
}

struct Running {
    server: Arc<Server>,
    _tasks: JoinSet<()>,
}

impl Running {
    async fn start(fault: Fault) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Arc::new(Server { fault, address, state: Mutex::default() });
        let app = Router::new()
            .route("/v2/", get(ping))
            .route("/token", get(token))
            .route("/v2/a/b/blobs/{digest}", get(blob))
            .route("/v2/a/b/blobs/uploads/", post(begin))
            .route("/v2/a/b/blobs/uploads/{id}", get(status).patch(append).put(finish))
            .route("/v2/a/b/manifests/{name}", get(manifest).put(put_manifest))
            .layer(axum::extract::DefaultBodyLimit::max(64 << 20))
            .with_state(server.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { server, _tasks: tasks }
    }

    fn reference(&self) -> Reference {
        format!("{}/a/b:1", self.server.address).parse().unwrap()
    }

    fn request_count(&self, what: &str) -> usize {
        self.server.state.lock().unwrap().seen.iter().filter(|s| s.starts_with(what)).count()
    }
}

impl Server {
    /// Records a request. `Err` when it has no valid token.
    fn record_request(&self, what: &str, headers: &HeaderMap) -> Result<(), Box<Response>> {
        let mut state = self.state.lock().unwrap();
        state.seen.push(what.to_owned());
        if self.fault != Fault::ShortTokens {
            return Ok(());
        }
        let shown = headers.get("authorization").and_then(|v| v.to_str().ok()).unwrap_or_default();
        if !state.good.is_empty() && shown == format!("Bearer {}", state.good) {
            state.good.clear();
            return Ok(());
        }
        state.seen.push(format!("refused {what}"));
        Err(Box::new(self.challenge()))
    }

    fn challenge(&self) -> Response {
        let value = format!("Bearer realm=\"http://{}/token\",service=\"test\"", self.address);
        (StatusCode::UNAUTHORIZED, [("www-authenticate", value)]).into_response()
    }

    fn accepted(&self, id: usize) -> Response {
        let bytes = self.state.lock().unwrap().uploads[&id].len();
        let range = format!("0-{}", bytes.saturating_sub(1));
        let location = format!("/v2/a/b/blobs/uploads/{id}");
        (StatusCode::ACCEPTED, [("location", location), ("range", range)]).into_response()
    }
}

/// Response whose connection ends after the headers, before the first byte of the body.
fn cut() -> Response {
    let failure = futures_util::stream::once(async { Err::<Bytes, _>(std::io::Error::other("cut")) });
    (StatusCode::SERVICE_UNAVAILABLE, Body::from_stream(failure)).into_response()
}

async fn ping(State(server): State<Arc<Server>>) -> Response {
    if server.fault == Fault::ShortTokens { server.challenge() } else { StatusCode::OK.into_response() }
}

async fn token(State(server): State<Arc<Server>>) -> Response {
    let mut state = server.state.lock().unwrap();
    state.tokens += 1;
    state.good = format!("token-{}", state.tokens);
    format!(r#"{{"token":"{}"}}"#, state.good).into_response()
}

async fn blob(State(server): State<Arc<Server>>, Path(digest): Path<Digest>, headers: HeaderMap) -> Response {
    if let Err(refused) = server.record_request("blob", &headers) {
        return *refused;
    }
    let found = server.state.lock().unwrap().blobs.get(&digest).cloned();
    found.map_or_else(|| StatusCode::NOT_FOUND.into_response(), IntoResponse::into_response)
}

async fn begin(State(server): State<Arc<Server>>, headers: HeaderMap) -> Response {
    if let Err(refused) = server.record_request("begin", &headers) {
        return *refused;
    }
    let id = {
        let mut state = server.state.lock().unwrap();
        state.begun += 1;
        let id = state.begun;
        state.uploads.insert(id, Vec::new());
        id
    };
    server.accepted(id)
}

async fn status(State(server): State<Arc<Server>>, Path(id): Path<usize>, headers: HeaderMap) -> Response {
    if let Err(refused) = server.record_request("status", &headers) {
        return *refused;
    }
    let known = server.state.lock().unwrap().uploads.contains_key(&id);
    if known { server.accepted(id) } else { StatusCode::NOT_FOUND.into_response() }
}

async fn append(
    State(server): State<Arc<Server>>,
    Path(id): Path<usize>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if let Err(refused) = server.record_request("append", &headers) {
        return *refused;
    }
    if body.is_empty() {
        return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
    }
    server.state.lock().unwrap().uploads.get_mut(&id).unwrap().extend(&body);
    server.accepted(id)
}

async fn finish(
    State(server): State<Arc<Server>>,
    Path(id): Path<usize>,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if let Err(refused) = server.record_request("finish", &headers) {
        return *refused;
    }
    let digest: Digest = query["digest"].parse().unwrap();
    let mut state = server.state.lock().unwrap();
    let Some(upload) = state.uploads.get_mut(&id) else { return StatusCode::NOT_FOUND.into_response() };
    let is_first = !body.is_empty();
    upload.extend(&body);
    if server.fault == Fault::LostBeforeEnd && is_first {
        return cut();
    }
    let bytes = state.uploads.remove(&id).unwrap();
    if Digest::of(&bytes) != digest {
        return StatusCode::BAD_REQUEST.into_response();
    }
    state.blobs.insert(digest, bytes);
    match server.fault {
        Fault::LostAfterEnd => cut(),
        _ => StatusCode::CREATED.into_response(),
    }
}

async fn manifest(
    State(server): State<Arc<Server>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    if let Err(refused) = server.record_request("manifest", &headers) {
        return *refused;
    }
    let found = server.state.lock().unwrap().manifests.get(&name).cloned();
    found.map_or_else(|| StatusCode::NOT_FOUND.into_response(), IntoResponse::into_response)
}

async fn put_manifest(
    State(server): State<Arc<Server>>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if let Err(refused) = server.record_request("put-manifest", &headers) {
        return *refused;
    }
    server.state.lock().unwrap().manifests.insert(name, body.to_vec());
    StatusCode::CREATED.into_response()
}

fn credentials() -> Credentials {
    Credentials::Basic { user: "u".into(), password: Secret::new("p") }
}

/// Pushes an image of one layer and returns its digest.
async fn push_image(running: &Running) -> Digest {
    let parts = Parts::new(vec![Stored::plain(&Layer::new().file("noise", noise(400_000, 77)).tar())]);
    let bench = Bench::with(StoreOptions { retries: 2, timeouts: Timeouts::default(), ..options() });
    bench.import(&parts).await.unwrap();
    let source = "localhost/test/image:1".parse().unwrap();
    // Pushes one blob at a time: otherwise the requests would use up each other's tokens.
    let options = PushOptions { credentials: credentials(), concurrency: 1, ..PushOptions::default() };
    let pushed = bench.store.push(&source, &running.reference(), &options, progress()).await.unwrap();
    assert_eq!(pushed.digest, Digest::of(&parts.manifest));
    for (digest, bytes) in parts.blobs().iter().filter(|(digest, _)| **digest != pushed.digest) {
        assert_eq!(running.server.state.lock().unwrap().blobs.get(digest), Some(bytes));
    }
    pushed.digest
}

#[tokio::test]
async fn image_push_renews_expired_tokens() {
    let running = Running::start(Fault::ShortTokens).await;
    push_image(&running).await;
    assert!(running.request_count("refused finish") >= 2, "a token expired before each body");
}

#[tokio::test]
async fn disk_transfer_renews_expired_tokens() {
    let running = Running::start(Fault::ShortTokens).await;
    let dir = tempfile::tempdir().unwrap();
    let (disk, copy) = (dir.path().join("disk.raw"), dir.path().join("copy.raw"));
    std::fs::write(&disk, noise(3 << 20, 2_654_435_761)).unwrap();
    let options = DiskOptions {
        credentials: credentials(),
        concurrency: Some(1),
        chunk_bytes: Some(1 << 20),
        retries: 2,
        ..DiskOptions::default()
    };
    let quiet: coracle_disk::DiskProgress = Arc::new(|_, _| {});
    let pushed = push_disk(&disk, &running.reference(), &options, quiet.clone()).await.unwrap();
    assert!(pushed.moved >= 2, "{pushed:?}");
    pull_disk(&running.reference(), &copy, &options, quiet).await.unwrap();
    assert!(std::fs::read(&copy).unwrap() == std::fs::read(&disk).unwrap());
}

#[tokio::test]
async fn push_finishes_a_complete_upload() {
    let running = Running::start(Fault::LostBeforeEnd).await;
    push_image(&running).await;
    assert_eq!(
        (running.request_count("begin"), running.request_count("append")),
        (2, 0),
        "two blobs, begun once each"
    );
}

#[tokio::test]
async fn push_finds_the_blob_after_a_lost_response() {
    let running = Running::start(Fault::LostAfterEnd).await;
    push_image(&running).await;
    assert_eq!(
        (running.request_count("begin"), running.request_count("finish")),
        (2, 2),
        "two blobs, sent once each"
    );
}

//! Server that lies, breaks connections, and demands tokens.

use std::{
    collections::{BTreeMap, HashSet},
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::get,
};
use coracle_image::{ImageError, PullOptions, StoreOptions};
use coracle_oci::{Algorithm, Credentials, Digest, OciError, Reference, Secret};
use tokio::task::JoinSet;

use crate::common::{Bench, Layer, MANIFEST_TYPE, Parts, Stored, noise, options, progress};

/// Fault of a server.
#[derive(Clone, Copy, Default, PartialEq)]
enum Fault {
    #[default]
    None,
    /// The first request for each layer breaks off in the middle.
    BreakOff,
    /// Like [`Fault::BreakOff`], and ranges are ignored.
    BreakOffNoRange,
    /// Wrong bytes of the right length.
    WrongBytes,
    /// More bytes than announced.
    TooLong,
    /// Every request gets status 500 twice before it succeeds.
    ServerError,
    /// Manifests never end.
    EndlessManifest,
    /// The manifest does not match its digest header.
    WrongManifest,
    /// Blobs are forbidden.
    Forbidden,
    /// Tokens are required and given to every client with the password.
    Tokens,
    /// Like [`Fault::Tokens`], and each token expires after one request.
    ShortTokens,
}

#[derive(Default)]
struct Server {
    fault: Fault,
    blobs: BTreeMap<Digest, Vec<u8>>,
    manifest: Vec<u8>,
    manifest_type: String,
    address: Mutex<Option<SocketAddr>>,
    /// Token that is valid now.
    good: Mutex<String>,
    /// Requests so far, as `path` or `path range`.
    seen: Mutex<Vec<String>>,
}

struct Running {
    server: Arc<Server>,
    reference: Reference,
    _tasks: JoinSet<()>,
}

impl Running {
    async fn start(fault: Fault, parts: &Parts) -> Self {
        Self::serve(Server {
            fault,
            blobs: parts.blobs(),
            manifest: parts.manifest.clone(),
            manifest_type: MANIFEST_TYPE.into(),
            ..Server::default()
        })
        .await
    }

    async fn serve(server: Server) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Arc::new(server);
        *server.address.lock().unwrap() = Some(address);
        let app = Router::new()
            .route("/v2/", get(ping))
            .route("/token", get(token))
            .route("/v2/a/b/manifests/{name}", get(manifest))
            .route("/v2/a/b/blobs/{digest}", get(blob))
            .with_state(server.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { server, reference: format!("{address}/a/b:1").parse().unwrap(), _tasks: tasks }
    }

    fn requests(&self) -> String {
        self.server.seen.lock().unwrap().join("\n")
    }
}

impl Server {
    /// Records a request and returns how often it was made before.
    fn note(&self, what: String) -> usize {
        let mut seen = self.seen.lock().unwrap();
        let before = seen.iter().filter(|s| s.split(' ').next() == what.split(' ').next()).count();
        seen.push(what);
        before
    }

    fn challenge(&self) -> Response {
        let address = self.address.lock().unwrap().unwrap();
        let value = format!("Bearer realm=\"http://{address}/token\",service=\"test\"");
        (StatusCode::UNAUTHORIZED, [("www-authenticate", value)]).into_response()
    }

    fn allows(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get("authorization").and_then(|v| v.to_str().ok()).unwrap_or_default();
        match self.fault {
            Fault::Tokens => shown == "Bearer good-token",
            Fault::ShortTokens => {
                let mut good = self.good.lock().unwrap();
                let is_good = !good.is_empty() && shown == format!("Bearer {good}");
                if is_good {
                    good.clear();
                }
                is_good
            }
            _ => true,
        }
    }
}

async fn ping(State(server): State<Arc<Server>>, headers: HeaderMap) -> Response {
    if server.allows(&headers) { StatusCode::OK.into_response() } else { server.challenge() }
}

async fn token(
    State(server): State<Arc<Server>>,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    let before = server.note(format!("token {}", query["scope"]));
    let login = headers.get("authorization").map(|v| v.to_str().unwrap().to_owned());
    if login.as_deref() == Some("Basic dTpw") && server.fault == Fault::ShortTokens {
        let token = format!("token-{before}");
        server.good.lock().unwrap().clone_from(&token);
        return format!(r#"{{"access_token":"{token}","expires_in":60}}"#).into_response();
    }
    if login.as_deref() == Some("Basic dTpw") {
        return r#"{"access_token":"good-token","expires_in":60}"#.into_response();
    }
    (StatusCode::UNAUTHORIZED, r#"{"errors":[{"code":"UNAUTHORIZED"}]}"#).into_response()
}

async fn manifest(
    State(server): State<Arc<Server>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    let before = server.note(format!("manifest-{name}"));
    if !server.allows(&headers) {
        return server.challenge();
    }
    let digest = Digest::of(&server.manifest).to_string();
    match server.fault {
        Fault::ServerError if before < 2 => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Fault::EndlessManifest => {
            let chunk = || Ok::<_, std::io::Error>(Bytes::from(vec![b' '; 64 << 10]));
            Body::from_stream(futures_util::stream::repeat_with(chunk)).into_response()
        }
        Fault::WrongManifest => {
            ([("docker-content-digest", Digest::of(b"else").to_string())], server.manifest.clone())
                .into_response()
        }
        _ => match name.parse::<Digest>().ok().filter(|d| d.to_string() != digest) {
            Some(other) => match server.blobs.get(&other) {
                Some(bytes) => ([("content-type", MANIFEST_TYPE)], bytes.clone()).into_response(),
                None => StatusCode::NOT_FOUND.into_response(),
            },
            None => (
                [("content-type", server.manifest_type.clone()), ("docker-content-digest", digest)],
                server.manifest.clone(),
            )
                .into_response(),
        },
    }
}

async fn blob(State(server): State<Arc<Server>>, Path(digest): Path<String>, headers: HeaderMap) -> Response {
    let range = headers.get("range").map(|v| v.to_str().unwrap().to_owned());
    let before = server.note(format!("blob-{digest} {}", range.as_deref().unwrap_or("whole")));
    if !server.allows(&headers) {
        return server.challenge();
    }
    let Some(bytes) = digest.parse().ok().and_then(|d: Digest| server.blobs.get(&d)).cloned() else {
        return StatusCode::NOT_FOUND.into_response();
    };
    // The configuration is small and always correct, so that faults hit layers only.
    if bytes.starts_with(b"{") {
        return bytes.into_response();
    }
    let start: usize =
        range.map_or(0, |r| r.strip_prefix("bytes=").unwrap().trim_end_matches('-').parse().unwrap());
    let length = bytes.len();
    let part = |start: usize, end: usize| {
        let first = Bytes::copy_from_slice(&bytes[start..end]);
        let cut = end < length;
        Body::from_stream(futures_util::stream::unfold(Some(first), move |first| async move {
            match first {
                Some(bytes) => Some((Ok(bytes), None)),
                // Waits until the first part is on its way: dropping the connection also drops what is buffered. The server
                // cannot see when the client has read it.
                None if cut => {
                    coracle_testkit::elapse(std::time::Duration::from_millis(100)).await;
                    Some((Err(std::io::Error::other("cut")), None))
                }
                None => None,
            }
        }))
    };
    match server.fault {
        Fault::BreakOff | Fault::BreakOffNoRange if before == 0 => part(0, length / 2).into_response(),
        Fault::BreakOffNoRange => part(0, length).into_response(),
        Fault::WrongBytes => vec![b'?'; length].into_response(),
        Fault::TooLong => [bytes.as_slice(), b"more"].concat().into_response(),
        Fault::ServerError if before < 2 => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Fault::Forbidden => StatusCode::FORBIDDEN.into_response(),
        _ if start > 0 => {
            let range = format!("bytes {start}-{}/{length}", length - 1);
            (StatusCode::PARTIAL_CONTENT, [("content-range", range)], part(start, length)).into_response()
        }
        _ => bytes.into_response(),
    }
}

fn parts() -> Parts {
    Parts::new(vec![Stored::plain(&Layer::new().file("noise", noise(400_000, 2_654_435_761)).tar())])
}

fn anonymous() -> PullOptions {
    PullOptions { credentials: Credentials::Anonymous, ..PullOptions::default() }
}

async fn pull(bench: &Bench, running: &Running) -> Result<coracle_image::Image, ImageError> {
    bench.store.pull(&running.reference, &anonymous(), progress()).await
}

#[tokio::test]
async fn broken_download_is_resumed() {
    let running = Running::start(Fault::BreakOff, &parts()).await;
    let bench = Bench::new();
    let image = pull(&bench, &running).await.unwrap();
    let half = image.layers[0].size_bytes / 2;
    assert!(running.requests().contains(&format!("bytes={half}-")), "{}", running.requests());
    bench.store.rootfs(&image).await.unwrap();
}

#[tokio::test]
async fn sha512_image_is_pulled_verified_and_pruned() {
    let parts = parts().with_digests(Algorithm::Sha512);
    let running = Running::start(Fault::BreakOff, &parts).await;
    let bench = Bench::new();
    let name = running.reference.with_digest(Digest::with(Algorithm::Sha512, &parts.manifest));
    let image = bench.store.pull(&name, &anonymous(), progress()).await.unwrap();
    let layer = image.layers[0].digest;
    assert_eq!(layer, Digest::with(Algorithm::Sha512, &parts.layers[0].bytes));
    assert!(bench.path().join("blobs/sha512").join(layer.hex()).exists());
    bench.store.rootfs(&image).await.unwrap();
    assert_eq!(bench.store.get(&name).await.unwrap().unwrap().digest, image.digest);
    let kept = bench.store.prune(&HashSet::new(), false).await.unwrap();
    assert_eq!(kept.removed, [], "a named image stays");
    assert!(bench.store.remove(&name).await.unwrap());
    let pruned = bench.store.prune(&HashSet::new(), false).await.unwrap();
    assert!(pruned.removed.iter().any(|removed| removed.path.ends_with(layer.hex())), "{pruned:?}");
}

#[tokio::test]
async fn sha512_mismatch_is_refused() {
    for (fault, want) in [(Fault::WrongBytes, "blob"), (Fault::WrongManifest, "manifest")] {
        let parts = parts().with_digests(Algorithm::Sha512);
        let running = Running::start(fault, &parts).await;
        let pinned = if want == "manifest" { b"other".as_slice() } else { &parts.manifest };
        let name = running.reference.with_digest(Digest::with(Algorithm::Sha512, pinned));
        let error = Bench::new().store.pull(&name, &anonymous(), progress()).await.unwrap_err();
        assert!(
            matches!(&error, ImageError::Oci(OciError::DigestMismatch { what, .. }) if what.contains(want)),
            "{error}"
        );
    }
}

#[tokio::test]
async fn download_without_ranges_restarts() {
    let running = Running::start(Fault::BreakOffNoRange, &parts()).await;
    pull(&Bench::new(), &running).await.unwrap();
}

#[tokio::test]
async fn damaged_partial_download_is_fetched_again() {
    let parts = parts();
    let running = Running::start(Fault::None, &parts).await;
    let layer = &parts.layers[0];
    for (why, rest, want) in [
        ("good rest", layer.bytes[..100_000].to_vec(), "bytes=100000-"),
        ("damaged rest", vec![b'?'; 100_000], "whole"),
        ("longer than the blob", vec![b'?'; layer.bytes.len() + 1], "whole"),
        ("complete", layer.bytes.clone(), ""),
    ] {
        let bench = Bench::new();
        std::fs::write(bench.path().join("partial").join(layer.diff_id.hex()), rest).unwrap();
        running.server.seen.lock().unwrap().clear();
        pull(&bench, &running).await.unwrap();
        let asked = running
            .requests()
            .lines()
            .filter(|l| l.contains(&layer.diff_id.hex()))
            .map(str::to_owned)
            .collect::<Vec<_>>()
            .join(",");
        assert!(asked.ends_with(want), "{why}: {asked}");
    }
}

#[tokio::test]
async fn transient_server_error_is_retried() {
    let running = Running::start(Fault::ServerError, &parts()).await;
    pull(&Bench::new(), &running).await.unwrap();
    let never = Bench::with(StoreOptions { retries: 0, ..options() });
    let running = Running::start(Fault::ServerError, &parts()).await;
    let error = pull(&never, &running).await.unwrap_err();
    assert!(
        matches!(error, ImageError::Oci(OciError::Registry { status: 500, .. })) && error.is_transient(),
        "{error}"
    );
}

#[tokio::test]
async fn wrong_bytes_are_refused_and_removed() {
    for (why, fault, want) in [
        ("wrong bytes", Fault::WrongBytes, "COR-IMG-007"),
        ("too long", Fault::TooLong, "COR-IMG-008"),
        ("endless manifest", Fault::EndlessManifest, "COR-IMG-008"),
        ("wrong manifest", Fault::WrongManifest, "COR-IMG-007"),
        ("forbidden blob", Fault::Forbidden, "COR-IMG-005"),
    ] {
        let running = Running::start(fault, &parts()).await;
        let bench = Bench::new();
        let before = bench.listing();
        let error = pull(&bench, &running).await.expect_err(why);
        assert_eq!(error.code(), want, "{why}: {error}");
        assert_eq!(bench.listing(), before, "{why}: nothing is left");
    }
}

#[tokio::test]
async fn invalid_manifest_is_refused() {
    let parts = parts();
    let spoil = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut manifest = serde_json::from_slice(&parts.manifest).unwrap();
        change(&mut manifest);
        manifest.to_string().into_bytes()
    };
    let schema1 =
        br#"{"schemaVersion":1,"name":"a/b","tag":"1","architecture":"amd64","fsLayers":[]}"#.to_vec();
    let index = serde_json::json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [
        {"mediaType": MANIFEST_TYPE, "digest": Digest::of(b"x"), "size": 1, "platform": {"os": "linux", "architecture": "riscv64"}}]});
    for (why, manifest, code, words) in [
        ("schema 1", schema1, "COR-IMG-009", "schema 1"),
        ("foreign architecture", index.to_string().into_bytes(), "COR-IMG-006", "linux/riscv64"),
        (
            "larger than the blob",
            spoil(&|m| m["layers"][0]["size"] = 7_000_000.into()),
            "COR-IMG-008",
            "announced",
        ),
        ("smaller than the blob", spoil(&|m| m["layers"][0]["size"] = 7.into()), "COR-IMG-008", "announced"),
        (
            "more than all disks",
            spoil(&|m| m["layers"][0]["size"] = (60u64 << 30).into()),
            "COR-IMG-010",
            "needs",
        ),
        (
            "more than the limit",
            spoil(&|m| m["layers"][0]["size"] = (65u64 << 30).into()),
            "COR-IMG-008",
            "at most",
        ),
        (
            "large configuration",
            spoil(&|m| m["config"]["size"] = (5u64 << 20).into()),
            "COR-IMG-008",
            "configuration",
        ),
        ("no json", b"<html>".to_vec(), "COR-IMG-008", "parse"),
    ] {
        let free = rustix::fs::statvfs("/tmp").unwrap();
        if code == "COR-IMG-010" && free.f_bavail * free.f_frsize > 60 << 30 {
            continue;
        }
        let server = Server { blobs: parts.blobs(), manifest, ..Server::default() };
        let running = Running::serve(server).await;
        let bench = Bench::with(StoreOptions { retries: 1, ..options() });
        let before = bench.listing();
        let error = pull(&bench, &running).await.expect_err(why);
        assert_eq!(error.code(), code, "{why}: {error}");
        assert!(error.to_string().contains(words), "{why}: {error}");
        assert_eq!(bench.listing(), before, "{why}: nothing is left");
    }
}

#[tokio::test]
async fn index_selects_the_platform() {
    let parts = parts();
    let entry = |digest: Digest, size: usize, architecture: &str| serde_json::json!({"mediaType": MANIFEST_TYPE, "digest": digest, "size": size, "platform": {"os": "linux", "architecture": architecture}});
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [
        entry(Digest::of(b"arm"), 3, "arm64"), entry(Digest::of(&parts.manifest), parts.manifest.len(), "amd64"), entry(Digest::of(b"?"), 1, "unknown")]});
    let index = index.to_string().into_bytes();
    let server = Server {
        blobs: parts.blobs(),
        manifest: index.clone(),
        manifest_type: "application/vnd.oci.image.index.v1+json".into(),
        ..Server::default()
    };
    let running = Running::serve(server).await;
    let bench = Bench::new();
    let image = pull(&bench, &running).await.unwrap();
    assert_eq!(image.digest, Digest::of(&parts.manifest));
    let by_index = running.reference.with_digest(Digest::of(&index));
    assert_eq!(
        bench.store.get(&by_index).await.unwrap().unwrap().digest,
        image.digest,
        "pinned by the index's digest"
    );
    running.server.seen.lock().unwrap().clear();
    let always = PullOptions { policy: coracle_image::PullPolicy::Always, ..anonymous() };
    bench.store.pull(&running.reference, &always, progress()).await.unwrap();
    assert_eq!(running.requests(), "manifest-1", "nothing is fetched again");
}

#[tokio::test]
async fn pull_renews_expired_tokens() {
    let running = Running::start(Fault::ShortTokens, &parts()).await;
    let credentials = Credentials::Basic { user: "u".into(), password: Secret::new("p") };
    let login = PullOptions { credentials, ..anonymous() };
    Bench::new().store.pull(&running.reference, &login, progress()).await.unwrap();
    let tokens = running.requests().lines().filter(|line| line.starts_with("token ")).count();
    assert!(tokens >= 3, "manifest, configuration and layer each needed a new one: {}", running.requests());
}

#[tokio::test]
async fn pull_exchanges_tokens() {
    let running = Running::start(Fault::Tokens, &parts()).await;
    let bench = Bench::new();
    let error = pull(&bench, &running).await.unwrap_err();
    assert!(matches!(error, ImageError::Oci(OciError::Unauthorized { .. })), "{error}");
    let login = PullOptions {
        credentials: Credentials::Basic { user: "u".into(), password: Secret::new("p") },
        ..anonymous()
    };
    bench.store.pull(&running.reference, &login, progress()).await.unwrap();
    assert!(running.requests().contains("token repository:a/b:pull"), "{}", running.requests());
    let bearer = PullOptions { credentials: Credentials::Bearer(Secret::new("good-token")), ..anonymous() };
    Bench::new().store.pull(&running.reference, &bearer, progress()).await.unwrap();
}

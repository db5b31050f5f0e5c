//! Invalid requests get the right status and error, and leave nothing behind.

use std::time::Duration;

use coracle_testkit::elapse;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::{INDEX, MANIFEST, Registry, digest, start, start_in, start_with};

fn assert_nothing_stored(registry: &Registry) {
    for part in ["blobs", "manifests", "tmp"] {
        assert!(registry.files(part).is_empty(), "{part}");
    }
}

/// Writes raw HTTP and returns the response until the server closes the connection or is silent.
async fn raw(registry: &Registry, pieces: &[&[u8]], close: bool) -> String {
    let mut stream = TcpStream::connect(registry.url.trim_start_matches("http://")).await.unwrap();
    for piece in pieces {
        if stream.write_all(piece).await.is_err() {
            break;
        }
        // Makes the server read each piece separately. TCP has no event for this.
        elapse(Duration::from_millis(50)).await;
    }
    if close {
        stream.shutdown().await.ok();
    }
    let mut answer = Vec::new();
    let _end = tokio::time::timeout(Duration::from_secs(4), stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn path_tricks_are_refused() {
    let registry = start().await;
    let named = digest(b"x");
    for path in [
        "/v2/../../etc/blobs/uploads/",
        "/v2/a/../b/blobs/uploads/",
        "/v2/%2e%2e/blobs/uploads/",
        "/v2/a%00b/blobs/uploads/",
        "/v2/A/blobs/uploads/",
    ] {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: r\r\nauthorization: Bearer {}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            registry.token
        );
        let answer = raw(&registry, &[head.as_bytes()], false).await;
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("NAME_INVALID"), "{path}: {answer}");
    }
    let body = registry.manifest("a", json!({})).await;
    for tag in ["..", ".x", "a%2Fb", "-x"] {
        let put = registry.put_manifest("a", tag, MANIFEST, &body).await;
        assert!(matches!(put.status, 400 | 404), "{tag}: {}", put.status);
    }
    assert_eq!(registry.get(&format!("/v2/a/blobs/{named}%2f..")).await.status, 404);
    assert!(registry.files("manifests").is_empty());
}

#[tokio::test]
async fn truncated_chunk_is_not_a_blob() {
    let registry = start().await;
    let at = registry.begin("a").await;
    let head = format!(
        "PUT {at}?digest={} HTTP/1.1\r\nhost: r\r\nauthorization: Bearer {}\r\ncontent-length: 10\r\n\r\n",
        digest(b"0123456789"),
        registry.token
    );
    raw(&registry, &[head.as_bytes(), b"01234"], true).await;
    let state = registry.call("GET", &at, &[], "").await;
    assert_eq!((state.status, state.header("range")), (204, Some("0-4")), "what came can be gone on with");
    assert_nothing_stored(&registry);
    let done = registry.call("PUT", &format!("{at}?digest={}", digest(b"0123456789")), &[], "56789").await;
    assert_eq!(done.status, 201);
}

#[tokio::test]
async fn slow_body_is_408() {
    let registry = start_with(|c| c.limits.body_idle = Duration::from_millis(300)).await;
    let at = registry.begin("a").await;
    let head = format!(
        "PATCH {at} HTTP/1.1\r\nhost: r\r\nauthorization: Bearer {}\r\ncontent-length: 1000\r\n\r\n",
        registry.token
    );
    let silent = raw(&registry, &[head.as_bytes(), b"0"], false).await;
    assert!(silent.starts_with("HTTP/1.1 408") && silent.contains("BLOB_UPLOAD_INVALID"), "{silent}");
    let drip: Vec<&[u8]> =
        std::iter::once(head.as_bytes()).chain(std::iter::repeat_n(b"0".as_slice(), 20)).collect();
    let slow = raw(&registry, &drip, false).await;
    assert!(slow.starts_with("HTTP/1.1 408"), "one byte now and then: {slow}");
    assert_nothing_stored(&registry);
}

#[tokio::test]
async fn slow_head_ends_the_connection() {
    let registry = start_with(|c| c.limits.head_idle = Duration::from_millis(300)).await;
    let began = std::time::Instant::now();
    raw(&registry, &[b"GET /v2/ HTTP/1.1\r\nhost"], false).await;
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn unknown_media_type_is_415() {
    let registry = start().await;
    let body = registry.manifest("a", json!({})).await;
    let put = registry
        .put_manifest("a", "v1", "application/vnd.docker.distribution.manifest.v1+prettyjws", &body)
        .await;
    assert_eq!((put.status, put.code().as_str()), (415, "MANIFEST_INVALID"));
    for body in [b"".as_slice(), b"{", b"[]", b"null", b"{\"schemaVersion\":2}", b"\xff\xfe"] {
        let put = registry.put_manifest("a", "v1", MANIFEST, body).await;
        assert_eq!((put.status, put.code().as_str()), (400, "MANIFEST_INVALID"), "{body:?}");
    }
    assert!(registry.files("manifests").is_empty());
}

#[tokio::test]
async fn upload_over_its_limit_is_413() {
    let registry = start_with(|c| c.limits.upload_bytes = 100).await;
    let bytes = vec![7; 101];
    let at = registry.begin("a").await;
    let said = registry.call("PATCH", &at, &[], bytes.clone()).await;
    assert_eq!((said.status, said.code().as_str()), (413, "SIZE_INVALID"));
    let stream = reqwest::Body::wrap_stream(futures_util::stream::iter([Ok::<_, std::io::Error>(bytes)]));
    let request = registry.request("PATCH", &at).bearer_auth(&registry.token).body(stream);
    assert_eq!(registry.send(request).await.status, 413, "also when it does not say how long it is");
    assert_nothing_stored(&registry);
}

#[tokio::test]
async fn exceeded_quota_is_403() {
    let registry = start_with(|c| c.limits.repository_quota = Some(1000)).await;
    registry.push("a", &[1; 900]).await;
    let at = registry.begin("a").await;
    assert_eq!(registry.call("PATCH", &at, &[], vec![2; 200]).await.status, 413, "more than is left");
    registry.push("a", &[3; 100]).await;
    let refused = registry.call("PATCH", &at, &[], vec![2; 1]).await;
    assert_eq!((refused.status, refused.code().as_str()), (403, "DENIED"));
    registry.push("b", &[2; 900]).await;
}

#[tokio::test]
async fn unknown_method_is_405() {
    let registry = start().await;
    for (method, path) in
        [("PUT", "/v2/_catalog"), ("POST", "/v2/a/manifests/v1"), ("PATCH", "/api/stats"), ("DELETE", "/v2/")]
    {
        let got = registry.call(method, path, &[], "").await;
        assert_eq!((got.status, got.code().as_str()), (405, "UNSUPPORTED"), "{method} {path}");
    }
    assert_eq!(registry.get("/nothing").await.status, 404);
}

/// Each upload is within the quota when it begins; both together are not.
#[tokio::test]
async fn quota_is_checked_when_a_blob_is_entered() {
    for shared in [true, false] {
        let registry = start_with(move |c| {
            let quota = if shared { &mut c.limits.quota } else { &mut c.limits.repository_quota };
            *quota = Some(1000);
        })
        .await;
        let (one, other) = (vec![1; 600], vec![2; 600]);
        let mut begun = Vec::new();
        for bytes in [&one, &other] {
            let at = registry.begin("a").await;
            assert_eq!(registry.call("PATCH", &at, &[], bytes.clone()).await.status, 202);
            begun.push(format!("{at}?digest={}", digest(bytes)));
        }
        assert_eq!(registry.call("PUT", &begun[0], &[], "").await.status, 201);
        let refused = registry.call("PUT", &begun[1], &[], "").await;
        assert_eq!((refused.status, refused.code().as_str()), (403, "DENIED"), "all blobs: {shared}");
        assert!(registry.files("uploads").is_empty(), "nothing waits for room");
        assert_eq!(registry.files("blobs").len(), 1);
    }
}

#[tokio::test]
async fn mount_over_the_repository_quota_is_403() {
    let registry = start_with(|c| c.limits.repository_quota = Some(1000)).await;
    let (one, other) = (registry.push("a", &[1; 600]).await, registry.push("b", &[2; 600]).await);
    let mount = async |blob: &str| {
        registry.call("POST", &format!("/v2/c/blobs/uploads/?mount={blob}"), &[], "").await
    };
    assert_eq!(mount(&one).await.status, 201);
    assert_eq!(mount(&one).await.status, 201, "it is there already");
    let refused = mount(&other).await;
    assert_eq!((refused.status, refused.code().as_str()), (403, "DENIED"));
    assert_eq!(registry.get(&format!("/v2/c/blobs/{other}")).await.status, 404);
}

#[tokio::test]
async fn invalid_content_range_is_400() {
    let registry = start().await;
    let at = registry.begin("a").await;
    for range in ["x", "0-", "-1-5", "bytes 0-x/9"] {
        let refused = registry.call("PATCH", &at, &[("content-range", range)], "12345").await;
        assert_eq!((refused.status, refused.code().as_str()), (400, "BLOB_UPLOAD_INVALID"), "{range}");
    }
    assert_eq!(registry.call("PATCH", &at, &[("content-range", "0-4")], "12345").await.status, 202);
}

/// A client requests a blob and reads nothing. After the idle time, its connection is free for other clients.
#[tokio::test]
async fn client_that_does_not_read_is_disconnected() {
    let registry = start_with(|c| {
        c.limits.body_idle = Duration::from_millis(500);
        // Two silent clients, and the client that pushed.
        c.limits.connections = 3;
    })
    .await;
    let blob = registry.push("a", &vec![7; 32 << 20]).await;
    let mut silent = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(registry.url.trim_start_matches("http://")).await.unwrap();
        let ask = format!("GET /v2/a/blobs/{blob} HTTP/1.1\r\nhost: r\r\n\r\n");
        stream.write_all(ask.as_bytes()).await.unwrap();
        silent.push(stream);
    }
    let answer =
        raw(&registry, &[b"GET /healthz HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n"], false).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "a slot is free: {answer:?}");
}

/// Small file system, mounted where this host permits it.
fn small() -> Option<tempfile::TempDir> {
    let dir = tempfile::tempdir().unwrap();
    let mut mount = std::process::Command::new("mount");
    let mounted = mount.args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"]).arg(dir.path()).status();
    if mounted.is_ok_and(|s| s.success()) {
        return Some(dir);
    }
    coracle_testkit::tools::skip("cannot mount a tmpfs");
    None
}

#[tokio::test]
async fn full_disk_is_507_and_the_registry_survives() {
    let Some(dir) = small() else { return };
    let path = dir.path().to_owned();
    let registry = start_in(dir, |_| {}).await;
    let bytes = vec![7; 9 << 20];
    let at = registry.begin("a").await;
    let refused = registry.call("PUT", &format!("{at}?digest={}", digest(&bytes)), &[], bytes).await;
    assert_eq!((refused.status, refused.code().as_str()), (507, "STORAGE_FULL"));
    assert_nothing_stored(&registry);
    assert!(registry.files("uploads").is_empty(), "what was written of it is gone");
    let named = registry.push("a", b"small").await;
    assert_eq!(registry.get(&format!("/v2/a/blobs/{named}")).await.body, b"small");
    registry.end().await;
    let mut unmount = std::process::Command::new("umount");
    assert!(unmount.arg("-l").arg(path).status().unwrap().success());
}

#[tokio::test]
async fn directory_of_a_running_registry_is_refused() {
    let registry = start().await;
    let config =
        coracle_registry::Config::new(registry.dir.path().to_owned(), "127.0.0.1:0".parse().unwrap());
    let metrics = coracle_registry::Metrics::register(&mut prometheus_client::registry::Registry::default());
    let refused = coracle_registry::serve(config, metrics, Default::default(), |_| {}).await.unwrap_err();
    let source = std::error::Error::source(&refused).unwrap().to_string();
    assert!(source.contains("belongs to another registry"), "{source}");
}

#[tokio::test]
async fn slow_request_is_408_for_any_client() {
    let registry = start_with(|c| c.limits.body_idle = Duration::from_millis(300)).await;
    let secret = format!("authorization: Bearer {}\r\n", registry.token);
    for (path, secret) in
        [("POST /v2/token", ""), ("POST /api/tokens", secret.as_str()), ("PUT /v2/a/manifests/v1", &secret)]
    {
        let head = format!("{path} HTTP/1.1\r\nhost: r\r\n{secret}content-length: 1000\r\n\r\n");
        let answer = raw(&registry, &[head.as_bytes(), b"{"], false).await;
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("SIZE_INVALID"), "{path}: {answer}");
    }
    let large = registry.call("POST", "/v2/token", &[], vec![b'x'; 70_000]).await;
    assert_eq!((large.status, large.code().as_str()), (413, "SIZE_INVALID"));
    assert_nothing_stored(&registry);
}

#[tokio::test]
async fn wrong_digest_and_oversize_manifest_leave_no_file() {
    let registry = start_with(|c| c.limits.manifest_bytes = 2000).await;
    let wrong = digest(b"what was meant");
    let at = registry.begin("a").await;
    for (method, path) in [
        ("PUT", format!("{at}?digest={wrong}")),
        ("POST", format!("/v2/a/blobs/uploads/?digest={wrong}")),
        ("PUT", format!("/v2/a/blobs/{wrong}")),
    ] {
        let refused = registry.call(method, &path, &[], "what came").await;
        assert_eq!((refused.status, refused.code().as_str()), (400, "DIGEST_INVALID"), "{method} {path}");
    }
    assert_eq!(registry.get(&format!("/v2/a/blobs/{wrong}")).await.status, 404);
    assert!(registry.files("uploads").is_empty(), "what was wrong is not gone on with");
    let large = json!({"annotations": {"long": "x".repeat(3000)}}).to_string();
    let stream = |text: String| {
        reqwest::Body::wrap_stream(futures_util::stream::iter([Ok::<_, std::io::Error>(text)]))
    };
    let silent = registry.request("PUT", "/v2/a/manifests/v1").bearer_auth(&registry.token);
    let silent = registry.send(silent.header("content-type", MANIFEST).body(stream(large.clone()))).await;
    let said = registry.put_manifest("a", "v1", MANIFEST, large.as_bytes()).await;
    for refused in [said, silent] {
        assert_eq!((refused.status, refused.code().as_str()), (413, "SIZE_INVALID"));
    }
    assert_nothing_stored(&registry);
}

#[tokio::test]
async fn manifest_without_space_is_507_and_accepted_later() {
    let Some(dir) = small() else { return };
    let path = dir.path().to_owned();
    let registry = start_in(dir, |_| {}).await;
    let body = registry.manifest("a", json!({"annotations": {"long": "x".repeat(40_000)}})).await;
    let before = registry.files("manifests");
    let filler = path.join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
    drop(file);
    let refused = registry.put_manifest("a", "v1", MANIFEST, &body).await;
    assert_eq!((refused.status, refused.code().as_str()), (507, "STORAGE_FULL"));
    assert_eq!(registry.get("/v2/a/manifests/v1").await.status, 404);
    assert_eq!((registry.files("manifests"), registry.files("tmp")), (before, Vec::new()));
    std::fs::remove_file(&filler).unwrap();
    assert_eq!(registry.put_manifest("a", "v1", MANIFEST, &body).await.status, 201);
    registry.end().await;
    let mut unmount = std::process::Command::new("umount");
    assert!(unmount.arg("-l").arg(path).status().unwrap().success());
}

/// A browser that stores the token as a password must not write on request of another site's page.
#[tokio::test]
async fn cross_site_write_is_refused() {
    let registry = start().await;
    for (site, status) in [("cross-site", 403), ("same-site", 403), ("same-origin", 201), ("none", 201)] {
        let made = registry.call("POST", "/api/tokens", &[("sec-fetch-site", site)], r#"{"name":"x"}"#).await;
        assert_eq!(made.status, status, "{site}");
    }
    assert_eq!(
        registry.call("GET", "/", &[("sec-fetch-site", "cross-site")], "").await.status,
        200,
        "a link"
    );
}

#[tokio::test]
async fn unsized_manifest_that_stalls_blocks_no_other() {
    let registry = start().await;
    let body = registry.manifest("a", json!({})).await;
    let mut stream = TcpStream::connect(registry.url.trim_start_matches("http://")).await.unwrap();
    let head = format!(
        "PUT /v2/a/manifests/slow HTTP/1.1\r\nhost: r\r\nauthorization: Bearer {}\r\ncontent-type: {MANIFEST}\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n",
        registry.token
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // The registry requests the body when it begins to read it.
    let mut asked = [0; 12];
    stream.read_exact(&mut asked).await.unwrap();
    assert_eq!(&asked, b"HTTP/1.1 100");
    stream.write_all(b"1\r\n{\r\n").await.unwrap();
    assert_eq!(registry.put_manifest("a", "quick", MANIFEST, &body).await.status, 201);
}

#[tokio::test]
async fn quota_sum_is_cached_between_chunks() {
    let clock = coracle_types::Clock::fixed(coracle_types::UnixMillis(1_800_000_000_000));
    let own = clock.clone();
    let registry = start_with(move |c| (c.clock, c.limits.quota) = (own, Some(1000))).await;
    let at = registry.begin("a").await;
    assert_eq!(registry.call("PATCH", &at, &[], vec![1; 100]).await.status, 202);
    // Acts as another replica that fills the quota.
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(registry.dir.path().join("registry.db"));
    let pool = sqlx::sqlite::SqlitePool::connect_with(options).await.unwrap();
    sqlx::query("INSERT INTO blobs (digest, size, state, touched) VALUES ('sha256:x', 1000, 1, 0)")
        .execute(&pool)
        .await
        .unwrap();
    assert_eq!(
        registry.call("PATCH", &at, &[], vec![1; 100]).await.status,
        202,
        "the sum is kept for a while"
    );
    clock.advance(Duration::from_secs(6));
    assert_eq!(registry.call("PATCH", &at, &[], vec![1; 100]).await.status, 403);
    let finish = format!("{at}?digest={}", digest(&[1; 200]));
    assert_eq!(registry.call("PUT", &finish, &[], "").await.status, 403, "what counts is the sum at the end");
}

/// Sizes in descriptors are compared with the content, because totals, quotas and downloads rely on them.
#[tokio::test]
async fn manifest_with_a_wrong_size_is_refused() {
    let registry = start().await;
    let layer = registry.push("a", b"layer").await;
    let entry = |size: usize| json!({"mediaType": "application/octet-stream", "digest": layer, "size": size});
    for (why, layers) in [
        ("short", json!([entry(4)])),
        ("long", json!([entry(6)])),
        ("two sizes", json!([entry(5), entry(6)])),
    ] {
        let body = registry.manifest("a", json!({"layers": layers})).await;
        let put = registry.put_manifest("a", "v1", MANIFEST, &body).await;
        assert_eq!((put.status, put.code().as_str()), (400, "MANIFEST_INVALID"), "{why}");
    }
    let (named, body) = registry.image("a", "").await;
    let child = json!({"mediaType": MANIFEST, "digest": named, "size": body.len() + 1});
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [child]}).to_string();
    let put = registry.put_manifest("a", "v1", INDEX, index.as_bytes()).await;
    assert_eq!((put.status, put.code().as_str()), (400, "MANIFEST_INVALID"));
    assert_eq!(registry.get("/v2/a/manifests/v1").await.status, 404);
}

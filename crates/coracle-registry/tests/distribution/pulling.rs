//! Specification: "Pull", and "Determining Support".

use crate::common::{MANIFEST, digest, noise, start};

#[tokio::test]
async fn base_must_answer_200_or_401() {
    let registry = start().await;
    let anonymous = registry.get("/v2/").await;
    assert_eq!(anonymous.status, 401);
    assert_eq!(anonymous.code(), "UNAUTHORIZED");
    assert_eq!(registry.call("GET", "/v2/", &[], "").await.status, 200);
}

#[tokio::test]
async fn legacy_version_header_is_on_every_answer() {
    let registry = start().await;
    for path in ["/v2/", "/v2/a/tags/list", "/v2/_catalog"] {
        assert_eq!(
            registry.get(path).await.header("docker-distribution-api-version"),
            Some("registry/2.0"),
            "{path}"
        );
    }
}

#[tokio::test]
async fn manifest_get_must_return_the_bytes_by_tag_and_by_digest() {
    let registry = start().await;
    let (named, body) = registry.image("a/b", "latest").await;
    for reference in ["latest", &named] {
        let got = registry.get(&format!("/v2/a/b/manifests/{reference}")).await;
        assert_eq!((got.status, &got.body), (200, &body), "byte for byte");
        assert_eq!(got.header("content-type"), Some(MANIFEST), "what was pushed");
        assert_eq!(got.header("docker-content-digest"), Some(named.as_str()));
    }
}

#[tokio::test]
async fn manifest_get_must_be_404_when_there_is_none() {
    let registry = start().await;
    registry.image("a", "latest").await;
    let absent = digest(b"absent");
    for path in ["/v2/a/manifests/other", "/v2/b/manifests/latest", &format!("/v2/a/manifests/{absent}")] {
        let got = registry.get(path).await;
        assert_eq!((got.status, got.code().as_str()), (404, "MANIFEST_UNKNOWN"), "{path}");
    }
    assert_eq!(registry.get("/v2/a/manifests/.INVALID_MANIFEST_NAME").await.status, 404);
}

#[tokio::test]
async fn manifest_head_must_have_the_length_and_no_body() {
    let registry = start().await;
    let (named, body) = registry.image("a", "latest").await;
    let got = registry.send(registry.request("HEAD", "/v2/a/manifests/latest")).await;
    assert_eq!((got.status, got.body.len()), (200, 0));
    assert_eq!(got.header("content-length"), Some(body.len().to_string().as_str()));
    assert_eq!(got.header("docker-content-digest"), Some(named.as_str()));
    let absent = registry.send(registry.request("HEAD", "/v2/a/manifests/other")).await;
    assert_eq!((absent.status, absent.body.len()), (404, 0));
}

#[tokio::test]
async fn blob_get_must_return_the_bytes() {
    let registry = start().await;
    for size in [0, 1, 511, 600_000, 3_000_000] {
        let bytes = noise(size as u64 + 1, size);
        let named = registry.push("a", &bytes).await;
        let got = registry.get(&format!("/v2/a/blobs/{named}")).await;
        assert_eq!((got.status, got.body == bytes), (200, true), "{size} bytes");
        assert_eq!(got.header("docker-content-digest"), Some(named.as_str()));
        assert_eq!(got.header("content-length"), Some(size.to_string().as_str()));
    }
}

#[tokio::test]
async fn blob_get_must_be_404_when_there_is_none() {
    let registry = start().await;
    let named = registry.push("a", b"here").await;
    for path in [format!("/v2/a/blobs/{}", digest(b"absent")), format!("/v2/b/blobs/{named}")] {
        let got = registry.get(&path).await;
        assert_eq!((got.status, got.code().as_str()), (404, "BLOB_UNKNOWN"), "{path}");
    }
}

#[tokio::test]
async fn blob_head_must_have_the_length_and_no_body() {
    let registry = start().await;
    let named = registry.push("a", b"12345").await;
    let got = registry.send(registry.request("HEAD", &format!("/v2/a/blobs/{named}"))).await;
    assert_eq!((got.status, got.body.len(), got.header("content-length")), (200, 0, Some("5")));
    assert_eq!(registry.send(registry.request("HEAD", &format!("/v2/b/blobs/{named}"))).await.status, 404);
}

#[tokio::test]
async fn blob_get_should_support_ranges() {
    let registry = start().await;
    let bytes = noise(7, 1_500_000);
    let named = registry.push("a", &bytes).await;
    let path = format!("/v2/a/blobs/{named}");
    for (range, want) in [
        ("bytes=0-0", 0..1),
        ("bytes=1000-1999", 1000..2000),
        ("bytes=600000-1400000", 600_000..1_400_001),
        ("bytes=1499990-", 1_499_990..1_500_000),
        ("bytes=-10", 1_499_990..1_500_000),
    ] {
        let got = registry.send(registry.request("GET", &path).header("range", range)).await;
        assert_eq!((got.status, got.body == bytes[want.clone()]), (206, true), "{range}");
        let said = format!("bytes {}-{}/1500000", want.start, want.end - 1);
        assert_eq!(got.header("content-range"), Some(said.as_str()));
    }
    let beyond = registry.send(registry.request("GET", &path).header("range", "bytes=1500000-")).await;
    assert_eq!((beyond.status, beyond.header("content-range")), (416, Some("bytes */1500000")));
    let backwards = registry.send(registry.request("GET", &path).header("range", "bytes=500-0")).await;
    assert_eq!(backwards.status, 416);
    let path = format!("/v2/a/blobs/{}", registry.push("a", b"").await);
    let nothing = registry.send(registry.request("GET", &path).header("range", "bytes=-5")).await;
    assert_eq!((nothing.status, nothing.header("content-range")), (200, None), "all of nothing");
}

#[tokio::test]
async fn conditional_requests_save_the_body() {
    let registry = start().await;
    let (named, _) = registry.image("a", "latest").await;
    let blob = registry.push("a", b"blob").await;
    for (path, etag) in
        [("/v2/a/manifests/latest".to_owned(), &named), (format!("/v2/a/blobs/{blob}"), &blob)]
    {
        let etag = format!("\"{etag}\"");
        assert_eq!(registry.get(&path).await.header("etag"), Some(etag.as_str()));
        let known = registry.send(registry.request("GET", &path).header("if-none-match", &etag)).await;
        assert_eq!((known.status, known.body.len()), (304, 0), "{path}");
        let other = registry.send(registry.request("GET", &path).header("if-none-match", "\"x\"")).await;
        assert_eq!(other.status, 200, "{path}");
    }
}

//! Specification: "Push".

use serde_json::json;

use crate::common::{INDEX, MANIFEST, digest, noise, sha512, start, start_with};

#[tokio::test]
async fn post_then_put_must_make_a_blob() {
    let registry = start().await;
    let begun = registry.call("POST", "/v2/a/blobs/uploads/", &[], "").await;
    assert_eq!(begun.status, 202);
    let at = begun.header("location").unwrap();
    assert!(at.starts_with("/v2/a/blobs/uploads/"), "{at}");
    assert_eq!(begun.header("range"), Some("0-0"));
    assert!(at.ends_with(begun.header("docker-upload-uuid").unwrap()));
    let named = digest(b"hello");
    let headers = [("content-type", "application/octet-stream")];
    let done = registry.call("PUT", &format!("{at}?digest={named}"), &headers, "hello").await;
    assert_eq!(done.status, 201);
    assert_eq!(done.header("location"), Some(format!("/v2/a/blobs/{named}").as_str()));
    assert_eq!(done.header("docker-content-digest"), Some(named.as_str()));
    assert_eq!(registry.get(done.header("location").unwrap()).await.body, b"hello");
}

#[tokio::test]
async fn single_post_must_make_a_blob() {
    let registry = start().await;
    let named = digest(b"hello");
    let done = registry.call("POST", &format!("/v2/a/blobs/uploads/?digest={named}"), &[], "hello").await;
    assert_eq!((done.status, done.header("location")), (201, Some(format!("/v2/a/blobs/{named}").as_str())));
    assert_eq!(registry.get(&format!("/v2/a/blobs/{named}")).await.body, b"hello");
}

#[tokio::test]
async fn chunks_must_be_taken_in_order() {
    let registry = start().await;
    let bytes = noise(3, 300_000);
    let at = registry.begin("a").await;
    for (first, last) in [(0, 99_999), (100_000, 199_999)] {
        let range = format!("{first}-{last}");
        let took = registry.call("PATCH", &at, &[("content-range", &range)], &bytes[first..=last]).await;
        assert_eq!((took.status, took.header("range")), (202, Some(format!("0-{last}").as_str())));
        assert!(took.header("location").is_some());
    }
    let at = format!("{at}?digest={}", digest(&bytes));
    let done = registry.call("PUT", &at, &[("content-range", "200000-299999")], &bytes[200_000..]).await;
    assert_eq!(done.status, 201);
    assert!(registry.get(done.header("location").unwrap()).await.body == bytes);
}

#[tokio::test]
async fn chunk_out_of_order_must_be_416() {
    let registry = start().await;
    let at = registry.begin("a").await;
    assert_eq!(registry.call("PATCH", &at, &[("content-range", "0-4")], "01234").await.status, 202);
    for range in ["0-4", "6-10", "4-8"] {
        let refused = registry.call("PATCH", &at, &[("content-range", range)], "56789").await;
        assert_eq!(refused.status, 416, "{range}");
    }
    let state = registry.call("GET", &at, &[], "").await;
    assert_eq!((state.status, state.header("range")), (204, Some("0-4")), "nothing of them was taken");
    let longer = registry.call("PATCH", &at, &[("content-range", "5-20")], "56789").await;
    assert_eq!(longer.status, 416, "its length is not what it says");
}

#[tokio::test]
async fn stream_without_content_range_is_accepted() {
    let registry = start().await;
    let at = registry.begin("a").await;
    assert_eq!(registry.call("PATCH", &at, &[], "01234").await.header("range"), Some("0-4"));
    assert_eq!(registry.call("PATCH", &at, &[], "56789").await.header("range"), Some("0-9"));
    let done = registry.call("PUT", &format!("{at}?digest={}", digest(b"0123456789")), &[], "").await;
    assert_eq!(done.status, 201, "no bytes with the last request");
}

#[tokio::test]
async fn upload_status_must_be_204_with_location_and_range() {
    let registry = start().await;
    let at = registry.begin("a").await;
    registry.call("PATCH", &at, &[], "01234").await;
    let state = registry.call("GET", &at, &[], "").await;
    assert_eq!(
        (state.status, state.header("range"), state.header("location")),
        (204, Some("0-4"), Some(at.as_str()))
    );
}

#[tokio::test]
async fn upload_that_is_unknown_must_be_404() {
    let registry = start().await;
    let at = registry.begin("a").await;
    let elsewhere = at.replace("/v2/a/", "/v2/b/");
    for path in
        ["/v2/a/blobs/uploads/00112233445566778899aabbccddeeff", "/v2/a/blobs/uploads/nothing", &elsewhere]
    {
        for method in ["GET", "PATCH", "DELETE"] {
            let got = registry.call(method, path, &[], "").await;
            assert_eq!((got.status, got.code()), (404, "BLOB_UPLOAD_UNKNOWN".to_owned()), "{method} {path}");
        }
    }
}

#[tokio::test]
async fn upload_can_be_cancelled() {
    let registry = start().await;
    let at = registry.begin("a").await;
    registry.call("PATCH", &at, &[], "01234").await;
    assert_eq!(registry.call("DELETE", &at, &[], "").await.status, 204);
    assert_eq!(registry.call("GET", &at, &[], "").await.status, 404);
    assert!(registry.files("uploads").is_empty());
}

#[tokio::test]
async fn mount_must_be_201_with_location() {
    let registry = start().await;
    let named = registry.push("from/here", b"shared").await;
    let path = format!("/v2/to/there/blobs/uploads/?mount={named}&from=from/here");
    let done = registry.call("POST", &path, &[], "").await;
    assert_eq!(
        (done.status, done.header("location")),
        (201, Some(format!("/v2/to/there/blobs/{named}").as_str()))
    );
    assert_eq!(registry.get(&format!("/v2/to/there/blobs/{named}")).await.body, b"shared");
    let path = format!("/v2/third/blobs/uploads/?mount={named}");
    assert_eq!(registry.call("POST", &path, &[], "").await.status, 201, "from is optional");
    assert_eq!(registry.files("blobs").len(), 1, "stored once");
}

#[tokio::test]
async fn impossible_mount_should_be_an_upload() {
    let registry = start().await;
    let named = registry.push("a", b"shared").await;
    let absent = digest(b"absent");
    for query in [
        format!("mount={absent}&from=a"),
        format!("mount={named}&from=other"),
        format!("mount={named}&from=../etc"),
        "mount=nonsense&from=a".to_owned(),
    ] {
        let begun = registry.call("POST", &format!("/v2/b/blobs/uploads/?{query}"), &[], "").await;
        assert_eq!(begun.status, 202, "{query}");
        assert!(begun.header("location").unwrap().starts_with("/v2/b/blobs/uploads/"));
    }
}

#[tokio::test]
async fn content_that_has_another_digest_must_be_refused() {
    let registry = start().await;
    let at = registry.begin("a").await;
    let wrong = registry.call("PUT", &format!("{at}?digest={}", digest(b"other")), &[], "hello").await;
    assert_eq!((wrong.status, wrong.code().as_str()), (400, "DIGEST_INVALID"));
    for named in [digest(b"other"), digest(b"hello")] {
        assert_eq!(registry.get(&format!("/v2/a/blobs/{named}")).await.status, 404);
    }
    assert!(registry.files("blobs").is_empty() && registry.files("uploads").is_empty());
}

#[tokio::test]
async fn put_without_a_digest_must_be_refused() {
    let registry = start().await;
    let at = registry.begin("a").await;
    for query in ["", "?digest=", "?digest=sha256:12", "?digest=md5:00112233445566778899aabbccddeeff"] {
        let got = registry.call("PUT", &format!("{at}{query}"), &[], "hello").await;
        assert_eq!((got.status, got.code().as_str()), (400, "DIGEST_INVALID"), "{query}");
    }
}

#[tokio::test]
async fn sha512_is_a_digest_too() {
    let registry = start().await;
    let named = sha512(b"hello");
    let at = registry.begin("a").await;
    assert_eq!(registry.call("PUT", &format!("{at}?digest={named}"), &[], "hello").await.status, 201);
    assert_eq!(registry.get(&format!("/v2/a/blobs/{named}")).await.body, b"hello");
    let body = registry.manifest("a", json!({})).await;
    let named = sha512(&body);
    assert_eq!(registry.put_manifest("a", &named, MANIFEST, &body).await.status, 201);
    assert_eq!(registry.get(&format!("/v2/a/manifests/{named}")).await.body, body);
}

#[tokio::test]
async fn manifest_put_must_be_201_with_location() {
    let registry = start().await;
    let body = registry.manifest("a", json!({})).await;
    let named = digest(&body);
    for reference in ["v1", &named] {
        let put = registry.put_manifest("a", reference, MANIFEST, &body).await;
        assert_eq!(put.status, 201);
        assert_eq!(put.header("location"), Some(format!("/v2/a/manifests/{reference}").as_str()));
        assert_eq!(put.header("docker-content-digest"), Some(named.as_str()));
        assert_eq!(registry.get(put.header("location").unwrap()).await.body, body);
    }
}

#[tokio::test]
async fn manifest_put_moves_a_tag() {
    let registry = start().await;
    let (first, _) = registry.image_with("a", "v1", json!({"annotations": {"n": "1"}})).await;
    let (second, _) = registry.image_with("a", "v1", json!({"annotations": {"n": "2"}})).await;
    let got = registry.get("/v2/a/manifests/v1").await;
    assert_eq!(got.header("docker-content-digest"), Some(second.as_str()));
    assert_eq!(registry.get(&format!("/v2/a/manifests/{first}")).await.status, 200, "by digest it stays");
}

#[tokio::test]
async fn manifest_under_another_digest_must_be_refused() {
    let registry = start().await;
    let body = registry.manifest("a", json!({})).await;
    let put = registry.put_manifest("a", &digest(b"other"), MANIFEST, &body).await;
    assert_eq!((put.status, put.code().as_str()), (400, "DIGEST_INVALID"));
    assert_eq!(registry.files("manifests").len(), 0);
}

#[tokio::test]
async fn manifest_should_be_taken_up_to_4_mib() {
    let registry = start().await;
    let filler = "x".repeat((4 << 20) - 2000);
    let (named, body) = registry.image_with("a", "big", json!({"annotations": {"f": filler}})).await;
    assert!(body.len() > (4 << 20) - 2000);
    assert_eq!(registry.get(&format!("/v2/a/manifests/{named}")).await.body.len(), body.len());
}

#[tokio::test]
async fn manifest_that_is_too_large_should_be_413() {
    let registry = crate::common::start_with(|c| c.limits.manifest_bytes = 10_000).await;
    let body = registry.manifest("a", json!({"annotations": {"f": "x".repeat(10_000)}})).await;
    let put = registry.put_manifest("a", "big", MANIFEST, &body).await;
    assert_eq!((put.status, put.code().as_str()), (413, "SIZE_INVALID"));
    let stream = reqwest::Body::wrap_stream(futures_util::stream::iter(vec![Ok::<_, std::io::Error>(body)]));
    let request = registry.request("PUT", "/v2/a/manifests/big").bearer_auth(&registry.token);
    let put = registry.send(request.header("content-type", MANIFEST).body(stream)).await;
    assert_eq!(put.status, 413, "also when it does not say how long it is");
    assert!(registry.files("manifests").is_empty());
}

#[tokio::test]
async fn manifest_whose_blobs_are_missing_should_be_refused() {
    let registry = start().await;
    let elsewhere = registry.push("b", b"only in b").await;
    let absent = digest(b"absent");
    for missing in [elsewhere, absent] {
        let layer = json!([{"mediaType": "application/octet-stream", "digest": missing, "size": 1}]);
        let body = registry.manifest("a", json!({"layers": layer})).await;
        let put = registry.put_manifest("a", "v1", MANIFEST, &body).await;
        assert_eq!((put.status, put.code().as_str()), (400, "MANIFEST_BLOB_UNKNOWN"));
        assert_eq!(put.json()["errors"][0]["detail"]["digest"], missing);
    }
    assert_eq!(registry.get("/v2/a/manifests/v1").await.status, 404);
    assert!(registry.files("manifests").is_empty());
}

#[tokio::test]
async fn manifest_with_a_subject_must_be_taken_before_the_subject() {
    let registry = start().await;
    let subject = digest(b"not there yet");
    let extra = json!({"subject": {"mediaType": MANIFEST, "digest": subject, "size": 5}});
    let body = registry.manifest("a", extra).await;
    let put = registry.put_manifest("a", &digest(&body), MANIFEST, &body).await;
    assert_eq!((put.status, put.header("oci-subject")), (201, Some(subject.as_str())));
}

#[tokio::test]
async fn index_must_be_taken() {
    let registry = start().await;
    let (named, body) = registry.image("a", "").await;
    let entry = json!({"mediaType": MANIFEST, "digest": named, "size": body.len(), "platform": {"os": "linux", "architecture": "amd64"}});
    let index =
        serde_json::to_vec(&json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]})).unwrap();
    assert_eq!(registry.put_manifest("a", "multi", INDEX, &index).await.status, 201);
    let got = registry.get("/v2/a/manifests/multi").await;
    assert_eq!((got.header("content-type"), &got.body), (Some(INDEX), &index));
}

#[tokio::test]
async fn tags_beside_a_digest_are_set() {
    let registry = start().await;
    let body = registry.manifest("a", json!({})).await;
    let put =
        registry.put_manifest("a", &format!("{}?tag=one&tag=two", digest(&body)), MANIFEST, &body).await;
    assert_eq!((put.status, put.header("oci-tag")), (201, Some("one")));
    for tag in ["one", "two"] {
        assert_eq!(registry.get(&format!("/v2/a/manifests/{tag}")).await.body, body);
    }
}

#[tokio::test]
async fn uploads_continue_after_a_restart() {
    let registry = start().await;
    let (bytes, at) = (noise(5, 200_000), registry.begin("a").await);
    assert_eq!(registry.call("PATCH", &at, &[], &bytes[..120_000]).await.status, 202);
    let registry = crate::common::start_in(registry.end().await, |_| {}).await;
    let state = registry.call("GET", &at, &[], "").await;
    assert_eq!((state.status, state.header("range")), (204, Some("0-119999")));
    let done = registry.call("PUT", &format!("{at}?digest={}", digest(&bytes)), &[], &bytes[120_000..]).await;
    assert_eq!(done.status, 201);
}

#[tokio::test]
async fn sparse_index_is_accepted_if_configured() {
    for (allowed, status) in [(false, 400), (true, 201)] {
        let registry = start_with(move |c| c.allow_sparse_indexes = allowed).await;
        let child = json!({"mediaType": MANIFEST, "digest": digest(b"elsewhere"), "size": 9});
        let body = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [child]});
        let put = registry.put_manifest("a", "v1", INDEX, &serde_json::to_vec(&body).unwrap()).await;
        assert_eq!(put.status, status, "allowed: {allowed}");
        let layer = json!({"mediaType": "application/octet-stream", "digest": digest(b"missing"), "size": 7});
        let body = registry.manifest("a", json!({"layers": [layer]})).await;
        let put = registry.put_manifest("a", "v2", MANIFEST, &body).await;
        assert_eq!((put.status, put.code().as_str()), (400, "MANIFEST_BLOB_UNKNOWN"), "blobs are needed");
    }
}

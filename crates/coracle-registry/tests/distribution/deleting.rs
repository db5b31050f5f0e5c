//! Specification: "Content Management".

use serde_json::json;

use crate::common::{MANIFEST, digest, start};

#[tokio::test]
async fn tag_delete_must_be_202_and_leave_the_manifest() {
    let registry = start().await;
    let (named, _) = registry.image("a", "v1").await;
    assert_eq!(registry.call("DELETE", "/v2/a/manifests/v1", &[], "").await.status, 202);
    assert_eq!(registry.get("/v2/a/manifests/v1").await.status, 404);
    assert_eq!(registry.get(&format!("/v2/a/manifests/{named}")).await.status, 200);
    assert_eq!(registry.get("/v2/a/tags/list").await.json()["tags"], json!([]));
    assert_eq!(registry.call("DELETE", "/v2/a/manifests/v1", &[], "").await.status, 404);
}

#[tokio::test]
async fn manifest_delete_must_be_202_and_take_its_tags() {
    let registry = start().await;
    let (named, body) = registry.image("a", "v1").await;
    registry.put_manifest("a", "v2", MANIFEST, &body).await;
    let path = format!("/v2/a/manifests/{named}");
    assert_eq!(registry.call("DELETE", &path, &[], "").await.status, 202);
    for path in [path.as_str(), "/v2/a/manifests/v1", "/v2/a/manifests/v2"] {
        assert_eq!(registry.get(path).await.status, 404, "{path}");
    }
    assert_eq!(registry.call("DELETE", &path, &[], "").await.code(), "MANIFEST_UNKNOWN");
    assert!(registry.files("manifests").is_empty());
}

#[tokio::test]
async fn blob_delete_must_be_202() {
    let registry = start().await;
    let named = registry.push("a", b"blob").await;
    registry.push("b", b"blob").await;
    let path = format!("/v2/a/blobs/{named}");
    assert_eq!(registry.call("DELETE", &path, &[], "").await.status, 202);
    assert_eq!(registry.get(&path).await.status, 404);
    assert_eq!(registry.call("DELETE", &path, &[], "").await.code(), "BLOB_UNKNOWN");
    assert_eq!(
        registry.get(&format!("/v2/b/blobs/{named}")).await.body,
        b"blob",
        "another repository keeps it"
    );
}

#[tokio::test]
async fn referrer_that_is_deleted_is_no_longer_listed() {
    let registry = start().await;
    let subject = digest(b"base");
    let (named, _) = registry
        .image_with("a", "", json!({"subject": {"mediaType": MANIFEST, "digest": subject, "size": 4}}))
        .await;
    registry.call("DELETE", &format!("/v2/a/manifests/{named}"), &[], "").await;
    assert_eq!(registry.get(&format!("/v2/a/referrers/{subject}")).await.json()["manifests"], json!([]));
}

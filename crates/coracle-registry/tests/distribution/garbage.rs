//! Mark and sweep with a grace period, concurrent with pushes that never wait and never lose content.

use std::sync::Arc;
use std::time::Duration;

use coracle_testkit::{elapse, eventually};
use coracle_types::{Clock, UnixMillis};
use serde_json::{Value, json};

use crate::common::{MANIFEST, Registry, digest, noise, start_with};

const HOUR: Duration = Duration::from_secs(3600);

async fn with_clock() -> (Registry, Clock) {
    let clock = Clock::fixed(UnixMillis(1_800_000_000_000));
    let own = clock.clone();
    let registry = start_with(move |c| {
        c.clock = own;
        c.sweeping.grace = HOUR;
        c.limits.upload_age = HOUR;
    });
    (registry.await, clock)
}

async fn sweep(registry: &Registry) -> Value {
    let swept = registry.call("POST", "/api/garbage", &[], "").await;
    assert_eq!(swept.status, 200);
    swept.json()
}

#[tokio::test]
async fn unreferenced_blob_is_removed_after_the_grace() {
    let (registry, clock) = with_clock().await;
    registry.image("a", "v1").await;
    let loose = registry.push("a", &noise(1, 5000)).await;
    assert_eq!(sweep(&registry).await["blobs"], 0);
    clock.advance(HOUR * 2);
    let would = registry.get("/api/garbage").await.json();
    assert_eq!(would, json!({"blobs": [loose], "bytes": 5000}), "it says what it would free");
    assert_eq!(sweep(&registry).await, json!({"blobs": 1, "bytes": 5000, "uploads": 0, "manifests": 0}));
    assert_eq!(registry.get(&format!("/v2/a/blobs/{loose}")).await.status, 404);
    assert_eq!(registry.files("blobs").len(), 2, "config and layer of the image stay");
    assert_eq!(registry.get(&format!("/v2/a/blobs/{}", digest(b"layer"))).await.body, b"layer");
    assert_eq!(sweep(&registry).await["blobs"], 0);
}

#[tokio::test]
async fn blobs_of_a_deleted_image_are_removed_unless_shared() {
    let (registry, clock) = with_clock().await;
    let (first, _) = registry.image("a", "v1").await;
    registry.image("b", "v1").await;
    let only_a = registry.push("a", b"only a").await;
    let layers = json!([{"mediaType": "application/octet-stream", "digest": only_a, "size": 6}]);
    let (second, _) = registry.image_with("a", "v2", json!({"layers": layers})).await;
    for named in [first, second] {
        registry.call("DELETE", &format!("/v2/a/manifests/{named}"), &[], "").await;
    }
    clock.advance(HOUR * 2);
    assert_eq!(sweep(&registry).await["blobs"], 1);
    assert_eq!(registry.files("blobs").len(), 2);
    assert_eq!(
        registry.get(&format!("/v2/a/blobs/{}", digest(b"layer"))).await.status,
        404,
        "not of a any longer"
    );
    assert_eq!(registry.get(&format!("/v2/b/blobs/{}", digest(b"layer"))).await.status, 200);
    assert_eq!(registry.get("/v2/_catalog").await.json()["repositories"], json!(["b"]));
}

#[tokio::test]
async fn head_request_keeps_a_blob_for_another_grace() {
    let (registry, clock) = with_clock().await;
    let loose = registry.push("a", b"loose").await;
    clock.advance(HOUR - Duration::from_secs(1));
    let asked = registry.send(registry.request("HEAD", &format!("/v2/a/blobs/{loose}"))).await;
    assert_eq!(asked.status, 200, "a client with this answer does not push it");
    clock.advance(HOUR - Duration::from_secs(1));
    assert_eq!(sweep(&registry).await["blobs"], 0);
    clock.advance(HOUR);
    assert_eq!(sweep(&registry).await["blobs"], 1);
}

#[tokio::test]
async fn abandoned_upload_is_removed() {
    let (registry, clock) = with_clock().await;
    let (old, young) = (registry.begin("a").await, registry.begin("a").await);
    registry.call("PATCH", &old, &[], "01234").await;
    clock.advance(HOUR - Duration::from_secs(1));
    registry.call("PATCH", &young, &[], "01234").await;
    clock.advance(Duration::from_secs(2));
    assert_eq!(sweep(&registry).await["uploads"], 1);
    assert_eq!(registry.call("GET", &old, &[], "").await.status, 404);
    assert_eq!(registry.call("GET", &young, &[], "").await.status, 204);
    assert_eq!(registry.files("uploads").len(), 1);
}

#[tokio::test]
async fn upload_that_is_being_written_does_not_expire() {
    let (registry, clock) = with_clock().await;
    let registry = Arc::new(registry);
    let at = registry.begin("a").await;
    let (send, receive) = tokio::sync::mpsc::channel::<std::io::Result<&'static str>>(1);
    let parts = futures_util::stream::unfold(receive, async |mut parts| {
        let part = parts.recv().await?;
        Some((part, parts))
    });
    let body = reqwest::Body::wrap_stream(parts);
    let (own, path) = (Arc::clone(&registry), at.clone());
    let mut writing = tokio::task::JoinSet::new();
    writing.spawn(async move {
        own.send(own.request("PATCH", &path).bearer_auth(&own.token).body(body)).await.status
    });
    send.send(Ok("first")).await.unwrap();
    let file = registry.dir.path().join("uploads").join(at.rsplit('/').next().unwrap());
    eventually("the first part is stored", async || {
        (std::fs::metadata(&file).unwrap().len() >= 5).then_some(())
    })
    .await
    .unwrap();
    clock.advance(HOUR * 2);
    assert_eq!(sweep(&registry).await["uploads"], 0);
    send.send(Ok(" last")).await.unwrap();
    drop(send);
    assert_eq!(writing.join_next().await.unwrap().unwrap(), 202);
    assert_eq!(sweep(&registry).await["uploads"], 0, "its age begins at its last byte");
    let named = digest(b"first last");
    assert_eq!(registry.call("PUT", &format!("{at}?digest={named}"), &[], "").await.status, 201);
}

#[tokio::test]
async fn untagged_manifest_is_removed_only_if_configured() {
    for (untagged, gone) in [(None, 0), (Some(HOUR), 1)] {
        let clock = Clock::fixed(UnixMillis(1_800_000_000_000));
        let own = clock.clone();
        let registry = start_with(move |c| {
            c.clock = own;
            c.sweeping.untagged = untagged;
        })
        .await;
        let (base, body) = registry.image("a", "base").await;
        let about = json!({"subject": {"mediaType": MANIFEST, "digest": base, "size": body.len()}});
        let (signature, _) = registry.image_with("a", "", about).await;
        let (loose, _) = registry.image_with("a", "", json!({"annotations": {"n": "1"}})).await;
        clock.advance(HOUR * 2);
        assert_eq!(sweep(&registry).await["manifests"], gone);
        assert_eq!(
            registry.get(&format!("/v2/a/manifests/{signature}")).await.status,
            200,
            "it is about a manifest that stays"
        );
        assert_eq!(
            registry.get(&format!("/v2/a/manifests/{loose}")).await.status,
            if gone == 1 { 404 } else { 200 }
        );
    }
}

/// Pushes of a few blobs race with sweeps with almost no grace period. Blobs of an acknowledged manifest must stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_sweeps_keep_acknowledged_blobs() {
    let registry = start_with(|c| {
        c.sweeping.grace = Duration::from_millis(300);
        c.sweeping.every = Duration::from_millis(5);
    });
    let registry = Arc::new(registry.await);
    let mut pushers = tokio::task::JoinSet::new();
    for who in 0..4 {
        let registry = Arc::clone(&registry);
        pushers.spawn(async move {
            for round in 0..25 {
                let repo = format!("r{}", (who + round) % 3);
                let body = push(&registry, &repo, json!({"annotations": {"round": round.to_string()}})).await;
                let gone = registry
                    .call("DELETE", &format!("/v2/{repo}/manifests/{}", digest(&body)), &[], "")
                    .await;
                assert!(matches!(gone.status, 202 | 404), "another pusher may have been quicker");
                // The subject is the age of blobs at a sweep: each pusher has a different pace.
                elapse(Duration::from_millis(20 * (who + 1))).await;
            }
        });
    }
    while let Some(ended) = pushers.join_next().await {
        ended.unwrap();
    }
    push(&registry, "last", json!({})).await;
    let swept = async || (registry.files("blobs").len() <= 2).then_some(());
    eventually("no garbage outlives the sweep", swept).await.unwrap();
    assert_eq!(registry.files("blobs").len(), 2, "blobs of a manifest stay");
    assert_eq!(registry.get(&format!("/v2/last/blobs/{}", digest(b"layer"))).await.body, b"layer");
}

/// Pushes an image as tag `v` and returns its manifest. Starts again when a blob exceeded the grace period and was swept before
/// a manifest referred to it.
async fn push(registry: &Registry, repo: &str, about: Value) -> Vec<u8> {
    loop {
        let body = registry.manifest(repo, about.clone()).await;
        let put = registry.put_manifest(repo, "v", MANIFEST, &body).await;
        if put.status == 201 {
            return body;
        }
        let said = String::from_utf8_lossy(&put.body);
        assert!(put.status == 400 && said.contains("MANIFEST_BLOB_UNKNOWN"), "{}: {said}", put.status);
    }
}

#[tokio::test]
async fn blob_without_a_row_is_removed_after_the_grace() {
    let (registry, clock) = with_clock().await;
    // State after a power failure between writing the file and its row.
    let bytes = b"orphan";
    let name = digest(bytes).trim_start_matches("sha256:").to_owned();
    std::fs::write(registry.dir.path().join("blobs/sha256").join(&name), bytes).unwrap();
    assert_eq!(sweep(&registry).await["blobs"], 0, "an upload may be about to name it");
    assert_eq!(registry.files("blobs"), [name]);
    clock.advance(HOUR * 2);
    assert_eq!(sweep(&registry).await["blobs"], 1);
    assert!(registry.files("blobs").is_empty());
}

#[tokio::test]
async fn sync_skips_a_blob_that_vanishes_meanwhile() {
    let registry = start_with(|_| {}).await;
    // A blob that is listed but absent when it is read, as if a sweep removed it in between.
    let name = digest(b"gone").trim_start_matches("sha256:").to_owned();
    let file = registry.dir.path().join("blobs/sha256").join(name);
    std::os::unix::fs::symlink("/absent", file).unwrap();
    assert_eq!(registry.call("POST", "/api/catalog/sync", &[], "").await.status, 200);
}

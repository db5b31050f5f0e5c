//! Ours: mark and sweep with a grace, beside pushes that never wait and never lose anything.

use std::sync::Arc;
use std::time::Duration;

use coracle_types::{Clock, UnixMillis};
use serde_json::json;

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

async fn sweep(registry: &Registry) -> serde_json::Value {
    let swept = registry.call("POST", "/api/garbage", &[], "").await;
    assert_eq!(swept.status, 200);
    swept.json()
}

#[tokio::test]
async fn blob_that_nobody_names_goes_after_the_grace_and_not_before() {
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
async fn blobs_of_a_deleted_image_go_unless_another_names_them() {
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
async fn asking_for_a_blob_keeps_it_for_another_grace() {
    let (registry, clock) = with_clock().await;
    let loose = registry.push("a", b"loose").await;
    clock.advance(HOUR - Duration::from_secs(1));
    let asked = registry.send(registry.request("HEAD", &format!("/v2/a/blobs/{loose}"))).await;
    assert_eq!(asked.status, 200, "a client that is told so will not push it");
    clock.advance(HOUR - Duration::from_secs(1));
    assert_eq!(sweep(&registry).await["blobs"], 0);
    clock.advance(HOUR);
    assert_eq!(sweep(&registry).await["blobs"], 1);
}

#[tokio::test]
async fn upload_that_nobody_goes_on_with_is_forgotten() {
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
async fn untagged_manifests_go_only_where_that_is_wanted() {
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

/// Pushes of the same few blobs race with sweeps without any grace worth the name. Whatever was acknowledged under a
/// manifest is there afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sweeps_race_with_pushes_and_take_nothing_that_was_acknowledged() {
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
                let body =
                    registry.manifest(&repo, json!({"annotations": {"round": round.to_string()}})).await;
                let put = registry.put_manifest(&repo, "v", MANIFEST, &body).await;
                assert_eq!(put.status, 201, "{}", String::from_utf8_lossy(&put.body));
                let gone = registry
                    .call("DELETE", &format!("/v2/{repo}/manifests/{}", digest(&body)), &[], "")
                    .await;
                assert!(matches!(gone.status, 202 | 404), "another pusher may have been quicker");
                tokio::time::sleep(Duration::from_millis(20 * (who + 1))).await;
            }
        });
    }
    while let Some(ended) = pushers.join_next().await {
        ended.unwrap();
    }
    registry.image("last", "v").await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!(registry.files("blobs").len(), 2, "no garbage outlives the sweep, and what is named stays");
    assert_eq!(registry.get(&format!("/v2/last/blobs/{}", digest(b"layer"))).await.body, b"layer");
}

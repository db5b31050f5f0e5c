//! PostgreSQL: one pass through what the other files test with SQLite.

use std::time::Duration;

use coracle_testkit::postgres::Postgres;
use coracle_types::{Clock, UnixMillis};
use serde_json::json;

use crate::common::{MANIFEST, digest, start_in, start_with};

#[tokio::test]
async fn names_in_postgresql_behave_as_in_sqlite() {
    let Some(postgres) = Postgres::start().unwrap() else { return };
    let clock = Clock::fixed(UnixMillis(1_800_000_000_000));
    let (dsn, own) = (postgres.dsn(), clock.clone());
    let at = dsn.parse::<coracle_registry::MetaAt>().unwrap();
    let meta = at.clone();
    let registry = start_with(move |c| (c.meta, c.clock) = (Some(meta), own)).await;
    let (named, body) = registry.image("a/b", "b").await;
    for tag in ["C", "a", "_x", "A"] {
        assert_eq!(registry.put_manifest("a/b", tag, MANIFEST, &body).await.status, 201);
    }
    let tags = registry.get("/v2/a/b/tags/list").await.json();
    assert_eq!(
        tags["tags"],
        json!(["_x", "A", "a", "b", "C"]),
        "the same order in any locale of the database"
    );
    assert_eq!(registry.get("/v2/a/b/tags/list?n=2&last=A").await.json()["tags"], json!(["a", "b"]));
    let about = json!({"subject": {"mediaType": MANIFEST, "digest": named, "size": body.len()}});
    registry.image_with("a/b", "", about).await;
    assert_eq!(
        registry.get(&format!("/v2/a/b/referrers/{named}")).await.json()["manifests"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let path = format!("/v2/c/blobs/uploads/?mount={}&from=a/b", digest(b"layer"));
    assert_eq!(registry.call("POST", &path, &[], "").await.status, 201);
    assert_eq!(
        registry.get("/api/stats").await.json(),
        json!({"repositoryCount": 1, "tagCount": 5, "blobCount": 2, "totalSize": 7})
    );
    assert_eq!(registry.get("/api/repositories/a/b").await.json()["tagCount"], 5);
    let made = registry.call("POST", "/api/tokens", &[], r#"{"name":"ci"}"#).await.json();
    let write = registry.request("POST", "/v2/a/blobs/uploads/").bearer_auth(made["token"].as_str().unwrap());
    assert_eq!(registry.send(write).await.status, 202);
    registry.push("a/b", b"loose").await;
    clock.advance(Duration::from_secs(48 * 3600));
    let swept = registry.call("POST", "/api/garbage", &[], "").await.json();
    assert_eq!((&swept["blobs"], &swept["bytes"], &swept["uploads"]), (&json!(1), &json!(5), &json!(1)));
    let registry = start_in(registry.end().await, move |c| (c.meta, c.clock) = (Some(at), clock)).await;
    assert_eq!(registry.get("/v2/a/b/manifests/a").await.body, body, "after a restart");
    assert!(!registry.dir.path().join("registry.db").exists());
}

#[tokio::test]
async fn quotas_in_postgresql_hold_for_uploads_at_once() {
    let Some(postgres) = Postgres::start().unwrap() else { return };
    let at = postgres.dsn().parse::<coracle_registry::MetaAt>().unwrap();
    let registry = start_with(move |c| {
        c.meta = Some(at);
        (c.limits.quota, c.limits.repository_quota) = (Some(3000), Some(1000));
    })
    .await;
    let mut begun = Vec::new();
    for n in 0..4 {
        let (repo, bytes) = (if n < 2 { "a" } else { "b" }, vec![n; 700]);
        let at = registry.begin(repo).await;
        assert_eq!(registry.call("PATCH", &at, &[], bytes.clone()).await.status, 202);
        begun.push(format!("{at}?digest={}", digest(&bytes)));
    }
    let ends = begun.iter().map(|path| registry.call("PUT", path, &[], ""));
    let statuses: Vec<_> = futures_util::future::join_all(ends).await.iter().map(|a| a.status).collect();
    let taken = |of: &[u16]| of.iter().filter(|s| **s == 201).count();
    assert!(statuses.iter().all(|s| matches!(s, 201 | 403)), "{statuses:?}");
    assert_eq!((taken(&statuses[..2]), taken(&statuses[2..])), (1, 1), "{statuses:?}");
}

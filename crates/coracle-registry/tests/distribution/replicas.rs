//! Two registries on one PostgreSQL database and one S3 server: a client cannot tell them apart.

use std::time::Duration;

use coracle_registry::{MetaAt, S3Config};
use coracle_testkit::postgres::Postgres;
use coracle_testkit::s3::{ACCESS_KEY, BUCKET, S3Server, SECRET_KEY};
use coracle_types::{Clock, UnixMillis};
use serde_json::json;

use crate::common::{MANIFEST, Registry, digest, start_with};

struct Pair {
    one: Registry,
    other: Registry,
    clock: Clock,
    s3: S3Config,
    meta: MetaAt,
    _postgres: Postgres,
    _store: S3Server,
}

async fn pair() -> Option<Pair> {
    let (postgres, store) = (Postgres::start().unwrap()?, S3Server::start().unwrap()?);
    let s3 = S3Config {
        endpoint: store.url().to_owned(),
        region: "us-east-1".into(),
        bucket: BUCKET.into(),
        prefix: "epoch/".into(),
        access_key: ACCESS_KEY.into(),
        secret_key: SECRET_KEY.into(),
    };
    let meta: MetaAt = postgres.dsn().parse().unwrap();
    let clock = Clock::fixed(UnixMillis(1_800_000_000_000));
    let replica = async || {
        let (meta, s3, clock) = (meta.clone(), s3.clone(), clock.clone());
        start_with(move |c| (c.meta, c.s3, c.clock) = (Some(meta), Some(s3), clock)).await
    };
    let (one, other) = (replica().await, replica().await);
    Some(Pair { one, other, clock, s3, meta, _postgres: postgres, _store: store })
}

/// Bytes that fill more than one part of the object store.
fn large() -> Vec<u8> {
    (0..12_000_000u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect()
}

#[tokio::test]
async fn two_replicas_behave_as_one() {
    let Some(Pair { one, other, clock, s3, meta, _postgres, _store }) = pair().await else { return };
    // Content pushed to one replica is read from the other: blobs, ranges of blobs, manifests, tags.
    let (named, body) = one.image("team/app", "1").await;
    assert_eq!(other.get("/v2/team/app/manifests/1").await.body, body);
    assert_eq!(other.get(&format!("/v2/team/app/blobs/{}", digest(b"layer"))).await.body, b"layer");
    let bytes = large();
    let blob = one.push("team/app", &bytes).await;
    let path = format!("/v2/team/app/blobs/{blob}");
    assert!(other.get(&path).await.body == bytes, "made of several pieces");
    let range = other.call("GET", &path, &[("range", "bytes=5242870-5242889")], "").await;
    assert_eq!((range.status, range.body.as_slice()), (206, &bytes[5_242_870..5_242_890]));
    let empty = other.push("team/app", b"").await;
    assert_eq!(one.get(&format!("/v2/team/app/blobs/{empty}")).await.status, 200);

    // Moved tags and removed content are seen by the other replica.
    let (moved, _) = other.image_with("team/app", "1", json!({"annotations": {"n": "2"}})).await;
    assert_eq!(one.get("/v2/team/app/manifests/1").await.header("docker-content-digest"), Some(&*moved));
    assert_eq!(other.call("DELETE", &format!("/v2/team/app/manifests/{named}"), &[], "").await.status, 202);
    assert_eq!(one.get(&format!("/v2/team/app/manifests/{named}")).await.status, 404);

    // A token created on one replica is valid on the other, until it is removed on either.
    let made = one.call("POST", "/api/tokens", &[], r#"{"name":"ci"}"#).await.json();
    let write = || other.request("POST", "/v2/a/blobs/uploads/").bearer_auth(made["token"].as_str().unwrap());
    assert_eq!(other.send(write()).await.status, 202);

    // A sweep of either replica removes garbage of both.
    clock.advance(Duration::from_secs(48 * 3600));
    let swept = other.call("POST", "/api/garbage", &[], "").await.json();
    assert_eq!(swept["blobs"], 2, "{swept}");
    assert_eq!(one.get(&path).await.status, 404);
    assert_eq!(one.get("/v2/team/app/manifests/1").await.status, 200);

    // A third replica starts without any state of its own.
    let third = start_with(move |c| (c.meta, c.s3, c.clock) = (Some(meta), Some(s3), clock)).await;
    assert_eq!(third.get("/v2/team/app/manifests/1").await.header("docker-content-digest"), Some(&*moved));
}

#[tokio::test]
async fn upload_continues_at_any_replica() {
    let Some(Pair { one, other, _postgres, _store, .. }) = pair().await else { return };
    let bytes = large();
    let named = digest(&bytes);
    let at = one.begin("team/app").await;
    // Alternates between replicas: neither uses state from before a request to the other one.
    let cuts = [0, 3_000_000, 3_000_001, 9_000_000, 11_000_000];
    for (n, cut) in cuts.windows(2).enumerate() {
        let replica = if n % 2 == 0 { &other } else { &one };
        let range = format!("{}-{}", cut[0], cut[1] - 1);
        let took = replica.call("PATCH", &at, &[("content-range", &range)], &bytes[cut[0]..cut[1]]).await;
        assert_eq!(took.status, 202, "{}", String::from_utf8_lossy(&took.body));
    }
    let look = one.call("GET", &at, &[], "").await;
    assert_eq!((look.status, look.header("range")), (204, Some("0-10999999")));
    let done = one.call("PUT", &format!("{at}?digest={named}"), &[], &bytes[11_000_000..]).await;
    assert_eq!(done.status, 201, "{}", String::from_utf8_lossy(&done.body));
    assert!(other.get(&format!("/v2/team/app/blobs/{named}")).await.body == bytes);
    assert_eq!(other.call("GET", &at, &[], "").await.status, 404, "the upload has ended");

    // A wrong digest leaves nothing behind, whichever replica receives it.
    let at = other.begin("team/app").await;
    assert_eq!(one.call("PATCH", &at, &[], "abc").await.status, 202);
    let wrong = other.call("PUT", &format!("{at}?digest={}", digest(b"other")), &[], "").await;
    assert_eq!((wrong.status, wrong.code().as_str()), (400, "DIGEST_INVALID"));
    assert_eq!(one.call("GET", &at, &[], "").await.status, 404);
}

#[tokio::test]
async fn tables_are_rebuilt_from_the_object_store() {
    let Some(Pair { one, other, s3, _postgres, _store, .. }) = pair().await else { return };
    let (named, body) = one.image("team/app", "v1").await;
    let blob = other.push("team/app", &large()).await;
    let alone = start_with(move |c| c.s3 = Some(s3)).await;
    assert_eq!(alone.get("/v2/team/app/manifests/v1").await.body, body);
    assert_eq!(alone.get(&format!("/v2/team/app/manifests/{named}")).await.status, 200);
    assert_eq!(alone.get("/v2/team/app/tags/list").await.json()["tags"], json!(["v1"]));
    assert_eq!(alone.get("/api/stats").await.json()["blobCount"], 3, "{blob} is known, too");
    assert_eq!(alone.put_manifest("team/app", "v2", MANIFEST, &body).await.status, 201);
}

#[tokio::test]
async fn wrong_key_or_address_fails_at_start() {
    let Some(store) = S3Server::start().unwrap() else { return };
    let good = S3Config {
        endpoint: store.url().to_owned(),
        region: "us-east-1".into(),
        bucket: BUCKET.into(),
        prefix: String::new(),
        access_key: ACCESS_KEY.into(),
        secret_key: SECRET_KEY.into(),
    };
    for (why, want, config) in [
        ("secret", "status 403", S3Config { secret_key: "wrong".into(), ..good.clone() }),
        ("scheme", "invalid object store address", S3Config { endpoint: "ftp://x".into(), ..good.clone() }),
        ("bucket", "invalid object store address", S3Config { bucket: "../x".into(), ..good.clone() }),
        ("prefix", "invalid object store address", S3Config { prefix: "../".into(), ..good.clone() }),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut settings =
            coracle_registry::Config::new(dir.path().to_owned(), "127.0.0.1:0".parse().unwrap());
        settings.s3 = Some(config);
        let metrics = coracle_registry::Metrics::register(&mut Default::default());
        let refused =
            coracle_registry::serve(settings, metrics, Default::default(), |_| ()).await.unwrap_err();
        let cause = std::error::Error::source(&refused).unwrap().to_string();
        assert!(cause.contains(want) && !cause.contains("wrong"), "{why}: {cause}");
    }
}

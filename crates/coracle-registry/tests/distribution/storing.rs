//! Bytes and rows of a manifest stay consistent, despite concurrent changes and crashes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_testkit::eventually;
use serde_json::json;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tempfile::TempDir;

use crate::common::{MANIFEST, Registry, digest, noise, start, start_in};

/// Executes statements on the database of a registry that has ended.
async fn change(dir: &Path, statements: &[&str]) {
    let options = SqliteConnectOptions::new().filename(dir.join("registry.db"));
    let pool = SqlitePool::connect_with(options).await.unwrap();
    for statement in statements {
        sqlx::query(sqlx::AssertSqlSafe((*statement).to_owned())).execute(&pool).await.unwrap();
    }
    pool.close().await;
}

fn manifest_file(dir: &TempDir, named: &str) -> PathBuf {
    dir.path().join(format!("manifests/a/_digests/{}.json", named.replace(':', "-")))
}

/// Polls until HEAD has this status: a start repairs while it serves.
async fn wait_for(registry: &Registry, path: &str, status: u16) {
    let what = format!("{path} becomes {status}");
    let ask = async || (registry.send(registry.request("HEAD", path)).await.status == status).then_some(());
    eventually(&what, ask).await.unwrap();
}

#[tokio::test]
async fn sync_keeps_a_tag_whose_file_is_older() {
    let registry = start().await;
    registry.image("a", "v1").await;
    let file = registry.dir.path().join("manifests/a/_tags/v1.json");
    let old = std::fs::read(&file).unwrap();
    let (moved, body) = registry.image_with("a", "v1", json!({"annotations": {"n": "2"}})).await;
    // State that a sync reads when a push overtakes it.
    std::fs::write(&file, old).unwrap();
    assert_eq!(registry.call("POST", "/api/catalog/sync", &[], "").await.status, 200);
    let got = registry.get("/v2/a/manifests/v1").await;
    assert_eq!((got.header("docker-content-digest"), &got.body), (Some(&*moved), &body));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_sync_reverts_no_change() {
    let registry = Arc::new(start().await);
    let own = Arc::clone(&registry);
    let mut syncs = tokio::task::JoinSet::new();
    syncs.spawn(async move {
        loop {
            assert_eq!(own.call("POST", "/api/catalog/sync", &[], "").await.status, 200);
        }
    });
    for round in 0..40 {
        let body = registry.manifest("a", json!({"annotations": {"round": round.to_string()}})).await;
        assert_eq!(registry.put_manifest("a", "v", MANIFEST, &body).await.status, 201);
        let named = digest(&body);
        for _ in 0..5 {
            let got = registry.get("/v2/a/manifests/v").await;
            assert_eq!(got.header("docker-content-digest"), Some(&*named), "round {round}");
        }
        let path = format!("/v2/a/manifests/{named}");
        assert_eq!(registry.call("DELETE", &path, &[], "").await.status, 202);
        for path in [path.as_str(), "/v2/a/manifests/v"] {
            for _ in 0..5 {
                let head = registry.send(registry.request("HEAD", path)).await.status;
                assert_eq!(head, 404, "round {round}: {path}");
            }
        }
    }
    syncs.abort_all();
    assert!(registry.files("manifests").is_empty());
}

#[tokio::test]
async fn deletion_interrupted_after_rows_is_completed() {
    let registry = start().await;
    let (named, _) = registry.image("a", "v1").await;
    let dir = registry.end().await;
    let reference =
        format!("INSERT INTO file_changes (repo, reference) VALUES ('a', '{named}'), ('a', 'v1')");
    change(dir.path(), &["DELETE FROM tags", "DELETE FROM refs", "DELETE FROM manifests", &reference]).await;
    let file = manifest_file(&dir, &named);
    assert!(file.exists());
    let registry = start_in(dir, |_| {}).await;
    let gone = async || registry.files("manifests").is_empty().then_some(());
    eventually("the files of the deleted image are removed", gone).await.unwrap();
    assert_eq!(registry.get(&format!("/v2/a/manifests/{named}")).await.status, 404, "it does not come back");
}

#[tokio::test]
async fn deletion_interrupted_after_files_is_completed() {
    let registry = start().await;
    let (named, _) = registry.image("a", "v1").await;
    let dir = registry.end().await;
    std::fs::remove_file(manifest_file(&dir, &named)).unwrap();
    let registry = start_in(dir, |_| {}).await;
    let path = format!("/v2/a/manifests/{named}");
    wait_for(&registry, &path, 404).await;
    assert_eq!(registry.get("/v2/a/tags/list").await.json()["tags"], json!([]));
    assert!(registry.files("manifests").is_empty());
}

#[tokio::test]
async fn tag_without_a_file_gets_one_at_start() {
    let registry = start().await;
    let (named, body) = registry.image("a", "v1").await;
    let dir = registry.end().await;
    let file = dir.path().join("manifests/a/_tags/v1.json");
    std::fs::remove_file(&file).unwrap();
    let registry = start_in(dir, |_| {}).await;
    eventually("the tag has a file", async || file.exists().then_some(())).await.unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), body);
    assert_eq!(registry.get("/v2/a/manifests/v1").await.header("docker-content-digest"), Some(&*named));
}

#[tokio::test]
async fn many_manifests_without_bytes_are_left_alone() {
    let registry = start().await;
    for n in 0..65 {
        registry.image_with("a", "", json!({"annotations": {"n": n.to_string()}})).await;
    }
    let (named, _) = registry.image("a", "v1").await;
    let loose = registry.push("a", &noise(1, 5000)).await;
    let dir = registry.end().await;
    let manifests = dir.path().join("manifests");
    std::fs::rename(&manifests, dir.path().join("elsewhere")).unwrap();
    let registry = start_in(dir, |c| {
        c.sweeping.grace = Duration::ZERO;
        c.sweeping.every = Duration::from_millis(5);
    })
    .await;
    // Sweeps begin after the repair.
    wait_for(&registry, &format!("/v2/a/blobs/{loose}"), 404).await;
    let path = format!("/v2/a/manifests/{named}");
    assert_eq!(registry.send(registry.request("HEAD", &path)).await.status, 200, "it is another storage");
    let dir = registry.end().await;
    std::fs::remove_dir_all(&manifests).unwrap();
    std::fs::rename(dir.path().join("elsewhere"), &manifests).unwrap();
    let registry = start_in(dir, |_| {}).await;
    assert_eq!(registry.get("/v2/a/manifests/v1").await.status, 200);
}

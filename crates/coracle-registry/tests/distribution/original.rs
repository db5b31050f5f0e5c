//! Routes of epoch, the original registry of snapshots.

use coracle_testkit::eventually;
use serde_json::json;

use crate::common::{MANIFEST, digest, noise, start, start_in};

#[tokio::test]
async fn whole_blob_put_is_accepted() {
    let registry = start().await;
    let named = digest(b"hello");
    let done = registry.call("PUT", &format!("/v2/a/blobs/{named}"), &[], "hello").await;
    assert_eq!(done.status, 201);
    assert_eq!(registry.get(&format!("/v2/a/blobs/{named}")).await.body, b"hello");
    let wrong = registry.call("PUT", &format!("/v2/a/blobs/{named}"), &[], "other").await;
    assert_eq!(wrong.code(), "DIGEST_INVALID");
}

#[tokio::test]
async fn api_lists_repositories_and_tags() {
    let registry = start().await;
    let (named, body) = registry.image("team/app", "v1").await;
    let stats = registry.get("/api/stats").await.json();
    assert_eq!(stats, json!({"repositoryCount": 1, "tagCount": 1, "blobCount": 2, "totalSize": 7}));
    let list = registry.get("/api/repositories").await.json();
    assert_eq!(
        (&list[0]["name"], &list[0]["tagCount"], &list[0]["kind"]),
        (&json!("team/app"), &json!(1), &json!("container-image"))
    );
    let one = registry.get("/api/repositories/team/app").await.json();
    assert_eq!(one, list[0]);
    for field in ["id", "totalSize", "artifactType", "createdAt", "updatedAt"] {
        assert!(!one[field].is_null(), "{field}");
    }
    let tags = registry.get("/api/repositories/team/app/tags").await.json();
    for field in [
        "id",
        "repoName",
        "name",
        "digest",
        "artifactType",
        "kind",
        "totalSize",
        "layerCount",
        "platformSizes",
        "pushedAt",
        "syncedAt",
    ] {
        assert!(!tags[0][field].is_null(), "{field}");
    }
    let tag = registry.get("/api/repositories/team/app/tags/v1").await.json();
    assert_eq!(
        (&tag["repoName"], &tag["tag"], &tag["digest"]),
        (&json!("team/app"), &json!("v1"), &json!(named))
    );
    assert_eq!(tag["manifest"], serde_json::from_slice::<serde_json::Value>(&body).unwrap());
    assert_eq!(registry.get("/api/repositories/none").await.status, 404);
    assert_eq!(registry.call("DELETE", "/api/repositories/team/app/tags/v1", &[], "").await.status, 204);
    assert_eq!(registry.get("/api/repositories/team/app/tags/v1").await.status, 404);
}

#[tokio::test]
async fn download_of_a_cloud_image_is_its_disk() {
    let registry = start().await;
    let (first, second) = (noise(1, 70_000), noise(2, 30_000));
    let part = |digest: String, size: usize, title: &str| {
        json!({"mediaType": "application/vnd.cocoonstack.disk.raw.part", "digest": digest, "size": size,
            "annotations": {"org.opencontainers.image.title": title}})
    };
    let notes = json!({"mediaType": "application/vnd.cocoonstack.vm.config+json", "digest": digest(b"layer"), "size": 5});
    let parts = [
        part(registry.push("os", &second).await, second.len(), "disk.raw.part.001"),
        notes,
        part(registry.push("os", &first).await, first.len(), "disk.raw.part.000"),
    ];
    let extra = json!({"artifactType": "application/vnd.cocoonstack.os-image.v1+json", "layers": parts});
    registry.image_with("os", "latest", extra).await;
    let got = registry.get("/dl/os").await;
    assert_eq!(
        (got.status, got.header("content-type"), got.header("content-length")),
        (200, Some("application/octet-stream"), Some("100000"))
    );
    assert!(got.body == [first, second].concat(), "by title, the disk alone");
}

#[tokio::test]
async fn download_of_a_snapshot_is_an_import_archive() {
    let registry = start().await;
    let (memory, state) = (noise(3, 5_000), b"{\"a\":1}");
    let config = json!({"schemaVersion": "v1", "snapshotId": "s1", "image": "os:1", "cpu": 2, "memory": 1 << 30,
        "files": {"memory-ranges": {"mode": 0o600, "sparseMap": [{"o": 4096, "l": 5000}], "sparseSize": 1 << 20}}});
    let config = serde_json::to_vec(&config).unwrap();
    let layer = |kind: &str, digest: String, size: usize, title: &str| json!({"mediaType": kind, "digest": digest, "size": size, "annotations": {"org.opencontainers.image.title": title}});
    let layers = [
        layer(
            "application/vnd.cocoonstack.vm.memory",
            registry.push("vm", &memory).await,
            memory.len(),
            "memory-ranges",
        ),
        layer(
            "application/vnd.cocoonstack.vm.state+json",
            registry.push("vm", state).await,
            state.len(),
            "state.json",
        ),
    ];
    let config = json!({"mediaType": "application/vnd.cocoonstack.snapshot.config.v1+json",
        "digest": registry.push("vm", &config).await, "size": config.len()});
    let extra = json!({"artifactType": "application/vnd.cocoonstack.snapshot.v1+json", "config": config, "layers": layers});
    registry.image_with("vm", "latest", extra).await;
    let got = registry.get("/dl/vm").await;
    assert_eq!((got.status, got.header("content-type")), (200, Some("application/x-tar")));
    let mut archive = tar::Archive::new(got.body.as_slice());
    let mut seen = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let records: Vec<String> = entry
            .pax_extensions()
            .unwrap()
            .into_iter()
            .flatten()
            .map(|r| {
                let r = r.unwrap();
                format!("{}={}", r.key().unwrap(), r.value().unwrap())
            })
            .collect();
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
        seen.push((
            entry.path().unwrap().display().to_string(),
            entry.header().mode().unwrap(),
            records,
            bytes,
        ));
    }
    assert_eq!(
        seen.iter().map(|s| s.0.as_str()).collect::<Vec<_>>(),
        ["snapshot.json", "memory-ranges", "state.json"]
    );
    let head: serde_json::Value = serde_json::from_slice(&seen[0].3).unwrap();
    assert_eq!(
        (&head["version"], &head["config"]["id"], &head["config"]["name"], &head["config"]["cpu"]),
        (&json!(1), &json!("s1"), &json!("vm"), &json!(2))
    );
    assert_eq!((seen[1].1, &seen[1].3), (0o600, &memory), "only the data segments");
    let mut records = seen[1].2.clone();
    records.sort();
    assert_eq!(records, ["COCOON.sparse.map=[{\"l\":5000,\"o\":4096}]", "COCOON.sparse.size=1048576"]);
    assert_eq!((seen[2].1, seen[2].3.as_slice()), (0o640, state.as_slice()));
    let page = String::from_utf8(registry.get("/r/vm@latest").await.body).unwrap();
    assert!(page.contains("<th scope=\"row\">snapshotId</th><td>s1</td>"), "{page}");
}

/// Without its configuration, the archive would be imported as a VM with other properties.
#[tokio::test]
async fn snapshot_download_without_configuration_is_refused() {
    let registry = start().await;
    let large = json!({"schemaVersion": "v1", "description": "x".repeat(9 << 20)}).to_string();
    for (repo, config) in [("large", large.as_bytes()), ("broken", b"{".as_slice()), ("list", b"[]")] {
        let config = json!({"mediaType": "application/vnd.cocoonstack.snapshot.config.v1+json",
            "digest": registry.push(repo, config).await, "size": config.len()});
        let artifact = "application/vnd.cocoonstack.snapshot.v1+json";
        let layer = json!({"mediaType": "application/octet-stream", "digest": digest(b"layer"), "size": 5,
            "annotations": {"org.opencontainers.image.title": "mem"}});
        let extra = json!({"artifactType": artifact, "config": config, "layers": [layer]});
        registry.image_with(repo, "latest", extra).await;
        let refused = registry.get(&format!("/dl/{repo}")).await;
        assert_eq!((refused.status, refused.code().as_str()), (501, "UNSUPPORTED"), "{repo}");
    }
}

#[tokio::test]
async fn download_of_a_container_image_is_refused() {
    let registry = start().await;
    registry.image("app", "latest").await;
    assert_eq!(registry.get("/dl/app").await.status, 405);
    assert_eq!(registry.get("/dl/none").await.status, 404);
}

#[tokio::test]
async fn tables_are_rebuilt_after_loss_of_the_database() {
    let registry = start().await;
    let (named, body) = registry.image("a/b", "v1").await;
    let about = json!({"subject": {"mediaType": MANIFEST, "digest": named, "size": body.len()}});
    registry.image_with("a/b", "", about).await;
    let dir = registry.end().await;
    for name in ["registry.db", "registry.db-wal", "registry.db-shm"] {
        std::fs::remove_file(dir.path().join(name)).ok();
    }
    let registry = start_in(dir, |_| {}).await;
    assert_eq!(registry.get("/v2/a/b/manifests/v1").await.body, body);
    assert_eq!(registry.get(&format!("/v2/a/b/blobs/{}", digest(b"layer"))).await.body, b"layer");
    assert_eq!(
        registry.get(&format!("/v2/a/b/referrers/{named}")).await.json()["manifests"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    assert_eq!(
        registry.call("POST", "/api/catalog/sync", &[], "").await.json(),
        json!({"manifests": 2, "tags": 1, "blobs": 2})
    );
}

/// Simulates a crash between writing the file of a manifest and its row.
#[tokio::test]
async fn interrupted_manifest_push_is_repaired_at_start() {
    let registry = start().await;
    let whole = registry.manifest("a", json!({"annotations": {"n": "whole"}})).await;
    let lacking = json!([{"mediaType": "application/octet-stream", "digest": digest(b"absent"), "size": 6}]);
    let lacking = registry.manifest("a", json!({"layers": lacking})).await;
    registry.image("a", "v1").await;
    let dir = registry.end().await;
    let file = |body: &[u8]| {
        dir.path().join(format!("manifests/a/_digests/{}.json", digest(body).replace(':', "-")))
    };
    for body in [&whole, &lacking] {
        std::fs::write(file(body), body).unwrap();
    }
    let gone = file(&lacking);
    let registry = start_in(dir, |_| {}).await;
    // The order is not defined: one manifest is entered, the other is removed.
    let gone = gone.file_name().unwrap().to_string_lossy().into_owned();
    eventually("both manifests are repaired", async || {
        let entered = registry.get(&format!("/v2/a/manifests/{}", digest(&whole))).await.status == 200;
        (entered && !registry.files("manifests").contains(&gone)).then_some(())
    })
    .await
    .unwrap();
    assert_eq!(registry.get(&format!("/v2/a/manifests/{}", digest(&whole))).await.body, whole);
    assert_eq!(registry.get(&format!("/v2/a/manifests/{}", digest(&lacking))).await.status, 404);
    assert_eq!(registry.files("manifests").len(), 3, "two manifests and a tag");
}

#[tokio::test]
async fn single_sign_on_is_501_and_health_is_public() {
    let registry = start().await;
    for path in ["/login", "/login/callback", "/logout", "/auth/me"] {
        assert_eq!(registry.get(path).await.status, 501, "{path}");
    }
    assert_eq!(registry.get("/healthz").await.status, 200);
}

#[tokio::test]
async fn pages_are_markup_without_script_under_a_strict_policy() {
    let registry = start().await;
    let hostile = json!({"annotations": {"<script>alert(1)</script>": "\"><img src=x>"}});
    registry.image_with("a", "v1", hostile).await;
    for (path, want) in [("/", "href=\"/r/a\""), ("/r/a", "href=\"/r/a@v1\""), ("/r/a@v1", "&lt;script&gt;")]
    {
        let got = registry.get(path).await;
        let html = String::from_utf8(got.body.clone()).unwrap();
        assert!(html.contains(want), "{path}: {html}");
        assert!(!html.contains("<script") && !html.contains("<img"), "{path}");
        assert!(got.header("content-security-policy").unwrap().starts_with("default-src 'none'"));
    }
    let asked = registry.get("/tokens").await;
    assert_eq!(asked.status, 401);
    assert!(
        asked.header("www-authenticate").unwrap().starts_with("Basic realm="),
        "a browser can answer that"
    );
    assert_eq!(registry.call("GET", "/tokens", &[], "").await.status, 200);
    assert_eq!(registry.get("/style.css").await.header("content-type"), Some("text/css"));
}

//! `coracle push-layout` pushes the image of a package to a real registry.

use crate::support::{CORACLE, text};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::tools;
use serde_json::Value;
use tokio::process::Command;

#[tokio::test]
async fn oci_layout_image_is_pushed_unchanged() {
    if tools::require(["docker-registry"]).is_none() {
        return;
    }
    let registry = DebianRegistry::start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let layer = LayerTar::new().file("usr/bin/coracle", 0o755, &[7; 100_000]).finish();
    write_layout(dir.path(), &[layer], &ImageSpec::default(), "0.1.0").unwrap();
    let target = format!("{}/coracle/coracle:0.1.0", registry.address());
    let push = Command::new(CORACLE).arg("push-layout").arg(dir.path()).arg(&target).output().await.unwrap();
    assert!(push.status.success(), "{}", text(&push.stderr));
    let index: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("index.json")).unwrap()).unwrap();
    let digest = index["manifests"][0]["digest"].as_str().unwrap();
    assert_eq!(text(&push.stdout).trim(), digest);
    let url = format!("http://{}/v2/coracle/coracle/manifests/0.1.0", registry.address());
    let accept = index["manifests"][0]["mediaType"].as_str().unwrap();
    let answer = reqwest::Client::new().get(url).header("accept", accept).send().await.unwrap();
    assert_eq!(answer.headers()["docker-content-digest"], digest);
    let there = std::fs::read(dir.path().join("blobs/sha256").join(&digest[7..])).unwrap();
    assert_eq!(answer.bytes().await.unwrap(), there);
}

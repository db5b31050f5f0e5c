//! Tags in the registry of this project, over HTTP.

use std::net::SocketAddr;

use coracle_cocoon::{OciTags, SnapshotTags as _};
use coracle_registry::{Config, Metrics, serve};
use tokio::{sync::oneshot, task::JoinSet};
use tokio_util::sync::CancellationToken;

#[tokio::test(flavor = "multi_thread")]
async fn tags_are_looked_up_and_removed_in_a_registry() {
    let _first = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::new(dir.path().to_owned(), SocketAddr::from(([127, 0, 0, 1], 0)));
    config.token = Some("secret".into());
    let (send, ready) = oneshot::channel();
    let metrics = Metrics::register(&mut prometheus_client::registry::Registry::default());
    let mut task = JoinSet::new();
    task.spawn(async move {
        let announce = move |ready: &coracle_registry::Ready| send.send(ready.address).unwrap();
        serve(config, metrics, CancellationToken::new(), announce).await.unwrap();
    });
    let url = format!("http://{}", ready.await.unwrap());
    let manifest =
        r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}"#;
    let put = reqwest::Client::new()
        .put(format!("{url}/v2/vk-prod-demo-0/manifests/hibernate"))
        .bearer_auth("secret")
        .header("content-type", "application/vnd.oci.image.index.v1+json")
        .body(manifest);
    let answer = put.send().await.unwrap();
    assert_eq!(answer.status(), 201, "{}", answer.text().await.unwrap());
    let tags = OciTags::new(&url, Some("secret"), Vec::new()).unwrap();
    assert!(tags.has("vk-prod-demo-0", "hibernate").await.unwrap());
    assert!(!tags.has("vk-prod-demo-0", "latest").await.unwrap());
    assert!(!tags.has("vk-prod-other-0", "hibernate").await.unwrap());
    let reader = OciTags::new(&url, None, Vec::new()).unwrap();
    assert!(reader.has("vk-prod-demo-0", "hibernate").await.unwrap(), "reads need no token");
    reader.delete("vk-prod-demo-0", "hibernate").await.unwrap_err();
    for _again in 0..2 {
        tags.delete("vk-prod-demo-0", "hibernate").await.unwrap();
    }
    assert!(!tags.has("vk-prod-demo-0", "hibernate").await.unwrap());
    let nowhere = OciTags::new("http://127.0.0.1:1", None, Vec::new()).unwrap();
    nowhere.has("vk-prod-demo-0", "hibernate").await.unwrap_err();
}

//! Groups Image Manager, Image Consistency and Image Identifier Consistency of critest, with real registries.

use std::net::TcpListener;
use std::time::Duration;

use coracle_oci::{Registries, RegistryHosts};
use coracle_proto::cri::*;
use coracle_testkit::oci::{ImageSpec as Config, LayerTar, write_layout};
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::tools;
use tonic::Code;

use crate::support::{Node, container, sandbox};

/// Registry that the suite names. A mirror answers for it.
const UPSTREAM: &str = "registry.example.com/e2e";

/// Pushes an image under `name`. Equal `content` results in an equal image.
fn push(registry: &DebianRegistry, content: &str, name: &str) {
    let layout = tempfile::tempdir().unwrap();
    let layer = LayerTar::new().file("content", 0o644, content.as_bytes()).finish();
    let config = Config { cmd: vec!["serve".into()], ..Config::default() };
    write_layout(layout.path(), &[layer], &config, "1").unwrap();
    registry.push(layout.path(), "1", name, None).unwrap();
}

/// Returns a node with `registry` as the mirror of [`UPSTREAM`]. `None` if the programs are missing.
async fn start_mirrored_node() -> Option<(DebianRegistry, Node)> {
    tools::require(["docker-registry", "skopeo"])?;
    let registry = DebianRegistry::start().unwrap();
    let hosts = format!("[host.'http://{}']", registry.address());
    let hosts = RegistryHosts::parse(&hosts).unwrap().hosts();
    let node = Node::with(Registries::default().with("registry.example.com", hosts)).await;
    Some((registry, node))
}

#[tokio::test(flavor = "multi_thread")]
async fn public_image_with_tag_should_be_pulled_and_removed() {
    let Some((registry, node)) = start_mirrored_node().await else { return };
    push(&registry, "one", "e2e/test-image-tag:all");
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let name = format!("{UPSTREAM}/test-image-tag:all");
    let id = kubelet.pull(&name, None).await.unwrap();
    assert_eq!(kubelet.pull(&name, None).await.unwrap(), id, "again, and nothing is transferred");
    let image = kubelet.image_status(&name).await.unwrap();
    assert_eq!((image.id.as_str(), image.repo_tags.as_slice()), (id.as_str(), &[name.clone()][..]));
    kubelet.remove_image(&name).await.unwrap();
    assert_eq!(kubelet.image_status(&name).await, None);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn public_image_without_tag_should_show_latest() {
    let Some((registry, node)) = start_mirrored_node().await else { return };
    push(&registry, "one", "e2e/test-image-latest:latest");
    let mut daemon = node.open().await;
    let name = format!("{UPSTREAM}/test-image-latest");
    daemon.kubelet.pull(&name, None).await.unwrap();
    let image = daemon.kubelet.image_status(&name).await.unwrap();
    assert_eq!(image.repo_tags, [format!("{name}:latest")]);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn public_image_with_digest_should_show_that_digest() {
    let Some((registry, node)) = start_mirrored_node().await else { return };
    push(&registry, "one", "e2e/test-image-digest:1");
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let tagged = format!("{UPSTREAM}/test-image-digest:1");
    kubelet.pull(&tagged, None).await.unwrap();
    let name = kubelet.image_status(&tagged).await.unwrap().repo_digests.remove(0);
    kubelet.remove_image(&tagged).await.unwrap();
    kubelet.pull(&name, None).await.unwrap();
    let image = kubelet.image_status(&name).await.unwrap();
    assert_eq!((image.repo_digests, image.repo_tags), (vec![name], vec![]));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_tags_of_one_image_are_one_image() {
    let Some((registry, node)) = start_mirrored_node().await else { return };
    let names: Vec<_> = (1..=3).map(|n| format!("{UPSTREAM}/test-image-tags:{n}")).collect();
    (1..=3).for_each(|n| push(&registry, "one", &format!("e2e/test-image-tags:{n}")));
    push(&registry, "two", "e2e/test-image-2:latest");
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    for name in names.iter().chain([&format!("{UPSTREAM}/test-image-2")]) {
        kubelet.pull(name, None).await.unwrap();
    }
    let listed = kubelet.image_list().await;
    let images: Vec<_> = listed.iter().filter(|image| image.repo_tags.contains(&names[0])).collect();
    assert_eq!((images.len(), &images[0].repo_tags), (1, &names));
    assert_eq!(listed.len(), 3, "with the other one, and the one of the node");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn image_of_two_registries_has_one_id() {
    let Some((registry, node)) = start_mirrored_node().await else { return };
    let second = DebianRegistry::start().unwrap();
    push(&registry, "one", "e2e/pause:3.9");
    push(&second, "one", "other/pause:3.9");
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let names = [format!("{UPSTREAM}/pause:3.9"), format!("{}/other/pause:3.9", second.address())];
    let first = kubelet.pull(&names[0], None).await.unwrap();
    assert_eq!(kubelet.pull(&names[1], None).await.unwrap(), first);
    let image = kubelet.image_status(&names[1]).await.unwrap();
    assert_eq!((image.id.as_str(), image.repo_tags.len()), (first.as_str(), 2));
    let pod = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let id = kubelet.create(&pod, container("main", &first, &[]), sandbox("web")).await.unwrap();
    let (status, listed) = (kubelet.status(&id).await.unwrap(), kubelet.containers().await.remove(0));
    assert_eq!((status.image_id, listed.image_id), (first.clone(), first));
    kubelet.remove(&id).await.unwrap();
    kubelet.remove_image(&names[0]).await.unwrap();
    assert_eq!(kubelet.image_status(&names[1]).await, None, "the names of both registries are gone");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pull_with_timeout_of_the_caller_leaves_no_image() {
    // This registry accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let name = format!("{}/slow:1", silent.local_addr().unwrap());
    let image = Some(ImageSpec { image: name.clone(), ..ImageSpec::default() });
    let mut request = tonic::Request::new(PullImageRequest { image, ..PullImageRequest::default() });
    request.set_timeout(Duration::from_millis(300));
    let late = daemon.kubelet.images.pull_image(request).await.unwrap_err();
    assert!([Code::DeadlineExceeded, Code::Cancelled].contains(&late.code()), "{late}");
    assert_eq!(daemon.kubelet.image_status(&name).await, None);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_pull_returns_the_cri_error_code() {
    if tools::require(["docker-registry", "skopeo"]).is_none() {
        return;
    }
    let registry = DebianRegistry::start_with_password().unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let name = format!("{}/private:1", registry.address());
    let anonymous = kubelet.pull(&name, None).await.unwrap_err();
    assert_eq!(anonymous.code(), Code::PermissionDenied, "{anonymous}");
    let auth = AuthConfig { username: "user".into(), password: "secret".into(), ..AuthConfig::default() };
    let missing = kubelet.pull(&name, Some(auth)).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound, "{missing}");
    let gone = kubelet.pull(&format!("{closed}/any:1"), None).await.unwrap_err();
    // The kubelet recognises the first word only with the code Unknown.
    let is_read = gone.code() == Code::Unknown && gone.message().starts_with("RegistryUnavailable");
    assert!(is_read, "{gone}");
    let invalid = kubelet.pull("UPPER CASE", None).await.unwrap_err();
    assert_eq!(invalid.code(), Code::InvalidArgument);
    daemon.end().await;
}

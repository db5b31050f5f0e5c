//! Images that must be signed by the policy of a namespace, with a real registry and signatures made with sigstore's libraries.

use std::process::Command;
use std::sync::{Arc, Mutex};

use coracle_image::PublicKeys;
use coracle_oci::Registries;
use coracle_pod::NamespaceKeys;
use coracle_proto::cri::*;
use coracle_testkit::oci::{ImageSpec as Config, LayerTar, write_layout};
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::tools;
use tonic::{Code, Status};

use crate::support::{IMAGE, Kubelet, Node, container, sandbox};

/// Pushes an image and returns its name with its digest.
fn push(registry: &DebianRegistry, node: &Node, content: &str) -> String {
    let layout = node.dir.path().join(content);
    let layer = LayerTar::new().file("bin/true", 0o755, content.as_bytes()).finish();
    let config = Config { cmd: vec!["/bin/true".into()], ..Config::default() };
    let manifest = write_layout(&layout, &[layer], &config, "1").unwrap();
    let name = registry.push(&layout, "1", &format!("team/{content}:1"), None).unwrap();
    format!("{}@{manifest}", name.rsplit_once(':').unwrap().0)
}

/// Signs an image with a new key, and returns the public key.
fn sign(image: &str) -> String {
    let output = Command::new(tools::tool("cosign-sign").unwrap()).arg(image).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn sandbox_in(namespace: &str, name: &str) -> PodSandboxConfig {
    let mut config = sandbox(name);
    namespace.clone_into(&mut config.metadata.as_mut().unwrap().namespace);
    config
}

impl Kubelet {
    async fn pull_for(&mut self, namespace: &str, image: &str) -> Result<(), Status> {
        let image = Some(ImageSpec { image: image.into(), ..ImageSpec::default() });
        let sandbox_config = Some(sandbox_in(namespace, "web"));
        self.images.pull_image(PullImageRequest { image, auth: None, sandbox_config }).await.map(drop)
    }

    /// Creates a container from an image of the node, in a pod of a namespace, with another image as a volume.
    async fn uses(&mut self, namespace: &str, image: &str, volume: Option<&str>) -> Result<(), Status> {
        let config = sandbox_in(namespace, namespace);
        let pod = self.run_sandbox(config.clone()).await?;
        let mut container = container("app", image, &[]);
        container.mounts.extend(volume.map(|image| Mount {
            container_path: "/volume".into(),
            readonly: true,
            image: Some(ImageSpec { image: image.into(), ..ImageSpec::default() }),
            ..Mount::default()
        }));
        let made = self.create(&pod, container, config).await;
        self.stop_sandbox(&pod).await?;
        self.remove_sandbox(&pod).await?;
        made.map(drop)
    }
}

fn assert_refused(answer: Result<(), Status>, why: &str) {
    let status = answer.unwrap_err();
    // The kubelet takes the pod's reason from the first word, which it recognises only with this code.
    assert_eq!(status.code(), Code::Unknown, "{status}");
    assert!(status.message().starts_with("SignatureValidationFailed: "), "{status}");
    assert!(status.message().contains(why), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn image_must_be_signed_as_its_namespace_wants() {
    if tools::require(["docker-registry", "skopeo", "cosign-sign"]).is_none() {
        return;
    }
    let registry = DebianRegistry::start().unwrap();
    let at = format!("http://{}", registry.address());
    let mut node = Node::with(Registries::default().with_url(&at)).await;
    let policy = Arc::new(Mutex::new(None::<Option<String>>));
    let known = policy.clone();
    node.image_keys = NamespaceKeys::of(move |namespace| match &*known.lock().unwrap() {
        None => Err("it was not read yet".to_owned()),
        Some(Some(pem)) if namespace == "team" => Ok(Some(PublicKeys::parse(pem).unwrap())),
        Some(_) => Ok(None),
    });
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let (app, other) = (push(&registry, &node, "app"), push(&registry, &node, "other"));
    assert_refused(kubelet.pull_for("free", &app).await, "not read yet");
    *policy.lock().unwrap() = Some(None);
    for image in [&app, &other] {
        kubelet.pull_for("team", image).await.unwrap();
    }

    *policy.lock().unwrap() = Some(Some(sign(&other)));
    for image in [&app, IMAGE] {
        assert_refused(kubelet.uses("team", image, None).await, "is not signed");
        kubelet.uses("free", image, None).await.unwrap();
    }
    assert_refused(kubelet.pull_for("team", &app).await, "is not signed");
    kubelet.pull_for("free", &app).await.unwrap();
    assert_refused(kubelet.uses("team", &other, Some(&app)).await, "is not signed");
    kubelet.uses("team", &other, None).await.unwrap();

    *policy.lock().unwrap() = Some(Some(sign(&app)));
    kubelet.uses("team", &app, None).await.unwrap();
    // The result is cached while the registry is unavailable, even across a restart of the daemon: the kubelet does not pull
    // again.
    drop(registry);
    kubelet.uses("team", &app, None).await.unwrap();
    daemon.end().await;
    let mut daemon = node.open().await;
    daemon.kubelet.uses("team", &app, None).await.unwrap();
    daemon.kubelet.uses("team", &other, None).await.unwrap_err();
    daemon.end().await;
}

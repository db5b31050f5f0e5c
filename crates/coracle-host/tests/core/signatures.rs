//! Images that must be signed, with a real registry and signatures made by sigstore's libraries.

use std::process::Command;

use coracle_frontends::HostService;
use coracle_oci::{NoProgress, PullOrigin, Reference, Registries};
use coracle_proto::host as pb;
use coracle_proto::host::host_server::Host as _;
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::tools;
use std::sync::Arc;
use tonic::{Code, Request, Status};

use super::support::{IMAGE, Node};

/// Signs an image with a new key, and returns the public key.
fn sign(image: &str, digest: &str) -> String {
    let repository = image.rsplit_once(':').unwrap().0;
    let mut command = Command::new(tools::tool("cosign-sign").unwrap());
    let output = command.arg(format!("{repository}@{digest}")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Stores the signatures of one digest under another digest.
fn copy_signatures(image: &str, from: &str, to: &str) {
    let repository = image.rsplit_once(':').unwrap().0;
    let name = |digest: &str| format!("{repository}:{}.sig", digest.replace(':', "-"));
    let mut command = Command::new(tools::tool("crane").unwrap());
    let output = command.args(["copy", "--insecure", &name(from), &name(to)]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

struct World {
    node: Node,
    service: HostService,
    host: coracle_host::Host,
}

impl World {
    async fn create(&self, image: &str, keys: &str) -> Result<(), Status> {
        let request = pb::CreateVmRequest {
            name: "web".into(),
            image: image.into(),
            vcpus: 1,
            memory_mib: 128,
            image_keys: keys.into(),
            ..pb::CreateVmRequest::default()
        };
        self.service.create_vm(Request::new(request)).await?;
        self.host.delete("web", true, None).await.unwrap();
        Ok(())
    }

    async fn assert_refused(&self, image: &str, keys: &str, why: &str) {
        let status = self.create(image, keys).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied, "{status:?}");
        assert_eq!(status.metadata().get("coracle-code").unwrap(), "COR-IMG-020");
        assert!(status.message().contains(why), "{status:?}");
        assert!(self.host.list().is_empty(), "nothing was made");
    }

    /// Pushes an image and pulls it to the node. Returns name and digest.
    async fn push(&self, registry: &DebianRegistry, content: &str, name: &str) -> (String, String) {
        let layout = self.node.dir.path().join(content);
        let layer = LayerTar::new().file("bin/true", 0o755, content.as_bytes()).finish();
        let spec = ImageSpec { cmd: vec!["/bin/true".into()], ..ImageSpec::default() };
        write_layout(&layout, &[layer], &spec, "1").unwrap();
        let image = registry.push(&layout, "1", name, None).unwrap();
        let reference: Reference = image.parse().unwrap();
        let how = (coracle_image::PullPolicy::IfNotPresent, PullOrigin::Local);
        let found = self.host.pull(&reference, how, Arc::new(NoProgress)).await.unwrap();
        (image, found.digest.to_string())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn image_must_be_signed_by_a_key_of_the_caller() {
    if tools::require(["docker-registry", "skopeo", "crane", "cosign-sign"]).is_none() {
        return;
    }
    let registry = DebianRegistry::start().unwrap();
    let mut node = Node::new().await;
    node.registries = Registries::default().with_url(&format!("http://{}", registry.address()));
    let host = node.open().await;
    let world = World { node, service: HostService::new(host.clone()), host };
    let (app, of_app) = world.push(&registry, "one", "team/app:1").await;
    let (other, of_other) = world.push(&registry, "two", "team/app:2").await;
    let of_another = sign(&other, &of_other);

    world.create(&app, "").await.unwrap();
    world.assert_refused(&app, &of_another, "0 signatures").await;
    let own = sign(&app, &of_app);
    world.assert_refused(&app, &of_another, "1 signatures in its repository, none by the keys").await;
    world.create(&app, &own).await.unwrap();
    world.create(&app, &format!("{of_another}{own}")).await.unwrap();
    // A signature is valid for its own image only.
    copy_signatures(&app, &of_app, &of_other);
    world.assert_refused(&other, &own, "1 signatures").await;
    world.assert_refused(IMAGE, &own, "made on this node").await;
    let status = world.create(&app, "no PEM").await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    // Without the registry, verified images are known and all others are refused.
    drop(registry);
    world.create(&app, &own).await.unwrap();
    assert!(world.create(&other, &of_another).await.is_err());
    world.host.shutdown().await;
}

//! Pods whose images must be signed with the keys of their namespace. The tests of the image crates cover the search for
//! signatures.

use anyhow::Result;
use coracle_api::cocoon::{LifecycleState, keys};
use coracle_api::keys::IMAGE_POLICY;
use coracle_testkit::cluster;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::world::{IMAGE, World};

const KEY: &str = "-----BEGIN PUBLIC KEY-----\n\
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEfWMtJ1wv5jmFygdU7SrplPjhjPXe\n\
PO722VfBduFFppHgpTQlVmcvrDRXX4YGZ91EBZKAJRiVD24J7lqBwEeKyw==\n\
-----END PUBLIC KEY-----";

impl World {
    /// Writes the policy: these keys apply to all namespaces.
    async fn require(&self, keys: &str) -> Result<()> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let policy = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": IMAGE_POLICY}, "data": {"_default": keys},
        });
        api.patch(IMAGE_POLICY, &PatchParams::apply("test").force(), &Patch::Apply(policy)).await?;
        Ok(())
    }
}

#[test]
fn unsigned_image_waits_for_another_policy() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.options.image_policy = Some(world.namespace.clone());
        world.require(KEY).await?;
        let daemon = world.start().await?;
        world.create("web", &["serve"], json!({})).await?;
        let vm = [(keys::VM_NAME, "vk-web"), (keys::MODE, "run"), (keys::IMAGE, IMAGE)];
        world.create_vm("machine", &vm).await?;
        for (name, reason) in [("web", "Failed"), ("machine", "ErrImagePull")] {
            let message = world.until_event(name, reason).await?;
            assert!(message.contains("it was made on this node and is in no registry"), "{message}");
        }
        world.require("").await?;
        world.until_ready("web").await?;
        world.until_state("machine", LifecycleState::Ready).await?;

        // A running pod stays unchanged; a new one is checked.
        world.require("no key").await?;
        world.create("late", &["serve"], json!({})).await?;
        let message = world.until_event("late", "Failed").await?;
        assert!(message.contains("ConfigMap coracle-image-policy: invalid public keys"), "{message}");
        daemon.until_vms(3).await?;
        for name in ["web", "machine", "late"] {
            world.delete(name).await?;
            world.until_gone(name).await?;
        }
        daemon.stop().await
    });
}

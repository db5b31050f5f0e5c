//! Signatures of the images of pods. They are checked at every pull, and again when an image is used, because an image that is
//! on the node is not pulled again for the next namespace. The host core caches the results.

use coracle_host::{HostError, NodeImage};
use coracle_image::{PublicKeys, PullOptions};
use coracle_oci::Reference;
use tonic::Status;

use crate::images::{Content, StoredImage};
use crate::refusal::{of_signature, unsigned_image};
use crate::server::CriServer;

impl CriServer {
    fn image_keys(&self, namespace: &str) -> Result<Option<PublicKeys>, Status> {
        self.0.options.image_keys.of_namespace(namespace).now().map_err(|why| unsigned_image(&why))
    }

    /// Checks an image that was pulled with these options.
    pub(crate) async fn check_pulled(
        &self,
        namespace: &str,
        reference: &Reference,
        image: &NodeImage,
        options: &PullOptions,
    ) -> Result<(), Status> {
        let Some(keys) = self.image_keys(namespace)? else { return Ok(()) };
        let checked = self.0.host.verify_image(reference, image, &keys, options).await;
        checked.map_err(|error| of_signature(&error))
    }

    /// Checks an image of this node before a pod uses it: one of its names must lead to a signature. Registries are queried
    /// without credentials; results from a pull with credentials are cached.
    pub(crate) async fn check_stored(&self, namespace: &str, image: &StoredImage) -> Result<(), Status> {
        let Some(keys) = self.image_keys(namespace)? else { return Ok(()) };
        let (reference, options) = (image.reference(), PullOptions::default());
        if let (Content::Disk(disk), Ok(name)) = (&image.content, reference.parse()) {
            return self.check_pulled(namespace, &name, &NodeImage::Disk(disk.clone()), &options).await;
        }
        let reason = "it has no name by which its registry is found".to_owned();
        let mut refusal = HostError::Unsigned { reference, reason };
        let names = self.0.host.images().names();
        for name in names.iter().filter(|name| image.has(&name.digest)) {
            match self.0.host.verify_digest(&name.reference, &name.digest, &keys, &options).await {
                Ok(()) => return Ok(()),
                Err(error) => refusal = error,
            }
        }
        Err(of_signature(&refusal))
    }
}

//! Signatures of the images of pods: looked for at every pull, and again where an image is used, since one that is here is not
//! pulled for the next namespace. The host core remembers what it found.

use coracle_host::{HostError, NodeImage};
use coracle_image::{PublicKeys, PullOptions};
use coracle_oci::Reference;
use tonic::Status;

use crate::images::{Content, StoredImage};
use crate::refusal::{of_signature, unsigned};
use crate::server::CriServer;

impl CriServer {
    fn image_keys(&self, namespace: &str) -> Result<Option<PublicKeys>, Status> {
        self.0.options.image_keys.of_namespace(namespace).now().map_err(|why| unsigned(&why))
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

    /// Checks an image of this node that a pod is to use: one of its names leads to a signature. Registries are asked
    /// without credentials; what was found with those of a pull is remembered.
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

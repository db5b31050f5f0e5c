//! Verifies the signatures of images.

use coracle_image::{ImageError, PublicKeys, PullOptions, SignatureError};
use coracle_oci::{Digest, OciError, PullOrigin, Reference};

use super::Host;
use super::resolve_image::{NodeImage, is_of_this_host};
use crate::HostError;

impl Host {
    /// Verifies that one of the keys has signed an image of this node. A positive result is remembered by digest and keys.
    /// Otherwise the registry is asked, with the credentials of `options`. Cancel-safe.
    ///
    /// # Errors
    /// [`HostError::Unsigned`]; [`HostError::Image`] with the registry's error.
    pub async fn verify_image(
        &self,
        reference: &Reference,
        image: &NodeImage,
        keys: &PublicKeys,
        options: &PullOptions,
    ) -> Result<(), HostError> {
        match image {
            NodeImage::Container(image) => self.verify_digest(reference, &image.digest, keys, options).await,
            NodeImage::Disk(_) => Err(disk_image_error(reference)),
        }
    }

    /// Like [`Host::verify_image`], for the image of a snapshot.
    ///
    /// # Errors
    /// As for [`Host::verify_image`]; [`HostError::NoSnapshot`].
    pub async fn verify_snapshot(
        &self,
        name: &str,
        keys: &PublicKeys,
        origin: PullOrigin,
    ) -> Result<(), HostError> {
        let info = self.snapshot(name).await?;
        let failed = |source: ImageError| HostError::Image { reference: info.image.clone(), source };
        let reference: Reference = info.image.parse().map_err(|error: OciError| failed(error.into()))?;
        match info.image_digest.parse::<Digest>() {
            Ok(digest) if info.disk_image_vm.is_none() => {
                let options = PullOptions { origin, ..PullOptions::default() };
                self.verify_digest(&reference, &digest, keys, &options).await
            }
            _ => Err(disk_image_error(&reference)),
        }
    }

    /// Like [`Host::verify_image`], for the container image with this digest.
    ///
    /// # Errors
    /// Like [`Host::verify_image`].
    pub async fn verify_digest(
        &self,
        reference: &Reference,
        digest: &Digest,
        keys: &PublicKeys,
        options: &PullOptions,
    ) -> Result<(), HostError> {
        let unsigned = |reason: String| HostError::Unsigned { reference: reference.to_string(), reason };
        if is_of_this_host(reference) {
            return Err(unsigned("it was made on this node and is in no registry".to_owned()));
        }
        let signed_images = &self.0.signed_images;
        if signed_images.has(digest, keys) {
            return Ok(());
        }
        match self.images().verify(reference, digest, keys, options).await {
            Ok(()) => {
                // The image is signed in any case; the next daemon verifies it again.
                if let Err(error) = signed_images.add(*digest, keys).await {
                    tracing::warn!(%reference, %error, "note a signed image failed");
                }
                Ok(())
            }
            Err(error @ SignatureError::Untrusted { .. }) => Err(unsigned(error.to_string())),
            Err(SignatureError::Oci(error)) => {
                Err(HostError::Image { reference: reference.to_string(), source: error.into() })
            }
        }
    }
}

fn disk_image_error(reference: &Reference) -> HostError {
    let reason = "signatures of disk images are not looked for".to_owned();
    HostError::Unsigned { reference: reference.to_string(), reason }
}

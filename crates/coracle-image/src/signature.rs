//! Signatures of images by public keys, as cosign and containers/image store them: in the repository of the image, under the
//! tag `sha256-<digest>.sig`. Each signature is a layer with the signed payload (sigstore, "Cosign Signature Specifications").

mod keys;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use coracle_oci::{
    Client, Descriptor, Digest, Manifest, OciError, Operation, Reference, Session, fetch_bytes,
};
use serde::Deserialize;

pub use keys::{InvalidPublicKey, PublicKeys};

/// Media type of a signed payload.
const PAYLOAD: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// Annotation of the payload's layer that holds the signature, in base64.
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
/// `critical.type` of a payload.
const TYPE: &str = "cosign container image signature";
/// Longest manifest and longest payload that are read.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;
const PAYLOAD_BYTES_MAX: u64 = 64 << 10;
/// Limit of signatures checked per image.
const SIGNATURES_MAX: usize = 64;

/// Why an image is not known to be signed by one of the keys.
#[derive(Debug, thiserror::Error)]
pub enum SignatureError {
    /// No signature of the image is by one of the keys.
    #[error("{found} signatures in its repository, none by the keys that are required")]
    Untrusted {
        /// Number of signatures that were checked; 0 if the image has none.
        found: usize,
    },
    /// Error of the registry.
    #[error(transparent)]
    Oci(#[from] OciError),
}

/// Signed payload: what a signature states.
#[derive(Deserialize)]
struct Payload {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    #[serde(rename = "type")]
    kind: String,
    image: SignedImage,
}

#[derive(Deserialize)]
struct SignedImage {
    #[serde(rename = "docker-manifest-digest")]
    digest: String,
}

/// Searches for a signature of one of the digests by one of the keys. Cancel-safe.
///
/// # Errors
/// [`SignatureError`].
pub(crate) async fn verify(
    client: &Client<'_>,
    reference: &Reference,
    digests: &[Digest],
    keys: &PublicKeys,
) -> Result<(), SignatureError> {
    let mut last = SignatureError::Untrusted { found: 0 };
    for digest in digests {
        let tag = digest.to_string().replace(':', "-");
        let name = format!("{}/{}:{tag}.sig", reference.registry(), reference.repository());
        let signatures: Reference = name.parse()?;
        for endpoint in client.endpoints(&signatures, Operation::Pull)? {
            let found = match client.open(endpoint, &signatures, Operation::Pull).await {
                Ok(session) => verify_at(&session, digest, keys).await,
                Err(error) => Err(error.into()),
            };
            match found {
                Ok(()) => return Ok(()),
                Err(SignatureError::Oci(OciError::NotFound { .. })) => {}
                Err(error) => last = error,
            }
        }
    }
    Err(last)
}

/// Checks the signatures on one server.
async fn verify_at(session: &Session, digest: &Digest, keys: &PublicKeys) -> Result<(), SignatureError> {
    let tag = format!("{}.sig", digest.to_string().replace(':', "-"));
    let manifest = session.manifest(&tag, MANIFEST_BYTES_MAX).await?;
    let manifest = Manifest::parse(&manifest.bytes);
    let manifest = manifest.map_err(|error| OciError::hostile(format!("manifest of signatures: {error}")))?;
    let layers = manifest.layers.unwrap_or_default();
    let signed = layers.iter().filter_map(|layer| {
        let signature = layer.annotation(SIGNATURE)?;
        Some((Descriptor::try_from(layer).ok()?, decode_base64(signature)?))
    });
    let mut found = 0;
    for (layer, signature) in signed.take(SIGNATURES_MAX) {
        if layer.media_type != PAYLOAD || layer.size_bytes > PAYLOAD_BYTES_MAX {
            continue;
        }
        found += 1;
        let payload = fetch_bytes(session, &layer.digest, layer.size_bytes).await?;
        if is_of(&payload, digest) && keys.have_signed(&payload, &signature) {
            return Ok(());
        }
    }
    Err(SignatureError::Untrusted { found })
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

/// True when the payload is about the image with this digest.
fn is_of(payload: &[u8], digest: &Digest) -> bool {
    let payload: Result<Payload, _> = serde_json::from_slice(payload);
    payload.is_ok_and(|payload| {
        payload.critical.kind == TYPE && payload.critical.image.digest == digest.to_string()
    })
}

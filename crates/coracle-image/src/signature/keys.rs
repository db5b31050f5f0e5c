//! Public keys that verify signatures of images.

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P384_SHA256_ASN1, ED25519, RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey,
    VerificationAlgorithm,
};
use coracle_oci::Digest;
use x509_parser::pem::Pem;
use x509_parser::prelude::FromDer as _;
use x509_parser::public_key::PublicKey as Parsed;
use x509_parser::x509::SubjectPublicKeyInfo;

/// Label of a public key (RFC 7468, section 13).
const LABEL: &str = "PUBLIC KEY";
/// Ed25519 (RFC 8410, section 3).
const ED25519_OID: &str = "1.3.101.112";

/// Text without a public key, or with an unsupported key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid public keys: {reason}")]
pub struct InvalidPublicKey {
    reason: String,
}

/// Public keys, one of which must have signed an image. Cheap to clone.
#[derive(Clone)]
pub struct PublicKeys {
    keys: Vec<(&'static dyn VerificationAlgorithm, Vec<u8>)>,
    fingerprint: Digest,
}

impl std::fmt::Debug for PublicKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PublicKeys({} of {})", self.keys.len(), self.fingerprint)
    }
}

impl PublicKeys {
    /// Parses PEM blocks: ECDSA on P-256 or P-384, Ed25519, RSA of at least 2048 bits.
    ///
    /// # Errors
    /// [`InvalidPublicKey`].
    pub fn parse(pem: &str) -> Result<Self, InvalidPublicKey> {
        let wrong = |reason: String| InvalidPublicKey { reason };
        let mut keys = Vec::new();
        for block in Pem::iter_from_buffer(pem.as_bytes()) {
            let block = block.map_err(|error| wrong(error.to_string()))?;
            if block.label != LABEL {
                return Err(wrong(format!("a PEM block {:?} in the place of {LABEL}", block.label)));
            }
            keys.push(key(&block.contents).map_err(wrong)?);
        }
        match keys.is_empty() {
            true => Err(wrong("no PEM block".to_owned())),
            false => Ok(Self { keys, fingerprint: Digest::of(pem.trim().as_bytes()) }),
        }
    }

    /// Digest of the PEM text.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        self.fingerprint
    }

    /// True when one of the keys has signed the message, with SHA-256.
    pub(crate) fn have_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        self.keys.iter().any(|(algorithm, key)| {
            UnparsedPublicKey::new(*algorithm, key).verify(message, signature).is_ok()
        })
    }
}

fn key(der: &[u8]) -> Result<(&'static dyn VerificationAlgorithm, Vec<u8>), String> {
    let (_, info) = SubjectPublicKeyInfo::from_der(der).map_err(|error| error.to_string())?;
    let bytes = info.subject_public_key.data.to_vec();
    if info.algorithm.algorithm.to_id_string() == ED25519_OID {
        return Ok((&ED25519, bytes));
    }
    match info.parsed().map_err(|error| error.to_string())? {
        Parsed::EC(point) => match point.key_size() {
            256 => Ok((&ECDSA_P256_SHA256_ASN1, bytes)),
            384 => Ok((&ECDSA_P384_SHA256_ASN1, bytes)),
            bits => Err(format!("ECDSA with {bits} bits is not supported")),
        },
        Parsed::RSA(_) => Ok((&RSA_PKCS1_2048_8192_SHA256, bytes)),
        _ => Err(format!("algorithm {} is not supported", info.algorithm.algorithm)),
    }
}

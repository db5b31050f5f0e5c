//! Client certificates: the handshake accepts any certificate, and its signature is verified afterwards.
//!
//! A certificate of another authority does not fail the handshake. Such a client may have a token, or use a part of the server
//! with another authority; otherwise it gets a response that names the problem. The handshake proves that the client has the
//! key.

use std::sync::Arc;
use std::time::Duration;

use coracle_types::Clock;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};

use crate::user::User;

/// Invalid client authorities.
#[derive(Debug, thiserror::Error)]
#[error("invalid client CA: {reason}")]
pub struct InvalidClientCa {
    reason: String,
}

/// Authorities of client certificates. Clones share them.
#[derive(Clone, Debug)]
pub struct ClientCa {
    verifier: Arc<dyn ClientCertVerifier>,
    clock: Clock,
}

impl ClientCa {
    /// Reads the authorities of a PEM file.
    ///
    /// # Errors
    /// [`InvalidClientCa`] when a certificate cannot be read, or the file contains none.
    pub fn new(pem: &[u8], clock: Clock) -> Result<Self, InvalidClientCa> {
        let wrong = |reason: String| InvalidClientCa { reason };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
            roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
        Ok(Self { verifier: verifier.map_err(|error| wrong(error.to_string()))?, clock })
    }

    /// Returns whether one of the authorities has signed this chain for a client, and the chain is valid now.
    #[must_use]
    pub fn has_signed(&self, chain: &[CertificateDer<'_>]) -> bool {
        let Some((own, between)) = chain.split_first() else { return false };
        let now = u64::try_from(self.clock.now().seconds()).unwrap_or(0);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(now));
        let verified = self.verifier.verify_client_cert(own, between, now);
        if let Err(error) = &verified {
            tracing::debug!(%error, "client certificate is invalid");
        }
        verified.is_ok()
    }

    /// Returns the user of a client certificate that one of the authorities has signed and that is valid now.
    #[must_use]
    pub fn user(&self, chain: &[CertificateDer<'_>]) -> Option<User> {
        let own = chain.first()?;
        if self.has_signed(chain) { User::of_certificate(own) } else { None }
    }
}

/// Certificate verifier that accepts clients without a certificate, and any certificate whose key the client has.
#[derive(Debug)]
pub struct AnyCertificate {
    hints: Vec<DistinguishedName>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl AnyCertificate {
    /// Returns a verifier that sends the names of these authorities to clients, so that they choose the right certificate.
    /// Without authorities, clients choose freely.
    #[must_use]
    pub fn new(authorities: Option<&ClientCa>, provider: &CryptoProvider) -> Self {
        let hints = authorities.map(|ca| ca.verifier.root_hint_subjects().to_vec()).unwrap_or_default();
        Self { hints, algorithms: provider.signature_verification_algorithms }
    }
}

impl ClientCertVerifier for AnyCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Request extension: client certificates of the connection, which [`AnyCertificate`] accepted.
#[derive(Clone, Debug, Default)]
pub struct PeerCertificates(pub Arc<[CertificateDer<'static>]>);

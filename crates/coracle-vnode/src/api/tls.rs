//! TLS of the API: clients are asked for a certificate, and may have none.
//!
//! A certificate of another authority does not fail the handshake: such a client may have a token, and else gets an answer
//! that says what is wrong. The handshake shows that the client has the key; who signed the certificate is checked behind it.

use std::sync::Arc;
use std::time::Duration;

use coracle_types::Clock;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoClientAuth, WebPkiClientVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme};

use super::error::ApiError;
use super::user::User;

/// Protocols that clients may choose; upgrades need the second.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Authorities of client certificates.
#[derive(Clone, Debug)]
pub(super) struct ClientCa {
    verifier: Arc<dyn ClientCertVerifier>,
    clock: Clock,
}

impl ClientCa {
    /// Those of a PEM file.
    pub(super) fn new(pem: &[u8], clock: Clock) -> Result<Self, ApiError> {
        let wrong = |reason: String| ApiError::ClientCa { reason };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
            roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
        Ok(Self { verifier: verifier.map_err(|error| wrong(error.to_string()))?, clock })
    }

    /// The user of a certificate that one of them signed for clients and that is valid now.
    pub(super) fn user(&self, chain: &[CertificateDer<'_>]) -> Option<User> {
        let (own, between) = chain.split_first()?;
        let now = u64::try_from(self.clock.now().seconds()).unwrap_or(0);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(now));
        match self.verifier.verify_client_cert(own, between, now) {
            Ok(_) => User::of_certificate(own),
            Err(error) => {
                tracing::debug!(%error, "client certificate is invalid");
                None
            }
        }
    }
}

/// The settings of new connections: the certificate of `serving`, and whether clients are asked for theirs.
pub(super) fn server_config(
    serving: &ServerConfig,
    ca: Option<&ClientCa>,
) -> Result<Arc<ServerConfig>, ApiError> {
    let provider = serving.crypto_provider().clone();
    let clients: Arc<dyn ClientCertVerifier> = match ca {
        Some(ca) => Arc::new(Requested::new(ca, &provider)),
        None => Arc::new(NoClientAuth),
    };
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|source| ApiError::Tls { source })?;
    let mut config =
        config.with_client_cert_verifier(clients).with_cert_resolver(serving.cert_resolver.clone());
    config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
    Ok(Arc::new(config))
}

/// Takes any certificate whose key the client has.
#[derive(Debug)]
struct Requested {
    ca: ClientCa,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Requested {
    fn new(ca: &ClientCa, provider: &CryptoProvider) -> Self {
        Self { ca: ca.clone(), algorithms: provider.signature_verification_algorithms }
    }
}

impl ClientCertVerifier for Requested {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.ca.verifier.root_hint_subjects()
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

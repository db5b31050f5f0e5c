//! Verification of the server's certificate.

use std::sync::Arc;

use aws_lc_rs::digest;
use reqwest::{Certificate, Client};
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, aws_lc_rs as provider_of, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use sha2::{Digest as _, Sha256};

use super::options::SoapOptions;
use crate::{Credentials, VsphereError};

/// Creates a client that trusts what the credentials name: a thumbprint, their own authorities, those of the system, or any
/// certificate.
pub(super) fn client(credentials: &Credentials, options: &SoapOptions) -> Result<Client, VsphereError> {
    let wrong = |what: String| VsphereError::Tls { server: credentials.server().to_owned(), what };
    let builder = Client::builder()
        .http1_only()
        .tcp_nodelay(true)
        .connect_timeout(options.connect)
        .pool_idle_timeout(options.idle)
        .pool_max_idle_per_host(options.calls_max);
    let builder = if !credentials.thumbprint.is_empty() {
        builder.tls_backend_preconfigured(pinned_config(&credentials.thumbprint).map_err(wrong)?)
    } else if credentials.insecure {
        builder.tls_danger_accept_invalid_certs(true)
    } else if !credentials.ca_pem.is_empty() {
        let bundle = Certificate::from_pem_bundle(credentials.ca_pem.as_bytes());
        let bundle = bundle.map_err(|_| wrong("key \"ca.crt\" is not PEM".into()))?;
        if bundle.is_empty() {
            return Err(wrong("key \"ca.crt\" holds no certificate".into()));
        }
        builder.tls_certs_only(bundle)
    } else {
        builder
    };
    builder.build().map_err(|e| wrong(e.to_string()))
}

fn pinned_config(thumbprint: &str) -> Result<ClientConfig, String> {
    let provider = Arc::new(provider_of::default_provider());
    let pin = Pin { thumbprint: thumbprint.to_owned(), provider: provider.clone() };
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(pin))
        .with_no_client_auth();
    Ok(config)
}

/// Whether a certificate has the thumbprint: SHA-256, or SHA-1, which its length shows. A pin only has to withstand a second
/// certificate with the same digest (second preimage), not two certificates of an attacker's choice (collision).
fn is_pinned(certificate: &[u8], thumbprint: &str) -> bool {
    match thumbprint.len() {
        40 => {
            let sum = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, certificate);
            hex::encode(sum.as_ref()) == thumbprint
        }
        _ => hex::encode(Sha256::digest(certificate)) == thumbprint,
    }
}

/// Verifier that accepts only the certificate of a thumbprint, regardless of its name and authority. Signatures are still
/// verified.
#[derive(Debug)]
struct Pin {
    thumbprint: String,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pin {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if is_pinned(end_entity, &self.thumbprint) {
            return Ok(ServerCertVerified::assertion());
        }
        Err(rustls::Error::General("the certificate has another thumbprint than the Secret says".into()))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_is_pinned_by_sha256_or_sha1() {
        // Digests of "abc" (FIPS 180-4, examples).
        let sha1 = "a9993e364706816aba3e25717850c26c9cd0d89d";
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert!(is_pinned(b"abc", sha1) && is_pinned(b"abc", sha256));
        assert!(!is_pinned(b"abd", sha1) && !is_pinned(b"abd", sha256));
        assert!(!is_pinned(b"abc", &sha256[..40]), "a short SHA-256 is no SHA-1");
        assert!(!is_pinned(b"abc", ""), "no thumbprint pins nothing");
    }
}

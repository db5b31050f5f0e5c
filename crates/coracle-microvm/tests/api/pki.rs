//! Certificates of nodes and operators.

use std::path::Path;

use coracle_microvm::AgentTls;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

/// Certificate authority, and its certificate.
pub(crate) struct Pki(rcgen::Issuer<'static, rcgen::KeyPair>, String);

impl Pki {
    pub(crate) fn new() -> Self {
        let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self(rcgen::Issuer::new(params, key), pem)
    }

    /// Returns certificate and key for `name`.
    fn sign(&self, name: &str) -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    /// Returns the TLS configuration of a node that accepts only clients with a certificate of this authority.
    pub(crate) fn server(&self, name: &str) -> ServerTlsConfig {
        let (certificate, key) = self.sign(name);
        ServerTlsConfig::new()
            .identity(Identity::from_pem(certificate, key))
            .client_ca_root(Certificate::from_pem(&self.1))
    }

    /// Writes the files of an operator to `dir`, and overwrites those of another authority.
    pub(crate) fn client(&self, dir: &Path) -> AgentTls {
        let file = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let (certificate, key) = self.sign("operator");
        let identity = Some((file("tls.crt", &certificate), file("tls.key", &key)));
        AgentTls { ca: file("ca.crt", &self.1), identity }
    }
}

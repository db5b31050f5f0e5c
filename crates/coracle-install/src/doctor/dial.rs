//! Checks the certificate of a server as a client that trusts the authority of the cluster.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Time limit for the answer of a server.
const LIMIT: Duration = Duration::from_secs(5);

/// Reason why a server cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DialError {
    /// The connection failed.
    Unreachable(String),
    /// The handshake failed: the certificate is expired, has another name, or comes from another authority.
    Untrusted(String),
}

/// Returns when the certificate of the server expires. The connection is closed at once.
pub(super) async fn dial(address: &str, name: &str, authority: &str) -> Result<Timestamp, DialError> {
    let untrusted = |error: &dyn std::fmt::Display| DialError::Untrusted(error.to_string());
    let config = config(authority).map_err(DialError::Untrusted)?;
    let name = ServerName::try_from(name.to_owned()).map_err(|error| untrusted(&error))?;
    let stream = match timeout(LIMIT, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(DialError::Unreachable(error.to_string())),
        Err(_) => return Err(DialError::Unreachable(format!("no answer within {} s", LIMIT.as_secs()))),
    };
    let stream = match timeout(LIMIT, TlsConnector::from(config).connect(name, stream)).await {
        Ok(shaken) => shaken.map_err(|error| untrusted(&error))?,
        Err(_) => return Err(DialError::Unreachable(format!("no handshake within {} s", LIMIT.as_secs()))),
    };
    let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    shown.and_then(end_of).ok_or_else(|| untrusted(&"no certificate"))
}

fn config(authority: &str) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(authority.as_bytes()) {
        roots.add(root.map_err(|error| error.to_string())?).map_err(|error| error.to_string())?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| error.to_string())?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

fn end_of(certificate: &CertificateDer<'_>) -> Option<Timestamp> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Timestamp::from_second(parsed.validity().not_after.timestamp()).ok()
}

/// Returns when the first of the PEM certificates expires; `None` when there is none. Pure.
pub(super) fn end_of_bundle(pem: &[u8]) -> Option<Timestamp> {
    let first = CertificateDer::pem_slice_iter(pem).next()?.ok()?;
    end_of(&first)
}

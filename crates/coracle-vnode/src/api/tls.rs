//! TLS of the API: client certificates are requested and optional.

use std::sync::Arc;

use coracle_access::{AnyCertificate, ClientCa};
use rustls::ServerConfig;
use rustls::server::NoClientAuth;
use rustls::server::danger::ClientCertVerifier;

use super::error::ApiError;

/// Protocols that clients may choose; upgrades need HTTP/1.1.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Returns the TLS configuration of new connections: with the certificate of `serving`, and a request for client certificates
/// if `ca` is set.
pub(super) fn server_config(
    serving: &ServerConfig,
    ca: Option<&ClientCa>,
) -> Result<Arc<ServerConfig>, ApiError> {
    let provider = serving.crypto_provider().clone();
    let clients: Arc<dyn ClientCertVerifier> = match ca {
        Some(ca) => Arc::new(AnyCertificate::new(Some(ca), &provider)),
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

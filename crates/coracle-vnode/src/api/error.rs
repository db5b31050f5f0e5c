//! Errors of the API server of the node.

use coracle_access::InvalidClientCa;

/// Error that prevents serving the API.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    /// The client authorities are invalid.
    #[error(transparent)]
    ClientCa(#[from] InvalidClientCa),
    /// The TLS configuration is invalid.
    #[error("cannot serve TLS")]
    Tls {
        /// TLS error.
        source: rustls::Error,
    },
}

//! Why the API cannot be served.

use coracle_access::InvalidClientCa;

/// The API could not be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    /// The certificates of the authorities cannot be used.
    #[error(transparent)]
    ClientCa(#[from] InvalidClientCa),
    /// There are no usable settings of TLS.
    #[error("cannot serve TLS")]
    Tls {
        /// Why.
        source: rustls::Error,
    },
}

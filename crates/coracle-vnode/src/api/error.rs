//! Why the API cannot be served.

/// The API could not be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    /// The certificates of the authorities cannot be used.
    #[error("invalid client CA: {reason}")]
    ClientCa {
        /// What is wrong with them.
        reason: String,
    },
    /// There are no usable settings of TLS.
    #[error("cannot serve TLS")]
    Tls {
        /// Why.
        source: rustls::Error,
    },
}

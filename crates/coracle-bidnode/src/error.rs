//! Errors of a reconcile.

use coracle_reconcile::{ApplyError, ElectionError};

use crate::market::MarketError;

/// Why a reconcile, or the controller, ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A read or write of the API server.
    #[error("{operation} {object}")]
    Api {
        /// Operation.
        operation: &'static str,
        /// With what.
        object: String,
        /// Cause.
        source: Box<kube::Error>,
    },
    /// A write of the object or its status.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The market.
    #[error(transparent)]
    Market(#[from] MarketError),
    /// The election.
    #[error(transparent)]
    Election(#[from] ElectionError),
}

impl Error {
    /// Whether it passes without anybody's action: another writer came first, or the market does not answer now.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Api { source, .. } => {
                matches!(source.as_ref(), kube::Error::Api(status) if status.code == 409)
            }
            Self::Apply(error) => error.is_conflict(),
            Self::Market(error) => error.is_transient(),
            Self::Election(_) => false,
        }
    }
}

/// An [`Error::Api`].
pub(crate) fn api(operation: &'static str, object: &str) -> impl FnOnce(kube::Error) -> Error {
    let object = object.to_owned();
    move |source| Error::Api { operation, object, source: Box::new(source) }
}

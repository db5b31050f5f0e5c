//! Errors of a reconcile.

use coracle_reconcile::{ApiError, ApplyError, ElectionError};

use crate::market::MarketError;

/// Why a reconcile, or the controller, ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A read or write of the API server.
    #[error(transparent)]
    Api(#[from] ApiError),
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
            Self::Api(error) => error.is_conflict(),
            Self::Apply(error) => error.is_conflict(),
            Self::Market(error) => error.is_transient(),
            Self::Election(_) => false,
        }
    }
}

/// An [`Error::Api`].
pub(crate) fn api(operation: &'static str, object: &str) -> impl FnOnce(kube::Error) -> Error {
    let failed = ApiError::on(operation, object.to_owned());
    move |source| failed(source).into()
}

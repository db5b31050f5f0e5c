//! Errors of a reconcile.

use coracle_reconcile::{ApiError, ApplyError, ElectionError};

use crate::market::MarketError;

/// Error of a reconcile or of the controller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A read or write of the API server failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A write of the object or its status failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A call of the market failed.
    #[error(transparent)]
    Market(#[from] MarketError),
    /// The leader election failed.
    #[error(transparent)]
    Election(#[from] ElectionError),
}

impl Error {
    /// Whether the error passes without intervention: another writer was first, or the market does not answer at present.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Api(error) => error.is_conflict(),
            Self::Apply(error) => error.is_conflict(),
            Self::Market(error) => error.is_transient(),
            Self::Election(_) => false,
        }
    }
}

/// Creates an [`Error::Api`].
pub(crate) fn api(operation: &'static str, object: &str) -> impl FnOnce(kube::Error) -> Error {
    let failed = ApiError::on(operation, object.to_owned());
    move |source| failed(source).into()
}

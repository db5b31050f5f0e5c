//! What ends a reconcile.

use coracle_reconcile::{ApplyError, ElectionError};

use crate::market::MarketError;

/// Why a reconcile, or the controller, ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A read or write of the API server.
    #[error("{operation} {object}")]
    Api {
        /// What was tried.
        operation: &'static str,
        /// With what.
        object: String,
        /// Why.
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

/// An [`Error::Api`].
pub(crate) fn api(operation: &'static str, object: &str) -> impl FnOnce(kube::Error) -> Error {
    let object = object.to_owned();
    move |source| Error::Api { operation, object, source: Box::new(source) }
}

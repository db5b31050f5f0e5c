//! Why a pass failed.

use coracle_reconcile::{ApiError, ApplyError, ElectionError};

use crate::registry::RegistryError;

/// A failed pass, or a configuration that does not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The API server refused or could not be reached.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A write to a custom resource.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The registry refused or could not be reached.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A pod with the name of one of the set's belongs to another owner.
    #[error("pod {pod:?} exists and does not belong to the CocoonSet: delete it, or rename the set")]
    NameTaken {
        /// `namespace/name`.
        pod: String,
    },
    /// Other writers of the pool's reservations were always faster.
    #[error("cannot reserve a slot of pool {pool:?}: too many writers")]
    Contended {
        /// The pool.
        pool: String,
    },
    /// Times of the election that do not fit together.
    #[error(transparent)]
    Election(#[from] ElectionError),
}

impl Error {
    /// True for failures that pass by themselves: the pass is repeated, and logged at debug level only.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Api(error) => error.code().is_some_and(|code| code == 409 || code >= 500),
            Self::Apply(error) => error.is_conflict(),
            Self::Contended { .. } => true,
            Self::Registry(_) | Self::NameTaken { .. } | Self::Election(_) => false,
        }
    }
}

/// A failure of the API server to do `operation` on `object`.
pub(crate) fn api(operation: &'static str, object: impl Into<String>) -> impl FnOnce(kube::Error) -> Error {
    let failed = ApiError::on(operation, object.into());
    move |source| failed(source).into()
}

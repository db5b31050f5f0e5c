//! Errors of a reconcile.

use coracle_reconcile::{ApiError, ApplyError, ElectionError};

use crate::registry::RegistryError;

/// A failed reconcile, or an invalid configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The API server refused the call or could not be reached.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A write to a custom resource failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The registry refused the request or could not be reached.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A pod of another owner has the name of a pod of the set.
    #[error("pod {pod:?} exists and does not belong to the CocoonSet: delete it, or rename the set")]
    NameTaken {
        /// Pod, as `namespace/name`.
        pod: String,
    },
    /// Other writers of the pool's reservations were faster in every attempt.
    #[error("cannot reserve a slot of pool {pool:?}: too many writers")]
    Contended {
        /// Name of the pool.
        pool: String,
    },
    /// The times of the election contradict each other.
    #[error(transparent)]
    Election(#[from] ElectionError),
}

impl Error {
    /// True for temporary failures: the reconcile is repeated, and the failure is logged at debug level only.
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

/// Converts an error of the API server in `operation` on `object`.
pub(crate) fn api(operation: &'static str, object: impl Into<String>) -> impl FnOnce(kube::Error) -> Error {
    let failed = ApiError::on(operation, object.into());
    move |source| failed(source).into()
}

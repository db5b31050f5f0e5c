//! Errors of a reconcile.

use std::time::Duration;

use coracle_reconcile::{ApiError, ApplyError, ElectionError};
use coracle_vsphere::{FaultClass, VsphereError};

use crate::{Context, vcenters::ProviderError};

/// Error of a reconcile or of the controllers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kinds that the API server serves cannot be read.
    #[error("ask the API server for its kinds")]
    Discover {
        /// Cause.
        source: Box<kube::Error>,
    },
    /// A read or write of the API server failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A write of an object of this operator failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The leader election failed.
    #[error(transparent)]
    Election(#[from] ElectionError),
}

impl Error {
    /// Whether another writer was first. The next reconcile reads what that writer wrote.
    pub(crate) fn is_conflict(&self) -> bool {
        match self {
            Self::Api(error) => error.is_conflict(),
            Self::Apply(error) => error.is_conflict(),
            _ => false,
        }
    }
}

/// Interval of checks of a login that is under way.
const CONNECTING: Duration = Duration::from_secs(5);
/// Shortest retry interval.
const AGAIN: Duration = Duration::from_millis(50);

/// Creates an [`Error::Api`].
pub(crate) fn api(operation: &'static str, object: impl Into<String>) -> impl FnOnce(kube::Error) -> Error {
    let failed = ApiError::on(operation, object.into());
    move |source| failed(source).into()
}

/// Failure of a VsphereAgent: its condition, and the fault class that determines the retry.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestFailure {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) class: FaultClass,
    /// Time until the next try is useful, if known.
    pub(crate) after: Option<Duration>,
}

impl RequestFailure {
    pub(crate) fn new(reason: &'static str, message: impl Into<String>, class: FaultClass) -> Self {
        Self { reason, message: message.into(), class, after: None }
    }

    pub(crate) fn vsphere(reason: &'static str, error: &VsphereError) -> Self {
        Self::new(reason, chain(error), error.class())
    }

    pub(crate) fn provider(error: &ProviderError) -> Self {
        let class = match error {
            ProviderError::Vsphere(error) => error.class(),
            ProviderError::Login { source, .. } => source.class(),
            ProviderError::Connecting { .. } => FaultClass::Session,
            ProviderError::Read { .. } => FaultClass::Other,
            ProviderError::Missing { .. }
            | ProviderError::NotAllowed { .. }
            | ProviderError::Credentials { .. } => FaultClass::Config,
        };
        // A name that vSphere does not have is an error of the specification and not of the provider.
        let reason = match error {
            ProviderError::Vsphere(VsphereError::NoSuchName { .. } | VsphereError::Ambiguous { .. }) => {
                "VMCreateFailed"
            }
            _ => "ProviderUnavailable",
        };
        let after = match error {
            ProviderError::Login { retry, .. } => Some(*retry),
            ProviderError::Connecting { .. } => Some(CONNECTING),
            _ => None,
        };
        Self { after, ..Self::new(reason, chain(error), class) }
    }

    /// Time until the next try (contract, "Fault classes"). Changes of the objects involved trigger a reconcile earlier.
    /// Secrets are not watched, so they are read again after a short time, which costs no login.
    pub(crate) fn retry(&self, cx: &Context, key: &str) -> Duration {
        if let Some(after) = self.after {
            return after.clamp(AGAIN, cx.config.times.blocked.max(AGAIN));
        }
        match self.class {
            FaultClass::Auth | FaultClass::Config => cx.config.times.refused,
            FaultClass::Capacity => cx.capacity.failed(key.to_owned()),
            FaultClass::Session | FaultClass::Race | FaultClass::Gone | FaultClass::Other => {
                cx.backoffs.failed(key.to_owned())
            }
        }
    }
}

/// Text of an error and its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}

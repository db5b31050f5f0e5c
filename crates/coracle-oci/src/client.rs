//! HTTP client of registries: which servers to ask, with which credentials, and which addresses are refused.

mod address;
mod endpoint;
mod guard;
mod hosts;
mod policy;
mod registry_host;
mod session;
mod token;
mod transport;

pub use endpoint::Endpoint;
pub use hosts::{InvalidHosts, Registries};
pub use policy::{Operation, RetryPolicy, Timeouts};
pub use registry_host::{Capabilities, RegistryHost, RegistryHosts};
pub(crate) use session::RENEWALS_MAX;
pub use session::{ManifestBytes, Session};

use guard::Guard;
use transport::Transport;

use crate::OciError;
use crate::{
    Credentials, Reference,
    auth::{self, Login},
};

/// Origin of a request to a registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PullOrigin {
    /// A user of this host: every address that the host reaches is allowed.
    #[default]
    Local,
    /// A cluster, whose users choose registries: loopback, link-local and metadata addresses are refused unless they
    /// belong to configured registries.
    Cluster,
}

/// Registry client for one transfer: settings shared by all servers.
#[derive(Clone, Debug)]
pub struct Client<'a> {
    /// Configured servers.
    pub registries: &'a Registries,
    /// Credentials, looked up for each server.
    pub credentials: &'a Credentials,
    /// Origin of the requests.
    pub origin: PullOrigin,
    /// Time limits and retries.
    pub retry_policy: RetryPolicy,
}

impl Client<'_> {
    /// Servers to ask, in order of preference.
    ///
    /// # Errors
    /// [`OciError::Unsupported`] when the configuration leaves none.
    pub fn endpoints(&self, reference: &Reference, operation: Operation) -> Result<Vec<Endpoint>, OciError> {
        let all = self.registries.endpoints(reference, operation);
        if all.is_empty() { Err(hosts::no_server(reference, operation)) } else { Ok(all) }
    }

    /// Logs in to one server. A mirror gets only credentials of its own.
    ///
    /// # Errors
    /// [`OciError::Credentials`]; those of the registry.
    pub async fn open(
        &self,
        endpoint: Endpoint,
        reference: &Reference,
        operation: Operation,
    ) -> Result<Session, OciError> {
        let login = match self.credentials {
            Credentials::Basic { .. } | Credentials::Bearer(_) if endpoint.namespace.is_some() => {
                Login::Anonymous
            }
            credentials => auth::lookup(credentials, &endpoint.host).await?,
        };
        let guard = match self.origin {
            PullOrigin::Local => None,
            PullOrigin::Cluster => Some(Guard::new(self.registries)),
        };
        let transport = Transport::new(&self.retry_policy.timeouts, operation, &endpoint, guard);
        let transport = transport.map_err(|e| OciError::Network {
            registry: endpoint.host.clone(),
            operation: "prepare HTTP client".to_owned(),
            source: e.into(),
        })?;
        Session::open(transport, endpoint, reference.clone(), login, self.retry_policy.clone(), operation)
            .await
    }

    /// Logs in to the first server that has the manifest, or, for a push, that accepts uploads.
    ///
    /// # Errors
    /// Errors of the last server.
    pub async fn open_first(&self, reference: &Reference, operation: Operation) -> Result<Session, OciError> {
        let is_pinned = reference.digest().is_some();
        let mut all = self.endpoints(reference, operation)?;
        let last = all.pop();
        if operation == Operation::Pull {
            for endpoint in all.into_iter().filter(|e| is_pinned || e.capabilities.resolve) {
                match self.open(endpoint, reference, operation).await {
                    Ok(session) if session.resolve().await.is_ok() => return Ok(session),
                    Ok(_) => {}
                    Err(error) => tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "resolve manifest at mirror failed"
                    ),
                }
            }
        } else if let Some(first) = all.into_iter().next() {
            return self.open(first, reference, operation).await;
        }
        match last {
            Some(last) => self.open(last, reference, operation).await,
            None => Err(hosts::no_server(reference, operation)),
        }
    }
}

//! Sessions: one for each vCenter and user, opened from Secrets and shared by all pools.

use std::{collections::HashMap, sync::Arc};

use coracle_api::agentpool::{VsphereAgentPool, names};
use coracle_vsphere::{Connect, Credentials, CredentialsError, Site, Vsphere, VsphereError};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::{Mutex, Semaphore};

use crate::vm::site_spec;

/// Why a pool has no vCenter.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProviderError {
    /// The Secret cannot be read.
    #[error("read Secret {namespace}/{name}")]
    Read {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
        /// Cause.
        source: Box<kube::Error>,
    },
    /// There is none.
    #[error("no Secret {namespace}/{name}")]
    Missing {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// Its namespace does not allow the pool's namespace.
    #[error("Secret {secret} does not allow namespace {pool}: annotate it with {}", names::ALLOW_NAMESPACES)]
    NotAllowed {
        /// The Secret.
        secret: String,
        /// The pool's namespace.
        pool: String,
    },
    /// Its content is invalid.
    #[error("Secret {namespace}/{name}")]
    Credentials {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
        /// Cause.
        source: CredentialsError,
    },
    /// vCenter.
    #[error(transparent)]
    Vsphere(#[from] VsphereError),
}

/// A session and its places.
#[derive(Clone, Debug)]
pub(crate) struct Vcenter {
    pub(crate) api: Arc<dyn Vsphere>,
    pub(crate) creates: Arc<Semaphore>,
    pub(crate) destroys: Arc<Semaphore>,
    digest: u64,
}

/// A pool's place in a vCenter.
#[derive(Clone, Debug)]
pub(crate) struct Provider {
    pub(crate) vcenter: Vcenter,
    pub(crate) site: Arc<Site>,
}

/// All sessions, by server and user.
#[derive(Debug)]
pub(crate) struct Vcenters {
    connect: Arc<dyn Connect>,
    creates: usize,
    destroys: usize,
    cross_namespace: bool,
    open: Mutex<HashMap<(String, String), Vcenter>>,
}

impl Vcenters {
    pub(crate) fn new(
        connect: Arc<dyn Connect>,
        creates: usize,
        destroys: usize,
        cross_namespace: bool,
    ) -> Self {
        Self { connect, creates, destroys, cross_namespace, open: Mutex::default() }
    }

    /// The session of a pool's Secret, read now, and its names there.
    pub(crate) async fn provider(
        &self,
        client: &Client,
        pool: &VsphereAgentPool,
    ) -> Result<Provider, ProviderError> {
        let credentials = self.credentials(client, pool).await?;
        let vcenter = self.session(&credentials).await?;
        let site = vcenter.api.site(&site_spec(pool)).await?;
        Ok(Provider { vcenter, site })
    }

    async fn credentials(
        &self,
        client: &Client,
        pool: &VsphereAgentPool,
    ) -> Result<Credentials, ProviderError> {
        let reference = &pool.spec.vsphere.credentials_secret_ref;
        let pool_ns = pool.namespace().unwrap_or_default();
        let namespace =
            if reference.namespace.is_empty() { pool_ns.clone() } else { reference.namespace.clone() };
        let name = reference.name.clone();
        let api: Api<Secret> = Api::namespaced(client.clone(), &namespace);
        let secret = match api.get_opt(&name).await {
            Ok(Some(secret)) => secret,
            Ok(None) => return Err(ProviderError::Missing { namespace, name }),
            Err(source) => return Err(ProviderError::Read { namespace, name, source: Box::new(source) }),
        };
        let allowed =
            secret.annotations().get(names::ALLOW_NAMESPACES).map(String::as_str).unwrap_or_default();
        let is_allowed = allowed.split(',').any(|ns| ns.trim() == pool_ns || ns.trim() == "*");
        if namespace != pool_ns && !is_allowed && !self.cross_namespace {
            return Err(ProviderError::NotAllowed { secret: format!("{namespace}/{name}"), pool: pool_ns });
        }
        let data = secret.data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0)).collect();
        Credentials::parse(&data).map_err(|source| ProviderError::Credentials { namespace, name, source })
    }

    /// The open session; a Secret that says something else opens a new one and closes the old.
    async fn session(&self, credentials: &Credentials) -> Result<Vcenter, VsphereError> {
        let key = (credentials.url.clone(), credentials.username.clone());
        // Held while logging in: all who need the session wait for the one login.
        let mut open = self.open.lock().await;
        if let Some(found) = open.get(&key).filter(|v| v.digest == credentials.digest()) {
            return Ok(found.clone());
        }
        let api = self.connect.connect(credentials).await?;
        let vcenter = Vcenter {
            api,
            creates: Arc::new(Semaphore::new(self.creates.max(1))),
            destroys: Arc::new(Semaphore::new(self.destroys.max(1))),
            digest: credentials.digest(),
        };
        if let Some(old) = open.insert(key, vcenter.clone()) {
            old.api.close().await;
        }
        Ok(vcenter)
    }

    /// Logs out everywhere.
    pub(crate) async fn close(&self) {
        for (_, vcenter) in self.open.lock().await.drain() {
            vcenter.api.close().await;
        }
    }
}

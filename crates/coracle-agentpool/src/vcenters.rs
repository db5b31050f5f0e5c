//! vCenter sessions: one for each content of a Secret, shared by all pools that use it.
//!
//! A separate task opens each session, and callers wait for it for a short time only: a vCenter that does not answer blocks no
//! worker that serves VMs of other vCenters. A failure is remembered, so that a wrong password costs one login in each pause,
//! regardless of how many objects need it.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use coracle_api::agentpool::{VsphereAgentPool, names};
use coracle_reconcile::Backoff;
use coracle_vsphere::{Connect, Credentials, CredentialsError, FaultClass, Site, Vsphere, VsphereError};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{Instant, timeout},
};
use tracing::{info, warn};

use crate::vm::site_spec;

/// Why a pool has no vCenter session.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProviderError {
    /// The Secret cannot be read.
    #[error("read Secret {namespace}/{name}")]
    Read {
        /// Namespace of the Secret.
        namespace: String,
        /// Name of the Secret.
        name: String,
        /// Cause.
        source: Box<kube::Error>,
    },
    /// The Secret does not exist.
    #[error("no Secret {namespace}/{name}; create it again, or set cleanupPolicy Retain to leave the VMs")]
    Missing {
        /// Namespace of the Secret.
        namespace: String,
        /// Name of the Secret.
        name: String,
    },
    /// The Secret does not allow the pool's namespace.
    #[error("Secret {secret} does not allow namespace {pool}: annotate it with {}", names::ALLOW_NAMESPACES)]
    NotAllowed {
        /// Secret, as `namespace/name`.
        secret: String,
        /// Namespace of the pool.
        pool: String,
    },
    /// The content of the Secret is invalid.
    #[error("Secret {namespace}/{name}")]
    Credentials {
        /// Namespace of the Secret.
        namespace: String,
        /// Name of the Secret.
        name: String,
        /// Cause.
        source: CredentialsError,
    },
    /// The server has not answered yet; the login continues in the background.
    #[error("{server} has not answered the login")]
    Connecting {
        /// Host and port.
        server: String,
    },
    /// The login failed. The next login is made after a pause, or when the Secret changes.
    // The message omits the remaining time, which would change the status with each reconcile.
    #[error("log in at {server}, the next try is after a pause or when the Secret changes")]
    Login {
        /// Host and port.
        server: String,
        /// Time until the next login.
        retry: Duration,
        /// Cause.
        source: Arc<VsphereError>,
    },
    /// A call of vCenter failed.
    #[error(transparent)]
    Vsphere(#[from] VsphereError),
}

/// vCenter session with limits on concurrent creations and destructions.
#[derive(Clone, Debug)]
pub(crate) struct Vcenter {
    pub(crate) api: Arc<dyn Vsphere>,
    pub(crate) creates: Arc<Semaphore>,
    pub(crate) destroys: Arc<Semaphore>,
    /// Number of the session in this process.
    pub(crate) serial: u64,
}

/// Session and resolved site of a pool.
#[derive(Clone, Debug)]
pub(crate) struct Provider {
    pub(crate) vcenter: Vcenter,
    pub(crate) site: Arc<Site>,
}

impl Provider {
    /// Observes an error of a call. After "gone" the cached names are wrong and must be resolved again.
    pub(crate) fn observe(&self, error: &VsphereError) {
        if error.class() == FaultClass::Gone {
            self.vcenter.api.forget();
        }
    }
}

/// State of a login.
#[derive(Clone, Debug)]
enum Login {
    /// The login is under way.
    Connecting,
    Open(Vcenter),
    Failed {
        until: Instant,
        source: Arc<VsphereError>,
    },
}

/// Login, and its consecutive failures.
#[derive(Debug)]
struct Session {
    login: watch::Sender<Login>,
    failures: Mutex<u32>,
}

/// Time limits and bounds of sessions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Concurrent creations in one vCenter.
    pub(crate) creates: usize,
    /// Concurrent destructions in one vCenter.
    pub(crate) destroys: usize,
    /// Longest wait of a reconcile for a login.
    pub(crate) patience: Duration,
    /// Pause after a refused login.
    pub(crate) refused: Duration,
    /// Pauses after other failures.
    pub(crate) backoff: Backoff,
}

/// All sessions, by the whole content of their Secrets. Two Secrets that differ in any key never close each other's session.
#[derive(Debug)]
pub(crate) struct Vcenters {
    connect: Arc<dyn Connect>,
    limits: Limits,
    cross_namespace: bool,
    sessions: Mutex<HashMap<Credentials, Arc<Session>>>,
    /// Resource version and content last read from each Secret, by namespace and name.
    secrets: Mutex<HashMap<(String, String), (u64, Credentials)>>,
    tasks: Mutex<JoinSet<()>>,
    serial: AtomicU64,
}

impl Vcenters {
    pub(crate) fn new(connect: Arc<dyn Connect>, limits: Limits, cross_namespace: bool) -> Self {
        Self {
            connect,
            limits,
            cross_namespace,
            sessions: Mutex::default(),
            secrets: Mutex::default(),
            tasks: Mutex::default(),
            serial: AtomicU64::new(0),
        }
    }

    /// Reads a pool's Secret and returns its session, with the pool's names resolved there.
    pub(crate) async fn provider(
        &self,
        client: &Client,
        pool: &VsphereAgentPool,
    ) -> Result<Provider, ProviderError> {
        let credentials = self.credentials(client, pool).await?;
        self.at(&credentials, pool).await
    }

    /// Like [`Self::provider`]. If the Secret is gone, as in a namespace that is being deleted, uses its last known content.
    pub(crate) async fn provider_for_removal(
        &self,
        client: &Client,
        pool: &VsphereAgentPool,
    ) -> Result<Provider, ProviderError> {
        let credentials = match self.credentials(client, pool).await {
            Err(ProviderError::Missing { namespace, name }) => {
                let last =
                    self.secrets.lock().get(&(namespace.clone(), name.clone())).map(|(_, c)| c.clone());
                last.ok_or(ProviderError::Missing { namespace, name })?
            }
            other => other?,
        };
        self.at(&credentials, pool).await
    }

    async fn at(
        &self,
        credentials: &Credentials,
        pool: &VsphereAgentPool,
    ) -> Result<Provider, ProviderError> {
        let vcenter = self.session(credentials).await?;
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
        let version = secret.resource_version().and_then(|v| v.parse().ok()).unwrap_or(0);
        let data = secret.data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0)).collect();
        match Credentials::parse(&data) {
            Ok(credentials) => Ok(self.store_secret((namespace, name), version, credentials)),
            Err(source) => Err(ProviderError::Credentials { namespace, name, source }),
        }
    }

    /// Stores the content of a Secret, and closes the session of its previous content unless another Secret has the same.
    /// Reconciles read concurrently: content that is older than the known version is discarded.
    fn store_secret(&self, secret: (String, String), version: u64, credentials: Credentials) -> Credentials {
        let mut secrets = self.secrets.lock();
        if let Some((known, newer)) = secrets.get(&secret)
            && *known > version
        {
            return newer.clone();
        }
        let before = secrets.insert(secret, (version, credentials.clone()));
        let is_used = |old: &Credentials| secrets.values().any(|(_, c)| c == old);
        let old = before.map(|(_, old)| old).filter(|old| !is_used(old));
        drop(secrets);
        if let Some(old) = old {
            self.close_session(&old);
        }
        credentials
    }

    /// Closes the session of credentials that no Secret has any more.
    fn close_session(&self, old: &Credentials) {
        let session = self.sessions.lock().remove(old);
        if let Some(Login::Open(vcenter)) = session.map(|s| s.login.borrow().clone()) {
            info!(server = old.server(), "Secret changed, closing its former session");
            self.tasks.lock().spawn(async move { vcenter.api.close().await });
        }
    }

    /// Returns the open session of these credentials. Starts a login if there is none, and waits for it for a short time.
    async fn session(&self, credentials: &Credentials) -> Result<Vcenter, ProviderError> {
        let server = || credentials.server().to_owned();
        let mut login = self.login(credentials);
        let settled = login.wait_for(|login| !matches!(login, Login::Connecting));
        // Only the state after the wait counts: its sender is dropped only together with the session.
        let _ = timeout(self.limits.patience, settled).await.map(drop);
        let now = login.borrow().clone();
        match now {
            Login::Open(vcenter) => Ok(vcenter),
            Login::Connecting => Err(ProviderError::Connecting { server: server() }),
            Login::Failed { until, source } => {
                let retry = until.saturating_duration_since(Instant::now());
                Err(ProviderError::Login { server: server(), retry, source })
            }
        }
    }

    /// Returns the login of these credentials, and starts it unless it is under way, open, or failed a short while ago.
    fn login(&self, credentials: &Credentials) -> watch::Receiver<Login> {
        let mut sessions = self.sessions.lock();
        let mut is_new = false;
        let session = sessions.entry(credentials.clone()).or_insert_with(|| {
            is_new = true;
            Arc::new(Session { login: watch::Sender::new(Login::Connecting), failures: Mutex::new(0) })
        });
        let session = session.clone();
        drop(sessions);
        let is_due = session.login.send_if_modified(|login| {
            let is_over = matches!(login, Login::Failed { until, .. } if *until <= Instant::now());
            if is_over {
                *login = Login::Connecting;
            }
            is_over
        });
        let receiver = session.login.subscribe();
        if is_new || is_due {
            self.open(session, credentials.clone());
        }
        receiver
    }

    /// Logs in, in the background.
    fn open(&self, session: Arc<Session>, credentials: Credentials) {
        let (connect, limits) = (self.connect.clone(), self.limits);
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            let login = match connect.connect(&credentials).await {
                Ok(api) => {
                    *session.failures.lock() = 0;
                    Login::Open(Vcenter {
                        api,
                        creates: Arc::new(Semaphore::new(limits.creates.max(1))),
                        destroys: Arc::new(Semaphore::new(limits.destroys.max(1))),
                        serial,
                    })
                }
                Err(error) => {
                    let pause = pause(&limits, error.class(), &session.failures);
                    let source = Arc::new(error);
                    let cause: &dyn std::error::Error = &*source;
                    warn!(server = credentials.server(), error = cause, ?pause, "login failed");
                    Login::Failed { until: Instant::now() + pause, source }
                }
            };
            session.login.send_replace(login);
        });
    }

    /// Cancels logins under way, and logs out everywhere.
    pub(crate) async fn close(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.shutdown().await;
        let sessions: Vec<_> = self.sessions.lock().drain().map(|(_, session)| session).collect();
        let mut closing = JoinSet::new();
        for session in sessions {
            let login = session.login.borrow().clone();
            if let Login::Open(vcenter) = login {
                closing.spawn(async move { vcenter.api.close().await });
            }
        }
        while closing.join_next().await.is_some() {}
    }
}

/// Pause after a failed login: long after a refusal, since vCenter locks accounts; otherwise doubled with each failure.
fn pause(limits: &Limits, class: FaultClass, failures: &Mutex<u32>) -> Duration {
    let mut failures = failures.lock();
    *failures = failures.saturating_add(1);
    match class {
        FaultClass::Auth | FaultClass::Config => limits.refused,
        _ => {
            let doubled = limits.backoff.base.saturating_mul(2_u32.saturating_pow((*failures - 1).min(16)));
            doubled.min(limits.backoff.max)
        }
    }
}

//! Opens connections to nodes.

use std::{
    fmt,
    future::ready,
    io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use coracle_reconcile::ControllerMetrics;
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{
    Code,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use super::{
    address::AgentAddress,
    agent_service::AgentService,
    call::{Caller, Deadlines, chain},
    client::NodeClient,
    error::{AgentError, Origin},
    host_service::HostService,
    stream::{Connect, TrackedStream},
};

/// Interval at which certificates are read again, so that rotated ones are used.
const RELOAD: Duration = Duration::from_secs(10);
/// HTTP/2 keep-alive interval.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// TLS configuration for calls to agents.
#[derive(Clone, Debug, Default)]
pub struct AgentTls {
    /// PEM file of the authority that signed the nodes' certificates.
    pub ca: PathBuf,
    /// PEM files of the client certificate and its key. `None`: no client certificate.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Connection to one node.
#[derive(Clone, Debug)]
pub(super) struct Connection {
    /// Calls to the node. The connection closes when all clones are dropped.
    pub(super) client: Arc<dyn NodeClient>,
    /// Cancelled when the connection has broken.
    pub(super) closed: CancellationToken,
}

/// Opens connections to agents, with the certificates of the configuration.
pub(crate) struct Dialer {
    streams: Arc<dyn Connect>,
    tls: Option<AgentTls>,
    deadlines: Deadlines,
    metrics: ControllerMetrics,
    loaded: Mutex<Option<(Instant, ClientTlsConfig)>>,
    /// Last logged problem with the operator's certificates.
    trouble: Mutex<Option<String>>,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer")
            .field("tls", &self.tls)
            .field("deadlines", &self.deadlines)
            .finish_non_exhaustive()
    }
}

impl Dialer {
    /// Uses TLS, or plaintext when the configuration has no certificates.
    #[must_use]
    pub(crate) fn new(
        streams: Arc<dyn Connect>,
        tls: Option<AgentTls>,
        deadlines: Deadlines,
        metrics: ControllerMetrics,
    ) -> Self {
        Self { streams, tls, deadlines, metrics, loaded: Mutex::default(), trouble: Mutex::default() }
    }

    /// Connects to the host service of a node that announces one, otherwise to its agent service.
    ///
    /// A node serves its host service only to callers with a certificate. Without certificates the agent service is used.
    ///
    /// # Errors
    /// UNAVAILABLE without a listener, FAILED_PRECONDITION when the operator's own certificates are unusable.
    pub(super) async fn dial(&self, to: &AgentAddress) -> Result<Connection, AgentError> {
        let (address, deadlines, metrics) = (to.address.clone(), self.deadlines, self.metrics.clone());
        let caller = Caller { address, deadlines, metrics };
        if let Some(address) = to.host_service.as_ref().filter(|_| self.tls.is_some()) {
            let (channel, closed) = self.connect(address, to, &caller).await?;
            let mut service = HostService::new(channel, caller.clone());
            if service.read_features().await? {
                return Ok(Connection { client: Arc::new(service), closed });
            }
        }
        let (channel, closed) = self.connect(&to.address, to, &caller).await?;
        Ok(Connection { client: Arc::new(AgentService::new(channel, caller)), closed })
    }

    /// Connects to one address of a node.
    pub(super) async fn connect(
        &self,
        address: &str,
        to: &AgentAddress,
        caller: &Caller,
    ) -> Result<(Channel, CancellationToken), AgentError> {
        let error = |code, message| caller.error("connect", code, message);
        let endpoint = self
            .endpoint(address)
            .ok_or_else(|| error(Code::InvalidArgument, "the address is not host:port".into()))?;
        let secured = self.with_client_tls(endpoint, address, to.server_name.as_deref()).await;
        self.log_trouble(secured.as_ref().err());
        let endpoint = secured.map_err(|why| AgentError {
            origin: Origin::Configuration,
            ..error(Code::FailedPrecondition, why)
        })?;
        match tokio::time::timeout(self.deadlines.connect, self.open(&endpoint, address)).await {
            Ok(Ok(opened)) => Ok(opened),
            Ok(Err(why)) => Err(error(Code::Unavailable, why)),
            Err(_) => {
                let message = format!("no connection within {:?}", self.deadlines.connect);
                Err(error(Code::Unavailable, message))
            }
        }
    }

    fn endpoint(&self, address: &str) -> Option<Endpoint> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}")).ok()?;
        // A host that loses power closes no connection: without keep-alive an event stream would wait forever.
        let alive = endpoint.http2_keep_alive_interval(KEEP_ALIVE).keep_alive_while_idle(true);
        Some(alive.keep_alive_timeout(self.deadlines.call))
    }

    /// Opens a channel over one stream. The channel never reconnects by itself: a new connection reads the certificates again.
    async fn open(&self, endpoint: &Endpoint, address: &str) -> Result<(Channel, CancellationToken), String> {
        let stream = self.streams.connect(address).await.map_err(|e| chain(&e))?;
        let (stream, closed) = TrackedStream::new(stream);
        let mut stream = Some(TokioIo::new(stream));
        let closed_before = || io::Error::from(io::ErrorKind::ConnectionAborted);
        let once = tower::service_fn(move |_: Uri| ready(stream.take().ok_or_else(closed_before)));
        let channel = endpoint.connect_with_connector(once).await.map_err(|e| chain(&e))?;
        Ok((channel, closed))
    }

    /// Returns `endpoint` with the operator's certificates and the name that the node's certificate must have.
    async fn with_client_tls(
        &self,
        endpoint: Endpoint,
        address: &str,
        server_name: Option<&str>,
    ) -> Result<Endpoint, String> {
        let Some(tls) = self.tls_config().await? else { return Ok(endpoint) };
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let name = server_name.unwrap_or(host).trim_matches(['[', ']']).to_owned();
        endpoint.tls_config(tls.domain_name(name)).map_err(|e| chain(&e))
    }

    /// Logs a problem when it changes: every connection attempt has the same problem.
    fn log_trouble(&self, now: Option<&String>) {
        let mut logged = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        match now {
            Some(why) if logged.as_ref() != Some(why) => {
                tracing::warn!(error = why, "load certificates for agents failed");
            }
            None if logged.is_some() => tracing::info!("certificates for agents are usable again"),
            _ => {}
        }
        *logged = now.cloned();
    }

    async fn tls_config(&self) -> Result<Option<ClientTlsConfig>, String> {
        let Some(tls) = &self.tls else { return Ok(None) };
        let fresh =
            |(at, config): &(Instant, ClientTlsConfig)| (at.elapsed() < RELOAD).then(|| config.clone());
        let cached = self.loaded.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(fresh);
        if cached.is_some() {
            return Ok(cached);
        }
        let read = async |path: &PathBuf| {
            tokio::fs::read(path).await.map_err(|e| format!("read {}: {e}", path.display()))
        };
        let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&tls.ca).await?));
        if let Some((certificate, key)) = &tls.identity {
            config = config.identity(Identity::from_pem(read(certificate).await?, read(key).await?));
        }
        *self.loaded.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), config.clone()));
        Ok(Some(config))
    }
}

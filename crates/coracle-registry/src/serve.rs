//! Runs a registry: storage, tables, listener, sweep. Joins every task that it starts.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use coracle_types::Clock;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::{Gate, hash, secret};
use crate::connection::{self, Drained, Flow, drive};
use crate::error::StoreError;
use crate::http;
use crate::manifest_memory::ManifestMemory;
use crate::manifest_store::ManifestStore;
use crate::meta::{Entry, FIRST_CREATED_BY, FIRST_ID, Meta, MetaAt, TokenRow};
use crate::metrics::Metrics;
use crate::registry::{Limits, Registry, Sweeping};
use crate::rights::{Rights, Role};
use crate::storage::Storage;
use crate::storage::files::Files;
use crate::storage::s3::{S3, S3Config};
use crate::tls;

/// Time limit of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Time for clients to finish their requests at shutdown.
const GRACE: Duration = Duration::from_secs(5);

/// Settings of a registry.
#[derive(Clone, Debug)]
pub struct Config {
    /// Existing directory of the registry, for blobs, manifests, uploads and the first token.
    pub dir: PathBuf,
    /// Database. `None`: SQLite in the directory.
    pub meta: Option<MetaAt>,
    /// Object store for blobs and manifests. `None`: files in the directory.
    pub s3: Option<S3Config>,
    /// Listen address. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// Certificate and key, as PEM files. `None`: plain HTTP.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// True when reads need a token.
    pub private_reads: bool,
    /// True when pages and `/api/` need a token.
    pub private_pages: bool,
    /// True when pushes and deletes need no token.
    pub open_writes: bool,
    /// Additional token, which may push and delete in all repositories.
    pub token: Option<String>,
    /// Public base URL, if it differs from the URL of requests.
    pub public_url: Option<String>,
    /// True when anonymous clients get the empty token of epoch.
    pub empty_token: bool,
    /// True when an index is accepted although its manifests are missing in the repository.
    pub allow_sparse_indexes: bool,
    /// Limits that clients are subject to.
    pub limits: Limits,
    /// Garbage collection.
    pub sweeping: Sweeping,
    /// Clock.
    pub clock: Clock,
}

impl Config {
    /// Registry in a directory, with default settings.
    pub fn new(dir: PathBuf, listen: SocketAddr) -> Self {
        Self {
            dir,
            meta: None,
            s3: None,
            listen,
            tls: None,
            private_reads: false,
            private_pages: false,
            open_writes: false,
            token: None,
            public_url: None,
            empty_token: false,
            allow_sparse_indexes: false,
            limits: Limits::default(),
            sweeping: Sweeping::default(),
            clock: Clock::system(),
        }
    }
}

/// Properties of a started registry.
#[derive(Clone, Debug)]
pub struct Ready {
    /// Listen address.
    pub address: SocketAddr,
    /// First token, if this start created it.
    pub new_token: Option<String>,
    /// File of the first token.
    pub token_file: PathBuf,
}

/// Reason why a registry does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Error of storage or database.
    #[error("open the registry")]
    Store(#[from] StoreError),
    /// The registry cannot listen at an address.
    #[error("listen on {at}")]
    Listen {
        /// Address.
        at: SocketAddr,
        /// Cause.
        source: io::Error,
    },
    /// The certificate cannot be used.
    #[error("use the certificate {}", .path.display())]
    Certificate {
        /// File.
        path: PathBuf,
        /// Cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file of the first token cannot be read or written.
    #[error("keep the first token in {}", .path.display())]
    Token {
        /// File.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

/// Serves until `stop`. Calls `ready` when the listener is open.
///
/// # Errors
/// [`ServeError`] when directory, database, certificate or listen address cannot be used.
pub async fn serve(
    config: Config,
    metrics: Metrics,
    stop: CancellationToken,
    ready: impl FnOnce(&Ready),
) -> Result<(), ServeError> {
    let storage: Arc<dyn Storage> = match &config.s3 {
        None => Arc::new(Files::open(&config.dir)?),
        Some(s3) => Arc::new(S3::open(s3, config.limits.upload_bytes).await?),
    };
    let at = config.meta.clone().unwrap_or_else(|| MetaAt::Sqlite(config.dir.join("registry.db")));
    let meta = Meta::open(&at).await?;
    let token_file = config.dir.join("token");
    let new_token = first_token(&meta, &token_file, config.clock.now().0).await?;
    let acceptor = config.tls.as_ref().map(|(cert, key)| tls::acceptor(cert, key)).transpose();
    let acceptor = acceptor.map_err(|(path, source)| ServeError::Certificate { path, source })?;
    let manifest_memory = ManifestMemory::new(config.limits.manifest_bytes);
    let manifests = ManifestStore::new(Arc::clone(&storage), meta.clone(), config.clock.clone());
    let registry = Arc::new(Registry {
        storage,
        meta,
        gate: Gate::new(
            config.private_reads,
            config.private_pages,
            config.open_writes,
            config.token.as_deref(),
        ),
        limits: config.limits,
        sweeping: config.sweeping,
        sessions: Default::default(),
        metrics,
        clock: config.clock,
        writes: TaskTracker::new(),
        public_url: config.public_url,
        tls: acceptor.is_some(),
        empty_token: config.empty_token,
        pushed: if config.allow_sparse_indexes { Entry::PushedSparse } else { Entry::Pushed },
        manifests,
        manifest_memory,
        orphans_entered: Default::default(),
        used: Default::default(),
    });
    registry.fill().await?;
    let fail = |source| ServeError::Listen { at: config.listen, source };
    let listener = TcpListener::bind(config.listen).await.map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    ready(&Ready { address, new_token, token_file });
    let upkeep = async {
        if let Some(Err(error)) = stop.run_until_cancelled(registry.manifests.repair()).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "repair manifests failed");
        }
        registry.keep_sweeping(stop.clone()).await;
    };
    tokio::join!(accept(&registry, &listener, acceptor, &stop), upkeep);
    registry.writes.close();
    let _late = timeout(GRACE, registry.writes.wait()).await;
    Ok(())
}

/// Creates the first token if it does not exist: in the file and, as a hash, in the database. A revoked token stays revoked
/// although the file still contains it.
async fn first_token(meta: &Meta, path: &Path, now: i64) -> Result<Option<String>, ServeError> {
    let (token, new) =
        token_file(path).map_err(|source| ServeError::Token { path: path.to_owned(), source })?;
    let hash = hash(&token);
    let rights = Rights::everywhere(Role::Admin);
    let row = TokenRow {
        // Each replica has a first token. A start with the same token changes nothing.
        id: format!("{FIRST_ID}{}", hex::encode(&hash[..4])),
        name: "first".to_owned(),
        writes: 1,
        role: Some(rights.role().to_string()),
        repositories: Some(rights.globs().join(" ")),
        created_by: FIRST_CREATED_BY.to_owned(),
        created: now,
        expires: None,
        last_used: None,
    };
    if !meta.put_token_once(&hash, &row).await? && meta.token(&hash).await?.is_none() {
        tracing::warn!(file = %path.display(), "first token is revoked; remove its file to get another one");
    }
    Ok(new.then_some(token))
}

/// Reads the token in the file, or creates it. Also returns whether it is new.
fn token_file(path: &Path) -> io::Result<(String, bool)> {
    match fs::read_to_string(path) {
        Ok(text) => Ok((text.trim().to_owned(), false)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let token = secret();
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            file.write_all(format!("{token}\n").as_bytes())?;
            file.sync_all()?;
            Ok((token, true))
        }
        Err(e) => Err(e),
    }
}

/// Router of one connection.
fn router(registry: &Arc<Registry>, flow: &Arc<Flow>) -> Router {
    let (registry, flow) = (Arc::clone(registry), Arc::clone(flow));
    Router::new().fallback(move |request| {
        let (registry, flow) = (Arc::clone(&registry), Arc::clone(&flow));
        async move { http::answer(registry, request).await.map(|body| flow.count(body)) }
    })
}

/// Accepts connections until `stop`, then waits for open connections.
async fn accept(
    registry: &Arc<Registry>,
    listener: &TcpListener,
    tls: Option<TlsAcceptor>,
    stop: &CancellationToken,
) {
    let slots = Arc::new(Semaphore::new(registry.limits.connections));
    let (open, graceful) = (TaskTracker::new(), GracefulShutdown::new());
    let (builder, idle) = (connection::builder(registry.limits.head_idle), registry.limits.body_idle);
    loop {
        // Connections above the limit wait in the backlog of the kernel.
        let Some(Ok(slot)) = stop.run_until_cancelled(Arc::clone(&slots).acquire_owned()).await else {
            break;
        };
        let stream = match stop.run_until_cancelled(listener.accept()).await {
            None => break,
            Some(Ok((stream, _))) => stream,
            Some(Err(error)) => {
                // Pauses when out of file descriptors; without a pause, this loop would spin.
                tracing::warn!(%error, "accept connection failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let _latency_only = stream.set_nodelay(true);
        let flow = Arc::new(Flow::default());
        let (router, stream) = (router(registry, &flow), Drained::new(stream, idle));
        let (builder, watcher, tls) = (builder.clone(), graceful.watcher(), tls.clone());
        let connected = registry.metrics.track_connection();
        open.spawn(async move {
            let (_slot, _connected) = (slot, connected);
            match tls {
                None => drive(builder, stream, router, watcher, flow, idle).await,
                Some(tls) => match timeout(HANDSHAKE, tls.accept(stream)).await {
                    Ok(Ok(stream)) => drive(builder, stream, router, watcher, flow, idle).await,
                    Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
                    Err(_) => tracing::debug!("TLS handshake timed out"),
                },
            }
        });
    }
    open.close();
    let ended = async {
        graceful.shutdown().await;
        open.wait().await;
    };
    let _late = timeout(GRACE, ended).await;
}

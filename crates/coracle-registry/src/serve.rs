//! A running registry: storage, names, door, sweep. Everything it starts it also ends.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use coracle_types::Clock;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::{Gate, hash, secret};
use crate::error::StoreError;
use crate::http;
use crate::meta::{Meta, MetaAt, TokenRow};
use crate::metrics::Metrics;
use crate::registry::{Limits, Registry, Sweeping};
use crate::storage::Storage;
use crate::storage::files::Files;
use crate::storage::s3::{S3, S3Config};

/// A TLS handshake takes no longer.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long clients have to let go of a connection when the registry ends.
const GRACE: Duration = Duration::from_secs(5);
/// Most that hyper reads ahead of one connection, in bytes.
const READ_AHEAD: usize = 256 << 10;

/// How a registry is served.
#[derive(Clone, Debug)]
pub struct Config {
    /// Folder of the registry, which exists: blobs, manifests, uploads, the first token.
    pub dir: PathBuf,
    /// Names and tokens. `None`: SQLite in the folder.
    pub meta: Option<MetaAt>,
    /// Blobs and manifests in an object store. `None`: files in the folder.
    pub s3: Option<S3Config>,
    /// Address to serve on; port 0 takes any.
    pub listen: SocketAddr,
    /// Certificate and key, as PEM files. `None`: plain HTTP.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Only tokens may read.
    pub private_reads: bool,
    /// Only tokens may see the pages and the routes for tools (`/api/`).
    pub private_pages: bool,
    /// Everybody may write.
    pub open_writes: bool,
    /// A token to accept besides those in the database.
    pub token: Option<String>,
    /// How clients reach the registry, where that is not what they say themselves.
    pub public_url: Option<String>,
    /// Give anonymous clients the empty token of the original.
    pub empty_token: bool,
    /// Bounds on clients.
    pub limits: Limits,
    /// Garbage.
    pub sweeping: Sweeping,
    /// Where the time comes from.
    pub clock: Clock,
}

impl Config {
    /// A registry in a folder, with the defaults.
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
            limits: Limits::default(),
            sweeping: Sweeping::default(),
            clock: Clock::system(),
        }
    }
}

/// What a registry says when it is ready.
#[derive(Clone, Debug)]
pub struct Ready {
    /// Where it listens.
    pub address: SocketAddr,
    /// The first token, when this start made it. It is shown once, and in the file.
    pub new_token: Option<String>,
    /// The file of the first token.
    pub token_file: PathBuf,
}

/// Why a registry does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Storage or names.
    #[error("open the registry")]
    Store(#[from] StoreError),
    /// The address.
    #[error("listen on {at}")]
    Listen {
        /// Where.
        at: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The certificate.
    #[error("use the certificate {}", .path.display())]
    Certificate {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The first token.
    #[error("keep the first token in {}", .path.display())]
    Token {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Serves until `stop`. Calls `ready` once the door is open.
///
/// # Errors
/// A folder, a database, a certificate or an address that cannot be had.
pub async fn serve(
    config: Config,
    metrics: Metrics,
    stop: CancellationToken,
    ready: impl FnOnce(&Ready),
) -> Result<(), ServeError> {
    let storage: Arc<dyn Storage> = match &config.s3 {
        None => Arc::new(Files::open(&config.dir)?),
        Some(s3) => Arc::new(S3::open(s3, config.clock.clone()).await?),
    };
    let at = config.meta.clone().unwrap_or_else(|| MetaAt::Sqlite(config.dir.join("registry.db")));
    let meta = Meta::open(&at).await?;
    let token_file = config.dir.join("token");
    let new_token = first_token(&meta, &token_file, config.clock.now().0).await?;
    let acceptor = config.tls.as_ref().map(|(cert, key)| acceptor(cert, key)).transpose()?;
    let units = config.limits.manifest_bytes.div_ceil(64 << 10).max(1);
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
        turns: Default::default(),
        manifest_memory: Arc::new(Semaphore::new(usize::try_from(units).unwrap_or(usize::MAX))),
    });
    registry.fill().await?;
    let fail = |source| ServeError::Listen { at: config.listen, source };
    let listener = TcpListener::bind(config.listen).await.map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    ready(&Ready { address, new_token, token_file });
    let upkeep = async {
        if let Some(Err(error)) = stop.run_until_cancelled(registry.settle()).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "pushes that were cut off not settled");
        }
        registry.keep_sweeping(stop.clone()).await;
    };
    tokio::join!(accept(&registry, &listener, acceptor, &stop), upkeep);
    registry.writes.close();
    let _late = timeout(GRACE, registry.writes.wait()).await;
    Ok(())
}

/// Makes the first token when there is none, in the file and, as a hash, in the database.
async fn first_token(meta: &Meta, path: &Path, now: i64) -> Result<Option<String>, ServeError> {
    let fail = |source| ServeError::Token { path: path.to_owned(), source };
    let (token, new) = match fs::read_to_string(path) {
        Ok(text) => (text.trim().to_owned(), false),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let token = secret();
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(fail)?;
            file.write_all(format!("{token}\n").as_bytes()).and_then(|()| file.sync_all()).map_err(fail)?;
            (token, true)
        }
        Err(e) => return Err(fail(e)),
    };
    let hash = hash(&token);
    let row = TokenRow {
        // Replicas have one each; a start with the same one changes nothing.
        id: format!("first-{}", hex::encode(&hash[..4])),
        name: "first".to_owned(),
        writes: 1,
        created_by: "start".to_owned(),
        created: now,
        expires: None,
        last_used: None,
    };
    meta.put_token(&hash, &row).await?;
    Ok(new.then_some(token))
}

fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, ServeError> {
    let fail = |path: &Path, source: Box<dyn std::error::Error + Send + Sync>| ServeError::Certificate {
        path: path.to_owned(),
        source,
    };
    let chain =
        CertificateDer::pem_file_iter(cert).and_then(Iterator::collect).map_err(|e| fail(cert, e.into()))?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| fail(key, e.into()))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map(|builder| builder.with_no_client_auth())
        .and_then(|builder| builder.with_single_cert(chain, secret));
    let mut config = config.map_err(|e| fail(cert, e.into()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Takes connections until `stop`, then waits for those that are open.
async fn accept(
    registry: &Arc<Registry>,
    listener: &TcpListener,
    tls: Option<TlsAcceptor>,
    stop: &CancellationToken,
) {
    let slots = Arc::new(Semaphore::new(registry.limits.connections));
    let own = Arc::clone(registry);
    let router = Router::new().fallback(move |request| http::answer(Arc::clone(&own), request));
    let (open, graceful) = (TaskTracker::new(), GracefulShutdown::new());
    let builder = connection(registry.limits.head_idle);
    loop {
        // A full house waits in the kernel's queue instead of being turned away.
        let Some(Ok(slot)) = stop.run_until_cancelled(Arc::clone(&slots).acquire_owned()).await else {
            break;
        };
        let stream = match stop.run_until_cancelled(listener.accept()).await {
            None => break,
            Some(Ok((stream, _))) => stream,
            Some(Err(error)) => {
                // Out of descriptors: without a pause this would spin.
                tracing::warn!(%error, "connection not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let _latency_only = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let (builder, watcher, tls) = (builder.clone(), graceful.watcher(), tls.clone());
        let connected = registry.metrics.connected();
        open.spawn(async move {
            let (_slot, _connected) = (slot, connected);
            match tls {
                None => drive(builder, stream, service, watcher).await,
                Some(tls) => match timeout(HANDSHAKE, tls.accept(stream)).await {
                    Ok(Ok(stream)) => drive(builder, stream, service, watcher).await,
                    Ok(Err(error)) => tracing::debug!(%error, "handshake not made"),
                    Err(_) => tracing::debug!("handshake took too long"),
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

fn connection(head_idle: Duration) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(head_idle).max_buf_size(READ_AHEAD);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(head_idle).max_concurrent_streams(64);
    builder
}

/// Serves one connection until its client or `watcher` ends it.
async fn drive<S>(
    builder: auto::Builder<TokioExecutor>,
    stream: S,
    service: TowerToHyperService<Router>,
    watcher: Watcher,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection.into_owned()).await {
        tracing::debug!(error, "connection ended");
    }
}

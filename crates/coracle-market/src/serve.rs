//! A running market: store, writer and listeners. All its tasks end with it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::serve::{Listener, ListenerExt as _};
use coracle_auction::Command;
use coracle_certificate::{ClientCertificates, FileTls, TlsError, TlsFiles};
use coracle_proto::market::admin_server::AdminServer;
use coracle_proto::market::market_server::MarketServer;
use coracle_proto::market::supply_server::SupplyServer;
use coracle_proto::market::trading_server::TradingServer;
use coracle_telemetry::{Admin, Readiness, TlsListener};
use coracle_types::Clock;
use futures_util::{Stream, StreamExt as _, stream};
use prometheus_client::registry::Registry as Meters;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::Gate;
use crate::caller;
use crate::catalogue;
use crate::error::{RequestError, StoreError};
use crate::grpc::GrpcServices;
use crate::history::{Percentiles, ROLL_UP_INTERVAL_MS};
use crate::http;
use crate::learning::Learning;
use crate::metrics::Metrics;
use crate::recover::{Recovered, mismatch, recover};
use crate::registry::{Kind, Registry};
use crate::replica::{Advertised, forward};
use crate::review::{Accounts, Reviewed};
use crate::service::Service;
use crate::service::start_of;
use crate::state::MarketState;
use crate::store::{Store, StoreAt};
use crate::writer::{Health, MARKET_ITSELF, Writer};

/// Time that clients have to close their connections when the market ends.
const GRACE: Duration = Duration::from_secs(1);
/// Delay after a change before held bids are examined again.
const RELIEF: Duration = Duration::from_millis(500);

/// Configuration of a market.
#[derive(Clone, Debug)]
pub struct Config {
    /// Store of journal, names and history.
    pub store: StoreAt,
    /// Address of gRPC; port 0 selects a free one.
    pub grpc: SocketAddr,
    /// Address of HTTP and JSON; port 0 selects a free one.
    pub http: SocketAddr,
    /// TLS files of gRPC and HTTP. `None`: no TLS, which is allowed only on loopback unless `plaintext` is set.
    pub tls: Option<TlsFiles>,
    /// Whether addresses other than loopback may be served without TLS.
    pub plaintext: bool,
    /// Address of metrics and health.
    pub admin: Option<SocketAddr>,
    /// Regions for which the default catalogue is created if it does not exist.
    pub regions: Vec<String>,
    /// Region of requests without one.
    pub default_region: Option<String>,
    /// Administrator token that is accepted in addition to those in the store.
    pub admin_token: Option<String>,
    /// Lease of the writer of a shared store; after its end another process may write.
    pub lease: Duration,
    /// Address at which other processes of a shared store reach this one, with the ports of gRPC and HTTP. `None`: the address
    /// of the listeners.
    pub advertise: Option<IpAddr>,
    /// Service accounts of a cluster that trade here; `None`: only the market's own tokens are accepted.
    pub accounts: Option<Accounts>,
    /// Clock.
    pub clock: Clock,
}

/// Addresses of a running market.
#[derive(Clone, Copy, Debug)]
pub struct Server {
    /// Address of gRPC.
    pub grpc: SocketAddr,
    /// Address of HTTP and JSON.
    pub http: SocketAddr,
    /// Address of metrics and health.
    pub admin: Option<SocketAddr>,
}

/// Error of a market.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The store failed.
    #[error("open the market's store")]
    Store(#[from] StoreError),
    /// An address cannot be listened on.
    #[error("listen on {at}")]
    Listen {
        /// Address of the listener.
        at: SocketAddr,
        /// Cause.
        source: io::Error,
    },
    /// TLS is required, because tokens would be readable in transit.
    #[error(
        "{at} is not a loopback address, and the market has no certificate: give it one, or allow plaintext"
    )]
    Plaintext {
        /// Address of the listener.
        at: SocketAddr,
    },
    /// The certificate files cannot be used.
    #[error("prepare TLS")]
    Tls(#[from] TlsError),
    /// A listener failed later.
    #[error("serve {listener}")]
    Listener {
        /// Name of the listener.
        listener: &'static str,
        /// Cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The default catalogue could not be created.
    #[error("prepare the markets")]
    Prepare(#[source] RequestError),
}

async fn listen(at: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(at).await.map_err(|source| ServeError::Listen { at, source })
}

/// Waits until no other process writes to a shared store. Until then, connections are forwarded to the writing process.
async fn wait_for_lease(
    store: &Store,
    config: &Config,
    (grpc, http): (&TcpListener, &TcpListener),
    (at, readiness): (&Server, &Readiness),
    stop: &CancellationToken,
) -> Result<Option<i64>, StoreError> {
    let own = Advertised::of(at.grpc, at.http, config.advertise);
    let (holder, known) = watch::channel(None);
    tokio::select! {
        epoch = take_over(store, config, own, (&holder, readiness), stop) => epoch,
        () = forward((grpc, http), known) => Ok(None),
    }
}

/// Takes the lease when it is free. Publishes the present holder, and is ready while the holder has an address.
async fn take_over(
    store: &Store,
    config: &Config,
    own: Option<Advertised>,
    (holder, readiness): (&watch::Sender<Option<Advertised>>, &Readiness),
    stop: &CancellationToken,
) -> Result<Option<i64>, StoreError> {
    let ready =
        |ready: bool| ["listeners", "journal"].into_iter().for_each(|part| readiness.set(part, ready));
    loop {
        match store.take_over(config.clock.now().0, lease_ms(config), own).await {
            Ok(epoch) => {
                ready(false);
                return Ok(Some(epoch));
            }
            Err(StoreError::Held { until_ms }) => {
                // Ignore a lease of this process from before a restart: connections would be forwarded to itself for ever.
                let other = store.holder().await?.filter(|at| own != Some(*at));
                if holder.send_if_modified(|known| std::mem::replace(known, other) != other) {
                    let at = other.map(|at| at.grpc.to_string());
                    tracing::info!(until_ms, holder = at, "waiting for the lease of another process");
                }
                ready(other.is_some());
                let pause = tokio::time::sleep(config.lease / 10);
                if stop.run_until_cancelled(pause).await.is_none() {
                    return Ok(None);
                }
            }
            Err(error) => return Err(error),
        }
    }
}

/// Serves until `stop`. Calls `ready` once the market listens.
///
/// # Errors
/// The store or an address is unavailable. A listener or the journal fails later, also because another process took over the
/// store.
pub async fn serve(
    config: Config,
    stop: CancellationToken,
    ready: impl FnOnce(Server),
) -> Result<(), ServeError> {
    let mut meters = Meters::default();
    let metrics = Metrics::register(&mut meters);
    let readiness = Readiness::default();
    for part in ["listeners", "journal"] {
        readiness.set(part, false);
    }
    let tls = secure(&config)?;
    let store = Store::open(&config.store).await?;
    let (grpc, web) = (listen(config.grpc).await?, listen(config.http).await?);
    let admin = match config.admin {
        Some(at) => Some(listen(at).await?),
        None => None,
    };
    let at = Server {
        grpc: local_addr(&grpc)?,
        http: local_addr(&web)?,
        admin: admin.as_ref().map(local_addr).transpose()?,
    };
    let mut listeners: JoinSet<Result<(), ServeError>> = JoinSet::new();
    if let Some(listener) = admin {
        let (page, closing) = (Admin::new(meters, readiness.clone()), stop.clone());
        listeners.spawn(async move {
            let serving = page.serve(listener, closing.child_token());
            run_with_grace(&closing, serving)
                .await
                .unwrap_or(Ok(()))
                .map_err(|source| listener_error("admin", source))
        });
    }
    let waited = wait_for_lease(&store, &config, (&grpc, &web), (&at, &readiness), &stop).await?;
    let Some(epoch) = waited else { return Ok(()) };
    let (writer, task) = open_markets(&store, epoch, &config, &metrics, &readiness).await?;
    let (done, stopped) = (stop.child_token(), stop.clone());
    listeners.spawn(async move { Ok(task.run(done).await?) });
    if matches!(config.store, StoreAt::Postgres(_)) {
        let (store, config, stop) = (store.clone(), config.clone(), stop.child_token());
        listeners.spawn(async move { keep_lease(&store, epoch, &config, stop).await });
    }
    let service = service(store, writer, &config, metrics, stop.child_token()).await?;
    prepare(&service, &config.regions).await.map_err(ServeError::Prepare)?;
    let streams = service.streams.clone();
    let (percentiles, over) = (keep_percentiles(service.clone()), stop.child_token());
    streams.spawn(async move { over.run_until_cancelled(percentiles).await });
    let (relief, over) = (keep_relieving(service.clone()), stop.child_token());
    streams.spawn(async move { over.run_until_cancelled(relief).await });
    let gate = GrpcServices { service: service.clone() };
    let (closing, learning) = (stop.clone(), service.clone());
    let (grpc_tls, web_tls) = tls.unzip();
    listeners.spawn(async move {
        let router = tonic::transport::Server::builder()
            .layer(tower::layer::layer_fn(move |inner| Learning { inner, service: learning.clone() }))
            .add_service(MarketServer::new(gate.clone()))
            .add_service(TradingServer::new(gate.clone()))
            .add_service(SupplyServer::new(gate.clone()))
            .add_service(AdminServer::new(gate));
        let signal = closing.clone().cancelled_owned();
        let serving = async {
            match grpc_tls {
                Some(tls) => {
                    let incoming = tls_connections(TlsListener::with_settings(grpc, Arc::new(tls)));
                    router.serve_with_incoming_shutdown(incoming, signal).await
                }
                None => {
                    // The builder's own setting applies only to listeners that it creates itself.
                    let incoming = TcpListenerStream::new(grpc).map(|socket| socket.inspect(set_nodelay));
                    router.serve_with_incoming_shutdown(incoming, signal).await
                }
            }
        };
        run_with_grace(&closing, serving)
            .await
            .unwrap_or(Ok(()))
            .map_err(|source| listener_error("gRPC", source))
    });
    let (routes, quiet) = (http::routes(service), stop.child_token());
    listeners.spawn(async move {
        // Streams do not end by themselves, so the listener closes their connections.
        let serving = async {
            match web_tls {
                Some(tls) => {
                    let listener = TlsListener::with_settings(web, Arc::new(tls));
                    axum::serve(listener.tap_io(|stream| set_nodelay(stream.get_ref().0)), routes).await
                }
                None => axum::serve(web.tap_io(|socket| set_nodelay(socket)), routes).await,
            }
        };
        match quiet.run_until_cancelled(serving).await {
            Some(served) => served.map_err(|source| listener_error("HTTP", source)),
            None => Ok(()),
        }
    });
    readiness.set("listeners", true);
    ready(at);
    let ended = listeners.join_next().await;
    stopped.cancel();
    streams.close();
    streams.wait().await;
    while listeners.join_next().await.is_some() {}
    match ended {
        Some(Ok(result)) => result,
        Some(Err(source)) => Err(listener_error("task", source)),
        None => Ok(()),
    }
}

/// TLS of gRPC and of HTTP, if configured.
fn secure(config: &Config) -> Result<Option<(FileTls, FileTls)>, ServeError> {
    let Some(files) = &config.tls else {
        let open = [config.grpc, config.http].into_iter().find(|at| !at.ip().is_loopback());
        return match open.filter(|_| !config.plaintext) {
            Some(at) => Err(ServeError::Plaintext { at }),
            None => Ok(None),
        };
    };
    // Tenants authenticate by token, so client certificates are optional; the supplier API requires them.
    let load = |protocols: &[&str]| FileTls::load(files.clone(), ClientCertificates::Optional, protocols);
    Ok(Some((load(&["h2"])?, load(&["h2", "http/1.1"])?)))
}

/// Endless stream of a listener's connections.
fn tls_connections(listener: TlsListener) -> impl Stream<Item = io::Result<TlsStream<TcpStream>>> {
    stream::unfold(listener, |mut listener| async move {
        let (connection, _) = listener.accept().await;
        set_nodelay(connection.get_ref().0);
        Some((Ok(connection), listener))
    })
}

/// Disables Nagle's algorithm: otherwise a short frame waits up to 40 ms for an acknowledgement.
fn set_nodelay(socket: &TcpStream) {
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "set TCP_NODELAY failed");
    }
}

/// Result of a listener; `None` if its clients stay connected for too long after `stop`.
async fn run_with_grace<T>(stop: &CancellationToken, serving: impl Future<Output = T>) -> Option<T> {
    let over = async {
        stop.cancelled().await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        served = serving => Some(served),
        () = over => None,
    }
}

fn listener_error(
    listener: &'static str,
    source: impl std::error::Error + Send + Sync + 'static,
) -> ServeError {
    ServeError::Listener { listener, source: Box::new(source) }
}

fn local_addr(listener: &TcpListener) -> Result<SocketAddr, ServeError> {
    let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
    listener.local_addr().map_err(|source| ServeError::Listen { at: unknown, source })
}

/// Recovers all markets of the store, and creates a writer that is not running yet.
async fn open_markets(
    store: &Store,
    epoch: i64,
    config: &Config,
    metrics: &Metrics,
    readiness: &Readiness,
) -> Result<(Writer, crate::writer::WriterTask), StoreError> {
    let registry = Registry::load(store.clone()).await?;
    let mut made = crate::store::Projections::default();
    let mut slots = std::collections::BTreeMap::new();
    for (no, name) in registry.all(Kind::Market) {
        let Some(start) = start_of(&registry.body(Kind::Market, no)) else { continue };
        let Recovered { market, seq, chain, replayed, made: rows } = recover(store, no, start, false).await?;
        tracing::info!(market = name, seq, replayed, "market opened");
        let since = rows.calls.first().map_or(i64::MAX, |call| call.at);
        if let Some(wrong) = mismatch(&store.calls(no, (since, i64::MAX)).await?, &rows.calls) {
            tracing::error!(market = name, wrong, "journal does not lead to the published calls");
            metrics.replay_mismatch.inc();
        }
        // Older calls are already in bars and would count twice.
        let rolled_to = store.rolled_to(no).await?;
        made.calls.extend(rows.calls.into_iter().filter(|call| call.at >= rolled_to));
        made.charges.extend(rows.charges);
        slots.insert(
            no,
            MarketState {
                name,
                market,
                seq,
                chain,
                at_risk: std::collections::BTreeMap::new(),
                start,
                since_snapshot: replayed,
                percentiles: Percentiles::default(),
            },
        );
    }
    let health = Health { metrics: metrics.clone(), readiness: readiness.clone() };
    health.set_journal_up(true);
    let (writer, task) = Writer::new(store.clone(), epoch, config.clock.clone(), health, made);
    *writer.markets.write() = slots;
    Ok((writer, task))
}

async fn service(
    store: Store,
    writer: Writer,
    config: &Config,
    metrics: Metrics,
    stop: CancellationToken,
) -> Result<Arc<Service>, ServeError> {
    let registry = Registry::load(store.clone()).await?;
    let gate = Gate::new(config.clock.clone(), store.tokens().await?, metrics.calls.clone());
    let root = registry.ensure(Kind::Tenant, "admin", &[]).await?;
    if let Some(token) = &config.admin_token {
        gate.admit(caller::hash(token), root, caller::ALL);
    }
    let service = Service {
        writer,
        registry,
        gate,
        metrics,
        store,
        clock: config.clock.clone(),
        default_region: config.default_region.clone(),
        caps: tokio::sync::Mutex::default(),
        capped: parking_lot::RwLock::default(),
        cancelled_setters: parking_lot::Mutex::default(),
        reviewed: Reviewed::new(config.accounts.clone(), config.clock.clone()),
        verifies_suppliers: config.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some()),
        streams: TaskTracker::new(),
        stop,
    };
    for (tenant, _) in service.registry.all(Kind::Tenant) {
        service.take_facts(tenant).await;
    }
    Ok(Arc::new(service))
}

/// Puts bids that are held by a cap into the book, soon after a change. Never returns.
async fn keep_relieving(service: Arc<Service>) {
    let mut changes = service.writer.events.subscribe();
    // Ends with the writer. A reader that missed changes only needs to know that there were some.
    while !matches!(changes.recv().await, Err(RecvError::Closed)) {
        tokio::time::sleep(RELIEF).await;
        changes = changes.resubscribe();
        if let Err(problem) = service.relieve().await {
            tracing::warn!(%problem, "move slices of caps failed");
        }
    }
}

/// Publishes percentiles of the last 30 days for each market, now and every hour. Never returns.
async fn keep_percentiles(service: Arc<Service>) {
    loop {
        let now = service.clock.now().0;
        for no in service.markets() {
            let Ok(of) = service.writer.read(no, |state| state.percentiles.clone()) else { continue };
            if let Err(error) = of.refresh(&service.store, no, now).await {
                tracing::warn!(%error, market = no, "read percentiles failed, keeping the old ones");
            }
        }
        tokio::time::sleep(Duration::from_millis(ROLL_UP_INTERVAL_MS)).await;
    }
}

/// Informs every market of the restart, and creates new built-in markets.
async fn prepare(service: &Service, regions: &[String]) -> Result<(), RequestError> {
    for no in service.markets() {
        service.writer.apply_one(no, MARKET_ITSELF, Command::Restarted).await?;
    }
    for t in catalogue::types() {
        if !regions.is_empty() && service.registry.number(Kind::Type, &t.name).is_none() {
            service.put_type(t).await?;
        }
    }
    for region in regions {
        for (kind, cap, reserve) in catalogue::DEFAULT {
            let name = format!("{kind}/{region}");
            if service.registry.number(Kind::Market, &name).is_none() {
                service.new_market(&name, catalogue::params(cap, reserve)).await?;
            }
        }
    }
    Ok(())
}

fn lease_ms(config: &Config) -> i64 {
    i64::try_from(config.lease.as_millis()).unwrap_or(i64::MAX / 2)
}

/// Renews the lease of a shared store. Ends in an error when it is lost.
async fn keep_lease(
    store: &Store,
    epoch: i64,
    config: &Config,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let every = config.lease / 3;
    loop {
        if stop.run_until_cancelled(tokio::time::sleep(every)).await.is_none() {
            return Ok(());
        }
        match store.renew(epoch, config.clock.now().0, lease_ms(config)).await {
            Ok(true) => {}
            Ok(false) => return Err(StoreError::Held { until_ms: 0 }.into()),
            Err(error) => tracing::warn!(%error, "renew lease failed"),
        }
    }
}

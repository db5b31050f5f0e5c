//! A running market: store, writer, doors. Everything it starts it also ends.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt as _;
use coracle_auction::Command;
use coracle_proto::market::admin_server::AdminServer;
use coracle_proto::market::market_server::MarketServer;
use coracle_proto::market::supply_server::SupplyServer;
use coracle_proto::market::trading_server::TradingServer;
use coracle_telemetry::{Admin, Readiness};
use coracle_types::Clock;
use futures_util::StreamExt as _;
use prometheus_client::registry::Registry as Meters;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::{self, Gate};
use crate::catalogue;
use crate::error::{Problem, StoreError};
use crate::grpc::Door;
use crate::history::{LOOK_MS, Percentiles};
use crate::http;
use crate::ignored::Ignored;
use crate::metrics::Metrics;
use crate::recover::{Recovered, mismatch, recover};
use crate::registry::{Kind, Registry};
use crate::review::{Accounts, Learning, Reviewed};
use crate::service::Service;
use crate::service::start_of;
use crate::store::{Store, StoreAt};
use crate::writer::{Health, NOBODY, Slot, Writer};

/// How long clients have to let go of a connection when the market ends.
const GRACE: Duration = Duration::from_secs(1);

/// How a market is served.
#[derive(Clone, Debug)]
pub struct Config {
    /// Journal, names, history.
    pub store: StoreAt,
    /// gRPC; port 0 takes any.
    pub grpc: SocketAddr,
    /// HTTP and JSON; port 0 takes any.
    pub http: SocketAddr,
    /// Metrics and health.
    pub admin: Option<SocketAddr>,
    /// Regions that get the default catalogue, when the market is new there.
    pub regions: Vec<String>,
    /// The region of requests that name none.
    pub default_region: Option<String>,
    /// An administrator's token to accept besides those in the store.
    pub admin_token: Option<String>,
    /// How long the writer of a shared store may be silent before another one takes over.
    pub lease: Duration,
    /// Service accounts of a cluster that trade here; `None`: only tokens of the market's own.
    pub accounts: Option<Accounts>,
    /// Where the time comes from.
    pub clock: Clock,
}

/// Where a running market listens.
#[derive(Clone, Copy, Debug)]
pub struct Server {
    /// gRPC.
    pub grpc: SocketAddr,
    /// HTTP and JSON.
    pub http: SocketAddr,
    /// Metrics and health.
    pub admin: Option<SocketAddr>,
}

/// Why a market does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The store.
    #[error("open the market's store")]
    Store(#[from] StoreError),
    /// An address.
    #[error("listen on {at}")]
    Listen {
        /// Where.
        at: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// A door ended.
    #[error("serve {door}")]
    Door {
        /// Which.
        door: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The catalogue could not be put in.
    #[error("prepare the markets")]
    Prepare(#[source] Problem),
}

async fn listen(at: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(at).await.map_err(|source| ServeError::Listen { at, source })
}

/// Waits until no other process writes to a shared store.
async fn take_over(
    store: &Store,
    config: &Config,
    stop: &CancellationToken,
) -> Result<Option<i64>, StoreError> {
    loop {
        match store.take_over(config.clock.now().0, lease_ms(config)).await {
            Ok(epoch) => return Ok(Some(epoch)),
            Err(StoreError::Held { until_ms }) => {
                tracing::info!(until_ms, "standing by: another process writes");
                let pause = tokio::time::sleep(config.lease / 10);
                if stop.run_until_cancelled(pause).await.is_none() {
                    return Ok(None);
                }
            }
            Err(error) => return Err(error),
        }
    }
}

/// Serves until `stop`. Calls `ready` once all doors are open.
///
/// # Errors
/// A store or an address that cannot be had; a door or the journal that fails later, also when
/// another process took the store over.
pub async fn serve(
    config: Config,
    stop: CancellationToken,
    ready: impl FnOnce(Server),
) -> Result<(), ServeError> {
    let mut meters = Meters::default();
    let metrics = Metrics::register(&mut meters);
    let readiness = Readiness::default();
    for part in ["doors", "journal"] {
        readiness.set(part, false);
    }
    let store = Store::open(&config.store).await?;
    let (grpc, web) = (listen(config.grpc).await?, listen(config.http).await?);
    let admin = match config.admin {
        Some(at) => Some(listen(at).await?),
        None => None,
    };
    let at =
        Server { grpc: local(&grpc)?, http: local(&web)?, admin: admin.as_ref().map(local).transpose()? };
    let mut doors: JoinSet<Result<(), ServeError>> = JoinSet::new();
    if let Some(listener) = admin {
        let (page, closing) = (Admin::new(meters, readiness.clone()), stop.clone());
        doors.spawn(async move {
            let serving = page.serve(listener, closing.child_token());
            within_grace(&closing, serving).await.unwrap_or(Ok(())).map_err(|source| door("admin", source))
        });
    }
    let Some(epoch) = take_over(&store, &config, &stop).await? else { return Ok(()) };
    let (writer, task) = open_markets(&store, epoch, &config, &metrics, &readiness).await?;
    let (done, stopped) = (stop.child_token(), stop.clone());
    doors.spawn(async move { Ok(task.run(done).await?) });
    if matches!(config.store, StoreAt::Postgres(_)) {
        let (store, config, stop) = (store.clone(), config.clone(), stop.child_token());
        doors.spawn(async move { keep_lease(&store, epoch, &config, stop).await });
    }
    let service = service(store, writer, &config, metrics, stop.child_token()).await?;
    prepare(&service, &config.regions).await.map_err(ServeError::Prepare)?;
    let streams = service.streams.clone();
    let (percentiles, over) = (keep_percentiles(service.clone()), stop.child_token());
    streams.spawn(async move { over.run_until_cancelled(percentiles).await });
    let gate = Door { service: service.clone() };
    let (closing, learning) = (stop.clone(), service.clone());
    // The builder's own setting is for listeners that it makes itself.
    let incoming = TcpListenerStream::new(grpc).map(|socket| socket.inspect(at_once));
    doors.spawn(async move {
        let serving = tonic::transport::Server::builder()
            .layer(tower::layer::layer_fn(move |inner| Learning { inner, service: learning.clone() }))
            .add_service(MarketServer::new(gate.clone()))
            .add_service(TradingServer::new(gate.clone()))
            .add_service(SupplyServer::new(gate.clone()))
            .add_service(AdminServer::new(gate))
            .serve_with_incoming_shutdown(incoming, closing.clone().cancelled_owned());
        within_grace(&closing, serving).await.unwrap_or(Ok(())).map_err(|source| door("gRPC", source))
    });
    let (routes, quiet) = (http::routes(service), stop.child_token());
    doors.spawn(async move {
        // Streams have no end of their own, so the door is closed around them.
        let serving = axum::serve(web.tap_io(|socket| at_once(socket)), routes).into_future();
        match quiet.run_until_cancelled(serving).await {
            Some(served) => served.map_err(|source| door("HTTP", source)),
            None => Ok(()),
        }
    });
    readiness.set("doors", true);
    ready(at);
    let ended = doors.join_next().await;
    stopped.cancel();
    streams.close();
    streams.wait().await;
    while doors.join_next().await.is_some() {}
    match ended {
        Some(Ok(result)) => result,
        Some(Err(source)) => Err(door("task", source)),
        None => Ok(()),
    }
}

/// A short frame does not wait until the one before is acknowledged: that takes a reader up to 40 ms.
fn at_once(socket: &TcpStream) {
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "short frames may be late");
    }
}

/// What a door says, unless its clients do not let go of it in time after `stop`.
async fn within_grace<T>(stop: &CancellationToken, serving: impl Future<Output = T>) -> Option<T> {
    let over = async {
        stop.cancelled().await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        served = serving => Some(served),
        () = over => None,
    }
}

fn door(door: &'static str, source: impl std::error::Error + Send + Sync + 'static) -> ServeError {
    ServeError::Door { door, source: Box::new(source) }
}

fn local(listener: &TcpListener) -> Result<SocketAddr, ServeError> {
    let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
    listener.local_addr().map_err(|source| ServeError::Listen { at: unknown, source })
}

/// All markets of the store, replayed, behind a writer that is not running yet.
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
            tracing::error!(market = name, wrong, "the journal does not lead to what was published");
            metrics.replay_mismatch.inc();
        }
        // What grew old is in bars, and would count twice.
        let rolled_to = store.rolled_to(no).await?;
        made.calls.extend(rows.calls.into_iter().filter(|call| call.at >= rolled_to));
        made.charges.extend(rows.charges);
        let (indicated, at_risk) = (market.now(), std::collections::BTreeMap::new());
        slots.insert(
            no,
            Slot {
                name,
                market,
                seq,
                chain,
                at_risk,
                start,
                since_snapshot: replayed,
                indicated,
                percentiles: Percentiles::default(),
            },
        );
    }
    let health = Health { metrics: metrics.clone(), readiness: readiness.clone() };
    health.journal_is(true);
    let (writer, task) = Writer::new(store.clone(), epoch, config.clock.clone(), health, made);
    *writer.markets.write().unwrap_or_else(std::sync::PoisonError::into_inner) = slots;
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
        gate.admit(auth::hash(token), root, auth::ALL);
    }
    let ignored = Ignored::after(store.last_ignored().await?);
    let service = Service {
        writer,
        registry,
        gate,
        metrics,
        store,
        clock: config.clock.clone(),
        default_region: config.default_region.clone(),
        caps: tokio::sync::Mutex::default(),
        capped: std::sync::RwLock::default(),
        cancelled_setters: std::sync::Mutex::default(),
        ignored: std::sync::Mutex::new(ignored),
        reviewed: Reviewed::new(config.accounts.clone(), config.clock.clone()),
        streams: TaskTracker::new(),
        stop,
    };
    for (tenant, _) in service.registry.all(Kind::Tenant) {
        service.take_facts(tenant).await;
    }
    Ok(Arc::new(service))
}

/// Publishes what each market cost in the last 30 days, now and every hour. Never ends by itself.
async fn keep_percentiles(service: Arc<Service>) {
    loop {
        let now = service.clock.now().0;
        for no in service.markets() {
            let Ok(of) = service.writer.read(no, |slot| slot.percentiles.clone()) else { continue };
            if let Err(error) = of.refresh(&service.store, no, now).await {
                tracing::warn!(%error, market = no, "percentiles are those of before");
            }
        }
        tokio::time::sleep(Duration::from_millis(LOOK_MS)).await;
    }
}

/// Tells every market that it was away, and makes those of the catalogue that are new.
async fn prepare(service: &Service, regions: &[String]) -> Result<(), Problem> {
    for no in service.markets() {
        service.writer.apply_one(no, NOBODY, Command::Restarted).await?;
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
            Err(error) => tracing::warn!(%error, "lease not renewed"),
        }
    }
}

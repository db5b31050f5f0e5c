//! Client of the market's API: commands with a deadline and a rate limit.

mod connection;

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use coracle_proto::market::{self as pb, market_client::MarketClient, trading_client::TradingClient};
use parking_lot::{Mutex, RwLock};
use tokio::time::{Instant, sleep, timeout};
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue, errors::InvalidMetadataValue},
    transport::{Channel, Endpoint},
};

use connection::Connection;

/// Deadline of a call.
const CALL: Duration = Duration::from_secs(10);
/// Interval at which the files with the token and the authority are read again.
const REFRESH_EVERY: Duration = Duration::from_secs(60);
/// Largest gRPC message in bytes.
const FRAME_BYTES_MAX: usize = 16 << 20;

/// Address of the market, and identity of the cluster there.
#[derive(Clone)]
pub struct MarketAt {
    /// gRPC address: `http://host:port` or `https://host:port`.
    pub url: String,
    /// PEM file of the authority of the market's certificate, for `https`. The file is read again at intervals, so that it can
    /// be rotated.
    pub ca: Option<PathBuf>,
    /// Token of the cluster's tenant.
    pub token: String,
    /// File with the token, used instead of `token`. The file is read again at intervals, so that the token can be rotated.
    pub token_file: Option<PathBuf>,
    /// Name of the cluster; tenants are `<cluster>/<namespace>`.
    pub cluster: String,
    /// Commands per second; bursts of up to four seconds' worth are allowed.
    pub rate: u32,
}

impl fmt::Debug for MarketAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MarketAt")
            .field("url", &self.url)
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}

/// Opens connections to the market.
pub trait Connect: fmt::Debug + Send + Sync {
    /// Creates a channel that connects at the first call.
    fn connect(&self, endpoint: &Endpoint) -> Channel;
}

/// Connections over TCP.
#[derive(Clone, Copy, Debug)]
pub struct TcpConnect;

impl Connect for TcpConnect {
    fn connect(&self, endpoint: &Endpoint) -> Channel {
        endpoint.connect_lazy()
    }
}

/// Error of a command. The command changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MarketError {
    /// The address, authority or token is invalid.
    #[error("invalid address, authority or token of market {url}")]
    Address {
        /// Address of the market.
        url: String,
        /// Cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The market refused the call or did not answer.
    #[error("{operation} in market {market}")]
    Call {
        /// Operation.
        operation: &'static str,
        /// Name of the market.
        market: String,
        /// Cause.
        source: Box<Status>,
    },
}

impl MarketError {
    /// Error code of the market, or else the gRPC code.
    #[must_use]
    pub fn code(&self) -> String {
        match self {
            Self::Address { .. } => "Unavailable".to_owned(),
            Self::Call { source, .. } => {
                let known = source.metadata().get("coracle-code").and_then(|v| v.to_str().ok());
                known.map_or_else(|| format!("{:?}", source.code()), str::to_owned)
            }
        }
    }

    /// Whether another change of the owner came first. A new reconcile resolves this.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        // The idempotency key contains the version: the same key with another body means that the version was used already.
        matches!(self.code().as_str(), "OWNER_VERSION" | "IDEMPOTENCY_CONFLICT")
    }

    /// Whether the market is unavailable or busy.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        let Self::Call { source, .. } = self else { return false };
        matches!(source.code(), Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted)
    }

    /// Whether the bid or allocation has already ended. A new reconcile resolves this.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.code().as_str(), "TERMINAL" | "NOT_FOUND")
    }
}

/// Client of the market. Clones are cheap.
#[derive(Clone, Debug)]
pub struct Market {
    connection: Arc<Connection>,
    token: Arc<RwLock<MetadataValue<Ascii>>>,
    token_file: Option<PathBuf>,
    cluster: String,
    pace: Arc<Pace>,
}

impl Market {
    /// Creates a client, which connects at the first call.
    ///
    /// # Errors
    /// [`MarketError::Address`].
    pub fn new(at: &MarketAt, connect: Arc<dyn Connect>) -> Result<Self, MarketError> {
        let wrong = |source: Box<dyn std::error::Error + Send + Sync>| MarketError::Address {
            url: at.url.clone(),
            source,
        };
        let connection = Connection::open(at, connect).map_err(wrong)?;
        let token = bearer(&at.token).map_err(|e| wrong(e.into()))?;
        Ok(Self {
            connection: Arc::new(connection),
            token: Arc::new(RwLock::new(token)),
            token_file: at.token_file.clone(),
            cluster: at.cluster.clone(),
            pace: Arc::new(Pace::new(at.rate)),
        })
    }

    /// Reads the files with the token and the authority, if configured. If reading fails, the known values stay.
    pub(crate) async fn refresh(&self) {
        self.connection.refresh().await;
        let Some(file) = &self.token_file else { return };
        match tokio::fs::read_to_string(file).await.map(|text| bearer(text.trim())) {
            Ok(Ok(token)) => *self.token.write() = token,
            Ok(Err(error)) => {
                tracing::warn!(%error, file = %file.display(), "invalid token in market token file")
            }
            Err(error) => tracing::warn!(%error, file = %file.display(), "read market token file failed"),
        }
    }

    /// Refreshes token and authority at intervals. Never returns.
    pub(crate) async fn keep_fresh(&self) {
        loop {
            sleep(REFRESH_EVERY).await;
            self.refresh().await;
        }
    }

    /// Name of the tenant of a namespace.
    #[must_use]
    pub fn tenant(&self, namespace: &str) -> String {
        format!("{}/{namespace}", self.cluster)
    }

    /// Name of the cluster at the market.
    pub(crate) fn cluster(&self) -> &str {
        &self.cluster
    }

    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let token = self.token.read().clone();
        request.metadata_mut().insert("authorization", token);
        request
    }

    pub(crate) fn trading(&self) -> TradingClient<Channel> {
        TradingClient::new(self.connection.channel()).max_decoding_message_size(FRAME_BYTES_MAX)
    }

    pub(crate) fn markets(&self) -> MarketClient<Channel> {
        MarketClient::new(self.connection.channel())
    }

    /// Places a bid. A repetition with the same key and body is the same bid.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn place(&self, bid: pb::PlaceBidRequest) -> Result<pb::BidReply, MarketError> {
        self.pace.wait().await;
        let market = bid.market.clone();
        call_market("place bid", market, self.trading().place_bid(self.request(bid))).await
    }

    /// Amends a bid.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn amend(&self, market: &str, r: pb::AmendBidRequest) -> Result<pb::BidReply, MarketError> {
        self.pace.wait().await;
        call_market("amend bid", market, self.trading().amend_bid(self.request(r))).await
    }

    /// Cancels the open units of a bid.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn cancel(&self, market: &str, r: pb::CancelBidRequest) -> Result<pb::BidReply, MarketError> {
        self.pace.wait().await;
        call_market("cancel bid", market, self.trading().cancel_bid(self.request(r))).await
    }

    /// Releases an allocation.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn release(
        &self,
        market: &str,
        r: pb::ReleaseAllocationRequest,
    ) -> Result<pb::BidReply, MarketError> {
        self.pace.wait().await;
        call_market("release allocation", market, self.trading().release_allocation(self.request(r))).await
    }

    /// Releases another allocation instead of one under notice.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn substitute(&self, market: &str, r: pb::SubstituteVictimRequest) -> Result<(), MarketError> {
        self.pace.wait().await;
        call_market("substitute allocation", market, self.trading().substitute_victim(self.request(r)))
            .await
            .map(drop)
    }

    /// Number of open units and live allocations of an owner, read from the market.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn remaining(&self, tenant: &str, uid: &str) -> Result<usize, MarketError> {
        let (owner_uid, tenant) = (uid.to_owned(), tenant.to_owned());
        let bids = pb::GetPendingBidsRequest {
            owner_uid: owner_uid.clone(),
            tenant: tenant.clone(),
            ..pb::GetPendingBidsRequest::default()
        };
        let allocations = pb::ListAllocationsRequest { owner_uid, tenant, include_ended: false };
        let mut trading = self.trading();
        let bids = call_market("list bids", "*", trading.get_pending_bids(self.request(bids))).await?;
        let allocations =
            call_market("list allocations", "*", trading.list_allocations(self.request(allocations))).await?;
        let open: u32 = bids.bids.iter().map(|b| b.open).sum();
        Ok(allocations.allocations.len() + usize::try_from(open).unwrap_or(usize::MAX))
    }
}

fn bearer(token: &str) -> Result<MetadataValue<Ascii>, InvalidMetadataValue> {
    format!("Bearer {token}").parse()
}

async fn call_market<T>(
    operation: &'static str,
    market: impl Into<String>,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, MarketError> {
    let late = || Err(Status::deadline_exceeded("the market did not answer in time"));
    let answer = timeout(CALL, call).await.unwrap_or_else(|_| late());
    answer.map(tonic::Response::into_inner).map_err(|source| MarketError::Call {
        operation,
        market: market.into(),
        source: Box::new(source),
    })
}

/// Rate limiter with bursts of four seconds' worth.
#[derive(Debug)]
struct Pace {
    every: Duration,
    /// Time of the next command if commands were evenly spaced.
    next: Mutex<Option<Instant>>,
}

const BURST_SECONDS: u32 = 4;

impl Pace {
    fn new(rate: u32) -> Self {
        Self { every: Duration::from_secs(1) / rate.max(1), next: Mutex::default() }
    }

    async fn wait(&self) {
        let until = {
            let now = Instant::now();
            let mut next = self.next.lock();
            let at = next.unwrap_or(now).max(now - Duration::from_secs(1) * BURST_SECONDS);
            *next = Some(at + self.every);
            at
        };
        tokio::time::sleep_until(until).await;
    }
}

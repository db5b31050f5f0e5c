//! The market's API: commands with a deadline and a rate, and the two streams that feed the mirror.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use coracle_proto::market::{self as pb, market_client::MarketClient, trading_client::TradingClient};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue, errors::InvalidMetadataValue},
    transport::{Channel, Endpoint},
};

use crate::{
    Config,
    mirror::{Change, Mirror},
};

/// No call takes longer.
const CALL: Duration = Duration::from_secs(10);
/// A market that does not answer is dialled again after so long.
const REDIAL: Duration = Duration::from_secs(1);
/// A stream that is dead is found out by pings of this interval.
const PING: Duration = Duration::from_secs(5);
/// A token that comes from a file is read again so often.
const TOKEN_EVERY: Duration = Duration::from_secs(60);
/// Largest frame.
const FRAME_BYTES_MAX: usize = 16 << 20;

/// Where the market is, and who we are there.
#[derive(Clone)]
pub struct MarketAt {
    /// `http://host:port` of its gRPC.
    pub url: String,
    /// Token of the cluster's tenant.
    pub token: String,
    /// Where the token is read from instead, each time the streams are opened: one that ends is replaced there in time.
    pub token_file: Option<PathBuf>,
    /// The cluster: tenants are `<cluster>/<namespace>`.
    pub cluster: String,
    /// Changes a second; four seconds' worth may come at once.
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

/// Why a command changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MarketError {
    /// It cannot be reached as told.
    #[error("use the market at {url}")]
    Address {
        /// Where.
        url: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It refused, or did not answer.
    #[error("{operation} in market {market}")]
    Call {
        /// What was tried.
        operation: &'static str,
        /// Where.
        market: String,
        /// Why.
        source: Box<Status>,
    },
}

impl MarketError {
    /// The market's constant for the reason, or the gRPC code.
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

    /// Another change of the owner came first: look again.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        // The key of a version names one request: with another body, that version's change was made already.
        matches!(self.code().as_str(), "OWNER_VERSION" | "IDEMPOTENCY_CONFLICT")
    }

    /// It is over already: look again.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.code().as_str(), "TERMINAL" | "NOT_FOUND")
    }
}

/// A client of the market. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Market {
    channel: Channel,
    token: Arc<RwLock<MetadataValue<Ascii>>>,
    token_file: Option<PathBuf>,
    cluster: String,
    pace: Arc<Pace>,
}

impl Market {
    /// Nothing is dialled yet.
    ///
    /// # Errors
    /// [`MarketError::Address`].
    pub fn new(at: &MarketAt) -> Result<Self, MarketError> {
        let wrong = |source: Box<dyn std::error::Error + Send + Sync>| MarketError::Address {
            url: at.url.clone(),
            source,
        };
        let endpoint = Endpoint::from_shared(at.url.clone()).map_err(|e| wrong(e.into()))?;
        let channel = endpoint
            .connect_timeout(CALL)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PING)
            .keep_alive_while_idle(true)
            .connect_lazy();
        let token = bearer(&at.token).map_err(|e| wrong(e.into()))?;
        Ok(Self {
            channel,
            token: Arc::new(RwLock::new(token)),
            token_file: at.token_file.clone(),
            cluster: at.cluster.clone(),
            pace: Arc::new(Pace::new(at.rate)),
        })
    }

    /// Reads the token anew where it comes from a file. What cannot be read leaves the one that is known.
    async fn read_token(&self) {
        let Some(file) = &self.token_file else { return };
        match tokio::fs::read_to_string(file).await.map(|text| bearer(text.trim())) {
            Ok(Ok(token)) => *self.token.write().unwrap_or_else(PoisonError::into_inner) = token,
            Ok(Err(error)) => {
                tracing::warn!(%error, file = %file.display(), "no token in the market's token file")
            }
            Err(error) => tracing::warn!(%error, file = %file.display(), "market's token not read"),
        }
    }

    /// Keeps the token of the file. Never ends by itself.
    async fn keep_token(&self) {
        loop {
            sleep(TOKEN_EVERY).await;
            self.read_token().await;
        }
    }

    /// The tenant of a namespace.
    #[must_use]
    pub fn tenant(&self, namespace: &str) -> String {
        format!("{}/{namespace}", self.cluster)
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let token = self.token.read().unwrap_or_else(PoisonError::into_inner).clone();
        request.metadata_mut().insert("authorization", token);
        request
    }

    fn trading(&self) -> TradingClient<Channel> {
        TradingClient::new(self.channel.clone()).max_decoding_message_size(FRAME_BYTES_MAX)
    }

    /// Places a bid. The same key and body again is the same bid.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn place(&self, bid: pb::PlaceBidRequest) -> Result<pb::BidReply, MarketError> {
        self.pace.wait().await;
        let market = bid.market.clone();
        answered("place bid", market, self.trading().place_bid(self.request(bid))).await
    }

    /// Changes a bid.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn amend(&self, market: &str, r: pb::AmendBidRequest) -> Result<pb::BidReply, MarketError> {
        self.pace.wait().await;
        answered("amend bid", market, self.trading().amend_bid(self.request(r))).await
    }

    /// Takes the open units of a bid back.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn cancel(&self, market: &str, r: pb::CancelBidRequest) -> Result<pb::BidReply, MarketError> {
        self.pace.wait().await;
        answered("cancel bid", market, self.trading().cancel_bid(self.request(r))).await
    }

    /// Gives a unit back.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn release(
        &self,
        market: &str,
        r: pb::ReleaseAllocationRequest,
    ) -> Result<pb::BidReply, MarketError> {
        self.pace.wait().await;
        answered("release unit", market, self.trading().release_allocation(self.request(r))).await
    }

    /// Gives up another unit instead of one under notice.
    ///
    /// # Errors
    /// [`MarketError::Call`].
    pub async fn substitute(&self, market: &str, r: pb::SubstituteVictimRequest) -> Result<(), MarketError> {
        self.pace.wait().await;
        answered("substitute unit", market, self.trading().substitute_victim(self.request(r))).await.map(drop)
    }

    /// Bids and units of an owner that are not over, read now.
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
        let units = pb::ListAllocationsRequest { owner_uid, tenant, include_ended: false };
        let mut trading = self.trading();
        let bids = answered("list bids", "*", trading.get_pending_bids(self.request(bids))).await?;
        let units = answered("list units", "*", trading.list_allocations(self.request(units))).await?;
        let open: u32 = bids.bids.iter().map(|b| b.open).sum();
        Ok(units.allocations.len() + usize::try_from(open).unwrap_or(usize::MAX))
    }
}

fn bearer(token: &str) -> Result<MetadataValue<Ascii>, InvalidMetadataValue> {
    format!("Bearer {token}").parse()
}

async fn answered<T>(
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

/// So many changes a second, and four seconds' worth at once.
#[derive(Debug)]
struct Pace {
    every: Duration,
    /// When the next change may be made, were they evenly spread.
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
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let at = next.unwrap_or(now).max(now - Duration::from_secs(1) * BURST_SECONDS);
            *next = Some(at + self.every);
            at
        };
        tokio::time::sleep_until(until).await;
    }
}

/// Keeps the mirror until `stop`; calls `changed` for each change of it.
pub(crate) async fn feed(
    market: &Market,
    mirror: &Mirror,
    config: &Config,
    changed: impl Fn(Change),
    stop: &CancellationToken,
) {
    while !stop.is_cancelled() {
        let fed = async {
            market.read_token().await;
            tokio::select! {
                () = market.keep_token() => Ok(()),
                status = owners(market, mirror, config, &changed) => status,
                status = prices(market, mirror, config, &changed) => status,
            }
        };
        let ended = tokio::select! {
            ended = fed => ended,
            () = stop.cancelled() => return,
        };
        if let Err(status) = ended {
            tracing::debug!(%status, "market stream ended");
        }
        mirror.lost().into_iter().for_each(&changed);
        tokio::select! {
            () = sleep(REDIAL) => {}
            () = stop.cancelled() => {}
        }
    }
}

fn span(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

async fn owners(
    market: &Market,
    mirror: &Mirror,
    config: &Config,
    changed: &impl Fn(Change),
) -> Result<(), Status> {
    let watch = pb::WatchOwnerRequest { tenant: market.cluster.clone(), below: true, ..Default::default() };
    let mut frames = market.trading().watch_owner(market.request(watch)).await?.into_inner();
    while let Some(frame) = frames.message().await? {
        mirror.frame(frame, config.clock.now().as_millisecond()).into_iter().for_each(changed);
        for reached in mirror.take_reached() {
            config.bid_metrics.reached(reached.stage, span(reached.took_ms));
        }
    }
    Ok(())
}

async fn prices(
    market: &Market,
    mirror: &Mirror,
    config: &Config,
    changed: &impl Fn(Change),
) -> Result<(), Status> {
    let mut client = MarketClient::new(market.channel.clone());
    // The stream opens first, so that no change falls between it and the list.
    let mut frames =
        client.stream_prices(market.request(pb::StreamPricesRequest::default())).await?.into_inner();
    let listed = client.list_markets(market.request(pb::ListMarketsRequest {})).await?.into_inner();
    for price in listed.markets {
        let frame = pb::PriceFrame {
            seq: price.seq,
            market: price.market.clone(),
            r#type: "price".into(),
            price: Some(price),
        };
        mirror.price(&frame).into_iter().for_each(changed);
    }
    mirror.priced().into_iter().for_each(changed);
    while let Some(frame) = frames.message().await? {
        // Present prices are as old as the market's last command; what a call made of them is new.
        if let Some(price) = frame.price.as_ref().filter(|_| frame.r#type == "call") {
            config.bid_metrics.lagged(span(config.clock.now().as_millisecond() - price.as_of_ms));
        }
        mirror.price(&frame).into_iter().for_each(changed);
    }
    Ok(())
}

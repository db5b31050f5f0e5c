//! Benchmark of the delays that readers of streams see.

use std::time::{Duration, Instant};

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::market_client::MarketClient;
use coracle_proto::market::owner_frame::Frame;
use coracle_proto::market::supply_client::SupplyClient;
use coracle_proto::market::trading_client::TradingClient;
use coracle_proto::market::{
    PlaceBidRequest, PutLotRequest, PutMarketRequest, ReportObservedRequest, StreamPricesRequest,
    WatchOwnerRequest,
};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::server::{ADMIN, MARKET, Served, now_ms, p99_ms, tokens, with};

/// Number of streams on one connection; servers allow 200.
const STREAMS: usize = 100;

/// Configures one call per second.
async fn call_each_second(channel: Channel) {
    let (reserve_micros, cap_micros) = (2_000_000, 8_000_000);
    let market = PutMarketRequest {
        market: MARKET.into(),
        reserve_micros,
        cap_micros,
        call_interval_ms: 1_000,
        effective_at_ms: 1,
        ..PutMarketRequest::default()
    };
    AdminClient::new(channel).put_market(with(ADMIN, market)).await.unwrap();
}

/// Places bids more often than calls are held, for as long as it is polled: a market without changes publishes no calls.
async fn trade(channel: Channel, token: &str) -> std::convert::Infallible {
    let (mut trading, mut n) = (TradingClient::new(channel), 0);
    loop {
        trading.place_bid(with(token, bid_of(n, &format!("trade-{n}")))).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        n += 1;
    }
}

/// Creates a bid for one unit, of one of a hundred owners.
fn bid_of(n: u64, key: &str) -> PlaceBidRequest {
    PlaceBidRequest {
        market: MARKET.into(),
        limit_micros: 3_000_000,
        quantity: 1,
        owner_uid: format!("6f9619ff-8b86-d011-b42d-{:012x}", n % 100),
        idempotency_key: key.into(),
        ..PlaceBidRequest::default()
    }
}

/// p99 of the time from a call until a reader has its price, in milliseconds.
pub(crate) async fn published(channel: Channel, token: &str, calls: usize) -> Option<f64> {
    call_each_second(channel.clone()).await;
    tokio::select! {
        took = reads(channel.clone(), calls) => p99_ms("call, journal and publication", took),
        never = trade(channel.clone(), token) => match never {},
    }
}

/// Delay after the call of each of `calls` prices. Times are whole milliseconds of the same computer's clock.
async fn reads(channel: Channel, calls: usize) -> Vec<Duration> {
    let only = StreamPricesRequest { markets: vec![MARKET.into()], ..StreamPricesRequest::default() };
    let mut frames = MarketClient::new(channel).stream_prices(with(ADMIN, only)).await.unwrap().into_inner();
    let (mut took, mut due_ms) = (Vec::new(), 0);
    while took.len() < calls {
        let frame = frames.message().await.unwrap().unwrap();
        let late = u64::try_from(now_ms() - due_ms).unwrap_or(0);
        if frame.r#type == "call" && due_ms > 0 {
            took.push(Duration::from_millis(late));
        }
        if let Some(price) = frame.price {
            due_ms = price.next_call_ms;
        }
    }
    took
}

/// p99 of the delay of a price at `readers` readers of one market's prices, in milliseconds.
pub(crate) async fn many_readers(readers: usize, calls: usize) -> Option<f64> {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let served = Served::start(&dir.path().join("market.db"));
    let channel = served.connect().await;
    call_each_second(channel.clone()).await;
    let token = tokens(channel.clone()).await.swap_remove(0);
    let mut all = JoinSet::new();
    for _ in 0..readers.div_ceil(STREAMS) {
        let channel = served.connect().await;
        for _ in 0..STREAMS {
            all.spawn(reads(channel.clone(), calls));
        }
    }
    let took = tokio::select! {
        took = all.join_all() => took.concat(),
        never = trade(channel, &token) => match never {},
    };
    served.kill();
    p99_ms(&format!("prices to {readers} readers"), took)
}

/// p99 of the time from a bid until its match is reported, with a free unit for each bid, in milliseconds.
pub(crate) async fn matches(bids: u32) -> Option<f64> {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let served = Served::start(&dir.path().join("market.db"));
    let channel = served.connect().await;
    let token = tokens(channel.clone()).await.swap_remove(0);
    let mut supply = SupplyClient::new(channel.clone());
    let lot = PutLotRequest { lot: "bench".into(), market: MARKET.into(), units: bids, notice_ms: 30_000 };
    supply.put_lot(with(ADMIN, lot)).await.unwrap();
    let mut trading = TradingClient::new(served.connect().await);
    let watch = WatchOwnerRequest::default();
    let mut frames = trading.watch_owner(with(&token, watch)).await.unwrap().into_inner();
    let mut took = Vec::new();
    for n in 0..bids {
        if n % 500 == 0 {
            supply.report_observed(with(ADMIN, ReportObservedRequest::default())).await.unwrap();
        }
        let (started, mut client) = (Instant::now(), trading.clone());
        let request = with(&token, bid_of(n.into(), &n.to_string()));
        let placed = async { client.place_bid(request).await.unwrap().into_inner().bid };
        let told = async {
            loop {
                if let Some(Frame::Allocation(unit)) = frames.message().await.unwrap().unwrap().frame {
                    return (unit.bid, started.elapsed());
                }
            }
        };
        let (bid, (matched, after)) = tokio::join!(placed, told);
        assert_eq!(bid, matched, "a unit for each bid, in order");
        took.push(after);
    }
    served.kill();
    p99_ms("from a bid to its match", took)
}

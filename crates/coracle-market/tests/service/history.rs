//! Roll-up of old prices, charges as a FOCUS table, and cancelled price setters, with a real process.

use std::path::Path;

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::supply_client::SupplyClient;
use coracle_proto::market::trading_client::TradingClient;
use coracle_proto::market::*;
use coracle_types::Clock;
use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};

use crate::support::{ADMIN, MARKET, Served, bid, observe, tenant, with};
use coracle_testkit::eventually;

const HOUR: i64 = 3_600_000;
const DAY: i64 = 24 * HOUR;

async fn open(file: &Path) -> SqlitePool {
    SqlitePool::connect_with(SqliteConnectOptions::new().filename(file)).await.unwrap()
}

async fn history(served: &Served, from: i64, to: i64, step: i64) -> Vec<Value> {
    let url = format!("{}/v1/markets/{MARKET}/history?from={from}&to={to}&step={step}", served.http);
    let response = reqwest::Client::new().get(url).bearer_auth(ADMIN).send().await.unwrap();
    let body: Value = response.json().await.unwrap();
    body["bars"].as_array().unwrap().clone()
}

/// Calls older than a week become minutes, minutes older than 90 days become hours, and hours older than two years are deleted.
/// The history that can be read stays the same except for its resolution.
#[tokio::test]
async fn old_prices_grow_coarser_and_stay_true() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("market.db");
    Served::sqlite(&file).stop();
    let pool = open(&file).await;
    let market: i64 = sqlx::query_scalar("SELECT no FROM names WHERE kind = 0 AND name = $1")
        .bind(MARKET)
        .fetch_one(&pool)
        .await
        .unwrap();
    let hour_of = |days: i64| (Clock::system().now().0 - days * DAY).div_euclid(HOUR) * HOUR;
    let (week, season, years) = (hour_of(9), hour_of(100), hour_of(800));
    // An hour of calls in two hours, with two calls per minute; the calls of the last day stay.
    for (number, at) in
        (-500..).zip((0..120).map(|n| week + n * 30_000).chain([hour_of(1), hour_of(1) + 30_000]))
    {
        sqlx::query("INSERT INTO calls (market, number, at, price, chain) VALUES ($1, $2, $3, $4, $5)")
            .bind(market)
            .bind(number)
            .bind(at)
            .bind(2_000_000 + (number + 500) * 100)
            .bind(&[0u8; 32][..])
            .execute(&pool)
            .await
            .unwrap();
    }
    for (step, at) in [(60_000, season), (60_000, season + 60_000), (HOUR, years), (HOUR, season - HOUR)] {
        sqlx::query("INSERT INTO bars (market, step, at, opening, high, low, closing, calls) VALUES ($1, $2, $3, 5, 9, 3, 4, 2)")
            .bind(market).bind(step).bind(at).execute(&pool).await.unwrap();
    }
    let served = Served::sqlite(&file);
    let counts = async || -> (i64, i64, i64) {
        let calls = sqlx::query_scalar("SELECT count(*) FROM calls WHERE market = $1").bind(market);
        let bars = |step: i64| {
            sqlx::query_scalar("SELECT count(*) FROM bars WHERE market = $1 AND step = $2")
                .bind(market)
                .bind(step)
        };
        (
            calls.fetch_one(&pool).await.unwrap(),
            bars(60_000).fetch_one(&pool).await.unwrap(),
            bars(HOUR).fetch_one(&pool).await.unwrap(),
        )
    };
    // Number of calls, minutes and hours.
    eventually("old prices are rolled up", async || (counts().await == (2, 60, 2)).then_some(()))
        .await
        .unwrap();
    let minutes = history(&served, week, week + HOUR, 0).await;
    assert_eq!(minutes.len(), 60);
    let first = &minutes[0];
    assert_eq!((first["atMs"].as_i64(), first["calls"].as_i64()), (Some(week), Some(2)));
    assert_eq!((first["open"].as_str(), first["close"].as_str()), (Some("2.0000"), Some("2.0001")));
    let hour = history(&served, week, week + HOUR, HOUR).await;
    assert_eq!((hour.len(), hour[0]["calls"].as_i64()), (1, Some(120)));
    assert_eq!((hour[0]["low"].as_str(), hour[0]["high"].as_str()), (Some("2.0000"), Some("2.0119")));
    let whole = history(&served, 0, hour_of(0), DAY).await;
    let calls: i64 = whole.iter().map(|bar| bar["calls"].as_i64().unwrap()).sum();
    assert_eq!(
        calls,
        2 + 120 + 4 + 2,
        "each call is in one place; what is older than two years is forgotten"
    );
    let of_season = &history(&served, season, season + HOUR, HOUR).await[0];
    assert_eq!((of_season["calls"].as_i64(), of_season["high"].as_str()), (Some(4), Some("0.000009")));
    let price = async || -> Value {
        let url = format!("{}/v1/markets/{MARKET}/price", served.http);
        reqwest::Client::new().get(url).bearer_auth(ADMIN).send().await.unwrap().json().await.unwrap()
    };
    let price = eventually("percentiles are published", async || {
        Some(price().await).filter(|price| !price["p50"].is_null())
    })
    .await
    .unwrap();
    let of = |name: &str| price[name].as_str().unwrap().parse::<f64>().unwrap();
    assert!(
        of("p20") >= 2.0 && of("p20") < of("p50") && of("p50") < of("p80") && of("p80") < 2.012,
        "{price}"
    );
    let advice = async |window: i64, survive: u32| -> Value {
        let query = format!("advice?window={window}&survive={survive}");
        let url = format!("{}/v1/markets/{MARKET}/{query}", served.http);
        reqwest::Client::new().get(url).bearer_auth(ADMIN).send().await.unwrap().json().await.unwrap()
    };
    assert_eq!(advice(60_000, 1000).await, json!({"limit": "2.0121", "samples": 62}), "never passed");
    assert_eq!(advice(60_000, 500).await, json!({"limit": "2.0061", "samples": 62}), "every second minute");
    assert_eq!(advice(10 * DAY, 500).await["code"], "NO_HISTORY", "the last month began nine days ago");
    served.stop();

    // The roll-up is complete: another process finds nothing to do and returns the same.
    let served = Served::sqlite(&file);
    assert_eq!(history(&served, week, week + HOUR, 0).await, minutes);
    assert_eq!(counts().await, (2, 60, 2));
    served.stop();
}

/// `format=focus`: a table with the columns of FOCUS 1.0, and the cost of usage.
#[tokio::test]
async fn charges_are_exported_as_a_focus_table() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::sqlite(&dir.path().join("market.db"));
    let channel = served.connect().await;
    let token = tenant(&channel, "prod/team", None, &["trade", "read"]).await;
    let host = tenant(&channel, "host", None, &["supply"]).await;
    let mut supply = SupplyClient::new(channel.clone());
    let lot = PutLotRequest { lot: "l".into(), market: MARKET.into(), units: 1, notice_ms: 0 };
    supply.put_lot(with(&host, lot)).await.unwrap();
    let supplied = channel.clone();
    let mut trading = TradingClient::new(channel);
    trading.place_bid(with(&token, bid(3_000_000, 1, "o", 0))).await.unwrap();
    let units = trading.list_allocations(with(&token, ListAllocationsRequest::default())).await.unwrap();
    let allocation = units.into_inner().allocations.remove(0).allocation;
    observe(&supplied, &host, "l", &allocation, MachineState::Ready).await;
    let release = ReleaseAllocationRequest { allocation: allocation.clone(), ..Default::default() };
    trading.release_allocation(with(&token, release)).await.unwrap();
    let get = async |format: &str| {
        let url = format!("{}/v1/charges?format={format}", served.http);
        let response = reqwest::Client::new().get(url).bearer_auth(&token).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    let table = eventually("the minimum is charged", async || {
        let (status, table) = get("focus").await;
        assert_eq!(status, 200, "{table}");
        table.contains("the rest of the first minute").then_some(table)
    })
    .await
    .unwrap();
    let mut lines = table.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let column = |name: &str| header.iter().position(|c| *c == name).unwrap();
    let rows: Vec<_> = lines.collect();
    assert!(rows.iter().all(|row| row[column("ResourceId")] == allocation));
    assert!(
        rows.iter()
            .all(|row| row[column("SubAccountId")] == "prod/team" && row[column("RegionId")] == "local")
    );
    let billed = |row: &Vec<&str>| row[column("BilledCost")].parse::<f64>().unwrap();
    let sum: f64 = rows.iter().map(billed).sum();
    assert!((sum - 2.0 / 60.0).abs() < 1e-6, "a minute at 2.00 an hour: {sum}");
    assert_eq!(get("xml").await.0, 400);
    served.stop();
}

/// A tenant that raises the price by a bid and cancels it before it wins is counted.
#[tokio::test]
async fn cancelled_price_setter_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::sqlite(&dir.path().join("market.db"));
    let channel = served.connect().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let rival = tenant(&channel, "c/rival", None, &["trade", "read"]).await;
    let host = tenant(&channel, "host", None, &["supply"]).await;
    let quick = PutMarketRequest {
        market: MARKET.into(),
        reserve_micros: 2_000_000,
        cap_micros: 8_000_000,
        call_interval_ms: 1_000,
        effective_at_ms: 1,
        ..PutMarketRequest::default()
    };
    AdminClient::new(channel.clone()).put_market(with(ADMIN, quick)).await.unwrap();
    let lot = PutLotRequest { lot: "l".into(), market: MARKET.into(), units: 1, notice_ms: 0 };
    SupplyClient::new(channel.clone()).put_lot(with(&host, lot)).await.unwrap();
    let mut trading = TradingClient::new(channel);
    trading.place_bid(with(&token, bid(4_000_000, 1, "o", 0))).await.unwrap();
    let low = trading.place_bid(with(&rival, bid(2_500_000, 1, "low", 0))).await.unwrap().into_inner().bid;
    let setter =
        trading.place_bid(with(&rival, bid(3_900_000, 1, "high", 0))).await.unwrap().into_inner().bid;
    let text =
        async || reqwest::get(format!("{}/metrics", served.admin)).await.unwrap().text().await.unwrap();
    let line = "coracle_market_clearing_price{class=\"a100-4x/local\"} 3.9";
    eventually("the call is held", async || text().await.contains(line).then_some(())).await.unwrap();
    for bid in [low, setter] {
        let cancel = CancelBidRequest { bid, if_owner_version: None, tenant: String::new() };
        trading.cancel_bid(with(&rival, cancel)).await.unwrap();
    }
    let text = text().await;
    assert!(text.contains("coracle_market_cancelled_setters_total 1"), "{text}");
    assert!(text.contains("coracle_market_cap_price{class=\"a100-4x/local\"} 8"), "{text}");
    let calls = text.lines().find_map(|line| line.strip_prefix("coracle_market_call_seconds_count "));
    assert!(calls.unwrap().parse::<u32>().unwrap() >= 1, "{text}");
    served.stop();
}

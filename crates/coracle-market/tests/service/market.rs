//! Tests of a real process over its network API: acknowledged commands survive SIGKILL, errors have the constants of the
//! contract, and unauthorised callers cannot tell whether an object exists.

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::market_client::MarketClient;
use coracle_proto::market::owner_frame::Frame;
use coracle_proto::market::supply_client::SupplyClient;
use coracle_proto::market::trading_client::TradingClient;
use coracle_proto::market::*;
use tonic::Code;

use crate::support::{ADMIN, DEADLINE, MARKET, Served, bid, observe, tenant, with};
use coracle_testkit::{elapse, eventually};

/// SIGKILL while bids are being placed, ten times. Every acknowledged bid exists afterwards, none twice.
#[tokio::test]
async fn acknowledged_bids_survive_sigkill() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("market.db");
    let served = Served::sqlite(&file);
    let channel = served.connect().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let mut acknowledged = std::collections::BTreeMap::new();
    let mut version = 0;
    let mut served = Some(served);
    for round in 0..10u64 {
        let now = served.take().unwrap();
        let mut client = TradingClient::new(now.connect().await);
        let mut killed = Some(now);
        for n in 0.. {
            if n == 20 + round * 7 {
                // The next request is in flight when the process is killed.
                let mut last = client.clone();
                let request = with(&token, bid(2_000_000, 1, "owner", version));
                let mut flying = tokio::task::JoinSet::new();
                flying.spawn(async move { last.place_bid(request).await });
                tokio::task::yield_now().await;
                killed.take().unwrap().sigkill();
                if let Some(Ok(Ok(reply))) = flying.join_next().await {
                    acknowledged.insert(version, reply.into_inner().bid);
                }
                break;
            }
            let reply = client.place_bid(with(&token, bid(2_000_000, 1, "owner", version))).await.unwrap();
            let reply = reply.into_inner();
            acknowledged.insert(version, reply.bid);
            version = reply.owner_version;
        }
        let now = Served::sqlite(&file);
        let mut client = TradingClient::new(now.connect().await);
        // The same request again returns the same bid if the request had arrived, otherwise a new one.
        let reply =
            client.place_bid(with(&token, bid(2_000_000, 1, "owner", version))).await.unwrap().into_inner();
        if let Some(first) = acknowledged.insert(version, reply.bid.clone()) {
            assert_eq!(first, reply.bid, "acknowledged and lost");
        }
        version = reply.owner_version;
        served = Some(now);
    }
    let now = served.take().unwrap();
    let channel = now.connect().await;
    let all = GetPendingBidsRequest { owner_uid: "owner".into(), ..GetPendingBidsRequest::default() };
    let found =
        TradingClient::new(channel.clone()).get_pending_bids(with(&token, all)).await.unwrap().into_inner();
    let found: std::collections::BTreeSet<_> = found.bids.into_iter().map(|bid| bid.bid).collect();
    let known: std::collections::BTreeSet<_> = acknowledged.into_values().collect();
    assert_eq!(found, known, "one bid for each version, and no other");
    let verify = VerifyRequest { market: MARKET.into() };
    let verdict = AdminClient::new(channel).verify(with(ADMIN, verify)).await.unwrap().into_inner();
    assert!(verdict.sound, "{}", verdict.detail);
    now.stop();
}

/// Life of a bid: capacity is added, the bid wins at once, its node runs, its owner watches, it is charged.
#[tokio::test]
async fn bid_is_allocated_provisioned_and_charged() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::sqlite(&dir.path().join("market.db"));
    let channel = served.connect().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let supplier = tenant(&channel, "host-1", None, &["supply"]).await;
    let mut supply = SupplyClient::new(channel.clone());
    let mut trading = TradingClient::new(channel.clone());
    let lot = PutLotRequest { lot: "gpu".into(), market: MARKET.into(), units: 2, notice_ms: 30_000 };
    supply.put_lot(with(&supplier, lot)).await.unwrap();
    let mut desired =
        supply.stream_desired(with(&supplier, StreamDesiredRequest {})).await.unwrap().into_inner();
    let mut next = async || {
        let frame = tokio::time::timeout(DEADLINE, desired.message()).await.unwrap().unwrap().unwrap();
        frame.frame.unwrap()
    };
    let set = DesiredSet { epochs: [(MARKET.to_owned(), 0)].into() };
    assert_eq!(next().await, desired_frame::Frame::Begin(set.clone()));
    assert_eq!(next().await, desired_frame::Frame::End(set));
    let watch = WatchOwnerRequest { owner_uid: "uid".into(), ..WatchOwnerRequest::default() };
    let mut frames = trading.watch_owner(with(&token, watch)).await.unwrap().into_inner();
    for synced in [false, true] {
        assert_eq!(frames.message().await.unwrap().unwrap().frame, Some(Frame::Synced(synced)));
    }

    let reply = trading.place_bid(with(&token, bid(2_880_000, 1, "uid", 0))).await.unwrap().into_inner();
    let desired_frame::Frame::Desired(one) = next().await else { panic!("the machine is desired") };
    assert_eq!((one.lot.as_str(), one.slot, one.owner_uid.as_str(), one.epoch), ("gpu", 0, "uid", 1));
    for state in [MachineState::Starting, MachineState::Running, MachineState::Ready] {
        observe(&channel, &supplier, "gpu", &one.allocation, state).await;
    }
    let active = tokio::time::timeout(DEADLINE, async {
        loop {
            if let Some(Frame::Allocation(unit)) = frames.message().await.unwrap().unwrap().frame
                && unit.state() == AllocationState::Active
            {
                return unit;
            }
        }
    });
    let unit = active.await.unwrap();
    assert_eq!((unit.node.as_str(), unit.price_micros, unit.limit_micros), ("bn-1", 2_000_000, 2_880_000));

    let why = ExplainRequest { id: unit.allocation.clone(), tenant: String::new() };
    let why = trading.explain(with(&token, why)).await.unwrap().into_inner();
    assert_eq!((why.standing.as_str(), why.sold), ("PLACED", 1));
    let release = ReleaseAllocationRequest {
        allocation: unit.allocation.clone(),
        if_owner_version: Some(reply.owner_version),
        ..ReleaseAllocationRequest::default()
    };
    trading.release_allocation(with(&token, release)).await.unwrap();
    let desired_frame::Frame::Removed(gone) = next().await else { panic!("it must not run any more") };
    assert_eq!((&gone.allocation, gone.epoch), (&one.allocation, 2));

    let rows = eventually("the minimum is charged", async || {
        let all = ListChargesRequest::default();
        let rows = trading.list_charges(with(&token, all)).await.unwrap().into_inner().charges;
        rows.iter().any(|row| row.reason == "minimum").then_some(rows)
    })
    .await
    .unwrap();
    let total: i64 = rows.iter().map(|row| row.to_ms - row.from_ms).sum();
    assert_eq!(total, 60_000, "a minute is the least");
    served.stop();
}

/// Table of invalid input, over gRPC and HTTP.
#[tokio::test]
async fn invalid_input_returns_the_contract_errors() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::sqlite(&dir.path().join("market.db"));
    let channel = served.connect().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let other = tenant(&channel, "c/other", None, &["trade", "read"]).await;
    let mut trading = TradingClient::new(channel.clone());
    let good = trading.place_bid(with(&token, bid(1_000_000, 2, "u", 0))).await.unwrap().into_inner();
    assert!(good.below_reserve, "it rests");
    let code = |change: fn(&mut PlaceBidRequest)| {
        let mut request = bid(2_000_000, 1, "v", 0);
        change(&mut request);
        let (mut trading, token) = (trading.clone(), token.clone());
        async move { trading.place_bid(with(&token, request)).await.map_or_else(|s| s.code(), |_| Code::Ok) }
    };
    assert_eq!(code(|b| b.limit_micros = 0).await, Code::InvalidArgument);
    assert_eq!(code(|b| b.limit_micros = 2_000_050).await, Code::InvalidArgument, "off the tick");
    assert_eq!(code(|b| b.quantity = 0).await, Code::InvalidArgument);
    assert_eq!(code(|b| b.quantity = 10_001).await, Code::InvalidArgument);
    assert_eq!(code(|b| b.min_fill = 2).await, Code::InvalidArgument);
    assert_eq!(code(|b| b.market = "a100-4x/mars".into()).await, Code::NotFound);
    assert_eq!(code(|b| b.idempotency_key = "k".repeat(129)).await, Code::InvalidArgument);
    assert_eq!(code(|b| b.tenant = "d/ns".into()).await, Code::PermissionDenied);
    let stale = trading.place_bid(with(&token, bid(2_000_000, 1, "u", 9))).await.unwrap_err();
    assert_eq!(stale.metadata().get("coracle-owner-version").unwrap(), "1");
    let get = |bid: &str| GetBidRequest { bid: bid.into(), tenant: String::new() };
    let theirs = trading.get_bid(with(&other, get(&good.bid))).await.unwrap_err();
    let never = trading.get_bid(with(&other, get("01J0000000000000000000000"))).await.unwrap_err();
    assert_eq!((theirs.code(), theirs.message()), (never.code(), never.message()), "no oracle");
    let missing = trading.get_bid(get(&good.bid)).await.unwrap_err();
    assert_eq!(missing.code(), Code::Unauthenticated);

    let web = reqwest::Client::new();
    let post = |body: &str, key: &str| {
        let request = web.post(format!("{}/v1/bids", served.http)).bearer_auth(&token);
        request
            .header("idempotency-key", key)
            .header("content-type", "application/json")
            .body(body.to_owned())
            .send()
    };
    let body = r#"{"market":"a100-4x/local","limit":"2.08","quantity":2}"#;
    let first = post(body, "web").await.unwrap();
    assert_eq!(first.status(), 201);
    let id = first.json::<serde_json::Value>().await.unwrap()["bid"].as_str().unwrap().to_owned();
    let again = post(body, "web").await.unwrap();
    assert_eq!(again.status(), 200, "the same bid");
    let conflict = post(&body.replace("2.08", "2.09"), "web").await.unwrap();
    assert_eq!(conflict.status(), 409);
    let problem: serde_json::Value = conflict.json().await.unwrap();
    assert_eq!(problem["code"], "IDEMPOTENCY_CONFLICT");
    for bad in [body.replace("2.08", "2.0800001"), body.replace("limit", "limmit"), "{".into()] {
        assert_eq!(post(&bad, "").await.unwrap().status(), 400, "{bad}");
    }
    let at = |path: String| web.get(format!("{}{path}", served.http)).bearer_auth(&token).send();
    let shown: serde_json::Value = at(format!("/v1/bids/{id}")).await.unwrap().json().await.unwrap();
    assert_eq!((shown["limit"].as_str(), shown["units"]["open"].as_u64()), (Some("2.0800"), Some(2)));
    let price: serde_json::Value =
        at("/v1/markets/a100-4x/local/price".into()).await.unwrap().json().await.unwrap();
    assert_eq!((price["quote"].as_str(), price["clearing"].as_str()), (Some("3.2000"), Some("2.0000")));
    let long = at("/v1/markets/a100-4x/local/history?from=1&to=100000000&step=1".into()).await.unwrap();
    assert_eq!(long.status(), 400);
    let cancel = || web.delete(format!("{}/v1/bids/{id}", served.http)).bearer_auth(&token).send();
    assert_eq!(cancel().await.unwrap().status(), 200);
    assert_eq!(cancel().await.unwrap().status(), 409, "over");
    assert_eq!(web.get(format!("{}/v1/markets", served.http)).send().await.unwrap().status(), 401);
    let halt = HaltRequest { market: MARKET.into() };
    AdminClient::new(channel.clone()).halt(with(ADMIN, halt)).await.unwrap();
    let halted = post(body, "later").await.unwrap();
    assert_eq!(halted.status(), 503);
    assert_eq!(halted.json::<serde_json::Value>().await.unwrap()["code"], "HALTED");
    let metrics = web.get(format!("{}/metrics", served.admin)).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("coracle_market_bids_total{result=\"accepted\"} 2"), "{metrics}");
    let ready = web.get(format!("{}/readyz", served.admin)).send().await.unwrap();
    assert_eq!(ready.status(), 200);
}

/// The sum of limits over all markets never exceeds the cap.
#[tokio::test]
async fn budget_cap_holds_over_all_markets() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::sqlite(&dir.path().join("market.db"));
    let channel = served.connect().await;
    let token = tenant(&channel, "c/ns", Some(10_000_000), &["trade", "read"]).await;
    let mut trading = TradingClient::new(channel.clone());
    let mut place = async |market: &str, limit, owner: &str| {
        let request = PlaceBidRequest { market: market.into(), ..bid(limit, 1, owner, 0) };
        let reply = trading.place_bid(with(&token, request)).await.unwrap().into_inner();
        let get = GetBidRequest { bid: reply.bid.clone(), tenant: String::new() };
        (trading.get_bid(with(&token, get)).await.unwrap().into_inner().hold, reply.bid)
    };
    let (hold, first) = place("a100-4x/local", 6_000_000, "a").await;
    assert_eq!(hold, "");
    assert_eq!(place("l40s-4x/local", 3_000_000, "b").await.0, "");
    assert_eq!(place("l40s-4x/local", 2_000_000, "c").await.0, "BUDGET", "eleven of ten");
    let cancel = CancelBidRequest { bid: first, if_owner_version: None, tenant: String::new() };
    TradingClient::new(channel.clone()).cancel_bid(with(&token, cancel)).await.unwrap();
    assert_eq!(place("l40s-4x/local", 1_000_000, "d").await.0, "", "the slice came over");
    let budget =
        TradingClient::new(channel.clone()).get_budget(with(&token, GetBudgetRequest::default())).await;
    let budget = budget.unwrap().into_inner();
    assert_eq!(budget.hourly_cap_micros, Some(10_000_000));
    assert!(budget.committed_micros <= 10_000_000, "{budget:?}");
    let book = GetBookRequest { market: "l40s-4x/local".into() };
    let book = MarketClient::new(channel).get_book(with(ADMIN, book)).await.unwrap().into_inner();
    assert_eq!(book.units, 3, "the held bid entered the book");
}

/// The cap of a cluster covers its namespaces. An amount that one of them frees serves a waiting bid of another one, without
/// another request.
#[tokio::test]
async fn cluster_cap_covers_namespaces_and_moves_freed_budget() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::sqlite(&dir.path().join("market.db"));
    let channel = served.connect().await;
    let token = tenant(&channel, "c", Some(10_000_000), &["trade", "read"]).await;
    let mut trading = TradingClient::new(channel.clone());
    let mut place = async |tenant: &str, market: &str, limit| {
        let (market, tenant) = (market.into(), tenant.to_owned());
        let request = PlaceBidRequest { market, tenant, ..bid(limit, 1, "o", 0) };
        trading.place_bid(with(&token, request)).await.unwrap().into_inner().bid
    };
    let first = place("c/a", "a100-4x/local", 7_000_000).await;
    let waits = place("c/b", "l40s-4x/local", 4_000_000).await;
    let hold = async |bid: &str| {
        let get = GetBidRequest { bid: bid.into(), tenant: "c/b".into() };
        TradingClient::new(channel.clone()).get_bid(with(&token, get)).await.unwrap().into_inner().hold
    };
    assert_eq!(hold(&waits).await, "BUDGET", "eleven of ten");
    let cancel = CancelBidRequest { bid: first, if_owner_version: None, tenant: "c/a".into() };
    TradingClient::new(channel.clone()).cancel_bid(with(&token, cancel)).await.unwrap();
    eventually("the bid enters", async || hold(&waits).await.is_empty().then_some(())).await.unwrap();
    let namespace = tenant(&channel, "c/b", None, &["trade"]).await;
    let below = PlaceBidRequest { tenant: "c/b/x".into(), ..bid(2_000_000, 1, "o", 0) };
    let refused = TradingClient::new(channel.clone()).place_bid(with(&namespace, below)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "a namespace does not leave its cap by a new name");
}

/// With one byte of the journal flipped, the verification fails, and a restart is refused.
#[tokio::test]
async fn verify_detects_a_flipped_byte() {
    use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("market.db");
    let served = Served::sqlite(&file);
    let channel = served.connect().await;
    let token = tenant(&channel, "c/ns", None, &["trade"]).await;
    let mut trading = TradingClient::new(channel.clone());
    trading.place_bid(with(&token, bid(2_000_000, 1, "u", 0))).await.unwrap();
    let verify = || with(ADMIN, VerifyRequest { market: MARKET.into() });
    let mut admin = AdminClient::new(channel.clone());
    assert!(admin.verify(verify()).await.unwrap().into_inner().sound);
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(&file)).await.unwrap();
    let (market, seq, mut body): (i64, i64, Vec<u8>) =
        sqlx::query_as("SELECT market, seq, body FROM journal ORDER BY length(body) DESC LIMIT 1")
            .fetch_one(&pool)
            .await
            .unwrap();
    body[10] ^= 1;
    sqlx::query("UPDATE journal SET body = $1 WHERE market = $2 AND seq = $3")
        .bind(&body[..])
        .bind(market)
        .bind(seq)
        .execute(&pool)
        .await
        .unwrap();
    let verdict = admin.verify(verify()).await.unwrap().into_inner();
    assert!(!verdict.sound && verdict.detail.contains("the chain breaks"), "{verdict:?}");
}

/// The verification names any changed, deleted or added row in the data derived from the journal.
#[tokio::test]
async fn verify_finds_changed_deleted_and_added_rows() {
    use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("market.db");
    let served = Served::sqlite(&file);
    let channel = served.connect().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let host = tenant(&channel, "host", None, &["supply"]).await;
    let lot = PutLotRequest { lot: "l".into(), market: MARKET.into(), units: 1, notice_ms: 0 };
    SupplyClient::new(channel.clone()).put_lot(with(&host, lot)).await.unwrap();
    let mut trading = TradingClient::new(channel.clone());
    trading.place_bid(with(&token, bid(3_000_000, 1, "u", 0))).await.unwrap();
    let all = ListAllocationsRequest::default();
    let units = trading.list_allocations(with(&token, all)).await.unwrap().into_inner().allocations;
    observe(&channel, &host, "l", &units[0].allocation, MachineState::Ready).await;
    let release = ReleaseAllocationRequest { allocation: units[0].allocation.clone(), ..Default::default() };
    trading.release_allocation(with(&token, release)).await.unwrap();
    let mut admin = AdminClient::new(channel.clone());
    admin.snapshot(with(ADMIN, SnapshotRequest { market: MARKET.into() })).await.unwrap();
    let mut verdict = async || {
        let verify = with(ADMIN, VerifyRequest { market: MARKET.into() });
        admin.verify(verify).await.unwrap().into_inner().detail
    };
    assert_eq!(verdict().await, "");
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(&file)).await.unwrap();
    for (spoil, mend, want) in [
        (
            "UPDATE charges SET price = price - 1 WHERE reason = 'minimum'",
            "UPDATE charges SET price = price + 1 WHERE reason = 'minimum'",
            "is another one",
        ),
        (
            "INSERT INTO charges SELECT allocation, 'refund', starts, ends, tenant, price FROM charges WHERE reason = 'minimum'",
            "DELETE FROM charges WHERE reason = 'refund'",
            "charges are stored",
        ),
        (
            "UPDATE charges SET starts = starts - 1 WHERE reason = 'minimum'",
            "UPDATE charges SET starts = starts + 1 WHERE reason = 'minimum'",
            "is missing",
        ),
        ("UPDATE snapshots SET body = body || x'00'", "DELETE FROM snapshots", "is not the market then"),
        ("DELETE FROM journal WHERE seq = (SELECT max(seq) FROM journal)", "SELECT 1", "the journal ends at"),
    ] {
        sqlx::query(spoil).execute(&pool).await.unwrap();
        let detail = verdict().await;
        assert!(detail.contains(want), "{spoil}: {detail}");
        sqlx::query(mend).execute(&pool).await.unwrap();
    }
}

/// With a supplier that reports and no other activity, a market soon stops writing.
#[tokio::test]
async fn quiet_market_writes_nothing() {
    use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("market.db");
    let served = Served::sqlite(&file);
    let channel = served.connect().await;
    let put = PutMarketRequest {
        market: MARKET.into(),
        reserve_micros: 2_000_000,
        cap_micros: 8_000_000,
        call_interval_ms: 1_000,
        ..PutMarketRequest::default()
    };
    AdminClient::new(channel.clone()).put_market(with(ADMIN, put)).await.unwrap();
    let host = tenant(&channel, "host", None, &["supply"]).await;
    let lot = PutLotRequest { lot: "l".into(), market: MARKET.into(), units: 1, notice_ms: 0 };
    let mut supply = SupplyClient::new(channel.clone());
    supply.put_lot(with(&host, lot)).await.unwrap();
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(&file)).await.unwrap();
    let mut before = (-1i64, 0);
    eventually("as many rows for five seconds", async || {
        supply.report_observed(with(&host, ReportObservedRequest::default())).await.unwrap();
        let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM journal").fetch_one(&pool).await.unwrap();
        // Time within which an indicative call of a market with trade is due.
        elapse(std::time::Duration::from_secs(1)).await;
        before = if rows == before.0 { (rows, before.1 + 1) } else { (rows, 0) };
        (before.1 >= 5).then_some(())
    })
    .await
    .unwrap();
}

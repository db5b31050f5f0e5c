//! Invalid input, one table row each, over gRPC and HTTP of a real process.

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::supply_client::SupplyClient;
use coracle_proto::market::trading_client::TradingClient;
use coracle_proto::market::*;
use serde_json::{Value, json};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::support::{ADMIN, MARKET, Served, bid, observe, tenant, with};
use coracle_testkit::eventually;

/// HTTP client of the market, with one token.
struct Web {
    http: reqwest::Client,
    at: String,
    token: String,
}

/// Status, body, and the header `Retry-After`.
type Said = (u16, Value, Option<String>);

impl Web {
    fn new(served: &Served, token: &str) -> Self {
        Self { http: reqwest::Client::new(), at: served.http.clone(), token: token.to_owned() }
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Said {
        let request = if self.token.is_empty() { request } else { request.bearer_auth(&self.token) };
        let response = request.send().await.unwrap();
        let again = response.headers().get("retry-after").map(|v| v.to_str().unwrap().to_owned());
        let (status, body) = (response.status().as_u16(), response.text().await.unwrap());
        (status, serde_json::from_str(&body).unwrap_or_default(), again)
    }

    async fn get(&self, path: &str) -> Said {
        self.send(self.http.get(format!("{}{path}", self.at))).await
    }

    async fn delete(&self, path: &str) -> Said {
        self.send(self.http.delete(format!("{}{path}", self.at))).await
    }

    async fn patch(&self, path: &str, body: &Value) -> Said {
        let request = self.http.patch(format!("{}{path}", self.at));
        self.send(request.header("content-type", "application/json").body(body.to_string())).await
    }

    async fn place(&self, body: &Value) -> Said {
        let request = self.http.post(format!("{}/v1/bids", self.at));
        self.send(request.header("content-type", "application/json").body(body.to_string())).await
    }
}

/// Value in the metadata of a refusal.
fn metadata_value(status: &Status, key: &str) -> String {
    status.metadata().get(key).map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default()
}

async fn start() -> (tempfile::TempDir, Served, Channel) {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::sqlite(&dir.path().join("market.db"));
    let channel = served.connect().await;
    (dir, served, channel)
}

fn valid_bid() -> Value {
    json!({"market": MARKET, "limit": "2.0800", "quantity": 1})
}

/// PlaceBid with limit ≤ 0 or off the tick, quantity 0 or above 10 000, or min_fill above the quantity: 400 with the field. A
/// limit below the reserve is accepted.
#[tokio::test]
async fn invalid_bid_field_is_named_in_the_error() {
    let (_dir, served, channel) = start().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let web = Web::new(&served, &token);
    type Row = (&'static str, fn(&mut PlaceBidRequest), Value);
    let rows: [Row; 8] = [
        ("limit", |b| b.limit_micros = 0, json!({"limit": "0"})),
        ("limit", |b| b.limit_micros = -100, json!({"limit": "-0.0001"})),
        ("limit", |b| b.limit_micros = 2_000_050, json!({"limit": "2.00005"})),
        ("limit", |b| b.limit_micros = i64::MAX, json!({"limit": "1000000.000001"})),
        ("quantity", |b| b.quantity = 0, json!({"quantity": 0})),
        ("quantity", |b| b.quantity = 10_001, json!({"quantity": 10_001})),
        ("min_fill", |b| b.min_fill = 2, json!({"minFill": 2})),
        ("lease", |b| b.lease_ms = 999, json!({"leaseMs": 999})),
    ];
    let mut trading = TradingClient::new(channel);
    for (field, change, fields) in rows {
        let mut request = bid(2_000_000, 1, "o", 0);
        change(&mut request);
        let refused = trading.place_bid(with(&token, request)).await.unwrap_err();
        assert_eq!(
            (refused.code(), metadata_value(&refused, "coracle-field")),
            (Code::InvalidArgument, field.into())
        );
        let mut body = valid_bid();
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (status, problem, _) = web.place(&body).await;
        let name = if field == "min_fill" { "minFill" } else { field };
        assert_eq!((status, &problem["code"]), (400, &"INVALID_ARGUMENT".into()), "{body}");
        assert_eq!(problem["field"], name, "{problem}");
    }
    let low = json!({"market": MARKET, "limit": "0.0100", "quantity": 10_000});
    let (status, placed, _) = web.place(&low).await;
    assert_eq!((status, &placed["belowReserve"]), (201, &true.into()), "it rests");
    let (_, all, _) = web.get("/v1/bids").await;
    assert_eq!(all["units"], 10_000, "nothing else was taken: {all}");
    served.stop();
}

/// An unknown bid or allocation and one of another tenant get the same answer, so that existence is not disclosed.
#[tokio::test]
async fn foreign_object_is_not_found() {
    let (_dir, served, channel) = start().await;
    let mine = tenant(&channel, "c/mine", None, &["trade", "read"]).await;
    let other = tenant(&channel, "c/other", None, &["trade", "read"]).await;
    let host = tenant(&channel, "host", None, &["supply"]).await;
    let lot = PutLotRequest { lot: "l".into(), market: MARKET.into(), units: 1, notice_ms: 0 };
    SupplyClient::new(channel.clone()).put_lot(with(&host, lot)).await.unwrap();
    let mut trading = TradingClient::new(channel);
    let placed = trading.place_bid(with(&mine, bid(3_000_000, 2, "o", 0))).await.unwrap().into_inner().bid;
    let units = trading.list_allocations(with(&mine, ListAllocationsRequest::default())).await.unwrap();
    let unit = units.into_inner().allocations.remove(0).allocation;

    let never = "01J0000000000000000000000Z";
    let tenant = String::new;
    let mut told = Vec::new();
    for id in [&*placed, never] {
        let (bid, amend) = (id.to_owned(), AmendBidRequest { bid: id.into(), ..Default::default() });
        let get = GetBidRequest { bid: bid.clone(), tenant: tenant() };
        let cancel = CancelBidRequest { bid: bid.clone(), if_owner_version: None, tenant: tenant() };
        let explain = ExplainRequest { id: bid, tenant: tenant() };
        told.push(vec![
            trading.get_bid(with(&other, get)).await.unwrap_err(),
            trading.amend_bid(with(&other, amend)).await.unwrap_err(),
            trading.cancel_bid(with(&other, cancel)).await.unwrap_err(),
            trading.explain(with(&other, explain)).await.unwrap_err(),
        ]);
    }
    for id in [&*unit, never] {
        let release =
            ReleaseAllocationRequest { allocation: id.into(), tenant: tenant(), ..Default::default() };
        let explain = ExplainRequest { id: id.into(), tenant: tenant() };
        told.push(vec![
            trading.release_allocation(with(&other, release)).await.unwrap_err(),
            trading.explain(with(&other, explain)).await.unwrap_err(),
        ]);
    }
    for pair in told.chunks(2) {
        for (theirs, never) in pair[0].iter().zip(&pair[1]) {
            assert_eq!((theirs.code(), theirs.message()), (never.code(), never.message()));
            assert_eq!(
                (theirs.code(), metadata_value(theirs, "coracle-code")),
                (Code::NotFound, "NOT_FOUND".into())
            );
        }
    }
    let web = Web::new(&served, &other);
    let change = json!({"limit": "3.1"});
    for (theirs, never) in [
        (web.get(&format!("/v1/bids/{placed}")).await, web.get(&format!("/v1/bids/{never}")).await),
        (
            web.patch(&format!("/v1/bids/{placed}"), &change).await,
            web.patch(&format!("/v1/bids/{never}"), &change).await,
        ),
        (web.delete(&format!("/v1/bids/{placed}")).await, web.delete(&format!("/v1/bids/{never}")).await),
        (
            web.get(&format!("/v1/bids/{placed}/explain")).await,
            web.get(&format!("/v1/bids/{never}/explain")).await,
        ),
        (
            web.delete(&format!("/v1/allocations/{unit}")).await,
            web.delete(&format!("/v1/allocations/{never}")).await,
        ),
    ] {
        assert_eq!(theirs, never);
        assert_eq!((theirs.0, &theirs.1["code"]), (404, &"NOT_FOUND".into()));
    }
    let get = GetBidRequest { bid: placed, tenant: tenant() };
    let untouched = trading.get_bid(with(&mine, get)).await.unwrap().into_inner();
    assert_eq!((untouched.limit_micros, untouched.cancelled, untouched.ended), (3_000_000, 0, 0));
    served.stop();
}

/// Amending or cancelling an ended bid: 409 `TERMINAL`. A stale version: 409 `OWNER_VERSION` with the present one.
#[tokio::test]
async fn late_or_stale_bid_change_is_a_conflict() {
    let (_dir, served, channel) = start().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let web = Web::new(&served, &token);
    let mut trading = TradingClient::new(channel);
    let over = trading.place_bid(with(&token, bid(2_000_000, 1, "o", 0))).await.unwrap().into_inner().bid;
    let cancel = CancelBidRequest { bid: over.clone(), if_owner_version: None, tenant: String::new() };
    trading.cancel_bid(with(&token, cancel.clone())).await.unwrap();
    let amend = AmendBidRequest { bid: over.clone(), limit_micros: Some(2_100_000), ..Default::default() };
    for refused in [
        trading.cancel_bid(with(&token, cancel)).await.unwrap_err(),
        trading.amend_bid(with(&token, amend)).await.unwrap_err(),
    ] {
        let (code, word) = (refused.code(), metadata_value(&refused, "coracle-code"));
        assert_eq!((code, &*word), (Code::FailedPrecondition, "TERMINAL"));
    }
    let path = format!("/v1/bids/{over}");
    for (status, problem, _) in [web.delete(&path).await, web.patch(&path, &json!({"limit": "2.1"})).await] {
        assert_eq!((status, &problem["code"]), (409, &"TERMINAL".into()), "{problem}");
    }

    // A bid was placed and cancelled, so the owner is at its second version.
    let mut stale = valid_bid();
    stale["ownerUid"] = "o".into();
    stale["ifOwnerVersion"] = 0.into();
    let (status, problem, _) = web.place(&stale).await;
    assert_eq!(
        (status, &problem["code"], &problem["ownerVersion"]),
        (409, &"OWNER_VERSION".into(), &2.into())
    );
    let refused = trading.place_bid(with(&token, bid(2_000_000, 1, "o", 7))).await.unwrap_err();
    assert_eq!((refused.code(), &*metadata_value(&refused, "coracle-owner-version")), (Code::Aborted, "2"));
    stale["ifOwnerVersion"] = 2.into();
    assert_eq!(web.place(&stale).await.0, 201, "with the version of the reply");
    served.stop();
}

/// Missing or invalid token: 401. Wrong scope: 403. Too many requests: 429 with the time to retry. A halted market: 503.
#[tokio::test]
async fn unauthorised_call_returns_401_403_or_429() {
    let (_dir, served, channel) = start().await;
    let reader = tenant(&channel, "c/reader", None, &["read"]).await;
    let trader = tenant(&channel, "c/trader", None, &["trade", "read"]).await;
    for token in ["", "cmt_no_such_token"] {
        let (status, problem, _) = Web::new(&served, token).place(&valid_bid()).await;
        assert_eq!((status, &problem["code"]), (401, &"UNAUTHENTICATED".into()), "{token}");
    }
    let mut trading = TradingClient::new(channel.clone());
    let unknown = trading.place_bid(with("cmt_no_such_token", bid(2_000_000, 1, "o", 0))).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unauthenticated);
    let (status, problem, _) = Web::new(&served, &reader).place(&valid_bid()).await;
    assert_eq!((status, &problem["code"]), (403, &"FORBIDDEN".into()));
    let mut admin = AdminClient::new(channel);
    let halt = || HaltRequest { market: MARKET.into() };
    assert_eq!(admin.halt(with(&trader, halt())).await.unwrap_err().code(), Code::PermissionDenied);

    // One change per second, with a burst of five.
    let slow = PutTenantRequest {
        tenant: "c/slow".into(),
        rate: 1,
        scopes: vec!["trade".into()],
        ..PutTenantRequest::default()
    };
    let slow = admin.put_tenant(with(ADMIN, slow)).await.unwrap().into_inner().token;
    let web = Web::new(&served, &slow);
    let mut refused = None;
    for _ in 0..20 {
        let said = web.place(&valid_bid()).await;
        if said.0 != 201 {
            refused = Some(said);
            break;
        }
    }
    let (status, problem, again) = refused.unwrap();
    assert_eq!((status, &problem["code"]), (429, &"RATE_LIMIT".into()));
    assert!(again.unwrap().parse::<u32>().unwrap() >= 1);
    let also = trading.place_bid(with(&slow, bid(2_000_000, 1, "o", 0))).await.unwrap_err();
    assert_eq!(also.code(), Code::ResourceExhausted);

    admin.halt(with(ADMIN, halt())).await.unwrap();
    let web = Web::new(&served, &trader);
    let (status, problem, _) = web.place(&valid_bid()).await;
    assert_eq!((status, &problem["code"]), (503, &"HALTED".into()));
    assert_eq!(web.get("/v1/markets/a100-4x/local/price").await.1["halted"], true, "reads still work");
    served.stop();
}

/// While the journal cannot be written: 503 for every change, reads still work, `/readyz` fails, nothing is accepted.
/// Afterwards everything works again.
#[tokio::test]
async fn lost_journal_refuses_writes_and_serves_reads() {
    use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
    let (dir, served, channel) = start().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let web = Web::new(&served, &token);
    let (status, first, _) = web.place(&valid_bid()).await;
    assert_eq!(status, 201);
    let ready = async || reqwest::get(format!("{}/readyz", served.admin)).await.unwrap().status().as_u16();
    assert_eq!(ready().await, 200);

    let file = SqliteConnectOptions::new().filename(dir.path().join("market.db"));
    let pool = SqlitePool::connect_with(file).await.unwrap();
    sqlx::query("ALTER TABLE journal RENAME TO elsewhere").execute(&pool).await.unwrap();
    let path = format!("/v1/bids/{}", first["bid"].as_str().unwrap());
    for (what, said) in [
        ("place", web.place(&valid_bid()).await),
        ("amend", web.patch(&path, &json!({"limit": "2.1"})).await),
        ("cancel", web.delete(&path).await),
    ] {
        assert_eq!((said.0, &said.1["code"]), (503, &"UNAVAILABLE".into()), "{what}: {}", said.1);
    }
    let refused =
        TradingClient::new(channel).place_bid(with(&token, bid(2_000_000, 1, "o", 0))).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert_eq!(ready().await, 503);
    let (status, shown, _) = web.get(&path).await;
    assert_eq!((status, &shown["limit"], &shown["units"]["open"]), (200, &"2.0800".into(), &1.into()));
    assert_eq!(web.get("/v1/markets/a100-4x/local/price").await.0, 200);
    let metrics = reqwest::get(format!("{}/metrics", served.admin)).await.unwrap().text().await.unwrap();
    assert!(metrics.contains("coracle_market_journal_up 0"), "{metrics}");

    sqlx::query("ALTER TABLE elsewhere RENAME TO journal").execute(&pool).await.unwrap();
    eventually("bids are accepted again", async || (web.place(&valid_bid()).await.0 == 201).then_some(()))
        .await
        .unwrap();
    assert_eq!(ready().await, 200);
    let (_, all, _) = web.get("/v1/bids").await;
    assert_eq!(all["units"], 2, "what was refused is not there: {all}");
    let verify = VerifyRequest { market: MARKET.into() };
    let mut admin = AdminClient::new(served.connect().await);
    assert!(admin.verify(with(ADMIN, verify)).await.unwrap().into_inner().sound);
    served.stop();
}

/// A machine in the lot of another supplier changes nothing and is counted. An unknown state means only that the machine
/// exists.
#[tokio::test]
async fn observation_of_another_suppliers_machine_is_counted() {
    let (_dir, served, channel) = start().await;
    let trader = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let host = tenant(&channel, "host", None, &["supply"]).await;
    let liar = tenant(&channel, "liar", None, &["supply"]).await;
    let mut supply = SupplyClient::new(channel.clone());
    let lot = PutLotRequest { lot: "l".into(), market: MARKET.into(), units: 1, notice_ms: 0 };
    supply.put_lot(with(&host, lot)).await.unwrap();
    let mut trading = TradingClient::new(channel.clone());
    trading.place_bid(with(&trader, bid(3_000_000, 1, "o", 0))).await.unwrap();
    let mut state = async || {
        let all = ListAllocationsRequest::default();
        let units = trading.list_allocations(with(&trader, all)).await.unwrap().into_inner().allocations;
        (units[0].allocation.clone(), units[0].state())
    };
    let (unit, _) = state().await;
    for unknown in [&*unit, "01J0000000000000000000000Z", "x", ""] {
        observe(&channel, &liar, "l", unknown, MachineState::Ready).await;
    }
    assert_eq!(state().await.1, AllocationState::Provisioning, "no other supplier makes it ready");
    let metrics = reqwest::get(format!("{}/metrics", served.admin)).await.unwrap().text().await.unwrap();
    assert!(metrics.contains("coracle_market_unknown_machines_total 4"), "{metrics}");
    let machine = ObservedAllocation {
        market: MARKET.into(),
        lot: "l".into(),
        allocation: unit.clone(),
        state: MachineState::Ready.into(),
        node: "bn-1".into(),
        ..ObservedAllocation::default()
    };
    let report = ReportObservedRequest { epochs: Default::default(), allocations: vec![machine] };
    supply.report_observed(with(&host, report)).await.unwrap();
    assert_eq!(state().await.1, AllocationState::Provisioning, "the report names no version");
    let metrics = reqwest::get(format!("{}/metrics", served.admin)).await.unwrap().text().await.unwrap();
    assert!(metrics.contains("coracle_market_observations_without_epoch_total 1"), "{metrics}");
    observe(&channel, &host, "l", &unit, MachineState::Unspecified).await;
    assert_eq!(state().await.1, AllocationState::Provisioning, "nothing is concluded");
    observe(&channel, &host, "l", &unit, MachineState::Ready).await;
    assert_eq!(state().await.1, AllocationState::Active);
    served.stop();
}

/// A second token keeps cap and rate of its tenant. A revoked token is refused, also after a restart.
#[tokio::test]
async fn tokens_are_listed_and_revoked_and_keep_the_budget() {
    let (dir, served, channel) = start().await;
    let first = tenant(&channel, "c/ns", Some(5_000_000), &["trade", "read"]).await;
    let second = tenant(&channel, "c/ns", None, &["read"]).await;
    let mut trading = TradingClient::new(channel.clone());
    let budget = trading.get_budget(with(&second, GetBudgetRequest::default())).await.unwrap().into_inner();
    assert_eq!(budget.hourly_cap_micros, Some(5_000_000));
    let mut admin = AdminClient::new(channel.clone());
    let list = ListTokensRequest { tenant: "c/ns".into() };
    let tokens = admin.list_tokens(with(ADMIN, list)).await.unwrap().into_inner().tokens;
    assert_eq!(tokens.len(), 2);
    let trader = tokens.iter().find(|token| token.scopes == ["read", "trade"]).unwrap().id.clone();
    let revoke = |id: &str| with(ADMIN, RevokeTokenRequest { id: id.into() });
    admin.revoke_token(revoke(&trader)).await.unwrap();
    assert_eq!(admin.revoke_token(revoke(&trader)).await.unwrap_err().code(), Code::NotFound);
    let refused = async |trading: &mut TradingClient<Channel>| {
        trading.get_budget(with(&first, GetBudgetRequest::default())).await.unwrap_err().code()
    };
    assert_eq!(refused(&mut trading).await, Code::Unauthenticated);
    served.stop();
    let served = Served::sqlite(&dir.path().join("market.db"));
    assert_eq!(refused(&mut TradingClient::new(served.connect().await)).await, Code::Unauthenticated);
    served.stop();
}

/// A history of more than 10 000 points: 400 with a step that fits, with which the history is returned.
#[tokio::test]
async fn history_of_too_many_points_is_refused_with_fitting_step() {
    let (_dir, served, channel) = start().await;
    let token = tenant(&channel, "c/ns", None, &["read"]).await;
    let web = Web::new(&served, &token);
    let path = "/v1/markets/a100-4x/local/history?from=0&step=";
    let (status, problem, _) = web.get(&format!("{path}60000")).await;
    assert_eq!(
        (status, &problem["code"], &problem["field"]),
        (400, &"INVALID_ARGUMENT".into(), &"step".into())
    );
    let words = problem["detail"].as_str().unwrap().split(' ');
    let numbers: Vec<i64> = words.filter_map(|word| word.parse().ok()).collect();
    let [10_000, step] = numbers[..] else { panic!("{problem}") };
    assert_eq!(web.get(&format!("{path}{step}")).await.0, 200, "{step}");
    assert_eq!(web.get("/v1/markets/a100-4x/mars/history").await.1["code"], "UNKNOWN_MARKET");
    assert_eq!(web.get(&format!("{path}often")).await.0, 400);
    served.stop();
}

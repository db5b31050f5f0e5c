//! Streams of prices over every API, the audit, and instance types: a real process over its network API.

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::market_client::MarketClient;
use coracle_proto::market::trading_client::TradingClient;
use coracle_proto::market::*;
use futures_util::StreamExt as _;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::Message;
use tokio_tungstenite::{WebSocketStream, client_async};
use tonic::Code;

use crate::support::{ADMIN, DEADLINE, MARKET, Served, bid, tenant, with};

async fn websocket(served: &Served, token: &str) -> Result<WebSocketStream<TcpStream>, Error> {
    let host = served.http.strip_prefix("http://").unwrap();
    let mut request = format!("ws://{host}/v1/stream?market={MARKET}").into_client_request().unwrap();
    if !token.is_empty() {
        request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    Ok(client_async(request, TcpStream::connect(host).await.unwrap()).await?.0)
}

/// Waits for the next frame of a type.
async fn next_frame(socket: &mut WebSocketStream<TcpStream>, kind: &str) -> serde_json::Value {
    let told = async {
        loop {
            let Message::Text(text) = socket.next().await.unwrap().unwrap() else { continue };
            let frame: serde_json::Value = serde_json::from_str(&text).unwrap();
            if frame["type"] == kind {
                return frame;
            }
        }
    };
    timeout(DEADLINE, told).await.unwrap()
}

/// WebSocket, server-sent events and gRPC deliver the same frames. A reader that names its position gets no frame again.
#[tokio::test]
async fn prices_are_served_over_all_apis() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::sqlite(&dir.path().join("market.db"));
    let mut admin = AdminClient::new(served.connect().await);
    let mut socket = websocket(&served, ADMIN).await.unwrap();
    let first = next_frame(&mut socket, "price").await;
    assert_eq!((&first["market"], &first["price"]["quote"]), (&MARKET.into(), &"3.2000".into()));
    admin.halt(with(ADMIN, HaltRequest { market: MARKET.into() })).await.unwrap();
    let halted = next_frame(&mut socket, "halt").await;
    assert_eq!(halted["price"]["halted"], true);
    assert!(halted["seq"].as_u64() > first["seq"].as_u64(), "{first} {halted}");
    socket.close(None).await.unwrap();
    match websocket(&served, "").await {
        Err(Error::Http(response)) => assert_eq!(response.status(), 401),
        other => panic!("{:?}", other.map(drop)),
    }

    let seq = halted["seq"].as_u64().unwrap();
    let mut market = MarketClient::new(served.connect().await);
    let from = |from_seq| StreamPricesRequest { markets: vec![MARKET.into()], from_seq };
    let mut behind = market.stream_prices(with(ADMIN, from(Some(0)))).await.unwrap().into_inner();
    assert_eq!(behind.message().await.unwrap().unwrap().r#type, "gap", "something was missed");
    let mut abreast = market.stream_prices(with(ADMIN, from(Some(u64::MAX)))).await.unwrap().into_inner();
    admin.resume(with(ADMIN, ResumeRequest { market: MARKET.into() })).await.unwrap();
    let next = timeout(DEADLINE, abreast.message()).await.unwrap().unwrap().unwrap();
    assert!(next.r#type == "halt" && next.seq > seq, "nothing but what is new: {next:?}");

    let events = reqwest::Client::new().get(format!("{}/v1/stream?market={MARKET}", served.http));
    let mut events = events.bearer_auth(ADMIN).header("last-event-id", "0").send().await.unwrap();
    let chunk = timeout(DEADLINE, events.chunk()).await.unwrap().unwrap().unwrap();
    let text = String::from_utf8_lossy(&chunk).into_owned();
    assert!(text.contains("event: gap") && text.contains("\"quote\":\"3.2000\""), "{text}");
    served.stop();
}

/// The audit shows who placed, changed and attempted what, with the state before and after; also for a journal without tenants.
#[tokio::test]
async fn audit_log_records_actor_and_change() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("market.db");
    let served = Served::sqlite(&file);
    let channel = served.connect().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let mut trading = TradingClient::new(channel.clone());
    let placed = trading.place_bid(with(&token, bid(2_000_000, 3, "u", 0))).await.unwrap().into_inner();
    let amend =
        AmendBidRequest { bid: placed.bid.clone(), limit_micros: Some(2_500_000), ..Default::default() };
    trading.amend_bid(with(&token, amend)).await.unwrap();
    trading.place_bid(with(&token, bid(2_000_000, 3, "u", 0))).await.unwrap();
    trading.place_bid(with(&token, bid(2_000_000, 1, "u", 1))).await.unwrap_err();
    let audit = |from_seq, limit| AuditRequest { market: MARKET.into(), from_seq, limit };
    let mut admin = AdminClient::new(channel.clone());
    let all = admin.audit(with(ADMIN, audit(0, 0))).await.unwrap().into_inner().entries;
    let theirs: Vec<_> = all.iter().filter(|e| e.who == "c/ns").collect();
    let whats: Vec<_> = theirs.iter().map(|e| (e.what.as_str(), e.refused.as_str())).collect();
    let stale = "the owner's version is 2";
    assert_eq!(whats, [("place", ""), ("amend", ""), ("place", ""), ("place", stale)], "{all:#?}");
    assert_eq!((theirs[0].subject.as_str(), theirs[0].before.as_str()), (placed.bid.as_str(), ""));
    assert_eq!(theirs[0].after, "3 units at 2.0000, pending: 3 open, 0 live");
    assert_eq!(theirs[1].before, theirs[0].after);
    assert_eq!(theirs[1].after, "3 units at 2.5000, pending: 3 open, 0 live");
    assert_eq!(theirs[2].before, "", "a retry");
    let one = admin.audit(with(ADMIN, audit(theirs[1].seq, 1))).await.unwrap().into_inner().entries;
    assert_eq!(one, [theirs[1].clone()]);
    assert_eq!(admin.audit(with(ADMIN, audit(0, 1001))).await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(admin.audit(with(&token, audit(0, 0))).await.unwrap_err().code(), Code::PermissionDenied);
    let (seq, before) = (theirs[0].seq, theirs[0].clone());
    served.stop();

    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&file);
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    sqlx::query("ALTER TABLE journal DROP COLUMN who").execute(&pool).await.unwrap();
    pool.close().await;
    let served = Served::sqlite(&file);
    let mut admin = AdminClient::new(served.connect().await);
    let old = admin.audit(with(ADMIN, audit(seq, 1))).await.unwrap().into_inner().entries;
    assert_eq!(old, [AuditEntry { who: String::new(), ..before }], "an older store says all but who");
    let mut trading = TradingClient::new(served.connect().await);
    trading.place_bid(with(&token, bid(2_000_000, 1, "v", 0))).await.unwrap();
    let all = admin.audit(with(ADMIN, audit(seq + 4, 0))).await.unwrap().into_inner().entries;
    let whats: Vec<_> = all.iter().map(|e| (e.who.as_str(), e.what.as_str())).collect();
    assert!(whats.contains(&("", "restarted")) && whats.contains(&("c/ns", "place")), "{all:#?}");
    served.stop();
}

/// A changed reserve takes effect ten minutes after its announcement at the earliest; until then the announcement is visible.
#[tokio::test]
async fn reserve_is_announced_before_it_applies() {
    const NOTICE_MS: i64 = 600_000;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("market.db");
    let served = Served::sqlite(&file);
    let channel = served.connect().await;
    let mut admin = AdminClient::new(channel.clone());
    let put = |reserve_micros, call_interval_ms, effective_at_ms| PutMarketRequest {
        market: MARKET.into(),
        reserve_micros,
        cap_micros: 8_000_000,
        call_interval_ms,
        effective_at_ms,
        ..PutMarketRequest::default()
    };
    let now = coracle_types::Clock::system().now().0;
    for at_once in [1, now, now + NOTICE_MS - 1_000] {
        let refused = admin.put_market(with(ADMIN, put(3_000_000, 30_000, at_once))).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert_eq!(refused.metadata().get("coracle-field").unwrap(), "effective_at");
    }
    let told = admin.put_market(with(ADMIN, put(3_000_000, 1_000, 0))).await.unwrap().into_inner();
    assert_eq!((told.reserve_micros, told.quote_micros), (2_000_000, 3_200_000), "it does not hold yet");
    assert_eq!((told.next_reserve_micros, told.next_cap_micros), (3_000_000, 8_000_000));
    assert!(told.next_from_ms >= now + NOTICE_MS, "{told:?}");
    assert!(told.next_call_ms <= told.as_of_ms + 1_000, "the interval of calls has no notice: {told:?}");
    served.stop();

    let served = Served::sqlite(&file);
    let mut admin = AdminClient::new(served.connect().await);
    let token = tenant(&served.connect().await, "c/ns", None, &["read"]).await;
    let price = async || {
        let path = format!("{}/v1/markets/{MARKET}/price", served.http);
        let page = reqwest::Client::new().get(path).bearer_auth(&token).send().await.unwrap();
        page.json::<serde_json::Value>().await.unwrap()
    };
    let next = json!({"reserve": "3.0000", "cap": "8.0000", "fromMs": told.next_from_ms});
    assert_eq!(price().await["next"], next, "kept over a restart, told to everybody");
    let again = admin.put_market(with(ADMIN, put(3_000_000, 1_000, 0))).await.unwrap().into_inner();
    assert_eq!(again.next_from_ms, told.next_from_ms, "told again is not told anew");
    admin.put_market(with(ADMIN, put(2_000_000, 1_000, 0))).await.unwrap();
    assert_eq!(price().await["next"], serde_json::Value::Null, "taken back");
    served.stop();
}

/// An instance type has a list price, which is the cap of markets that do not set one.
#[tokio::test]
async fn instance_type_list_price_is_the_default_cap() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("market.db");
    let served = Served::sqlite(&file);
    let channel = served.connect().await;
    let mut admin = AdminClient::new(channel.clone());
    let small = InstanceType {
        name: "cpu-1".into(),
        vcpus: 1,
        memory_mib: 256,
        labels: [("size".to_owned(), "small".to_owned())].into(),
        list_price_micros: 1_600_000,
        ..InstanceType::default()
    };
    admin.put_instance_type(with(ADMIN, small.clone())).await.unwrap();
    let market = |name: &str| PutMarketRequest {
        market: name.into(),
        reserve_micros: 1_000_000,
        ..PutMarketRequest::default()
    };
    let put = admin.put_market(with(ADMIN, market("cpu-1/local"))).await.unwrap().into_inner();
    assert_eq!(put.cap_micros, 1_600_000);
    let unknown = admin.put_market(with(ADMIN, market("cpu-2/local"))).await.unwrap_err();
    assert_eq!(unknown.code(), Code::InvalidArgument);
    let bad: [fn(&mut InstanceType); 4] =
        [|t| t.name = "a/b".into(), |t| t.vcpus = 0, |t| t.memory_mib = 0, |t| t.list_price_micros = 0];
    for change in bad {
        let mut wrong = small.clone();
        change(&mut wrong);
        let refused = admin.put_instance_type(with(ADMIN, wrong)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
    }
    let token = tenant(&channel, "c/ns", None, &["read"]).await;
    let denied = admin.put_instance_type(with(&token, small.clone())).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);
    served.stop();

    let served = Served::sqlite(&file);
    let list = with(&token, ListInstanceTypesRequest {});
    let types = MarketClient::new(served.connect().await).list_instance_types(list).await.unwrap();
    let types = types.into_inner().types;
    let names: Vec<_> = types.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a100-4x", "a100-8x", "cpu-1", "h100-4x", "h100-8x", "l40s-4x"]);
    assert_eq!((types[0].gpus, types[0].list_price_micros), (4, 8_000_000));
    assert_eq!(types[2], small);
    served.stop();
}

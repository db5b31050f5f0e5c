//! Commands that every token may use.

use coracle_proto::market as pb;
use coracle_proto::market::market_client::MarketClient;
use serde_json::json;
use tonic::transport::Channel;

use super::{Connection, Item, dollars, market, market_failure, show, time};
use coracle_cli::cli::{
    AdviseArgs, At, HistoryArgs, OneMarketArgs, OptionalMarketArgs, PlainArgs, PriceArgs, SimulateArgs,
};
use coracle_cli::error::{Failure, exit};

const DAY_MS: i64 = 24 * 3600 * 1000;

async fn open(at: &At) -> Result<(Connection, MarketClient<Channel>), Failure> {
    let connection = Connection::open(at).await?;
    let client = MarketClient::new(connection.channel.clone());
    Ok((connection, client))
}

const PRICE: [&str; 6] = ["MARKET", "QUOTE", "CLEARING", "RESERVE", "CAP", "FREE"];
const PRICE_WIDE: [&str; 6] = ["INDICATIVE", "STATE", "NEXT-CALL", "SEQ", "NEXT-RESERVE", "FROM"];

fn price_item(p: &pb::MarketPrice) -> Item {
    let state = if p.halted { "halted" } else { "open" };
    let next = (p.next_from_ms > 0).then(|| dollars(p.next_reserve_micros));
    Item {
        name: p.market.clone(),
        cells: vec![
            p.market.clone(),
            dollars(p.quote_micros),
            dollars(p.clearing_micros),
            dollars(p.reserve_micros),
            dollars(p.cap_micros),
            p.free.to_string(),
        ],
        wide: vec![
            dollars(p.indicative_micros),
            state.into(),
            time(p.next_call_ms),
            p.seq.to_string(),
            next.clone().unwrap_or_default(),
            time(p.next_from_ms),
        ],
        document: json!({
            "market": p.market, "quote": dollars(p.quote_micros), "clearing": dollars(p.clearing_micros),
            "indicative": dollars(p.indicative_micros), "reserve": dollars(p.reserve_micros),
            "cap": dollars(p.cap_micros), "tick": dollars(p.tick_micros), "free": p.free, "state": state,
            "asOf": time(p.as_of_ms), "nextCall": time(p.next_call_ms), "seq": p.seq,
            "p20": p.p20_micros.map(dollars), "p50": p.p50_micros.map(dollars), "p80": p.p80_micros.map(dollars),
            "next": next.map(|reserve| {
                json!({"reserve": reserve, "cap": dollars(p.next_cap_micros), "from": time(p.next_from_ms)})
            }),
        }),
    }
}

pub(super) async fn price(args: PriceArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let listed = client
        .list_markets(connection.authorised_request(pb::ListMarketsRequest {})?)
        .await
        .map_err(market_failure)?;
    let wanted = |name: &str| {
        let (kind, region) = name.split_once('/').unwrap_or((name, ""));
        args.instance_type.as_deref().is_none_or(|k| k == kind)
            && args.region.as_deref().is_none_or(|r| r == region)
    };
    let found: Vec<_> = listed.into_inner().markets.into_iter().filter(|p| wanted(&p.market)).collect();
    if found.is_empty() && (args.instance_type.is_some() || args.region.is_some()) {
        let failure = Failure::new("UNKNOWN_MARKET", "market not found").exit(exit::NOT_FOUND);
        return Err(failure.help("list what there is: coracle market price"));
    }
    show(&args.at.output, "Price", &PRICE, &PRICE_WIDE, found.iter().map(price_item).collect())?;
    if !args.watch {
        return Ok(());
    }
    let markets = found.into_iter().map(|p| p.market).collect();
    let request = connection.authorised_request(pb::StreamPricesRequest { markets, from_seq: None })?;
    let mut frames = client.stream_prices(request).await.map_err(market_failure)?.into_inner();
    while let Some(frame) = frames.message().await.map_err(market_failure)? {
        if let Some(price) = frame.price.filter(|_| frame.r#type != "price") {
            show(&args.at.output, "Price", &[], &[], vec![price_item(&price)])?;
        }
    }
    Ok(())
}

pub(super) async fn history(args: HistoryArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let now = coracle_cli::commands::vm::now_ms();
    let request = pb::GetPriceHistoryRequest {
        market: market(&args.instance_type, &args.region),
        from_ms: args.from.map_or(now - DAY_MS, jiff::Timestamp::as_millisecond),
        to_ms: args.to.map_or(now, jiff::Timestamp::as_millisecond),
        step_ms: i64::try_from(args.step.as_millis()).unwrap_or(i64::MAX),
    };
    let bars = client
        .get_price_history(connection.authorised_request(request)?)
        .await
        .map_err(market_failure)?
        .into_inner()
        .bars;
    let item = |b: &pb::PriceBar| Item {
        name: time(b.at_ms),
        cells: vec![
            time(b.at_ms),
            dollars(b.open_micros),
            dollars(b.high_micros),
            dollars(b.low_micros),
            dollars(b.close_micros),
            b.calls.to_string(),
        ],
        wide: Vec::new(),
        document: json!({
            "at": time(b.at_ms), "open": dollars(b.open_micros), "high": dollars(b.high_micros),
            "low": dollars(b.low_micros), "close": dollars(b.close_micros), "calls": b.calls,
        }),
    };
    let header = ["TIME", "OPEN", "HIGH", "LOW", "CLOSE", "CALLS"];
    show(&args.at.output, "PriceBar", &header, &[], bars.iter().map(item).collect())
}

pub(super) async fn book(args: OneMarketArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let name = market(&args.instance_type, &args.region);
    let request = pb::GetBookRequest { market: name.clone() };
    let book =
        client.get_book(connection.authorised_request(request)?).await.map_err(market_failure)?.into_inner();
    let (kind, region) = (args.instance_type, args.region);
    let request = pb::GetMarketPriceRequest { instance_type: kind, region };
    let cap = client
        .get_market_price(connection.authorised_request(request)?)
        .await
        .map_err(market_failure)?
        .into_inner()
        .cap_micros;
    let items = (0i64..).zip(&book.bands).map(|(n, units)| {
        let (from, to) = (dollars(cap / 10 * n), dollars(cap / 10 * (n + 1)));
        Item {
            name: from.clone(),
            cells: vec![from.clone(), to.clone(), units.to_string()],
            wide: Vec::new(),
            document: json!({"market": name, "from": from, "to": to, "units": units}),
        }
    });
    show(&args.at.output, "Band", &["FROM", "TO", "UNITS"], &[], items.collect())
}

pub(super) async fn advise(args: AdviseArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let request = pb::AdviseRequest {
        market: market(&args.instance_type, &args.region),
        window_ms: i64::try_from(args.window.as_millis()).unwrap_or(i64::MAX),
        survive_permille: args.survive,
        ..Default::default()
    };
    let advice =
        client.advise(connection.authorised_request(request)?).await.map_err(market_failure)?.into_inner();
    let limit = dollars(advice.limit_micros);
    let item = Item {
        name: limit.clone(),
        cells: vec![limit.clone(), advice.samples.to_string()],
        wide: Vec::new(),
        document: json!({"limit": limit, "samples": advice.samples}),
    };
    show(&args.at.output, "Advice", &["LIMIT", "SAMPLES"], &[], vec![item])
}

pub(super) async fn simulate(args: SimulateArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let request = pb::SimulateRequest {
        market: market(&args.instance_type, &args.region),
        limit_micros: args.limit.as_micros(),
        quantity: args.quantity,
        min_fill: args.min_fill,
        tenant: args.at.tenant.clone(),
    };
    let s =
        client.simulate(connection.authorised_request(request)?).await.map_err(market_failure)?.into_inner();
    let wins = s.wins_at_micros.map_or_else(|| "never".to_owned(), dollars);
    let item = Item {
        name: s.at_call.to_string(),
        cells: vec![
            s.at_once.to_string(),
            s.at_call.to_string(),
            dollars(s.pays_micros),
            dollars(s.clearing_micros),
            s.displaced.to_string(),
            wins.clone(),
        ],
        wide: Vec::new(),
        document: json!({
            "atOnce": s.at_once, "atCall": s.at_call, "pays": dollars(s.pays_micros),
            "clearing": dollars(s.clearing_micros), "displaced": s.displaced, "winsAt": wins,
        }),
    };
    let header = ["AT-ONCE", "AT-CALL", "PAYS", "CLEARING", "DISPLACES", "WINS-AT"];
    show(&args.at.output, "Simulation", &header, &[], vec![item])
}

pub(super) async fn lots(args: OptionalMarketArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let request = pb::ListLotsRequest { market: args.market.unwrap_or_default() };
    let lots = client
        .list_lots(connection.authorised_request(request)?)
        .await
        .map_err(market_failure)?
        .into_inner()
        .lots;
    let item = |l: &pb::LotUse| Item {
        name: l.lot.clone(),
        cells: vec![
            l.lot.clone(),
            l.market.clone(),
            l.supplier.clone(),
            l.units.to_string(),
            l.taken.to_string(),
            pb::LotState::word(l.state),
        ],
        wide: Vec::new(),
        document: json!({
            "lot": l.lot, "market": l.market, "supplier": l.supplier, "units": l.units, "taken": l.taken,
            "state": pb::LotState::word(l.state),
        }),
    };
    let header = ["LOT", "MARKET", "SUPPLIER", "UNITS", "TAKEN", "STATE"];
    show(&args.at.output, "Lot", &header, &[], lots.iter().map(item).collect())
}

pub(super) async fn top(args: PlainArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let listed = client
        .list_markets(connection.authorised_request(pb::ListMarketsRequest {})?)
        .await
        .map_err(market_failure)?;
    let lots = client
        .list_lots(connection.authorised_request(pb::ListLotsRequest::default())?)
        .await
        .map_err(market_failure)?;
    let lots = lots.into_inner().lots;
    let mut items = Vec::new();
    for p in listed.into_inner().markets {
        let request = pb::GetBookRequest { market: p.market.clone() };
        let open = client
            .get_book(connection.authorised_request(request)?)
            .await
            .map_err(market_failure)?
            .into_inner()
            .units;
        let own = lots.iter().filter(|l| l.market == p.market);
        let (units, taken) = own
            .fold((0u64, 0u64), |(units, taken), l| (units + u64::from(l.units), taken + u64::from(l.taken)));
        let state = if p.halted { "halted" } else { "open" };
        items.push((open, Item {
            name: p.market.clone(),
            cells: vec![
                p.market.clone(),
                dollars(p.clearing_micros),
                open.to_string(),
                format!("{taken}/{units}"),
                state.into(),
            ],
            wide: vec![dollars(p.quote_micros), dollars(p.indicative_micros)],
            document: json!({
                "market": p.market, "clearing": dollars(p.clearing_micros), "quote": dollars(p.quote_micros),
                "indicative": dollars(p.indicative_micros), "open": open, "units": units, "taken": taken,
                "state": state,
            }),
        }));
    }
    // Markets with the highest demand first.
    items.sort_by(|(a, x), (b, y)| b.cmp(a).then_with(|| x.name.cmp(&y.name)));
    let items = items.into_iter().map(|(_, item)| item).collect();
    let header = ["MARKET", "CLEARING", "WAITING", "TAKEN", "STATE"];
    show(&args.at.output, "MarketUse", &header, &["QUOTE", "INDICATIVE"], items)
}

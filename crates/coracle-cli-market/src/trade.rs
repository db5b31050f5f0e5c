//! Commands of tenants and administrators.

use coracle_api::bidnode::names;
use coracle_proto::market as pb;
use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::trading_client::TradingClient;
use serde_json::json;
use tonic::transport::Channel;

use super::{Connection, Item, dollars, market, market_failure, show, time};
use coracle_cli::cli::{
    AmendArgs, At, BidCommand, BidsArgs, CancelArgs, ChargesArgs, ExplainIdArgs, Format, OneMarketArgs,
    PlaceArgs, PlainArgs,
};
use coracle_cli::error::Failure;
use coracle_cli::output;

/// Default cluster of a BidNode when no tenant is named.
const CLUSTER: &str = "kubernetes";

async fn open(at: &At) -> Result<(Connection, TradingClient<Channel>), Failure> {
    let connection = Connection::open(at).await?;
    let client = TradingClient::new(connection.channel.clone()).max_decoding_message_size(64 << 20);
    Ok((connection, client))
}

/// Returns the tenant and the BidNode's name that the flags select.
fn owner_filter(args: &BidsArgs) -> Result<(String, Option<String>), Failure> {
    let Some(bidnode) = &args.bidnode else { return Ok((args.at.tenant.clone(), None)) };
    let Some((namespace, name)) = bidnode.split_once('/') else {
        return Err(Failure::usage(format!("--bidnode {bidnode}: write NAMESPACE/NAME")));
    };
    let cluster = if args.at.tenant.is_empty() { CLUSTER } else { &args.at.tenant };
    Ok((format!("{cluster}/{namespace}"), Some(name.to_owned())))
}

fn has_bidnode_label(labels: &std::collections::BTreeMap<String, String>, name: Option<&String>) -> bool {
    name.is_none_or(|name| labels.get(names::BIDNODE) == Some(name))
}

async fn pending(args: &BidsArgs) -> Result<Vec<pb::Bid>, Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let (tenant, name) = owner_filter(args)?;
    let request = pb::GetPendingBidsRequest { tenant, include_ended: true, ..Default::default() };
    let mut bids = client
        .get_pending_bids(connection.authorised_request(request)?)
        .await
        .map_err(market_failure)?
        .into_inner()
        .bids;
    let is_over = |b: &pb::Bid| b.open + b.matched + b.provisioning + b.active + b.preempting == 0;
    bids.retain(|b| has_bidnode_label(&b.labels, name.as_ref()) && (args.all || !is_over(b)));
    Ok(bids)
}

pub(super) async fn bids(args: BidsArgs) -> Result<(), Failure> {
    let bids = pending(&args).await?;
    let item = |b: &pb::Bid| Item {
        name: b.bid.clone(),
        cells: vec![
            b.bid.clone(),
            b.market.clone(),
            dollars(b.limit_micros),
            b.quantity.to_string(),
            b.open.to_string(),
            (b.matched + b.provisioning).to_string(),
            b.active.to_string(),
            pb::BidState::word(b.state),
        ],
        wide: vec![b.tenant.clone(), b.owner_uid.clone(), b.hold.clone(), time(b.placed_at_ms)],
        document: json!({
            "bid": b.bid, "market": b.market, "tenant": b.tenant, "ownerUID": b.owner_uid,
            "limit": dollars(b.limit_micros), "quantity": b.quantity, "minFill": b.min_fill, "state": pb::BidState::word(b.state),
            "hold": b.hold, "labels": b.labels, "placedAt": time(b.placed_at_ms),
            "units": {
                "open": b.open, "matched": b.matched, "provisioning": b.provisioning, "active": b.active,
                "preempting": b.preempting, "ended": b.ended, "cancelled": b.cancelled, "expired": b.expired,
            },
        }),
    };
    let header = ["BID", "MARKET", "LIMIT", "UNITS", "OPEN", "BOOTING", "ACTIVE", "STATE"];
    let wide = ["TENANT", "OWNER", "HOLD", "PLACED"];
    show(&args.at.output, "Bid", &header, &wide, bids.iter().map(item).collect())
}

pub(super) async fn allocations(args: BidsArgs) -> Result<(), Failure> {
    let of: std::collections::BTreeSet<_> = match args.bidnode {
        Some(_) => pending(&BidsArgs { all: true, bidnode: args.bidnode.clone(), at: args.at.clone() })
            .await?
            .into_iter()
            .map(|b| b.bid)
            .collect(),
        None => Default::default(),
    };
    let (connection, mut client) = open(&args.at).await?;
    let (tenant, name) = owner_filter(&args)?;
    let request = pb::ListAllocationsRequest { tenant, include_ended: args.all, ..Default::default() };
    let reply =
        client.list_allocations(connection.authorised_request(request)?).await.map_err(market_failure)?;
    let mut units = reply.into_inner().allocations;
    units.retain(|u| name.is_none() || of.contains(&u.bid));
    let item = |u: &pb::Allocation| Item {
        name: u.allocation.clone(),
        cells: vec![
            u.allocation.clone(),
            u.market.clone(),
            pb::AllocationState::word(u.state),
            dollars(u.price_micros),
            dollars(u.limit_micros),
            u.node.clone(),
        ],
        wide: vec![
            u.bid.clone(),
            u.lot.clone(),
            time(u.active_at_ms),
            time(u.preempt_at_ms),
            u.reason.clone(),
        ],
        document: json!({
            "allocation": u.allocation, "bid": u.bid, "market": u.market, "tenant": u.tenant,
            "ownerUID": u.owner_uid, "state": pb::AllocationState::word(u.state), "price": dollars(u.price_micros),
            "limit": dollars(u.limit_micros), "lot": u.lot, "node": u.node, "reason": u.reason,
            "matchedAt": time(u.matched_at_ms), "activeAt": time(u.active_at_ms),
            "protectedUntil": time(u.protected_until_ms), "preemptAt": time(u.preempt_at_ms),
            "endedAt": time(u.ended_at_ms),
        }),
    };
    let header = ["UNIT", "MARKET", "STATE", "PRICE", "LIMIT", "NODE"];
    let wide = ["BID", "LOT", "ACTIVE", "UNTIL", "REASON"];
    show(&args.at.output, "Allocation", &header, &wide, units.iter().map(item).collect())
}

pub(super) async fn bid(command: BidCommand) -> Result<(), Failure> {
    match command {
        BidCommand::Place(args) => place(args).await,
        BidCommand::Amend(args) => amend(args).await,
        BidCommand::Cancel(args) => cancel(args).await,
    }
}

fn reply(format: &Format, reply: &pb::BidReply) -> Result<(), Failure> {
    let note = match (reply.replayed, reply.below_reserve) {
        (true, _) => "the same as before",
        (_, true) => "below the reserve: it waits",
        _ => "",
    };
    let item = Item {
        name: reply.bid.clone(),
        cells: vec![reply.bid.clone(), reply.owner_version.to_string(), note.to_owned()],
        wide: vec![time(reply.at_ms)],
        document: json!({
            "bid": reply.bid, "ownerVersion": reply.owner_version, "replayed": reply.replayed,
            "belowReserve": reply.below_reserve, "at": time(reply.at_ms),
        }),
    };
    show(format, "BidReply", &["BID", "VERSION", "NOTE"], &["AT"], vec![item])
}

async fn place(args: PlaceArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let lease = args.lease.map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX));
    let request = pb::PlaceBidRequest {
        market: market(&args.instance_type, &args.region),
        limit_micros: args.limit.as_micros(),
        quantity: args.quantity,
        min_fill: args.min_fill,
        owner_uid: args.owner,
        if_owner_version: args.if_version,
        idempotency_key: args.key,
        lease_ms: lease,
        tenant: args.at.tenant.clone(),
        ..pb::PlaceBidRequest::default()
    };
    let said = client.place_bid(connection.authorised_request(request)?).await.map_err(market_failure)?;
    reply(&args.at.output, said.get_ref())
}

async fn amend(args: AmendArgs) -> Result<(), Failure> {
    if args.limit.is_none() && args.quantity.is_none() {
        return Err(Failure::usage("nothing to change: give --limit or --quantity"));
    }
    let (connection, mut client) = open(&args.at).await?;
    let request = pb::AmendBidRequest {
        bid: args.bid,
        limit_micros: args.limit.map(coracle_auction::Price::as_micros),
        quantity: args.quantity,
        if_owner_version: args.if_version,
        tenant: args.at.tenant.clone(),
    };
    let said = client.amend_bid(connection.authorised_request(request)?).await.map_err(market_failure)?;
    reply(&args.at.output, said.get_ref())
}

async fn cancel(args: CancelArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let request = pb::CancelBidRequest {
        bid: args.bid,
        if_owner_version: args.if_version,
        tenant: args.at.tenant.clone(),
    };
    let said = client.cancel_bid(connection.authorised_request(request)?).await.map_err(market_failure)?;
    reply(&args.at.output, said.get_ref())
}

pub(super) async fn explain(args: ExplainIdArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let request = pb::ExplainRequest { id: args.id.clone(), tenant: args.at.tenant.clone() };
    let why =
        client.explain(connection.authorised_request(request)?).await.map_err(market_failure)?.into_inner();
    match &args.at.output {
        Format::Table | Format::Wide => output::write(&format!("{}\n", why.text)),
        Format::Name => output::write(&format!("{}\n", args.id)),
        format => output::document(
            format,
            &json!({
                "apiVersion": output::API_VERSION, "kind": "BidExplanation", "id": args.id, "text": why.text,
                "standing": why.standing, "rank": why.rank, "of": why.of, "sold": why.sold,
                "clearing": dollars(why.clearing_micros), "limit": dollars(why.limit_micros),
                "winsAt": why.wins_at_micros.map(dollars), "call": why.call,
            }),
        ),
    }
}

pub(super) async fn charges(args: ChargesArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let request = pb::ListChargesRequest {
        tenant: args.at.tenant.clone(),
        from_ms: args.from.map_or(0, jiff::Timestamp::as_millisecond),
        to_ms: args.to.map_or(0, jiff::Timestamp::as_millisecond),
    };
    let charges = client
        .list_charges(connection.authorised_request(request)?)
        .await
        .map_err(market_failure)?
        .into_inner()
        .charges;
    let item = |c: &pb::Charge| Item {
        name: c.allocation.clone(),
        cells: vec![
            c.allocation.clone(),
            time(c.from_ms),
            time(c.to_ms),
            dollars(c.price_micros),
            c.reason.clone(),
        ],
        wide: Vec::new(),
        document: json!({
            "allocation": c.allocation, "from": time(c.from_ms), "to": time(c.to_ms),
            "price": dollars(c.price_micros), "reason": c.reason,
        }),
    };
    let header = ["UNIT", "FROM", "TO", "PRICE", "REASON"];
    show(&args.at.output, "Charge", &header, &[], charges.iter().map(item).collect())
}

pub(super) async fn budget(args: PlainArgs) -> Result<(), Failure> {
    let (connection, mut client) = open(&args.at).await?;
    let request = pb::GetBudgetRequest { tenant: args.at.tenant.clone() };
    let budget = client
        .get_budget(connection.authorised_request(request)?)
        .await
        .map_err(market_failure)?
        .into_inner();
    let cap = budget.hourly_cap_micros.map_or_else(|| "none".to_owned(), dollars);
    let committed = dollars(budget.committed_micros);
    let item = Item {
        name: cap.clone(),
        cells: vec![cap.clone(), committed.clone(), budget.units.to_string()],
        wide: Vec::new(),
        document: json!({"hourlyCap": cap, "committed": committed, "units": budget.units}),
    };
    show(&args.at.output, "Budget", &["CAP", "COMMITTED", "UNITS"], &[], vec![item])
}

pub(super) async fn halt(args: OneMarketArgs, halted: bool) -> Result<(), Failure> {
    let connection = Connection::open(&args.at).await?;
    let name = market(&args.instance_type, &args.region);
    let mut client = AdminClient::new(connection.channel.clone());
    if halted {
        client
            .halt(connection.authorised_request(pb::HaltRequest { market: name.clone() })?)
            .await
            .map_err(market_failure)?;
    } else {
        client
            .resume(connection.authorised_request(pb::ResumeRequest { market: name.clone() })?)
            .await
            .map_err(market_failure)?;
    }
    let state = if halted { "halted" } else { "open" };
    let cells = vec![name.clone(), state.to_owned()];
    let document = json!({"market": name, "state": state});
    let item = Item { name, cells, wide: Vec::new(), document };
    show(&args.at.output, "MarketState", &["MARKET", "STATE"], &[], vec![item])
}

pub(super) async fn verify(args: OneMarketArgs) -> Result<(), Failure> {
    let connection = Connection::open(&args.at).await?;
    let name = market(&args.instance_type, &args.region);
    let mut client = AdminClient::new(connection.channel.clone());
    let request = connection.authorised_request(pb::VerifyRequest { market: name.clone() })?;
    let verdict = client.verify(request).await.map_err(market_failure)?.into_inner();
    if !verdict.sound {
        let message = format!("the journal of {name} is not what was written: {}", verdict.detail);
        return Err(
            Failure::new("COR-MKT-002", message).help("restore the store from a copy, and keep this one")
        );
    }
    let item = Item {
        name: name.clone(),
        cells: vec![name.clone(), verdict.commands.to_string(), "sound".into()],
        wide: Vec::new(),
        document: json!({
            "market": name, "commands": verdict.commands, "sound": true,
        }),
    };
    show(&args.at.output, "Verdict", &["MARKET", "COMMANDS", "JOURNAL"], &[], vec![item])
}

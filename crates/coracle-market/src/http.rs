//! HTTP API: JSON and server-sent events. Errors are problem documents (RFC 9457).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequestParts, Path, Query, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event as Frame, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use coracle_auction::Price;
use coracle_proto::market as pb;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::caller::{Caller, Scope};
use crate::error::RequestError;
use crate::json;
use crate::learning::Learning;
use crate::price_stream;
use crate::service::Service;
use crate::websocket::Upgrade;

type Shared = State<Arc<Service>>;
type Params = Query<BTreeMap<String, String>>;
type Answer = Result<Json<Value>, RequestError>;

/// Interval of keep-alive messages on a stream.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(15);

impl IntoResponse for RequestError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut body = json!({
            "type": format!("https://coracle.dev/problems/{}", self.code.to_lowercase()),
            "title": status.canonical_reason().unwrap_or_default(),
            "status": self.status, "code": self.code, "detail": self.detail,
        });
        if let Some(version) = self.owner_version {
            body["ownerVersion"] = version.into();
        }
        if let Some(field) = self.field {
            // Field names as in the HTTP API.
            body["field"] = if field == "min_fill" { "minFill" } else { field }.into();
        }
        let mut response =
            (status, [(header::CONTENT_TYPE, "application/problem+json")], body.to_string()).into_response();
        if status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        }
        response
    }
}

/// All routes.
pub(crate) fn routes(service: Arc<Service>) -> Router {
    Router::new()
        .route("/v1/markets", get(markets))
        .route("/v1/markets/{kind}/{region}/price", get(price))
        .route("/v1/markets/{kind}/{region}/history", get(history))
        .route("/v1/markets/{kind}/{region}/book", get(book))
        .route("/v1/markets/{kind}/{region}/advice", get(advice))
        .route("/v1/markets/{kind}/{region}/simulation", get(simulation))
        .route("/v1/bids", post(place).get(bids))
        .route("/v1/bids/{id}", get(bid).patch(amend).delete(cancel))
        .route("/v1/bids/{id}/explain", get(explain))
        .route("/v1/allocations", get(allocations))
        .route("/v1/allocations/{id}", delete(release))
        .route("/v1/charges", get(charges))
        .route("/v1/stream", get(stream))
        .with_state(service.clone())
        .layer(tower::layer::layer_fn(move |inner| Learning { inner, service: service.clone() }))
}

fn caller(service: &Service, headers: &HeaderMap, scope: Scope) -> Result<Caller, RequestError> {
    let token = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    service.gate.caller(token, &service.reviewed, scope)
}

/// Caller with permission to read.
struct Read(Caller);

impl FromRequestParts<Arc<Service>> for Read {
    type Rejection = RequestError;

    async fn from_request_parts(parts: &mut Parts, service: &Arc<Service>) -> Result<Self, RequestError> {
        caller(service, &parts.headers, Scope::Read).map(Self)
    }
}

/// Caller with permission to trade.
struct Trade(Caller);

impl FromRequestParts<Arc<Service>> for Trade {
    type Rejection = RequestError;

    async fn from_request_parts(parts: &mut Parts, service: &Arc<Service>) -> Result<Self, RequestError> {
        caller(service, &parts.headers, Scope::Trade).map(Self)
    }
}

/// Path of a market.
#[derive(Deserialize)]
struct MarketPath {
    kind: String,
    region: String,
}

impl MarketPath {
    fn name(&self) -> String {
        format!("{}/{}", self.kind, self.region)
    }
}

fn number<T: std::str::FromStr + Default>(
    query: &BTreeMap<String, String>,
    name: &str,
) -> Result<T, RequestError> {
    let Some(text) = query.get(name) else { return Ok(T::default()) };
    text.parse().map_err(|_| RequestError::invalid(format!("{name} must be a whole number")))
}

fn text(query: &BTreeMap<String, String>, name: &str) -> String {
    query.get(name).cloned().unwrap_or_default()
}

fn micros(what: &'static str, text: &str) -> Result<i64, RequestError> {
    let parsed = Price::parse(text).map(Price::as_micros);
    parsed.map_err(|e| RequestError::invalid_field(what, format!("{what}: {e}")))
}

async fn markets(State(s): Shared, _: Read) -> Answer {
    Ok(Json(json!({ "markets": s.prices()?.iter().map(json::price).collect::<Vec<_>>() })))
}

async fn price(State(s): Shared, _: Read, Path(market): Path<MarketPath>) -> Answer {
    Ok(Json(json::price(&s.price(&market.kind, &market.region)?)))
}

async fn history(State(s): Shared, _: Read, Path(market): Path<MarketPath>, Query(q): Params) -> Answer {
    let request = pb::GetPriceHistoryRequest {
        market: market.name(),
        from_ms: number(&q, "from")?,
        to_ms: number(&q, "to")?,
        step_ms: number(&q, "step")?,
    };
    let history = s.history(&request).await?;
    Ok(Json(json!({ "bars": history.bars.iter().map(json::bar).collect::<Vec<_>>() })))
}

async fn book(State(s): Shared, _: Read, Path(market): Path<MarketPath>) -> Answer {
    let book = s.book(&market.name())?;
    Ok(Json(json!({ "bands": book.bands, "units": book.units })))
}

async fn advice(State(s): Shared, _: Read, Path(market): Path<MarketPath>, Query(q): Params) -> Answer {
    let request = pb::AdviseRequest {
        market: market.name(),
        units: number(&q, "units")?,
        window_ms: number(&q, "window")?,
        survive_permille: number(&q, "survive")?,
    };
    let advice = s.advise(&request).await?;
    Ok(Json(json!({ "limit": Price::micros(advice.limit_micros).to_string(), "samples": advice.samples })))
}

async fn simulation(
    State(s): Shared,
    Read(caller): Read,
    Path(market): Path<MarketPath>,
    Query(q): Params,
) -> Answer {
    let request = pb::SimulateRequest {
        market: market.name(),
        limit_micros: micros("limit", &text(&q, "limit"))?,
        quantity: number(&q, "quantity")?,
        min_fill: number(&q, "minFill")?,
        tenant: text(&q, "tenant"),
    };
    let sim = s.simulate(caller, &request).await?;
    let dollars = |micros| Price::micros(micros).to_string();
    Ok(Json(json!({
        "atOnce": sim.at_once, "atCall": sim.at_call, "pays": dollars(sim.pays_micros),
        "clearing": dollars(sim.clearing_micros), "displaced": sim.displaced,
        "winsAt": sim.wins_at_micros.map(dollars),
    })))
}

/// Body of a new bid. Unknown fields are errors, so that a misspelt limit is not ignored.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NewBid {
    market: String,
    limit: String,
    #[serde(default)]
    quantity: u32,
    #[serde(default)]
    min_fill: u32,
    #[serde(default)]
    owner_uid: String,
    if_owner_version: Option<u64>,
    #[serde(default)]
    lease_ms: i64,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    tenant: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Change {
    limit: Option<String>,
    quantity: Option<u32>,
    if_owner_version: Option<u64>,
    #[serde(default)]
    tenant: String,
}

fn body<T>(body: Result<Json<T>, JsonRejection>) -> Result<T, RequestError> {
    body.map(|Json(value)| value).map_err(|e| RequestError::invalid(e.body_text()))
}

async fn place(
    State(s): Shared,
    Trade(caller): Trade,
    headers: HeaderMap,
    new: Result<Json<NewBid>, JsonRejection>,
) -> Result<(StatusCode, Json<Value>), RequestError> {
    let new = body(new)?;
    let key = headers.get("idempotency-key").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let request = pb::PlaceBidRequest {
        market: new.market,
        limit_micros: micros("limit", &new.limit)?,
        quantity: new.quantity,
        min_fill: new.min_fill,
        owner_uid: new.owner_uid,
        if_owner_version: new.if_owner_version,
        idempotency_key: key.to_owned(),
        lease_ms: new.lease_ms,
        labels: new.labels,
        tenant: new.tenant,
        expires_at_ms: 0,
    };
    let reply = s.place(caller, request).await?;
    let status = if reply.replayed { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Json(json::reply(&reply))))
}

async fn bids(State(s): Shared, Read(caller): Read, Query(q): Params) -> Answer {
    let request = pb::GetPendingBidsRequest {
        owner_uid: text(&q, "ownerUid"),
        tenant: text(&q, "tenant"),
        market: text(&q, "market"),
        include_ended: q.contains_key("all"),
    };
    let found = s.pending(caller, request).await?;
    Ok(Json(json!({ "units": found.units, "bids": found.bids.iter().map(json::bid).collect::<Vec<_>>() })))
}

async fn bid(State(s): Shared, Read(caller): Read, Path(id): Path<String>, Query(q): Params) -> Answer {
    let tenant = text(&q, "tenant");
    Ok(Json(json::bid(&s.get_bid(caller, pb::GetBidRequest { bid: id, tenant }).await?)))
}

async fn amend(
    State(s): Shared,
    Trade(caller): Trade,
    Path(id): Path<String>,
    change: Result<Json<Change>, JsonRejection>,
) -> Answer {
    let change = body(change)?;
    let request = pb::AmendBidRequest {
        bid: id,
        limit_micros: change.limit.map(|limit| micros("limit", &limit)).transpose()?,
        quantity: change.quantity,
        if_owner_version: change.if_owner_version,
        tenant: change.tenant,
    };
    Ok(Json(json::reply(&s.amend(caller, request).await?)))
}

fn version(query: &BTreeMap<String, String>) -> Result<Option<u64>, RequestError> {
    query.contains_key("ifOwnerVersion").then(|| number(query, "ifOwnerVersion")).transpose()
}

async fn cancel(State(s): Shared, Trade(caller): Trade, Path(id): Path<String>, Query(q): Params) -> Answer {
    let request =
        pb::CancelBidRequest { bid: id, if_owner_version: version(&q)?, tenant: text(&q, "tenant") };
    Ok(Json(json::reply(&s.cancel(caller, request).await?)))
}

async fn explain(State(s): Shared, Read(caller): Read, Path(id): Path<String>, Query(q): Params) -> Answer {
    let tenant = text(&q, "tenant");
    Ok(Json(json::explanation(&s.explain(caller, pb::ExplainRequest { id, tenant }).await?)))
}

async fn allocations(State(s): Shared, Read(caller): Read, Query(q): Params) -> Answer {
    let request = pb::ListAllocationsRequest {
        owner_uid: text(&q, "ownerUid"),
        tenant: text(&q, "tenant"),
        include_ended: q.contains_key("all"),
    };
    let found = s.allocations(caller, request).await?;
    Ok(Json(json!({ "allocations": found.allocations.iter().map(json::allocation).collect::<Vec<_>>() })))
}

async fn release(State(s): Shared, Trade(caller): Trade, Path(id): Path<String>, Query(q): Params) -> Answer {
    let request = pb::ReleaseAllocationRequest {
        allocation: id,
        if_owner_version: version(&q)?,
        tenant: text(&q, "tenant"),
        reason: 0,
    };
    Ok(Json(json::reply(&s.release(caller, request).await?)))
}

async fn charges(State(s): Shared, Read(caller): Read, Query(q): Params) -> Result<Response, RequestError> {
    let request = pb::ListChargesRequest {
        tenant: text(&q, "tenant"),
        from_ms: number(&q, "from")?,
        to_ms: number(&q, "to")?,
    };
    match text(&q, "format").as_str() {
        "" | "json" => {
            let rows = s.charges(caller, request).await?;
            Ok(Json(json!({ "charges": rows.iter().map(json::charge).collect::<Vec<_>>() })).into_response())
        }
        "csv" => {
            let rows = s.charges(caller, request).await?;
            let mut csv = String::from("allocation,from_ms,to_ms,price,reason\n");
            for c in rows {
                let price = Price::micros(c.price_micros);
                csv += &format!("{},{},{},{price},{}\n", c.allocation, c.from_ms, c.to_ms, c.reason);
            }
            Ok(([(header::CONTENT_TYPE, "text/csv")], csv).into_response())
        }
        "focus" => {
            Ok(([(header::CONTENT_TYPE, "text/csv")], s.focus(caller, &request).await?).into_response())
        }
        other => Err(RequestError::invalid_field("format", format!("no format {other}: json, csv or focus"))),
    }
}

/// Streams price changes as server-sent events, or over a WebSocket if the request asks for an upgrade.
async fn stream(
    State(s): Shared,
    _: Read,
    headers: HeaderMap,
    Query(q): Params,
    upgrade: Option<Upgrade>,
) -> Result<Response, RequestError> {
    let only = match q.get("market") {
        Some(name) => vec![s.market(name)?],
        None => Vec::new(),
    };
    // A browser that reconnects sends the last id that it received.
    let had = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let from_seq = if q.contains_key("from_seq") { Some(number(&q, "from_seq")?) } else { had };
    let (stop, tasks) = (s.stop.clone(), s.streams.clone());
    let frames = price_stream::stream(s, only, from_seq);
    if let Some(upgrade) = upgrade {
        return Ok(upgrade.serve(frames, &tasks, stop));
    }
    let frames = frames.take_until(stop.cancelled_owned()).map(|frame| Ok::<_, Infallible>(sse(&frame)));
    Ok(Sse::new(frames).keep_alive(KeepAlive::new().interval(HEARTBEAT)).into_response())
}

fn sse(frame: &pb::PriceFrame) -> Frame {
    let body = json::price_frame(frame).to_string();
    Frame::default().event(frame.r#type.clone()).id(frame.seq.to_string()).data(body)
}

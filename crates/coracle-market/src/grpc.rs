//! `coracle.market.v1` over gRPC: each method authenticates its caller and calls the service.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use coracle_auction::{Event, TenantNo};
use coracle_proto::market as pb;
use coracle_proto::market::{admin_server, market_server, supply_server, trading_server};
use futures_util::{Stream, StreamExt as _};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use crate::caller::{Caller, Scope};
use crate::convert;
use crate::error::RequestError;
use crate::price_stream;
use crate::registry::Kind;
use crate::service::Service;
use crate::writer::Batch;

/// Number of frames that are buffered for a slow reader.
const FRAMES: usize = 256;
/// Interval at which the leases of an owner with an open stream are renewed.
const RENEW_EVERY: Duration = Duration::from_secs(60);

/// All four services.
#[derive(Clone, Debug)]
pub(crate) struct GrpcServices {
    pub(crate) service: Arc<Service>,
}

impl From<RequestError> for Status {
    fn from(problem: RequestError) -> Self {
        let code = match (problem.status, problem.code) {
            (400, _) => Code::InvalidArgument,
            (401, _) => Code::Unauthenticated,
            (403, _) => Code::PermissionDenied,
            (404, _) => Code::NotFound,
            (409, "IDEMPOTENCY_CONFLICT") => Code::AlreadyExists,
            (409, "OWNER_VERSION") => Code::Aborted,
            (409, _) => Code::FailedPrecondition,
            (429, _) => Code::ResourceExhausted,
            (503, _) => Code::Unavailable,
            _ => Code::Internal,
        };
        let mut status = Self::new(code, problem.to_string());
        if let Some(version) = problem.owner_version
            && let Ok(value) = version.to_string().parse()
        {
            status.metadata_mut().insert("coracle-owner-version", value);
        }
        if let Some(value) = problem.field.and_then(|field| field.parse().ok()) {
            status.metadata_mut().insert("coracle-field", value);
        }
        if let Ok(value) = problem.code.parse() {
            status.metadata_mut().insert("coracle-code", value);
        }
        status
    }
}

type Frames<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl GrpcServices {
    fn caller<T>(&self, request: &Request<T>, scope: Scope) -> Result<Caller, Status> {
        let token = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        Ok(self.service.gate.caller(token, &self.service.reviewed, scope)?)
    }

    /// Authenticates a caller of the supplier API. If an authority for clients is configured, a certificate is required, so
    /// that a stolen token alone is useless.
    fn supplier_caller<T>(&self, request: &Request<T>) -> Result<Caller, Status> {
        if self.service.verifies_suppliers && request.peer_certs().is_none_or(|chain| chain.is_empty()) {
            let detail = "suppliers need a client certificate of the market's authority";
            return Err(RequestError::new(401, "CLIENT_CERTIFICATE", detail).into());
        }
        self.caller(request, Scope::Supply)
    }

    /// Creates a stream: the present state first, then what `pick` finds in each batch. A reader that falls behind starts
    /// again.
    fn stream<T: Send + 'static>(
        &self,
        first: impl Fn(&Service) -> Result<Vec<T>, RequestError> + Send + 'static,
        pick: impl Fn(&Service, &Batch) -> Vec<T> + Send + 'static,
    ) -> Frames<T> {
        let (tx, rx) = mpsc::channel(FRAMES);
        let (service, stop) = (self.service.clone(), self.service.stop.clone());
        let pump = async move {
            'over: loop {
                let mut batches = service.writer.events.subscribe();
                let frames = match first(&service) {
                    Ok(frames) => frames,
                    Err(problem) => {
                        tx.send(Err(problem.into())).await.unwrap_or_default();
                        return;
                    }
                };
                for frame in frames {
                    if tx.send(Ok(frame)).await.is_err() {
                        return;
                    }
                }
                loop {
                    let batch = match batches.recv().await {
                        Ok(batch) => batch,
                        Err(RecvError::Lagged(_)) => continue 'over,
                        Err(RecvError::Closed) => return,
                    };
                    for frame in pick(&service, &batch) {
                        if tx.send(Ok(frame)).await.is_err() {
                            return;
                        }
                    }
                }
            }
        };
        self.service.streams.spawn(async move { stop.run_until_cancelled(pump).await });
        Box::pin(ReceiverStream::new(rx))
    }
}

#[tonic::async_trait]
impl market_server::Market for GrpcServices {
    async fn list_markets(
        &self,
        r: Request<pb::ListMarketsRequest>,
    ) -> Result<Response<pb::ListMarketsResponse>, Status> {
        self.caller(&r, Scope::Read)?;
        Ok(Response::new(pb::ListMarketsResponse { markets: self.service.prices()? }))
    }

    async fn get_market_price(
        &self,
        r: Request<pb::GetMarketPriceRequest>,
    ) -> Result<Response<pb::MarketPrice>, Status> {
        self.caller(&r, Scope::Read)?;
        let r = r.into_inner();
        Ok(Response::new(self.service.price(&r.instance_type, &r.region)?))
    }

    async fn get_price_history(
        &self,
        r: Request<pb::GetPriceHistoryRequest>,
    ) -> Result<Response<pb::PriceHistory>, Status> {
        self.caller(&r, Scope::Read)?;
        Ok(Response::new(self.service.history(r.get_ref()).await?))
    }

    async fn get_book(&self, r: Request<pb::GetBookRequest>) -> Result<Response<pb::Book>, Status> {
        self.caller(&r, Scope::Read)?;
        Ok(Response::new(self.service.book(&r.get_ref().market)?))
    }

    type StreamPricesStream = Frames<pb::PriceFrame>;

    async fn stream_prices(
        &self,
        r: Request<pb::StreamPricesRequest>,
    ) -> Result<Response<Self::StreamPricesStream>, Status> {
        self.caller(&r, Scope::Read)?;
        let r = r.into_inner();
        let only = r.markets.iter().map(|name| self.service.market(name)).collect::<Result<Vec<_>, _>>()?;
        let (from_seq, stop) = (r.from_seq, self.service.stop.clone());
        let frames = price_stream::stream(self.service.clone(), only, from_seq).map(Ok);
        Ok(Response::new(Box::pin(frames.take_until(stop.cancelled_owned()))))
    }

    async fn advise(&self, r: Request<pb::AdviseRequest>) -> Result<Response<pb::Advice>, Status> {
        self.caller(&r, Scope::Read)?;
        Ok(Response::new(self.service.advise(r.get_ref()).await?))
    }

    async fn simulate(&self, r: Request<pb::SimulateRequest>) -> Result<Response<pb::Simulation>, Status> {
        let caller = self.caller(&r, Scope::Read)?;
        Ok(Response::new(self.service.simulate(caller, r.get_ref()).await?))
    }

    async fn list_lots(
        &self,
        r: Request<pb::ListLotsRequest>,
    ) -> Result<Response<pb::ListLotsResponse>, Status> {
        self.caller(&r, Scope::Read)?;
        Ok(Response::new(pb::ListLotsResponse { lots: self.service.lots(&r.get_ref().market)? }))
    }

    async fn list_instance_types(
        &self,
        r: Request<pb::ListInstanceTypesRequest>,
    ) -> Result<Response<pb::ListInstanceTypesResponse>, Status> {
        self.caller(&r, Scope::Read)?;
        Ok(Response::new(pb::ListInstanceTypesResponse { types: self.service.types() }))
    }
}

#[tonic::async_trait]
impl trading_server::Trading for GrpcServices {
    async fn place_bid(&self, r: Request<pb::PlaceBidRequest>) -> Result<Response<pb::BidReply>, Status> {
        let caller = self.caller(&r, Scope::Trade)?;
        Ok(Response::new(self.service.place(caller, r.into_inner()).await?))
    }

    async fn place_bids(
        &self,
        r: Request<pb::PlaceBidsRequest>,
    ) -> Result<Response<pb::PlaceBidsResponse>, Status> {
        use pb::place_bid_result::Result as One;
        let caller = self.caller(&r, Scope::Trade)?;
        let results = self.service.place_all(caller, r.into_inner().bids).await?;
        let results = results.into_iter().map(|result| {
            let result = match result {
                Ok(reply) => One::Reply(reply),
                Err(p) => One::Error(pb::RequestError {
                    code: p.code.into(),
                    detail: p.detail,
                    status: p.status.into(),
                    owner_version: p.owner_version,
                }),
            };
            pb::PlaceBidResult { result: Some(result) }
        });
        Ok(Response::new(pb::PlaceBidsResponse { results: results.collect() }))
    }

    async fn amend_bid(&self, r: Request<pb::AmendBidRequest>) -> Result<Response<pb::BidReply>, Status> {
        let caller = self.caller(&r, Scope::Trade)?;
        Ok(Response::new(self.service.amend(caller, r.into_inner()).await?))
    }

    async fn cancel_bid(&self, r: Request<pb::CancelBidRequest>) -> Result<Response<pb::BidReply>, Status> {
        let caller = self.caller(&r, Scope::Trade)?;
        Ok(Response::new(self.service.cancel(caller, r.into_inner()).await?))
    }

    async fn get_bid(&self, r: Request<pb::GetBidRequest>) -> Result<Response<pb::Bid>, Status> {
        let caller = self.caller(&r, Scope::Read)?;
        Ok(Response::new(self.service.get_bid(caller, r.into_inner()).await?))
    }

    async fn get_pending_bids(
        &self,
        r: Request<pb::GetPendingBidsRequest>,
    ) -> Result<Response<pb::GetPendingBidsResponse>, Status> {
        let caller = self.caller(&r, Scope::Read)?;
        Ok(Response::new(self.service.pending(caller, r.into_inner()).await?))
    }

    async fn list_allocations(
        &self,
        r: Request<pb::ListAllocationsRequest>,
    ) -> Result<Response<pb::ListAllocationsResponse>, Status> {
        let caller = self.caller(&r, Scope::Read)?;
        Ok(Response::new(self.service.allocations(caller, r.into_inner()).await?))
    }

    async fn release_allocation(
        &self,
        r: Request<pb::ReleaseAllocationRequest>,
    ) -> Result<Response<pb::BidReply>, Status> {
        let caller = self.caller(&r, Scope::Trade)?;
        Ok(Response::new(self.service.release(caller, r.into_inner()).await?))
    }

    async fn substitute_victim(
        &self,
        r: Request<pb::SubstituteVictimRequest>,
    ) -> Result<Response<pb::SubstituteVictimResponse>, Status> {
        let caller = self.caller(&r, Scope::Trade)?;
        self.service.substitute(caller, r.into_inner()).await?;
        Ok(Response::new(pb::SubstituteVictimResponse {}))
    }

    type WatchOwnerStream = Frames<pb::OwnerFrame>;

    async fn watch_owner(
        &self,
        r: Request<pb::WatchOwnerRequest>,
    ) -> Result<Response<Self::WatchOwnerStream>, Status> {
        let caller = self.caller(&r, Scope::Trade)?;
        let r = r.into_inner();
        let tenant = self.service.tenant(caller, &r.tenant).await?;
        let watched = Watched { tenant, below: r.below, uid: r.owner_uid };
        let (state, changes, renewed) = (watched.clone(), watched.clone(), watched);
        let first = move |service: &Service| owner_state(service, &state);
        let frames = self.stream(first, move |service, batch| owner_changes(service, batch, &changes));
        let (service, stop) = (self.service.clone(), self.service.stop.clone());
        let (alive, mut ended) = mpsc::channel::<()>(1);
        self.service.streams.spawn(async move {
            loop {
                for tenant in renewed.tenants(&service) {
                    if let Err(problem) = service.renew(tenant, &renewed.uid).await {
                        tracing::warn!(%problem, "renew leases");
                    }
                }
                tokio::select! {
                    () = tokio::time::sleep(RENEW_EVERY) => {}
                    () = stop.cancelled() => return,
                    _ = ended.recv() => return,
                }
            }
        });
        // The renewal ends when the stream that holds the sender is dropped.
        let held = frames.map(move |frame| {
            let _alive = &alive;
            frame
        });
        Ok(Response::new(Box::pin(held)))
    }

    async fn explain(&self, r: Request<pb::ExplainRequest>) -> Result<Response<pb::Explanation>, Status> {
        let caller = self.caller(&r, Scope::Read)?;
        Ok(Response::new(self.service.explain(caller, r.into_inner()).await?))
    }

    async fn list_charges(
        &self,
        r: Request<pb::ListChargesRequest>,
    ) -> Result<Response<pb::ListChargesResponse>, Status> {
        let caller = self.caller(&r, Scope::Read)?;
        Ok(Response::new(pb::ListChargesResponse {
            charges: self.service.charges(caller, r.into_inner()).await?,
        }))
    }

    async fn get_budget(&self, r: Request<pb::GetBudgetRequest>) -> Result<Response<pb::Budget>, Status> {
        let caller = self.caller(&r, Scope::Read)?;
        Ok(Response::new(self.service.budget(caller, r.into_inner()).await?))
    }
}

/// Owners whose bids and allocations are watched.
#[derive(Clone, Debug)]
struct Watched {
    tenant: u32,
    /// Whether the tenants below are included.
    below: bool,
    /// UID of the owner; empty: all owners.
    uid: String,
}

impl Watched {
    /// Present tenants; new namespaces create new ones.
    fn tenants(&self, service: &Service) -> Vec<u32> {
        if !self.below {
            return vec![self.tenant];
        }
        let own = service.registry.name(Kind::Tenant, self.tenant);
        let all = service.registry.all(Kind::Tenant).into_iter();
        all.filter(|(no, name)| *no == self.tenant || is_below(name, &own)).map(|(no, _)| no).collect()
    }

    fn has(&self, service: &Service, tenant: u32) -> bool {
        tenant == self.tenant
            || self.below && {
                let own = service.registry.name(Kind::Tenant, self.tenant);
                is_below(&service.registry.name(Kind::Tenant, tenant), &own)
            }
    }
}

fn is_below(name: &str, tenant: &str) -> bool {
    name.strip_prefix(tenant).is_some_and(|rest| rest.starts_with('/'))
}

/// All bids and allocations of the owners and their versions, between two frames `synced`.
fn owner_state(service: &Service, watched: &Watched) -> Result<Vec<pb::OwnerFrame>, RequestError> {
    use pb::owner_frame::Frame;
    let mark = |yes| pb::OwnerFrame { seq: 0, market: String::new(), frame: Some(Frame::Synced(yes)) };
    let mut frames = vec![mark(false)];
    let tenants = watched.tenants(service);
    let key = (!watched.uid.is_empty()).then(|| convert::owner_key(&watched.uid).0);
    for market in service.markets() {
        service.writer.read(market, |state| {
            let seq = u64::try_from(state.seq).unwrap_or(0);
            let mut put =
                |frame| frames.push(pb::OwnerFrame { seq, market: state.name.clone(), frame: Some(frame) });
            for (id, row) in tenants.iter().flat_map(|tenant| service.rows(state, *tenant, &watched.uid)) {
                put(Frame::Bid(convert::bid(market, state, &service.registry, id, row)));
                for (allocation, row) in state.market.allocations_of(id) {
                    put(Frame::Allocation(convert::allocation(
                        market,
                        state,
                        &service.registry,
                        allocation,
                        row,
                    )));
                }
            }
            // Owners without bids are included: a client must know its version to change anything.
            let owners = tenants.iter().flat_map(|tenant| state.market.owners_of_tenant(TenantNo(*tenant)));
            for (owner, version) in owners.filter(|(owner, _)| key.is_none_or(|key| key == *owner)) {
                let owner_uid = convert::owner_uid(&service.registry, owner);
                put(Frame::Owner(pb::OwnerVersion { owner_uid, version }));
            }
        })?;
    }
    frames.push(mark(true));
    Ok(frames)
}

/// Frames for the changes of a batch.
fn owner_changes(service: &Service, batch: &Batch, watched: &Watched) -> Vec<pb::OwnerFrame> {
    use pb::owner_frame::Frame;
    let key = (!watched.uid.is_empty()).then(|| convert::owner_key(&watched.uid).0);
    let is_mine = |tenant: u32, owner| key.is_none_or(|key| key == owner) && watched.has(service, tenant);
    let found = service.writer.read(batch.market, |state| -> Vec<pb::OwnerFrame> {
        let mine = |bid| {
            state.market.bid(bid).filter(|row| {
                let (tenant, owner) = state.market.owner_of(row);
                is_mine(tenant.0, owner)
            })
        };
        let bid = |id, row| Frame::Bid(convert::bid(batch.market, state, &service.registry, id, row));
        let unit = |allocation, row| {
            Frame::Allocation(convert::allocation(batch.market, state, &service.registry, allocation, row))
        };
        let mut frames = Vec::new();
        for event in &batch.events {
            match event {
                Event::Bid { bid: id } => frames.extend(mine(*id).map(|row| bid(*id, row))),
                // A bid counts its units by state. Without its frame a reader would see the allocation in two states, or in
                // none.
                Event::Allocation { allocation, bid: id } => {
                    if let Some((row, of)) = state.market.allocation(*allocation).zip(mine(*id)) {
                        frames.extend([bid(*id, of), unit(*allocation, row)]);
                    }
                }
                Event::Returned { allocation, bid: id, matched_at } => {
                    if let Some(of) = mine(*id) {
                        let allocation = crate::names::allocation(batch.market, *matched_at, *allocation);
                        let state = pb::AllocationState::Returned.into();
                        let gone = pb::Allocation { allocation, state, ..Default::default() };
                        frames.extend([bid(*id, of), Frame::Allocation(gone)]);
                    }
                }
                Event::AtRisk { allocation, .. } | Event::RiskOver { allocation } => {
                    let row = state.market.allocation(*allocation);
                    let row = row.filter(|row| mine(state.market.bid_of(row)).is_some());
                    frames.extend(row.map(|row| unit(*allocation, row)));
                }
                Event::Owner { tenant, owner, version } if is_mine(tenant.0, *owner) => {
                    let owner_uid = convert::owner_uid(&service.registry, *owner);
                    frames.push(Frame::Owner(pb::OwnerVersion { owner_uid, version: *version }));
                }
                _ => {}
            }
        }
        let market = &state.name;
        let all = frames.into_iter().map(|frame| pb::OwnerFrame {
            seq: batch.seq,
            market: market.clone(),
            frame: Some(frame),
        });
        all.collect()
    });
    found.unwrap_or_default()
}

#[tonic::async_trait]
impl supply_server::Supply for GrpcServices {
    async fn put_lot(&self, r: Request<pb::PutLotRequest>) -> Result<Response<pb::Lot>, Status> {
        let caller = self.supplier_caller(&r)?;
        Ok(Response::new(self.service.put_lot(caller, r.into_inner()).await?))
    }

    async fn drain_lot(
        &self,
        r: Request<pb::DrainLotRequest>,
    ) -> Result<Response<pb::DrainLotResponse>, Status> {
        let caller = self.supplier_caller(&r)?;
        self.service.drain_lot(caller, &r.get_ref().lot).await?;
        Ok(Response::new(pb::DrainLotResponse {}))
    }

    type StreamDesiredStream = Frames<pb::DesiredFrame>;

    async fn stream_desired(
        &self,
        r: Request<pb::StreamDesiredRequest>,
    ) -> Result<Response<Self::StreamDesiredStream>, Status> {
        let caller = self.supplier_caller(&r)?;
        let supplier = self.service.supplier(caller).await?;
        let first = move |service: &Service| Ok(service.desired_set(supplier));
        Ok(Response::new(self.stream(first, move |service, batch| service.desired_changes(batch, supplier))))
    }

    async fn report_observed(
        &self,
        r: Request<pb::ReportObservedRequest>,
    ) -> Result<Response<pb::ReportObservedResponse>, Status> {
        let caller = self.supplier_caller(&r)?;
        self.service.report_observed(caller, r.into_inner()).await?;
        Ok(Response::new(pb::ReportObservedResponse {}))
    }
}

#[tonic::async_trait]
impl admin_server::Admin for GrpcServices {
    async fn put_market(
        &self,
        r: Request<pb::PutMarketRequest>,
    ) -> Result<Response<pb::MarketPrice>, Status> {
        let caller = self.caller(&r, Scope::Admin)?;
        Ok(Response::new(self.service.put_market(caller, r.get_ref()).await?))
    }

    async fn put_instance_type(
        &self,
        r: Request<pb::InstanceType>,
    ) -> Result<Response<pb::InstanceType>, Status> {
        self.caller(&r, Scope::Admin)?;
        Ok(Response::new(self.service.put_type(r.into_inner()).await?))
    }

    async fn put_tenant(
        &self,
        r: Request<pb::PutTenantRequest>,
    ) -> Result<Response<pb::PutTenantResponse>, Status> {
        self.caller(&r, Scope::Admin)?;
        Ok(Response::new(pb::PutTenantResponse { token: self.service.put_tenant(r.get_ref()).await? }))
    }

    async fn list_tokens(
        &self,
        r: Request<pb::ListTokensRequest>,
    ) -> Result<Response<pb::ListTokensResponse>, Status> {
        self.caller(&r, Scope::Admin)?;
        Ok(Response::new(pb::ListTokensResponse { tokens: self.service.tokens(&r.get_ref().tenant)? }))
    }

    async fn revoke_token(
        &self,
        r: Request<pb::RevokeTokenRequest>,
    ) -> Result<Response<pb::RevokeTokenResponse>, Status> {
        self.caller(&r, Scope::Admin)?;
        self.service.revoke(&r.get_ref().id).await?;
        Ok(Response::new(pb::RevokeTokenResponse {}))
    }

    async fn halt(&self, r: Request<pb::HaltRequest>) -> Result<Response<pb::HaltResponse>, Status> {
        let caller = self.caller(&r, Scope::Admin)?;
        self.service.halt(caller, &r.get_ref().market, true).await?;
        Ok(Response::new(pb::HaltResponse {}))
    }

    async fn resume(&self, r: Request<pb::ResumeRequest>) -> Result<Response<pb::ResumeResponse>, Status> {
        let caller = self.caller(&r, Scope::Admin)?;
        self.service.halt(caller, &r.get_ref().market, false).await?;
        Ok(Response::new(pb::ResumeResponse {}))
    }

    async fn snapshot(
        &self,
        r: Request<pb::SnapshotRequest>,
    ) -> Result<Response<pb::SnapshotResponse>, Status> {
        self.caller(&r, Scope::Admin)?;
        let (bytes, seq) = self.service.snapshot(&r.get_ref().market).await?;
        Ok(Response::new(pb::SnapshotResponse { bytes: bytes as u64, seq: u64::try_from(seq).unwrap_or(0) }))
    }

    async fn verify(&self, r: Request<pb::VerifyRequest>) -> Result<Response<pb::VerifyResponse>, Status> {
        self.caller(&r, Scope::Audit)?;
        let v = self.service.verify(&r.get_ref().market).await?;
        let (commands, sound, detail) = (v.commands, v.sound, v.detail);
        Ok(Response::new(pb::VerifyResponse { commands, sound, detail }))
    }

    async fn audit(&self, r: Request<pb::AuditRequest>) -> Result<Response<pb::AuditResponse>, Status> {
        self.caller(&r, Scope::Audit)?;
        Ok(Response::new(pb::AuditResponse { entries: self.service.audit(r.get_ref()).await? }))
    }
}

//! gRPC calls of the in-memory market.

use std::collections::BTreeSet;

use coracle_auction::{
    AllocationId, AllocationState, Amendment, BidId, BidRequest, Command, Event, Price, ReleaseReason,
    TenantNo,
};
use coracle_proto::market::{self as pb, market_server::Market, owner_frame::Frame, trading_server::Trading};
use futures_util::StreamExt as _;
use tokio_stream::wrappers::BroadcastStream;
use tonic::{Request, Response, Status};

use super::{Frames, SimMarket, hash, local};

fn not_simulated<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not part of the simulation"))
}

#[tonic::async_trait]
impl Trading for SimMarket {
    async fn place_bid(&self, r: Request<pb::PlaceBidRequest>) -> Result<Response<pb::BidReply>, Status> {
        let r = r.into_inner();
        let request = {
            let mut state = self.0.state.lock().unwrap();
            let labels: std::collections::BTreeMap<_, _> = r.labels.iter().collect();
            let key = u128::from(hash((&r.tenant, &r.idempotency_key))) + 1;
            BidRequest {
                tenant: TenantNo(state.number(&r.tenant)),
                owner: state.owner(&r.owner_uid),
                if_owner_version: r.if_owner_version.filter(|_| !self.forgets()),
                key: if self.forgets() { [0; 16] } else { key.to_be_bytes() },
                body: hash((r.limit_micros, r.quantity, r.min_fill, &r.owner_uid, &labels)),
                limit: Price::micros(r.limit_micros),
                quantity: r.quantity,
                min_fill: r.min_fill,
                lease_ms: 900_000,
                expires_at: None,
                labels: labels.into_iter().map(|(k, v)| (k.as_str().into(), v.as_str().into())).collect(),
            }
        };
        self.execute_command("PlaceBid", Command::Place { request: Box::new(request) }).await
    }

    async fn amend_bid(&self, r: Request<pb::AmendBidRequest>) -> Result<Response<pb::BidReply>, Status> {
        let r = r.into_inner();
        let amendment = Amendment {
            tenant: TenantNo(self.0.state.lock().unwrap().number(&r.tenant)),
            bid: local(&r.bid, BidId)?,
            if_owner_version: r.if_owner_version.filter(|_| !self.forgets()),
            limit: r.limit_micros.map(Price::micros),
            units: r.quantity,
        };
        self.execute_command("AmendBid", Command::Amend { amendment }).await
    }

    async fn cancel_bid(&self, r: Request<pb::CancelBidRequest>) -> Result<Response<pb::BidReply>, Status> {
        let r = r.into_inner();
        let command = Command::Cancel {
            tenant: TenantNo(self.0.state.lock().unwrap().number(&r.tenant)),
            bid: local(&r.bid, BidId)?,
            if_owner_version: r.if_owner_version.filter(|_| !self.forgets()),
        };
        self.execute_command("CancelBid", command).await
    }

    async fn release_allocation(
        &self,
        r: Request<pb::ReleaseAllocationRequest>,
    ) -> Result<Response<pb::BidReply>, Status> {
        let r = r.into_inner();
        let command = Command::Release {
            tenant: TenantNo(self.0.state.lock().unwrap().number(&r.tenant)),
            allocation: local(&r.allocation, AllocationId)?,
            if_owner_version: r.if_owner_version.filter(|_| !self.forgets()),
            reason: match r.reason() {
                pb::ReleaseReason::NodeFailed => ReleaseReason::NodeFailed,
                pb::ReleaseReason::Unspecified => ReleaseReason::Unneeded,
            },
        };
        self.execute_command("ReleaseAllocation", command).await
    }

    async fn get_pending_bids(
        &self,
        r: Request<pb::GetPendingBidsRequest>,
    ) -> Result<Response<pb::GetPendingBidsResponse>, Status> {
        self.reachable()?;
        let bids = {
            let state = self.0.state.lock().unwrap();
            let all = state.engine.bids().filter(|(_, bid)| !bid.is_terminal());
            let all = all.map(|(id, row)| state.bid(id, row));
            all.filter(|bid| bid.owner_uid == r.get_ref().owner_uid).collect::<Vec<_>>()
        };
        let units = bids.iter().map(|bid| bid.open + bid.matched + bid.provisioning).sum();
        self.0.sim.after_call("GetPendingBids").await;
        Ok(Response::new(pb::GetPendingBidsResponse { bids: self.unless_forgotten(bids), units }))
    }

    async fn list_allocations(
        &self,
        r: Request<pb::ListAllocationsRequest>,
    ) -> Result<Response<pb::ListAllocationsResponse>, Status> {
        self.reachable()?;
        let allocations = {
            let state = self.0.state.lock().unwrap();
            let all = state.engine.allocations().filter(|(_, row)| row.state() != AllocationState::Ended);
            let all = all.map(|(id, row)| state.allocation(id, row));
            all.filter(|row| row.owner_uid == r.get_ref().owner_uid).collect()
        };
        let allocations = self.unless_forgotten(allocations);
        self.0.sim.after_call("ListAllocations").await;
        Ok(Response::new(pb::ListAllocationsResponse { allocations }))
    }

    type WatchOwnerStream = Frames<pb::OwnerFrame>;

    async fn watch_owner(
        &self,
        _: Request<pb::WatchOwnerRequest>,
    ) -> Result<Response<Self::WatchOwnerStream>, Status> {
        self.reachable()?;
        let mark = |yes| pb::OwnerFrame { frame: Some(Frame::Synced(yes)), ..pb::OwnerFrame::default() };
        let (known, hidden, batches) = {
            let state = self.0.state.lock().unwrap();
            let hidden: BTreeSet<_> = if self.forgets() {
                state.engine.bids().map(|(id, _)| id).collect()
            } else {
                BTreeSet::new()
            };
            (self.unless_forgotten(state.frames()), hidden, self.0.batches.subscribe())
        };
        let first = [vec![mark(false)], known, vec![mark(true)]].concat();
        let market = self.clone();
        let changes = BroadcastStream::new(batches).flat_map(move |batch| {
            let state = market.0.state.lock().unwrap();
            let frames = batch.map(|batch| state.changes(&batch, &hidden)).unwrap_or_default();
            futures_util::stream::iter(frames)
        });
        Ok(Response::new(self.until_cut(futures_util::stream::iter(first).chain(changes))))
    }

    async fn place_bids(
        &self,
        _: Request<pb::PlaceBidsRequest>,
    ) -> Result<Response<pb::PlaceBidsResponse>, Status> {
        not_simulated()
    }

    async fn get_bid(&self, _: Request<pb::GetBidRequest>) -> Result<Response<pb::Bid>, Status> {
        not_simulated()
    }

    async fn substitute_victim(
        &self,
        r: Request<pb::SubstituteVictimRequest>,
    ) -> Result<Response<pb::SubstituteVictimResponse>, Status> {
        self.reachable()?;
        let r = r.into_inner();
        let tenant = TenantNo(self.0.state.lock().unwrap().number(&r.tenant));
        let (victim, other) = (local(&r.preempting, AllocationId)?, local(&r.other, AllocationId)?);
        self.apply(Command::Substitute { tenant, victim, other })?;
        Ok(Response::new(pb::SubstituteVictimResponse {}))
    }

    async fn explain(&self, _: Request<pb::ExplainRequest>) -> Result<Response<pb::Explanation>, Status> {
        not_simulated()
    }

    async fn list_charges(
        &self,
        _: Request<pb::ListChargesRequest>,
    ) -> Result<Response<pb::ListChargesResponse>, Status> {
        not_simulated()
    }

    async fn get_budget(&self, _: Request<pb::GetBudgetRequest>) -> Result<Response<pb::Budget>, Status> {
        not_simulated()
    }
}

#[tonic::async_trait]
impl Market for SimMarket {
    async fn list_markets(
        &self,
        _: Request<pb::ListMarketsRequest>,
    ) -> Result<Response<pb::ListMarketsResponse>, Status> {
        self.reachable()?;
        let price = self.0.state.lock().unwrap().price("price").price;
        Ok(Response::new(pb::ListMarketsResponse { markets: price.into_iter().collect() }))
    }

    type StreamPricesStream = Frames<pb::PriceFrame>;

    async fn stream_prices(
        &self,
        _: Request<pb::StreamPricesRequest>,
    ) -> Result<Response<Self::StreamPricesStream>, Status> {
        self.reachable()?;
        let market = self.clone();
        let frames = BroadcastStream::new(self.0.batches.subscribe()).filter_map(move |batch| {
            let is_call = batch.is_ok_and(|batch| batch.1.iter().any(|e| matches!(e, Event::Call { .. })));
            let frame = market.0.state.lock().unwrap().price(if is_call { "call" } else { "price" });
            std::future::ready(Some(frame))
        });
        Ok(Response::new(self.until_cut(frames)))
    }

    async fn get_market_price(
        &self,
        _: Request<pb::GetMarketPriceRequest>,
    ) -> Result<Response<pb::MarketPrice>, Status> {
        not_simulated()
    }

    async fn get_price_history(
        &self,
        _: Request<pb::GetPriceHistoryRequest>,
    ) -> Result<Response<pb::PriceHistory>, Status> {
        not_simulated()
    }

    async fn get_book(&self, _: Request<pb::GetBookRequest>) -> Result<Response<pb::Book>, Status> {
        not_simulated()
    }

    async fn advise(&self, _: Request<pb::AdviseRequest>) -> Result<Response<pb::Advice>, Status> {
        not_simulated()
    }

    async fn simulate(&self, _: Request<pb::SimulateRequest>) -> Result<Response<pb::Simulation>, Status> {
        not_simulated()
    }

    async fn list_lots(
        &self,
        _: Request<pb::ListLotsRequest>,
    ) -> Result<Response<pb::ListLotsResponse>, Status> {
        not_simulated()
    }

    async fn list_instance_types(
        &self,
        _: Request<pb::ListInstanceTypesRequest>,
    ) -> Result<Response<pb::ListInstanceTypesResponse>, Status> {
        not_simulated()
    }
}

//! Placing, changing, cancelling and watching bids.

use coracle_auction::{
    AllocationId, AllocationState, Amendment, BidId, BidRequest, BidState, Command, OwnerKey, Price,
    ReleaseReason, Reply, TenantNo, Time,
};
use coracle_proto::market as pb;

use super::{Service, check_name};
use crate::caller::Caller;
use crate::convert;
use crate::error::RequestError;
use crate::focus;
use crate::names::{self, Named};
use crate::registry::Kind;
use crate::signed::ms;
use crate::state::MarketState;
use crate::writer::MARKET_ITSELF;

/// Default lease of a bid, in milliseconds.
const LEASE_MS: i64 = 15 * 60 * 1000;
/// Longest lease, in milliseconds: the engine counts it in 32 bits.
const LEASE_MAX_MS: i64 = 30 * 24 * 3600 * 1000;
/// Most bids of one request.
pub(crate) const BIDS_MAX: usize = 512;
/// Most charges of one answer.
const CHARGES_MAX: i64 = 100_000;
const KEY_MAX: usize = 128;
const LABELS_MAX: usize = 32;

impl Service {
    pub(crate) async fn place(
        &self,
        caller: Caller,
        request: pb::PlaceBidRequest,
    ) -> Result<pb::BidReply, RequestError> {
        let (market, request) = self.request(caller, request).await?;
        let tenant = request.tenant.0;
        let command = Command::Place { request: Box::new(request) };
        let (reply, at) = if self.is_capped(tenant) {
            Box::pin(self.apply_under_cap(caller, tenant, market, command)).await?
        } else {
            self.writer.apply_one(market, caller.tenant, command).await?
        };
        self.bid_reply(market, reply, at)
    }

    /// Places bids independently: a refused bid does not stop the others.
    pub(crate) async fn place_all(
        &self,
        caller: Caller,
        requests: Vec<pb::PlaceBidRequest>,
    ) -> Result<Vec<Result<pb::BidReply, RequestError>>, RequestError> {
        if requests.len() > BIDS_MAX {
            return Err(RequestError::invalid(format!("at most {BIDS_MAX} bids at once")));
        }
        let mut results: Vec<Result<pb::BidReply, RequestError>> = Vec::with_capacity(requests.len());
        let mut run: Vec<Command> = Vec::new();
        let mut run_market = 0;
        for request in requests {
            match self.request(caller, request).await {
                Err(problem) => {
                    self.flush(caller, run_market, &mut run, &mut results).await?;
                    results.push(Err(problem));
                }
                Ok((market, request)) => {
                    if market != run_market {
                        self.flush(caller, run_market, &mut run, &mut results).await?;
                        run_market = market;
                    }
                    let capped = self.is_capped(request.tenant.0);
                    let tenant = request.tenant.0;
                    let command = Command::Place { request: Box::new(request) };
                    if capped {
                        self.flush(caller, run_market, &mut run, &mut results).await?;
                        let reply = Box::pin(self.apply_under_cap(caller, tenant, market, command)).await;
                        results.push(reply.and_then(|(reply, at)| self.bid_reply(market, reply, at)));
                    } else {
                        run.push(command);
                    }
                }
            }
        }
        self.flush(caller, run_market, &mut run, &mut results).await?;
        Ok(results)
    }

    /// Applies the commands that were collected for one market, in one group.
    async fn flush(
        &self,
        caller: Caller,
        market: u32,
        run: &mut Vec<Command>,
        results: &mut Vec<Result<pb::BidReply, RequestError>>,
    ) -> Result<(), RequestError> {
        if run.is_empty() {
            return Ok(());
        }
        let applied = self.writer.apply(market, caller.tenant, std::mem::take(run)).await?;
        for reply in applied.replies {
            results.push(match reply {
                Reply::Refused(refusal) => Err(refusal.into()),
                reply => self.bid_reply(market, reply, applied.at),
            });
        }
        Ok(())
    }

    fn bid_reply(&self, market: u32, reply: Reply, at: Time) -> Result<pb::BidReply, RequestError> {
        let Reply::Bid { bid, owner_version, replayed, below_reserve } = reply else {
            return Err(RequestError::not_found());
        };
        let placed = if replayed {
            self.writer.read(market, |state| state.market.bid(bid).map(coracle_auction::Bid::placed_at))?
        } else {
            None
        };
        let name = names::bid(market, placed.unwrap_or(at), bid);
        Ok(pb::BidReply {
            bid: name,
            owner_version,
            replayed,
            below_reserve,
            at_ms: ms(placed.unwrap_or(at)),
        })
    }

    async fn request(
        &self,
        caller: Caller,
        request: pb::PlaceBidRequest,
    ) -> Result<(u32, BidRequest), RequestError> {
        let market = self.market(&request.market)?;
        let tenant = self.tenant(caller, &request.tenant).await?;
        self.gate.spend(tenant, 1)?;
        if request.idempotency_key.len() > KEY_MAX {
            return Err(RequestError::invalid_field(
                "idempotency_key",
                "idempotency_key must have at most 128 characters",
            ));
        }
        if request.labels.len() > LABELS_MAX {
            return Err(RequestError::invalid_field("labels", "labels must be at most 32"));
        }
        let lease = if request.lease_ms == 0 { LEASE_MS } else { request.lease_ms };
        if !(1000..=LEASE_MAX_MS).contains(&lease) {
            return Err(RequestError::invalid_field("lease", "lease must be from one second to 30 days"));
        }
        let owner = self.owner(&request.owner_uid).await?;
        let body = convert::body_digest(&request);
        Ok((
            market,
            BidRequest {
                tenant: TenantNo(tenant),
                owner,
                if_owner_version: request.if_owner_version,
                key: convert::key_digest(tenant, &request.idempotency_key),
                body,
                limit: Price::micros(request.limit_micros),
                quantity: request.quantity,
                min_fill: request.min_fill,
                lease_ms: u32::try_from(lease).unwrap_or(u32::MAX),
                expires_at: u64::try_from(request.expires_at_ms).ok().filter(|at| *at > 0).map(Time),
                labels: request.labels.into_iter().map(|(k, v)| (k.into(), v.into())).collect(),
            },
        ))
    }

    async fn owner(&self, uid: &str) -> Result<OwnerKey, RequestError> {
        let (key, is_uuid) = convert::owner_key(uid);
        if !is_uuid && !uid.is_empty() {
            check_name("owner_uid", uid)?;
            self.registry.ensure_owner(key.0, uid).await?;
        }
        Ok(key)
    }

    fn is_capped(&self, tenant: u32) -> bool {
        let capped = self.capped.read();
        !capped.is_empty() && self.with_parents(tenant).iter().any(|no| capped.contains(no))
    }

    /// Moves the unused part of the caps to this tenant and market, then applies the command.
    async fn apply_under_cap(
        &self,
        caller: Caller,
        tenant: u32,
        market: u32,
        command: Command,
    ) -> Result<(Reply, Time), RequestError> {
        let caps = self.caps.lock().await;
        self.move_slice(&caps, tenant, market).await?;
        self.writer.apply_one(market, caller.tenant, command).await
    }

    fn parse_bid_name(id: &str) -> Result<(u32, BidId), RequestError> {
        match names::parse(id) {
            Some((Named::Bid(market, bid), _)) => Ok((market, bid)),
            _ => Err(RequestError::not_found()),
        }
    }

    pub(crate) fn parse_allocation_name(id: &str) -> Result<(u32, AllocationId), RequestError> {
        match names::parse(id) {
            Some((Named::Allocation(market, allocation), _)) => Ok((market, allocation)),
            _ => Err(RequestError::not_found()),
        }
    }

    pub(crate) async fn amend(
        &self,
        caller: Caller,
        r: pb::AmendBidRequest,
    ) -> Result<pb::BidReply, RequestError> {
        let (market, bid) = Self::parse_bid_name(&r.bid)?;
        let tenant = self.tenant(caller, &r.tenant).await?;
        self.gate.spend(tenant, 1)?;
        let amendment = Amendment {
            tenant: TenantNo(tenant),
            bid,
            if_owner_version: r.if_owner_version,
            limit: r.limit_micros.map(Price::micros),
            units: r.quantity,
        };
        let command = Command::Amend { amendment };
        let done = if self.is_capped(tenant) {
            Box::pin(self.apply_under_cap(caller, tenant, market, command)).await
        } else {
            self.writer.apply_one(market, caller.tenant, command).await
        };
        let (reply, at) = done?;
        self.reply_for_bid(market, reply, at, r.bid)
    }

    pub(crate) async fn cancel(
        &self,
        caller: Caller,
        r: pb::CancelBidRequest,
    ) -> Result<pb::BidReply, RequestError> {
        let (market, bid) = Self::parse_bid_name(&r.bid)?;
        let tenant = self.tenant(caller, &r.tenant).await?;
        self.gate.spend(tenant, 1)?;
        let command = Command::Cancel { tenant: TenantNo(tenant), bid, if_owner_version: r.if_owner_version };
        let set_price = self.writer.read(market, |state| sets_price(&state.market, bid))?;
        let (reply, at) = self.writer.apply_one(market, caller.tenant, command).await?;
        if set_price {
            self.note_cancelled_setter(tenant, &r.bid);
        }
        self.reply_for_bid(market, reply, at, r.bid)
    }

    /// Logs a cancelled bid that had set the price, with the count of the tenant since the start of the process. A tenant that
    /// raises prices with bids which it cancels before they win does so repeatedly.
    fn note_cancelled_setter(&self, tenant: u32, bid: &str) {
        self.metrics.count_cancelled_setter();
        let mut counts = self.cancelled_setters.lock();
        let count = counts.entry(tenant).or_insert(0u64);
        *count += 1;
        let name = self.registry.name(Kind::Tenant, tenant);
        tracing::warn!(tenant = name, bid, count = *count, "bid that set the price was cancelled");
    }

    pub(crate) async fn release(
        &self,
        caller: Caller,
        r: pb::ReleaseAllocationRequest,
    ) -> Result<pb::BidReply, RequestError> {
        let (market, allocation) = Self::parse_allocation_name(&r.allocation)?;
        let tenant = self.tenant(caller, &r.tenant).await?;
        self.gate.spend(tenant, 1)?;
        let reason = match r.reason() {
            pb::ReleaseReason::NodeFailed => ReleaseReason::NodeFailed,
            pb::ReleaseReason::Unspecified => ReleaseReason::Unneeded,
        };
        let if_owner_version = r.if_owner_version;
        let command = Command::Release { tenant: TenantNo(tenant), allocation, if_owner_version, reason };
        let (reply, at) = self.writer.apply_one(market, caller.tenant, command).await?;
        let name = self.writer.read(market, |state| {
            let Reply::Bid { bid, .. } = reply else { return String::new() };
            state.market.bid(bid).map_or_else(String::new, |row| names::bid(market, row.placed_at(), bid))
        })?;
        self.reply_for_bid(market, reply, at, name)
    }

    fn reply_for_bid(
        &self,
        market: u32,
        reply: Reply,
        at: Time,
        name: String,
    ) -> Result<pb::BidReply, RequestError> {
        Ok(pb::BidReply { bid: name, at_ms: ms(at), ..self.bid_reply(market, reply, at)? })
    }

    pub(crate) async fn substitute(
        &self,
        caller: Caller,
        r: pb::SubstituteVictimRequest,
    ) -> Result<(), RequestError> {
        let (market, victim) = Self::parse_allocation_name(&r.preempting)?;
        let (other_market, other) = Self::parse_allocation_name(&r.other)?;
        let tenant = self.tenant(caller, &r.tenant).await?;
        self.gate.spend(tenant, 1)?;
        if market != other_market {
            return Err(RequestError::invalid("both units must be of one market"));
        }
        let command = Command::Substitute { tenant: TenantNo(tenant), victim, other };
        self.writer.apply_one(market, caller.tenant, command).await.map(drop)
    }

    pub(crate) async fn get_bid(
        &self,
        caller: Caller,
        r: pb::GetBidRequest,
    ) -> Result<pb::Bid, RequestError> {
        let (market, id) = Self::parse_bid_name(&r.bid)?;
        let tenant = self.tenant(caller, &r.tenant).await?;
        self.writer.read(market, |state| {
            let row = state.market.bid(id).ok_or_else(RequestError::not_found)?;
            if state.market.owner_of(row).0.0 != tenant {
                return Err(RequestError::not_found());
            }
            Ok(convert::bid(market, state, &self.registry, id, row))
        })?
    }

    pub(crate) async fn pending(
        &self,
        caller: Caller,
        r: pb::GetPendingBidsRequest,
    ) -> Result<pb::GetPendingBidsResponse, RequestError> {
        let tenant = self.tenant(caller, &r.tenant).await?;
        let only = if r.market.is_empty() { None } else { Some(self.market(&r.market)?) };
        let mut found = pb::GetPendingBidsResponse::default();
        for market in self.markets().into_iter().filter(|no| only.is_none_or(|only| only == *no)) {
            self.writer.read(market, |state| {
                for (id, row) in self.rows(state, tenant, &r.owner_uid) {
                    let u = row.units();
                    found.units += u32::from(u.open) + u32::from(u.matched) + u32::from(u.provisioning);
                    let waits =
                        matches!(row.state(), BidState::Pending | BidState::Matched | BidState::Provisioning);
                    if waits || r.include_ended {
                        found.bids.push(convert::bid(market, state, &self.registry, id, row));
                    }
                }
            })?;
        }
        found.bids.sort_by(|a, b| a.bid.cmp(&b.bid));
        Ok(found)
    }

    /// Bids of one owner, or of all owners of a tenant.
    pub(crate) fn rows<'a>(
        &self,
        state: &'a MarketState,
        tenant: u32,
        owner_uid: &str,
    ) -> Vec<(BidId, &'a coracle_auction::Bid)> {
        if owner_uid.is_empty() {
            state.market.bids_of_tenant(TenantNo(tenant)).collect()
        } else {
            state.market.bids_of(TenantNo(tenant), convert::owner_key(owner_uid).0).collect()
        }
    }

    pub(crate) async fn allocations(
        &self,
        caller: Caller,
        r: pb::ListAllocationsRequest,
    ) -> Result<pb::ListAllocationsResponse, RequestError> {
        let tenant = self.tenant(caller, &r.tenant).await?;
        let mut allocations = Vec::new();
        for market in self.markets() {
            self.writer.read(market, |state| {
                for (bid, _) in self.rows(state, tenant, &r.owner_uid) {
                    for (id, row) in state.market.allocations_of(bid) {
                        if r.include_ended || row.state() != AllocationState::Ended {
                            allocations.push(convert::allocation(market, state, &self.registry, id, row));
                        }
                    }
                }
            })?;
        }
        allocations.sort_by(|a, b| a.allocation.cmp(&b.allocation));
        Ok(pb::ListAllocationsResponse { allocations })
    }

    pub(crate) async fn explain(
        &self,
        caller: Caller,
        r: pb::ExplainRequest,
    ) -> Result<pb::Explanation, RequestError> {
        let tenant = self.tenant(caller, &r.tenant).await?;
        let (market, id) = match names::parse(&r.id) {
            Some((Named::Bid(market, bid), _)) => (market, bid),
            Some((Named::Allocation(market, allocation), _)) => {
                let bid = self.writer.read(market, |state| {
                    state.market.allocation(allocation).map(|row| state.market.bid_of(row))
                })?;
                (market, bid.ok_or_else(RequestError::not_found)?)
            }
            None => return Err(RequestError::not_found()),
        };
        let why = self.writer.read(market, |state| {
            let own = state.market.bid(id).is_some_and(|row| state.market.owner_of(row).0.0 == tenant);
            if own { state.market.explain(id) } else { None }
        })?;
        let why = why.ok_or_else(RequestError::not_found)?;
        Ok(pb::Explanation {
            text: why.to_string(),
            standing: convert::standing(why.standing).into(),
            rank: why.rank,
            of: why.of,
            sold: why.sold,
            clearing_micros: why.clearing.as_micros(),
            limit_micros: why.limit.as_micros(),
            wins_at_micros: why.wins_at.map(Price::as_micros),
            call: why.call,
        })
    }

    pub(crate) async fn charges(
        &self,
        caller: Caller,
        r: pb::ListChargesRequest,
    ) -> Result<Vec<pb::Charge>, RequestError> {
        let tenant = self.tenant(caller, &r.tenant).await?;
        let to = if r.to_ms == 0 { i64::MAX } else { r.to_ms };
        let rows = self.store.charges(tenant, r.from_ms, to, CHARGES_MAX + 1).await?;
        if i64::try_from(rows.len()).unwrap_or(i64::MAX) > CHARGES_MAX {
            return Err(RequestError::invalid(format!(
                "more than {CHARGES_MAX} charges: ask for a shorter time"
            )));
        }
        Ok(rows
            .into_iter()
            .map(|(allocation, from_ms, to_ms, price_micros, reason)| pb::Charge {
                allocation,
                from_ms,
                to_ms,
                price_micros,
                reason,
            })
            .collect())
    }

    /// Charges of a tenant as a FOCUS table, split at the ends of the span.
    pub(crate) async fn focus(
        &self,
        caller: Caller,
        r: &pb::ListChargesRequest,
    ) -> Result<String, RequestError> {
        let tenant = self.tenant(caller, &r.tenant).await?;
        let span = r.from_ms..if r.to_ms == 0 { i64::MAX } else { r.to_ms };
        let item = |charge: pb::Charge| {
            let no = Self::parse_allocation_name(&charge.allocation).map_or(0, |(market, _)| market);
            let market = self.registry.name(Kind::Market, no);
            let cap = || self.writer.read(no, |state| state.market.params().cap.as_micros()).unwrap_or(0);
            focus::Item {
                allocation: charge.allocation,
                list: Price::micros(self.list_price(&market).unwrap_or_else(cap)),
                market,
                from_ms: charge.from_ms,
                to_ms: charge.to_ms,
                price: Price::micros(charge.price_micros),
                reason: charge.reason,
            }
        };
        let items: Vec<_> = self.charges(caller, r.clone()).await?.into_iter().map(item).collect();
        Ok(focus::csv(&self.registry.name(Kind::Tenant, tenant), &items, &span))
    }

    pub(crate) async fn budget(
        &self,
        caller: Caller,
        r: pb::GetBudgetRequest,
    ) -> Result<pb::Budget, RequestError> {
        let tenant = self.tenant(caller, &r.tenant).await?;
        let (hourly_cap_micros, _) = super::tenant_facts(&self.registry.body(Kind::Tenant, tenant));
        let mut budget = pb::Budget { hourly_cap_micros, ..pb::Budget::default() };
        for market in self.markets() {
            if let Some(account) = self.writer.read(market, |state| state.market.account(TenantNo(tenant)))? {
                budget.committed_micros += i64::try_from(account.committed).unwrap_or(i64::MAX);
                budget.units += account.units;
            }
        }
        Ok(budget)
    }

    /// Renews the leases of a tenant's owners with open bids; called while they watch by a stream.
    pub(crate) async fn renew(&self, tenant: u32, owner_uid: &str) -> Result<(), RequestError> {
        let tenant = TenantNo(tenant);
        for market in self.markets() {
            let owners: Vec<OwnerKey> = self.writer.read(market, |state| {
                let rows = self.rows(state, tenant.0, owner_uid);
                let open = rows.into_iter().filter(|(_, row)| row.units().open > 0);
                let owners: std::collections::BTreeSet<_> =
                    open.map(|(_, row)| state.market.owner_of(row).1).collect();
                owners.into_iter().collect()
            })?;
            let commands: Vec<_> = owners.into_iter().map(|owner| Command::Renew { tenant, owner }).collect();
            if !commands.is_empty() {
                self.writer.apply(market, MARKET_ITSELF, commands).await?;
            }
        }
        Ok(())
    }
}

/// Whether the bid set the price of the last call, above the reserve.
fn sets_price(market: &coracle_auction::Market, bid: BidId) -> bool {
    let waits = market.bid(bid).is_some_and(|row| row.units().open > 0);
    let call = market.last_call().filter(|_| waits);
    call.is_some_and(|call| call.marginal == Some(bid) && call.price > market.params().reserve)
}

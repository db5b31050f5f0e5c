//! Capacity: lots of suppliers, their desired machines, and their observations.

use std::collections::BTreeMap;

use coracle_auction::{Command, Desired, EndReason, Event, Fault, LotNo, Machine, MachineState, SupplierNo};
use coracle_proto::market::{self as pb, desired_frame::Frame};

use super::{Service, check_name};
use crate::caller::Caller;
use crate::convert::{self, lot_key};
use crate::error::RequestError;
use crate::names;
use crate::registry::Kind;
use crate::signed::ms;
use crate::state::MarketState;
use crate::writer::Batch;

/// Most machines in one report.
const MACHINES_MAX: usize = 100_000;
/// Longest name of a Node (RFC 1123 subdomain), in bytes.
const NODE_NAME_MAX: usize = 253;

impl Service {
    /// Number of a supplier, whose name is that of its token's tenant.
    pub(crate) async fn supplier(&self, caller: Caller) -> Result<u32, RequestError> {
        let name = self.registry.name(Kind::Tenant, caller.tenant);
        Ok(self.registry.ensure(Kind::Supplier, &name, &[]).await?)
    }

    pub(crate) async fn put_lot(
        &self,
        caller: Caller,
        r: pb::PutLotRequest,
    ) -> Result<pb::Lot, RequestError> {
        check_name("lot", &r.lot)?;
        let market = self.market(&r.market)?;
        let supplier = self.supplier(caller).await?;
        let lot = self.registry.ensure(Kind::Lot, &lot_key(market, supplier, &r.lot), &[]).await?;
        let notice_ms = u64::try_from(if r.notice_ms == 0 { 120_000 } else { r.notice_ms })
            .map_err(|_| RequestError::invalid("notice must be above 0"))?;
        let command =
            Command::PutLot { lot: LotNo(lot), supplier: SupplierNo(supplier), slots: r.units, notice_ms };
        self.writer.apply_one(market, caller.tenant, command).await?;
        let state = self
            .writer
            .read(market, |state| state.market.lots().find(|(no, _)| no.0 == lot).map(|(_, l)| l.state()))?;
        let state = state.map_or(pb::LotState::Closed, convert::lot_state);
        Ok(pb::Lot { lot: r.lot, market: r.market, units: r.units, state: state.into() })
    }

    /// Lists the lots of a market, or of all markets.
    pub(crate) fn lots(&self, market: &str) -> Result<Vec<pb::LotUse>, RequestError> {
        let only = if market.is_empty() { None } else { Some(self.market(market)?) };
        let mut lots = Vec::new();
        for no in self.markets().into_iter().filter(|no| only.is_none_or(|only| only == *no)) {
            self.writer.read(no, |state| {
                for (lot, row) in state.market.lots() {
                    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                    lots.push(pb::LotUse {
                        lot: convert::lot_name(&self.registry, lot.0),
                        market: state.name.clone(),
                        supplier: self.registry.name(Kind::Supplier, row.supplier().0),
                        units: count(row.size()),
                        taken: count(row.taken()),
                        state: convert::lot_state(row.state()).into(),
                    });
                }
            })?;
        }
        Ok(lots)
    }

    /// Lots of a supplier: `(market, lot, name)`.
    fn lots_of(&self, supplier: u32) -> Vec<(u32, u32, String)> {
        self.registry
            .all(Kind::Lot)
            .into_iter()
            .filter_map(|(no, key)| {
                let mut parts = key.splitn(3, ' ');
                let market = parts.next()?.parse().ok()?;
                (parts.next()?.parse() == Ok(supplier)).then_some((market, no, parts.next()?.to_owned()))
            })
            .collect()
    }

    pub(crate) async fn drain_lot(&self, caller: Caller, name: &str) -> Result<(), RequestError> {
        let supplier = self.supplier(caller).await?;
        let own = self.lots_of(supplier).into_iter().filter(|(.., own)| own == name).collect::<Vec<_>>();
        if own.is_empty() {
            return Err(RequestError::not_found());
        }
        for (market, lot, _) in own {
            match self.writer.apply_one(market, caller.tenant, Command::DrainLot { lot: LotNo(lot) }).await {
                Err(problem) if problem.code != "NOT_FOUND" => return Err(problem),
                _ => {}
            }
        }
        Ok(())
    }

    /// Complete desired set of a supplier, at one instant.
    pub(crate) fn desired_set(&self, supplier: u32) -> Vec<pb::DesiredFrame> {
        let markets = self.writer.markets.read();
        let own = |state: &MarketState| state.market.lots().any(|(_, lot)| lot.supplier().0 == supplier);
        let mut epochs = BTreeMap::new();
        let mut frames = Vec::new();
        for (no, state) in markets.iter().filter(|(_, state)| own(state)) {
            epochs.insert(state.name.clone(), state.market.epoch());
            let all = state.market.desired(SupplierNo(supplier));
            frames.extend(all.map(|one| Frame::Desired(self.desired_allocation(*no, state, &one, 0))));
        }
        let set = pb::DesiredSet { epochs };
        let all = [Frame::Begin(set.clone())].into_iter().chain(frames).chain([Frame::End(set)]);
        all.map(|frame| pb::DesiredFrame { frame: Some(frame) }).collect()
    }

    /// Changes of a supplier's desired set in a batch. Each entry is the present one, not that at the time of the event.
    pub(crate) fn desired_changes(&self, batch: &Batch, supplier: u32) -> Vec<pb::DesiredFrame> {
        let changes = batch.events.iter().filter_map(|event| match event {
            Event::Desired { supplier: of, lot, slot, allocation, matched_at, epoch } if of.0 == supplier => {
                Some((*lot, *slot, *allocation, *matched_at, *epoch))
            }
            _ => None,
        });
        let mut frames = Vec::new();
        for (lot, slot, allocation, matched_at, epoch) in changes {
            let frame = self.writer.read(batch.market, |state| {
                match state.market.desired_at(lot, slot, allocation) {
                    Some(one) => Frame::Desired(self.desired_allocation(batch.market, state, &one, epoch)),
                    None => Frame::Removed(pb::RemovedAllocation {
                        market: state.name.clone(),
                        lot: convert::lot_name(&self.registry, lot.0),
                        slot,
                        allocation: names::allocation(batch.market, matched_at, allocation),
                        epoch,
                    }),
                }
            });
            frames.extend(frame.ok().map(|frame| pb::DesiredFrame { frame: Some(frame) }));
        }
        frames
    }

    fn desired_allocation(
        &self,
        market: u32,
        state: &MarketState,
        one: &Desired,
        epoch: u64,
    ) -> pb::DesiredAllocation {
        let row = state.market.allocation(one.allocation);
        let a = row.map(|row| convert::allocation(market, state, &self.registry, one.allocation, row));
        let a = a.unwrap_or_default();
        let bid = row.and_then(|row| state.market.bid(state.market.bid_of(row)));
        let labels = bid.map(coracle_auction::Bid::labels).unwrap_or_default();
        pb::DesiredAllocation {
            market: state.name.clone(),
            lot: convert::lot_name(&self.registry, one.lot.0),
            slot: one.slot,
            allocation: a.allocation,
            instance_type: self.instance_type(&state.name),
            tenant: a.tenant,
            owner_uid: a.owner_uid,
            labels: labels.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
            until_ms: one.until.map_or(0, ms),
            reason: one.reason.map_or("", EndReason::as_str).into(),
            saved: String::new(),
            epoch,
        }
    }

    /// Processes the report of a supplier, which is also its heartbeat. Machines in lots that the supplier does not have are
    /// counted. They are in no desired set, so the supplier ends them.
    pub(crate) async fn report_observed(
        &self,
        caller: Caller,
        r: pb::ReportObservedRequest,
    ) -> Result<(), RequestError> {
        if r.allocations.len() > MACHINES_MAX {
            return Err(RequestError::invalid(format!("at most {MACHINES_MAX} allocations")));
        }
        let supplier = self.supplier(caller).await?;
        self.writer.report_heartbeat(supplier).await?;
        let mut by_market: BTreeMap<u32, Vec<Machine>> = BTreeMap::new();
        let mut unknown = 0;
        for one in &r.allocations {
            match self.machine(supplier, one) {
                Some((market, machine)) => by_market.entry(market).or_default().push(machine),
                None => unknown += 1,
            }
        }
        self.metrics.count_unknown_machines(unknown);
        for (name, epoch) in &r.epochs {
            let Some(market) = self.registry.number(Kind::Market, name) else { continue };
            let machines = by_market.remove(&market).unwrap_or_default();
            let observed =
                |state: &MarketState| state.market.observed(SupplierNo(supplier), *epoch, &machines);
            let commands = self.writer.read(market, observed)?;
            if !commands.is_empty() {
                self.writer.apply(market, caller.tenant, commands).await?;
            }
        }
        // Without the version of the set that the supplier knew, its machines allow no conclusion.
        for (market, machines) in by_market {
            let (supplier, market) =
                (self.registry.name(Kind::Supplier, supplier), self.registry.name(Kind::Market, market));
            tracing::warn!(supplier, market, machines = machines.len(), "report without version ignored");
            self.metrics.count_without_epoch(machines.len());
        }
        Ok(())
    }

    fn machine(&self, supplier: u32, one: &pb::ObservedAllocation) -> Option<(u32, Machine)> {
        let market = self.registry.number(Kind::Market, &one.market)?;
        let lot = LotNo(self.registry.number(Kind::Lot, &lot_key(market, supplier, &one.lot))?);
        let (named, allocation) = Self::parse_allocation_name(&one.allocation).ok()?;
        let node: Box<str> = one.node.as_str().into();
        let is_name = !node.is_empty() && node.len() <= NODE_NAME_MAX;
        let state = match one.state() {
            pb::MachineState::Starting => MachineState::Starting,
            pb::MachineState::Registered if is_name => MachineState::Registered { node },
            pb::MachineState::Ready if is_name => MachineState::Ready { node },
            pb::MachineState::Running | pb::MachineState::Registered | pb::MachineState::Ready => {
                MachineState::Running
            }
            pb::MachineState::Failed => MachineState::Failed,
            pb::MachineState::Died => MachineState::Died {
                by: if one.fault() == pb::Fault::Guest { Fault::Guest } else { Fault::Host },
            },
            pb::MachineState::Stopping => MachineState::Stopping,
            pb::MachineState::Unspecified => MachineState::Unknown,
        };
        (named == market).then_some((market, Machine { lot, slot: one.slot, allocation, state }))
    }
}

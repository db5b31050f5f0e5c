//! Capacity: lots and reports of suppliers, and orders to them.

use coracle_auction::{
    Allocation, AllocationId, AllocationState, Command, Event, LotNo, LotState, SupplierNo, SupplierReport,
};
use coracle_proto::market as pb;

use super::{Service, check_name};
use crate::caller::Caller;
use crate::convert::{self, lot_key};
use crate::error::Problem;
use crate::ignored;
use crate::registry::Kind;
use crate::signed::ms;
use crate::state::MarketState;
use crate::store::IgnoredRow;
use crate::writer::Batch;

impl Service {
    /// A supplier has the name of its token's tenant.
    pub(crate) async fn supplier(&self, caller: Caller) -> Result<u32, Problem> {
        let name = self.registry.name(Kind::Tenant, caller.tenant);
        Ok(self.registry.ensure(Kind::Supplier, &name, &[]).await?)
    }

    pub(crate) async fn put_lot(&self, caller: Caller, r: pb::PutLotRequest) -> Result<pb::Lot, Problem> {
        check_name("lot", &r.lot)?;
        let market = self.market(&r.market)?;
        let supplier = self.supplier(caller).await?;
        let lot = self.registry.ensure(Kind::Lot, &lot_key(market, supplier, &r.lot), &[]).await?;
        let notice_ms = u64::try_from(if r.notice_ms == 0 { 120_000 } else { r.notice_ms })
            .map_err(|_| Problem::invalid("notice must be above 0"))?;
        let command =
            Command::PutLot { lot: LotNo(lot), supplier: SupplierNo(supplier), slots: r.units, notice_ms };
        self.writer.apply_one(market, caller.tenant, command).await?;
        let state = self
            .writer
            .read(market, |state| state.market.lots().find(|(no, _)| no.0 == lot).map(|(_, l)| l.state()))?;
        let state = state.map_or("closed", state_of);
        Ok(pb::Lot { lot: r.lot, market: r.market, units: r.units, state: state.into() })
    }

    /// All lots of a market, or of all.
    pub(crate) fn lots(&self, market: &str) -> Result<Vec<pb::LotUse>, Problem> {
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
                        state: state_of(row.state()).into(),
                    });
                }
            })?;
        }
        Ok(lots)
    }

    /// Lots of a supplier: `(market, lot)`.
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

    pub(crate) async fn drain_lot(&self, caller: Caller, name: &str) -> Result<(), Problem> {
        let supplier = self.supplier(caller).await?;
        let own = self.lots_of(supplier).into_iter().filter(|(.., own)| own == name).collect::<Vec<_>>();
        if own.is_empty() {
            return Err(Problem::not_found());
        }
        for (market, lot, _) in own {
            match self.writer.apply_one(market, caller.tenant, Command::DrainLot { lot: LotNo(lot) }).await {
                Err(problem) if problem.code != "NOT_FOUND" => return Err(problem),
                _ => {}
            }
        }
        Ok(())
    }

    pub(crate) async fn heartbeat(&self, caller: Caller) -> Result<(), Problem> {
        let supplier = self.supplier(caller).await?;
        let markets: std::collections::BTreeSet<u32> =
            self.lots_of(supplier).into_iter().map(|(m, ..)| m).collect();
        for market in markets {
            self.writer
                .apply_one(market, caller.tenant, Command::Heartbeat { supplier: SupplierNo(supplier) })
                .await?;
        }
        Ok(())
    }

    /// Report about an allocation. For an unknown one, or one of another supplier, it is ignored, logged, audited and counted:
    /// a supplier that came back from the dead has nothing to mend.
    pub(crate) async fn report(&self, caller: Caller, r: pb::ReportOrderRequest) -> Result<(), Problem> {
        let supplier = self.supplier(caller).await?;
        let report = SupplierReport::from_name(&r.report, &r.node).ok_or_else(|| {
            Problem::invalid(
                "report must be launched, registered (with node), ready, failed, drained or died",
            )
        })?;
        let own = |(market, allocation)| {
            let is_own = |state: &MarketState| {
                state.market.allocation(allocation).is_some_and(|row| of_supplier(state, row, supplier))
            };
            self.writer.read(market, is_own).is_ok_and(|own| own).then_some((market, allocation))
        };
        let Some((market, allocation)) = Self::named_allocation(&r.allocation).ok().and_then(own) else {
            self.metrics.unknown_report(&report);
            return self.ignore(caller, &r.allocation, report.as_str()).await;
        };
        self.writer.apply_one(market, caller.tenant, Command::Report { allocation, report }).await.map(drop)
    }

    /// Writes down that a report was of no use, when the tenant has not had its lines of this minute.
    async fn ignore(&self, caller: Caller, unit: &str, report: &str) -> Result<(), Problem> {
        let (now, who, subject) = (self.now(), caller.tenant, ignored::shown(unit));
        let line = self.ignored.lock().line(who, now.0);
        let Some(ignored::Line { no, unwritten }) = line else { return Ok(()) };
        let supplier = self.registry.name(Kind::Tenant, who);
        tracing::warn!(
            supplier,
            allocation = subject,
            report,
            unwritten,
            "report of an unknown allocation ignored"
        );
        let named = Self::named_allocation(&subject).map_or(0, |(market, _)| market);
        let market = if self.markets().contains(&named) { named } else { 0 };
        let (at, report) = (ms(now), report.to_owned());
        Ok(self.store.put_ignored(&IgnoredRow { no, at, who, market, report, subject, unwritten }).await?)
    }

    /// Orders of a supplier that are not done.
    pub(crate) fn outstanding(&self, supplier: u32) -> Result<Vec<pb::Order>, Problem> {
        let mut orders = Vec::new();
        for market in self.markets() {
            self.writer.read(market, |state| {
                for (id, row) in
                    state.market.allocations().filter(|(_, row)| of_supplier(state, row, supplier))
                {
                    match row.state() {
                        AllocationState::Provisioning => {
                            orders.push(self.order(market, state, "launch", id, row))
                        }
                        AllocationState::Preempting => {
                            orders.push(self.order(market, state, "reclaim", id, row))
                        }
                        _ => {}
                    }
                }
            })?;
        }
        Ok(orders)
    }

    /// Orders for a supplier in what just happened.
    pub(crate) fn orders_in(&self, batch: &Batch, supplier: u32) -> Vec<pb::Order> {
        let mut orders = Vec::new();
        for event in &batch.events {
            let (kind, allocation, lot, deadline) = match event {
                Event::Launch { allocation, lot, deadline } => ("launch", *allocation, *lot, ms(*deadline)),
                Event::Reclaim { allocation, lot, deadline, .. } => {
                    ("reclaim", *allocation, *lot, ms(*deadline))
                }
                Event::Spare { allocation, lot } => ("spare", *allocation, *lot, 0),
                _ => continue,
            };
            let found = self.writer.read(batch.market, |state| {
                let own = state.market.lots().any(|(no, l)| no == lot && l.supplier().0 == supplier);
                let row = state.market.allocation(allocation)?;
                own.then(|| pb::Order {
                    deadline_ms: deadline,
                    ..self.order(batch.market, state, kind, allocation, row)
                })
            });
            orders.extend(found.ok().flatten());
        }
        orders
    }

    fn order(
        &self,
        market: u32,
        state: &MarketState,
        kind: &str,
        id: AllocationId,
        row: &Allocation,
    ) -> pb::Order {
        let a = convert::allocation(market, state, &self.registry, id, row);
        let labels =
            state.market.bid(state.market.bid_of(row)).map(coracle_auction::Bid::labels).unwrap_or_default();
        pb::Order {
            kind: kind.into(),
            allocation: a.allocation,
            lot: a.lot,
            unit: a.unit,
            deadline_ms: a.preempt_at_ms,
            reason: a.reason,
            market: a.market,
            owner_uid: a.owner_uid,
            tenant: a.tenant,
            labels: labels.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
        }
    }
}

fn state_of(state: LotState) -> &'static str {
    match state {
        LotState::Open => "open",
        LotState::Silent => "silent",
        LotState::Draining => "draining",
    }
}

fn of_supplier(state: &MarketState, row: &Allocation, supplier: u32) -> bool {
    let lot = row.slot().0;
    state.market.lots().any(|(no, l)| no == lot && l.supplier().0 == supplier)
}

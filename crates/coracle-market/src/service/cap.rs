//! Hourly caps over all markets, and over the tenants below a tenant.
//!
//! Each market has a slice of the cap for each tenant, which the sum of the tenant's limits there never exceeds. The slices of
//! a cap never add up to more than the cap. The part that one market does not use moves to a market where a bid waits.

use std::collections::{BTreeMap, BTreeSet};

use coracle_auction::{Command, Price, TenantNo};

use super::Service;
use crate::error::RequestError;
use crate::registry::Kind;
use crate::writer::MARKET_ITSELF;

impl Service {
    /// The tenant and those above it: `c/ns` is below `c`.
    pub(crate) fn with_parents(&self, tenant: u32) -> Vec<u32> {
        let name = self.registry.name(Kind::Tenant, tenant);
        let above = name.match_indices('/').map(|(at, _)| &name[..at]);
        let above = above.filter_map(|parent| self.registry.number(Kind::Tenant, parent));
        above.chain([tenant]).collect()
    }

    /// The tenant and those below it.
    fn with_children(&self, tenant: u32) -> BTreeSet<u32> {
        let own = self.registry.name(Kind::Tenant, tenant);
        let is_below = |name: &str| name.strip_prefix(&own).is_some_and(|rest| rest.starts_with('/'));
        let all = self.registry.all(Kind::Tenant).into_iter();
        all.filter(|(no, name)| *no == tenant || is_below(name)).map(|(no, _)| no).collect()
    }

    /// Sum of a tenant's limits in a market, and its slice there.
    fn used(&self, tenant: u32, market: u32) -> Result<(i64, Option<i64>), RequestError> {
        let account = self.writer.read(market, |state| state.market.account(TenantNo(tenant)))?;
        let used = account.map_or(0, |account| i64::try_from(account.committed).unwrap_or(i64::MAX));
        Ok((used, account.and_then(|account| account.cap).map(Price::as_micros)))
    }

    async fn set_slice(&self, tenant: u32, market: u32, slice: i64) -> Result<(), RequestError> {
        let command = Command::Budget { tenant: TenantNo(tenant), cap: Some(Price::micros(slice.max(0))) };
        self.writer.apply_one(market, MARKET_ITSELF, command).await.map(drop)
    }

    /// Gives a tenant in a market all that its cap and those above it leave. Other slices shrink to what they use.
    pub(crate) async fn move_slice(
        &self,
        caps: &BTreeMap<u32, i64>,
        tenant: u32,
        market: u32,
    ) -> Result<(), RequestError> {
        let mut most = None;
        for capped in self.with_parents(tenant) {
            let Some(cap) = caps.get(&capped).copied() else { continue };
            let mut left = cap;
            for other in self.with_children(capped) {
                for place in self.markets().into_iter().filter(|place| (other, *place) != (tenant, market)) {
                    let (used, slice) = self.used(other, place)?;
                    left = left.saturating_sub(used);
                    if slice.is_none_or(|slice| slice > used) && (used > 0 || slice.is_some()) {
                        self.set_slice(other, place, used).await?;
                    }
                }
            }
            most = Some(most.map_or(left, |most: i64| most.min(left)).max(0));
        }
        let Some(most) = most else { return Ok(()) };
        let (_, slice) = self.used(tenant, market)?;
        if slice != Some(most) {
            self.set_slice(tenant, market, most).await?;
        }
        Ok(())
    }

    /// Amount that the caps of a tenant leave; `None`: the tenant has no cap.
    fn free(&self, caps: &BTreeMap<u32, i64>, tenant: u32) -> Result<Option<i64>, RequestError> {
        let mut free = None;
        for capped in self.with_parents(tenant) {
            let Some(cap) = caps.get(&capped).copied() else { continue };
            let mut left = cap;
            for other in self.with_children(capped) {
                for market in self.markets() {
                    left = left.saturating_sub(self.used(other, market)?.0);
                }
            }
            free = Some(free.map_or(left, |free: i64| free.min(left)));
        }
        Ok(free)
    }

    /// Moves what became free in another market or below another tenant to where bids wait for the cap. Writes only if a slice
    /// changes.
    pub(crate) async fn relieve(&self) -> Result<(), RequestError> {
        if self.capped.read().is_empty() {
            return Ok(());
        }
        let caps = self.caps.lock().await;
        for market in self.markets() {
            let waiting = self.writer.read(market, |state| state.market.tenants_held())?;
            for (tenant, least) in waiting {
                // If the free amount does not suffice for any of its bids, the slice is not moved.
                if self.free(&caps, tenant.0)?.is_some_and(|free| i128::from(free) >= least) {
                    self.move_slice(&caps, tenant.0, market).await?;
                }
            }
        }
        Ok(())
    }

    /// Applies a new cap: every tenant below keeps what it uses, in order, until the cap is exhausted. Without a cap, slices
    /// are removed.
    pub(crate) async fn spread_cap(&self, tenant: u32) -> Result<(), RequestError> {
        let caps = self.caps.lock().await;
        let mut left = caps.get(&tenant).copied();
        for below in self.with_children(tenant) {
            let still_capped = self.with_parents(below).iter().any(|no| caps.contains_key(no));
            for market in self.markets() {
                let (used, slice) = self.used(below, market)?;
                match &mut left {
                    Some(left) => {
                        let wanted = used.min(*left).max(0);
                        *left -= wanted;
                        if slice != Some(wanted) && (used > 0 || slice.is_some()) {
                            self.set_slice(below, market, wanted).await?;
                        }
                    }
                    None if !still_capped && slice.is_some() => {
                        let command = Command::Budget { tenant: TenantNo(below), cap: None };
                        self.writer.apply_one(market, MARKET_ITSELF, command).await?;
                    }
                    None => {}
                }
            }
        }
        drop(caps);
        self.relieve().await
    }
}

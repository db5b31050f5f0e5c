//! Hourly caps over all markets, and over the tenants below a tenant.
//!
//! Each market knows a slice for each tenant: the sum of its limits there never exceeds it. Slices of a cap never add up
//! to more than it. What one market does not use moves to where a bid waits.

use std::collections::{BTreeMap, BTreeSet};

use coracle_auction::{Command, Price, TenantNo};

use super::Service;
use crate::error::RequestError;
use crate::registry::Kind;
use crate::writer::MARKET_ITSELF;

impl Service {
    /// A tenant and those above it: `c/ns` is below `c`.
    pub(crate) fn with_parents(&self, tenant: u32) -> Vec<u32> {
        let name = self.registry.name(Kind::Tenant, tenant);
        let above = name.match_indices('/').map(|(at, _)| &name[..at]);
        let above = above.filter_map(|parent| self.registry.number(Kind::Tenant, parent));
        above.chain([tenant]).collect()
    }

    /// A tenant and those below it.
    fn with_children(&self, tenant: u32) -> BTreeSet<u32> {
        let own = self.registry.name(Kind::Tenant, tenant);
        let is_below = |name: &str| name.strip_prefix(&own).is_some_and(|rest| rest.starts_with('/'));
        let all = self.registry.all(Kind::Tenant).into_iter();
        all.filter(|(no, name)| *no == tenant || is_below(name)).map(|(no, _)| no).collect()
    }

    /// Sum of limits of a tenant in a market, and its slice there.
    fn used(&self, tenant: u32, market: u32) -> Result<(i64, Option<i64>), RequestError> {
        let account = self.writer.read(market, |state| state.market.account(TenantNo(tenant)))?;
        let used = account.map_or(0, |account| i64::try_from(account.committed).unwrap_or(i64::MAX));
        Ok((used, account.and_then(|account| account.cap).map(Price::as_micros)))
    }

    async fn set_slice(&self, tenant: u32, market: u32, slice: i64) -> Result<(), RequestError> {
        let command = Command::Budget { tenant: TenantNo(tenant), cap: Some(Price::micros(slice.max(0))) };
        self.writer.apply_one(market, MARKET_ITSELF, command).await.map(drop)
    }

    /// Gives a tenant in a market all that its cap and those above leave: other slices shrink to what they use.
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

    /// What the caps of a tenant leave; `None`: it has none.
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

    /// Lets bids that wait for the cap use what became free in another market or below another tenant. Writes only when a
    /// slice changes.
    pub(crate) async fn relieve(&self) -> Result<(), RequestError> {
        if self.capped.read().is_empty() {
            return Ok(());
        }
        let caps = self.caps.lock().await;
        for market in self.markets() {
            let waiting = self.writer.read(market, |state| state.market.tenants_held())?;
            for (tenant, least) in waiting {
                // Without enough for one of its bids the slice stays where it is.
                if self.free(&caps, tenant.0)?.is_some_and(|free| i128::from(free) >= least) {
                    self.move_slice(&caps, tenant.0, market).await?;
                }
            }
        }
        Ok(())
    }

    /// Applies a new cap: every tenant below keeps what it uses, in order, cut where the cap ends. Without a cap slices go.
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

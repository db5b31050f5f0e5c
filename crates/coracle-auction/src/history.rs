//! Price history. Charges are computed from it when they are needed, so that a call does not write to every running allocation.

use serde::{Deserialize, Serialize};

use crate::{Price, Time};

/// Prices that apply from a time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PricePoint {
    /// Time from which the prices apply.
    pub at: Time,
    /// Clearing price.
    pub price: Price,
    /// Tenant with a lower price, because its own bids do not raise its price; and that price.
    pub(crate) exempt_tenant: Option<(u32, Price)>,
}

impl PricePoint {
    /// Price of a tenant at this point, before it is limited by the allocation.
    pub(crate) fn for_tenant(&self, tenant: u32) -> Price {
        match self.exempt_tenant {
            Some((exempt_tenant, price)) if exempt_tenant == tenant => price,
            _ => self.price,
        }
    }
}

/// Price points by time; never empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct History {
    points: Vec<PricePoint>,
}

/// Allocations settle every hour, so older prices are never read.
const KEEP_MS: u64 = 2 * 3600 * 1000;
/// Number of old points that are dropped at a time.
const SLACK: usize = 1024;

impl History {
    pub(crate) fn starting_at(price: Price) -> Self {
        Self { points: vec![PricePoint { at: Time(0), price, exempt_tenant: None }] }
    }

    pub(crate) fn current(&self) -> &PricePoint {
        // The list is never empty: it starts with one point, and `push` keeps the last.
        self.points.last().unwrap_or(&PricePoint { at: Time(0), price: Price::ZERO, exempt_tenant: None })
    }

    /// Adds the prices that apply from now on. Unchanged prices add no point.
    pub(crate) fn push(&mut self, point: PricePoint) {
        let last = self.current();
        if (last.price, last.exempt_tenant) == (point.price, point.exempt_tenant) {
            return;
        }
        self.points.push(point);
        let old = self.points.partition_point(|p| p.at < Time(point.at.0.saturating_sub(KEEP_MS)));
        if old > SLACK {
            self.points.drain(..old - 1);
        }
    }

    /// Calls `row` for each period in which this tenant paid one price under this limit.
    pub(crate) fn stretches(
        &self,
        (from, to): (Time, Time),
        tenant: u32,
        limit: Price,
        mut row: impl FnMut(Time, Time, Price),
    ) {
        let first = self.points.partition_point(|p| p.at <= from).saturating_sub(1);
        let mut open: Option<(Time, Price)> = None;
        for point in &self.points[first..] {
            let start = point.at.max(from);
            if start >= to {
                break;
            }
            let price = point.for_tenant(tenant).min(limit);
            match open {
                Some((_, same)) if same == price => {}
                Some((since, before)) => {
                    row(since, start, before);
                    open = Some((start, price));
                }
                None => open = Some((start, price)),
            }
        }
        if let Some((since, price)) = open {
            row(since, to, price);
        }
    }
}

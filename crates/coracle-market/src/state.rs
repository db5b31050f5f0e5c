//! Markets in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_auction::{AllocationId, Market, Params, Price, Time};
use parking_lot::RwLock;

use crate::history::Percentiles;

/// One market in memory.
#[derive(Debug)]
pub(crate) struct MarketState {
    pub(crate) name: String,
    pub(crate) market: Market,
    /// Number of the last applied command.
    pub(crate) seq: i64,
    pub(crate) chain: [u8; 32],
    /// Allocations that the next call would preempt, and the price that keeps each.
    pub(crate) at_risk: BTreeMap<AllocationId, Price>,
    pub(crate) start: (Params, Time),
    pub(crate) since_snapshot: u64,
    /// Percentiles of recent prices.
    pub(crate) percentiles: Percentiles,
}

/// All markets. Only the writer changes them.
pub(crate) type Markets = Arc<RwLock<BTreeMap<u32, MarketState>>>;

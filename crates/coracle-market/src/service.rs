//! Operations of the market, shared by all its APIs.

mod admin;
mod cap;
mod read;
mod supply;
mod trade;
mod types;

pub(crate) use admin::start_of;
use std::collections::BTreeMap;

use coracle_auction::{Time, codec};
use coracle_types::Clock;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::Gate;
use crate::caller::{Caller, Scope};
use crate::error::{RequestError, StoreError};
use crate::metrics::Metrics;
use crate::registry::{Kind, Registry};
use crate::review::Reviewed;
use crate::store::Store;
use crate::writer::Writer;

/// State shared by the APIs.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) writer: Writer,
    pub(crate) registry: Registry,
    pub(crate) gate: Gate,
    pub(crate) metrics: Metrics,
    pub(crate) reviewed: Reviewed,
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) default_region: Option<String>,
    /// Whether suppliers need a client certificate.
    pub(crate) verifies_suppliers: bool,
    /// Hourly caps by tenant; each also covers the tenants below. Locked while a capped tenant places a bid, so that the slices
    /// of a cap never exceed it.
    pub(crate) caps: tokio::sync::Mutex<BTreeMap<u32, i64>>,
    /// Tenants that have a cap, for a check without the lock.
    pub(crate) capped: parking_lot::RwLock<std::collections::BTreeSet<u32>>,
    /// Number of cancelled bids that had set the price, by tenant.
    pub(crate) cancelled_setters: parking_lot::Mutex<BTreeMap<u32, u64>>,
    /// Streams of the service, which end with it.
    pub(crate) streams: TaskTracker,
    /// Cancelled when the service ends.
    pub(crate) stop: CancellationToken,
}

impl From<StoreError> for RequestError {
    fn from(error: StoreError) -> Self {
        tracing::error!(error = &error as &dyn std::error::Error, "store");
        Self::unavailable("the store does not answer")
    }
}

/// Longest name of a tenant, an owner, a lot or a market.
const NAME_MAX: usize = 128;

pub(crate) fn check_name(what: &str, name: &str) -> Result<(), RequestError> {
    if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
        return Err(RequestError::invalid(format!("{what} must have 1 to {NAME_MAX} characters")));
    }
    Ok(())
}

impl Service {
    pub(crate) fn now(&self) -> Time {
        Time(u64::try_from(self.clock.now().0).unwrap_or(0))
    }

    /// Finds a market by name.
    pub(crate) fn market(&self, name: &str) -> Result<u32, RequestError> {
        self.registry
            .number(Kind::Market, name)
            .ok_or_else(|| RequestError::new(404, "UNKNOWN_MARKET", format!("no market {name}")))
    }

    /// Returns the tenant of a request: that of the token, or another one by name. An operator's token trades for every
    /// namespace of its cluster, an administrator's for all tenants.
    pub(crate) async fn tenant(&self, caller: Caller, asked: &str) -> Result<u32, RequestError> {
        if asked.is_empty() {
            return Ok(caller.tenant);
        }
        let own = self.registry.name(Kind::Tenant, caller.tenant);
        // Only the operator of a cluster may name tenants below its own. Otherwise a namespace could evade its cap with a new
        // name.
        let below = !own.contains('/') && asked.strip_prefix(&own).is_some_and(|rest| rest.starts_with('/'));
        if asked != own && !below && !caller.may(Scope::Admin) {
            return Err(RequestError::new(403, "FORBIDDEN", "the token is another tenant's"));
        }
        check_name("tenant", asked)?;
        Ok(self.registry.ensure(Kind::Tenant, asked, &[]).await?)
    }

    /// All market numbers.
    pub(crate) fn markets(&self) -> Vec<u32> {
        self.registry.all(Kind::Market).into_iter().map(|(no, _)| no).collect()
    }
}

/// Encodes the stored data of a tenant: `(cap + 1 or 0, rate)`.
pub(crate) fn tenant_body(cap: Option<i64>, rate: u32) -> Vec<u8> {
    use codec::Codec;
    let mut body = Vec::new();
    cap.put(&mut body);
    rate.put(&mut body);
    body
}

pub(crate) fn tenant_facts(body: &[u8]) -> (Option<i64>, u32) {
    use codec::Codec;
    let mut from = body;
    let cap = Option::get(&mut from).unwrap_or(None);
    (cap, u32::get(&mut from).unwrap_or(0))
}

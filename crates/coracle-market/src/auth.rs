//! Authentication of callers, and their rate limits.

use std::collections::BTreeMap;

use coracle_types::{Clock, UnixMillis};
use parking_lot::{Mutex, RwLock};

use crate::caller::{Caller, Scope, hash};
use crate::error::RequestError;
use crate::metrics::Calls;
use crate::review::Reviewed;

/// Tokens by hash, and the recent request rate of each tenant.
#[derive(Debug)]
pub(crate) struct Gate {
    tokens: RwLock<BTreeMap<[u8; 32], Caller>>,
    buckets: Mutex<BTreeMap<u32, Bucket>>,
    rates: RwLock<BTreeMap<u32, u32>>,
    clock: Clock,
    calls: Calls,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    thousandths: i64,
    at: UnixMillis,
}

/// Mutations per second of a tenant without its own rate.
const RATE: u32 = 200;
/// Burst in seconds of the rate.
const BURST_SECONDS: i64 = 5;

impl Gate {
    pub(crate) fn new(clock: Clock, tokens: Vec<([u8; 32], u32, u8)>, calls: Calls) -> Self {
        let tokens =
            tokens.into_iter().map(|(hash, tenant, scopes)| (hash, Caller::new(tenant, scopes))).collect();
        Self {
            tokens: RwLock::new(tokens),
            buckets: Mutex::default(),
            rates: RwLock::default(),
            clock,
            calls,
        }
    }

    pub(crate) fn admit(&self, hash: [u8; 32], tenant: u32, scopes: u8) {
        self.tokens.write().insert(hash, Caller::new(tenant, scopes));
    }

    /// All tokens by hash.
    pub(crate) fn tokens(&self) -> Vec<([u8; 32], Caller)> {
        self.tokens.read().iter().map(|(hash, caller)| (*hash, *caller)).collect()
    }

    pub(crate) fn refuse(&self, hash: &[u8; 32]) {
        self.tokens.write().remove(hash);
    }

    pub(crate) fn set_rate(&self, tenant: u32, rate: u32) {
        self.rates.write().insert(tenant, rate);
    }

    /// Returns the caller of an `authorization` value, if it has the scope.
    pub(crate) fn caller(
        &self,
        authorization: Option<&str>,
        reviewed: &Reviewed,
        scope: Scope,
    ) -> Result<Caller, RequestError> {
        let denied = || RequestError::new(401, "UNAUTHENTICATED", "a bearer token is needed");
        let token = authorization.and_then(|value| value.strip_prefix("Bearer ")).ok_or_else(denied)?.trim();
        let known = self.tokens.read().get(&hash(token)).copied();
        let caller = known.or_else(|| reviewed.caller(token)).ok_or_else(denied)?;
        if caller.may(scope) {
            self.calls.count(scope);
            Ok(caller)
        } else {
            Err(RequestError::new(
                403,
                "FORBIDDEN",
                format!("the token has no scope {scope:?}").to_lowercase(),
            ))
        }
    }

    /// Takes `count` mutations from a tenant's allowance.
    pub(crate) fn spend(&self, tenant: u32, count: usize) -> Result<(), RequestError> {
        let rate = self.rates.read().get(&tenant).copied().unwrap_or(RATE);
        let rate = i64::from(rate);
        let now = self.clock.now();
        let mut buckets = self.buckets.lock();
        let full = rate * BURST_SECONDS * 1000;
        let bucket = buckets.entry(tenant).or_insert(Bucket { thousandths: full, at: now });
        let elapsed = i64::try_from(now.since(bucket.at).as_millis()).unwrap_or(0);
        bucket.thousandths = bucket.thousandths.saturating_add(elapsed.saturating_mul(rate)).min(full);
        bucket.at = now;
        let cost = i64::try_from(count).unwrap_or(i64::MAX).saturating_mul(1000);
        if bucket.thousandths < cost {
            return Err(RequestError::new(429, "RATE_LIMIT", format!("more than {rate} changes a second")));
        }
        bucket.thousandths -= cost;
        Ok(())
    }
}

//! Who calls, and how often they may.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError, RwLock};

use coracle_types::{Clock, UnixMillis};
use rand::RngCore;
use sha2::{Digest, Sha256};

use crate::error::Problem;
use crate::metrics::Calls;
use crate::review::Reviewed;

/// What a token is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    Read = 1,
    Trade = 2,
    Supply = 4,
    Admin = 8,
    Audit = 16,
}

impl Scope {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "read" => Self::Read,
            "trade" => Self::Trade,
            "supply" => Self::Supply,
            "admin" => Self::Admin,
            "audit" => Self::Audit,
            _ => return None,
        })
    }
}

impl Scope {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Trade => "trade",
            Self::Supply => "supply",
            Self::Admin => "admin",
            Self::Audit => "audit",
        }
    }
}

/// All scopes: the first token's.
pub(crate) const ALL: u8 = 31;

/// Who calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) tenant: u32,
    scopes: u8,
}

impl Caller {
    pub(crate) const fn new(tenant: u32, scopes: u8) -> Self {
        Self { tenant, scopes }
    }

    pub(crate) fn may(&self, scope: Scope) -> bool {
        self.scopes & scope as u8 != 0
    }
}

/// SHA-256 of a token: the token itself is stored nowhere.
pub(crate) fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

/// A new random token.
pub(crate) fn new_token() -> String {
    let mut bytes = [0u8; 24];
    rand::rng().fill_bytes(&mut bytes);
    bytes.iter().fold(String::from("cmt_"), |text, byte| text + &format!("{byte:02x}"))
}

/// Tokens by hash, and how much each tenant did of late.
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

/// Mutations a second of a tenant without a rate of its own.
const RATE: u32 = 200;
/// Seconds of the rate that may come at once.
const BURST_SECONDS: i64 = 5;

impl Gate {
    pub(crate) fn new(clock: Clock, tokens: Vec<([u8; 32], u32, u8)>, calls: Calls) -> Self {
        let tokens =
            tokens.into_iter().map(|(hash, tenant, scopes)| (hash, Caller { tenant, scopes })).collect();
        Self {
            tokens: RwLock::new(tokens),
            buckets: Mutex::default(),
            rates: RwLock::default(),
            clock,
            calls,
        }
    }

    pub(crate) fn admit(&self, hash: [u8; 32], tenant: u32, scopes: u8) {
        let caller = Caller { tenant, scopes };
        self.tokens.write().unwrap_or_else(PoisonError::into_inner).insert(hash, caller);
    }

    pub(crate) fn set_rate(&self, tenant: u32, rate: u32) {
        self.rates.write().unwrap_or_else(PoisonError::into_inner).insert(tenant, rate);
    }

    /// The caller behind an `authorization` value, if it may do this.
    pub(crate) fn caller(
        &self,
        authorization: Option<&str>,
        reviewed: &Reviewed,
        scope: Scope,
    ) -> Result<Caller, Problem> {
        let denied = || Problem::new(401, "UNAUTHENTICATED", "a bearer token is needed");
        let token = authorization.and_then(|value| value.strip_prefix("Bearer ")).ok_or_else(denied)?.trim();
        let known = self.tokens.read().unwrap_or_else(PoisonError::into_inner).get(&hash(token)).copied();
        let caller = known.or_else(|| reviewed.caller(token)).ok_or_else(denied)?;
        if caller.may(scope) {
            self.calls.count(scope);
            Ok(caller)
        } else {
            Err(Problem::new(403, "FORBIDDEN", format!("the token has no scope {scope:?}").to_lowercase()))
        }
    }

    /// Takes `count` mutations from a tenant's allowance.
    pub(crate) fn spend(&self, tenant: u32, count: usize) -> Result<(), Problem> {
        let rate =
            self.rates.read().unwrap_or_else(PoisonError::into_inner).get(&tenant).copied().unwrap_or(RATE);
        let rate = i64::from(rate);
        let now = self.clock.now();
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let full = rate * BURST_SECONDS * 1000;
        let bucket = buckets.entry(tenant).or_insert(Bucket { thousandths: full, at: now });
        let elapsed = i64::try_from(now.since(bucket.at).as_millis()).unwrap_or(0);
        bucket.thousandths = bucket.thousandths.saturating_add(elapsed.saturating_mul(rate)).min(full);
        bucket.at = now;
        let cost = i64::try_from(count).unwrap_or(i64::MAX).saturating_mul(1000);
        if bucket.thousandths < cost {
            return Err(Problem::new(429, "RATE_LIMIT", format!("more than {rate} changes a second")));
        }
        bucket.thousandths -= cost;
        Ok(())
    }
}

//! Authentication of callers by tokens of Kubernetes service accounts. The API server reviews each token. The answer is cached
//! for a short time, so that the authentication itself makes no request.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, header};
use coracle_types::{Clock, UnixMillis};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::caller::{Caller, Scope, hash};
use crate::error::StoreError;
use crate::registry::{Kind, Registry};

/// Required audience of a token: tokens for other services are refused.
pub const AUDIENCE: &str = "coracle-market";
/// Cache time of a valid token.
const KEEP: Duration = Duration::from_secs(60);
/// Cache time of an invalid token.
const KEEP_BAD: Duration = Duration::from_secs(10);
/// Most cached answers.
const KEPT_MAX: usize = 4096;
/// Concurrent reviews.
const AT_ONCE: usize = 8;

/// Kubernetes service account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Namespace of the account.
    pub namespace: String,
    /// Name of the account.
    pub name: String,
    /// Whether the account may create BidNodes in its namespace, which is required for trading.
    pub may_trade: bool,
}

impl Account {
    /// Parses a user name of the API server: `system:serviceaccount:<namespace>:<name>`. The account may not trade until its
    /// permissions have been reviewed.
    #[must_use]
    pub fn of_user(user: &str) -> Option<Self> {
        let (namespace, name) = user.strip_prefix("system:serviceaccount:")?.split_once(':')?;
        let whole = !namespace.is_empty() && !name.is_empty();
        whole.then(|| Self { namespace: namespace.to_owned(), name: name.to_owned(), may_trade: false })
    }
}

/// Why the owner of a token cannot be determined.
#[derive(Debug, thiserror::Error)]
#[error("review a token")]
pub struct Unreviewed(#[source] pub Box<dyn std::error::Error + Send + Sync>);

/// Future of one review.
pub type Answer<'a> = Pin<Box<dyn Future<Output = Result<Option<Account>, Unreviewed>> + Send + 'a>>;

/// Reviewer of tokens.
pub trait Review: Debug + Send + Sync {
    /// Returns the service account of a token that was issued for [`AUDIENCE`], with its permission to trade. `None`: the token
    /// is invalid or expired, or does not belong to a service account.
    fn review<'a>(&'a self, token: &'a str) -> Answer<'a>;
}

/// Accounts that may trade, and their tenants.
#[derive(Clone, Debug)]
pub struct Accounts {
    /// Reviewer.
    pub review: Arc<dyn Review>,
    /// Name of the cluster at the market: an account trades as `<cluster>/<its namespace>`.
    pub cluster: String,
    /// `<namespace>/<name>` of the operator, which trades for all namespaces of the cluster.
    pub operator: String,
}

/// Account of a token, if it is valid, and the end of its cache time, by hash of the token.
type Kept = BTreeMap<[u8; 32], (Option<Caller>, UnixMillis)>;

/// Cache of reviewed tokens.
#[derive(Debug)]
pub(crate) struct Reviewed {
    accounts: Option<Accounts>,
    clock: Clock,
    kept: Mutex<Kept>,
    asking: Semaphore,
}

/// Whether a token has the three parts of a JSON Web Token.
fn is_jwt(token: &str) -> bool {
    token.bytes().filter(|b| *b == b'.').count() == 2
}

/// The token of a request, if an API server can review it.
pub(crate) fn reviewable(headers: &HeaderMap) -> Option<&str> {
    bearer(headers).filter(|token| is_jwt(token))
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ").map(str::trim)
}

impl Reviewed {
    pub(crate) fn new(accounts: Option<Accounts>, clock: Clock) -> Self {
        Self { accounts, clock, kept: Mutex::default(), asking: Semaphore::new(AT_ONCE) }
    }

    fn find(&self, hash: &[u8; 32]) -> Option<Option<Caller>> {
        let now = self.clock.now();
        let kept = self.kept.lock();
        kept.get(hash).filter(|(_, until)| *until > now).map(|(caller, _)| *caller)
    }

    /// Caller of a token that was reviewed recently.
    pub(crate) fn caller(&self, token: &str) -> Option<Caller> {
        if self.accounts.is_none() || !is_jwt(token) { None } else { self.find(&hash(token)).flatten() }
    }

    fn keep(&self, hash: [u8; 32], caller: Option<Caller>) {
        let now = self.clock.now();
        let time = if caller.is_some() { KEEP } else { KEEP_BAD };
        let until = UnixMillis(now.0.saturating_add(i64::try_from(time.as_millis()).unwrap_or(i64::MAX)));
        let mut kept = self.kept.lock();
        if kept.len() >= KEPT_MAX {
            kept.retain(|_, (_, until)| *until > now);
        }
        // If the cache is full, as in a flood of tokens, each further token is reviewed again.
        if kept.len() < KEPT_MAX {
            kept.insert(hash, (caller, until));
        }
    }

    /// Has the token of a request reviewed, unless the answer is cached, and stores the tenant of its account.
    pub(crate) async fn learn(&self, headers: &HeaderMap, registry: &Registry) {
        let Some((accounts, token)) = self.accounts.as_ref().zip(reviewable(headers)) else { return };
        let hash = hash(token);
        if self.find(&hash).is_some() {
            return;
        }
        let Ok(_turn) = self.asking.acquire().await else { return };
        if self.find(&hash).is_some() {
            return;
        }
        let caller = match accounts.review.review(token).await {
            Ok(None) => None,
            Ok(Some(account)) => match caller_of(accounts, &account, registry).await {
                Ok(caller) => Some(caller),
                Err(error) => return tracing::warn!(%error, "store tenant of service account failed"),
            },
            // The answer is unknown: it is not cached, and the next request asks again.
            Err(error) => {
                return tracing::warn!(error = &error as &dyn std::error::Error, "review token failed");
            }
        };
        self.keep(hash, caller);
    }
}

/// Returns the caller as which an account trades.
async fn caller_of(
    accounts: &Accounts,
    account: &Account,
    registry: &Registry,
) -> Result<Caller, StoreError> {
    let is_operator = accounts.operator == format!("{}/{}", account.namespace, account.name);
    let tenant = if is_operator {
        accounts.cluster.clone()
    } else {
        format!("{}/{}", accounts.cluster, account.namespace)
    };
    let tenant = registry.ensure(Kind::Tenant, &tenant, &[]).await?;
    let trade = if is_operator || account.may_trade { Scope::Trade as u8 } else { 0 };
    Ok(Caller::new(tenant, Scope::Read as u8 | trade))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_parses_only_from_service_account_users() {
        let account = Account { namespace: "ns".into(), name: "a".into(), may_trade: false };
        assert_eq!(Account::of_user("system:serviceaccount:ns:a"), Some(account));
        for other in ["", "admin", "system:serviceaccount:ns", "system:serviceaccount::a", "system:node:n"] {
            assert_eq!(Account::of_user(other), None, "{other}");
        }
        assert!(is_jwt("a.b.c") && !is_jwt("cmt_0123") && !is_jwt("a.b"));
    }
}

//! Callers with a token of a Kubernetes service account. The API server says whose it is; the answer is kept for a
//! moment, so that the gate itself asks nobody.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::{HeaderMap, Request, header};
use coracle_types::{Clock, UnixMillis};
use tokio::sync::Semaphore;

use crate::auth::{Caller, Scope, hash};
use crate::registry::Kind;
use crate::service::Service;

/// Audience that a token must be made for: one that is good elsewhere is not good here.
pub const AUDIENCE: &str = "coracle-market";
/// How long a good token is not asked about again.
const KEEP: Duration = Duration::from_secs(60);
/// How long a bad one is not.
const KEEP_BAD: Duration = Duration::from_secs(10);
/// Answers that are kept at once.
const KEPT_MAX: usize = 4096;
/// Questions that are asked at once.
const AT_ONCE: usize = 8;

/// A service account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl Account {
    /// The account of a user name as the API server spells it: `system:serviceaccount:<namespace>:<name>`.
    #[must_use]
    pub fn of_user(user: &str) -> Option<Self> {
        let (namespace, name) = user.strip_prefix("system:serviceaccount:")?.split_once(':')?;
        let whole = !namespace.is_empty() && !name.is_empty();
        whole.then(|| Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

/// Why nobody can say whose a token is.
#[derive(Debug, thiserror::Error)]
#[error("review a token")]
pub struct Unreviewed(#[source] pub Box<dyn std::error::Error + Send + Sync>);

/// The future of one question.
pub type Answer<'a> = Pin<Box<dyn Future<Output = Result<Option<Account>, Unreviewed>> + Send + 'a>>;

/// Who knows whose a token is.
pub trait Review: Debug + Send + Sync {
    /// The service account of a token that was made for [`AUDIENCE`]; `None`: it is none, or over.
    fn review<'a>(&'a self, token: &'a str) -> Answer<'a>;
}

/// Which accounts trade, and as whom.
#[derive(Clone, Debug)]
pub struct Accounts {
    /// Who is asked.
    pub review: Arc<dyn Review>,
    /// Name of the cluster here: an account trades as `<cluster>/<its namespace>`.
    pub cluster: String,
    /// `<namespace>/<name>` of the operator, which trades for all namespaces of the cluster.
    pub operator: String,
}

/// Whose a token is, if anybody's, and until when that is believed; by its hash.
type Kept = BTreeMap<[u8; 32], (Option<Caller>, UnixMillis)>;

/// What is known of tokens, for a while.
#[derive(Debug)]
pub(crate) struct Reviewed {
    accounts: Option<Accounts>,
    clock: Clock,
    kept: Mutex<Kept>,
    asking: Semaphore,
}

/// A token that could be a service account's: three parts, as a JSON Web Token has.
fn is_jwt(token: &str) -> bool {
    token.bytes().filter(|b| *b == b'.').count() == 2
}

pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ").map(str::trim)
}

impl Reviewed {
    pub(crate) fn new(accounts: Option<Accounts>, clock: Clock) -> Self {
        Self { accounts, clock, kept: Mutex::default(), asking: Semaphore::new(AT_ONCE) }
    }

    fn find(&self, hash: &[u8; 32]) -> Option<Option<Caller>> {
        let now = self.clock.now();
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.get(hash).filter(|(_, until)| *until > now).map(|(caller, _)| *caller)
    }

    /// The caller of a token that was reviewed of late.
    pub(crate) fn caller(&self, token: &str) -> Option<Caller> {
        if self.accounts.is_none() || !is_jwt(token) { None } else { self.find(&hash(token)).flatten() }
    }

    fn keep(&self, hash: [u8; 32], caller: Option<Caller>) {
        let now = self.clock.now();
        let time = if caller.is_some() { KEEP } else { KEEP_BAD };
        let until = UnixMillis(now.0.saturating_add(i64::try_from(time.as_millis()).unwrap_or(i64::MAX)));
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT_MAX {
            kept.retain(|_, (_, until)| *until > now);
        }
        // Who floods us with tokens has each of them reviewed again.
        if kept.len() < KEPT_MAX {
            kept.insert(hash, (caller, until));
        }
    }
}

impl Service {
    /// Finds out whose the token of a request is, if that takes asking.
    pub(crate) async fn learn(&self, headers: &HeaderMap) {
        let reviewed = &self.reviewed;
        let Some((accounts, token)) = reviewed.accounts.as_ref().zip(bearer(headers)) else { return };
        if !is_jwt(token) {
            return;
        }
        let hash = hash(token);
        if reviewed.find(&hash).is_some() {
            return;
        }
        let Ok(_turn) = reviewed.asking.acquire().await else { return };
        if reviewed.find(&hash).is_some() {
            return;
        }
        let caller = match accounts.review.review(token).await {
            Ok(None) => None,
            Ok(Some(account)) => match self.caller_of(accounts, &account).await {
                Ok(caller) => Some(caller),
                Err(error) => return tracing::warn!(%error, "tenant of a service account not stored"),
            },
            // Not known: not kept, and asked again with the next request.
            Err(error) => {
                return tracing::warn!(error = &error as &dyn std::error::Error, "token not reviewed");
            }
        };
        reviewed.keep(hash, caller);
    }

    async fn caller_of(
        &self,
        accounts: &Accounts,
        account: &Account,
    ) -> Result<Caller, crate::error::StoreError> {
        let tenant = if accounts.operator == format!("{}/{}", account.namespace, account.name) {
            accounts.cluster.clone()
        } else {
            format!("{}/{}", accounts.cluster, account.namespace)
        };
        let tenant = self.registry.ensure(Kind::Tenant, &tenant, &[]).await?;
        Ok(Caller::new(tenant, Scope::Read as u8 | Scope::Trade as u8))
    }
}

/// Puts [`Service::learn`] in front of a door.
#[derive(Clone, Debug)]
pub(crate) struct Learning<S> {
    pub(crate) inner: S,
    pub(crate) service: Arc<Service>,
}

impl<S, B> tower::Service<Request<B>> for Learning<S>
where
    S: tower::Service<Request<B>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that said it is ready is the one to call.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        if bearer(request.headers()).is_none_or(|token| !is_jwt(token)) {
            return Box::pin(inner.call(request));
        }
        let service = self.service.clone();
        Box::pin(async move {
            service.learn(request.headers()).await;
            inner.call(request).await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_service_accounts_are_accounts() {
        let account = Account { namespace: "ns".into(), name: "a".into() };
        assert_eq!(Account::of_user("system:serviceaccount:ns:a"), Some(account));
        for other in ["", "admin", "system:serviceaccount:ns", "system:serviceaccount::a", "system:node:n"] {
            assert_eq!(Account::of_user(other), None, "{other}");
        }
        assert!(is_jwt("a.b.c") && !is_jwt("cmt_0123") && !is_jwt("a.b"));
    }
}

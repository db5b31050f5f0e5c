//! Authenticates and authorises each request before it is handled.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use coracle_access::{Access, Cache, Reviews, User};
use http::{HeaderMap, StatusCode, header};
use sha2::{Digest as _, Sha256};

use super::attributes::{Attributes, attributes};
use super::http_failure::HttpFailure;

/// Lifetimes of cached answers, equal to those of the kubelet (`--authentication-token-webhook-cache-ttl`,
/// `--authorization-webhook-cache-authorized-ttl`, `--authorization-webhook-cache-unauthorized-ttl`).
const TOKEN_TIME: Duration = Duration::from_secs(2 * 60);
const ALLOWED_TIME: Duration = Duration::from_secs(5 * 60);
const DENIED_TIME: Duration = Duration::from_secs(30);
/// Lifetime of a cached invalid token. The token may become valid soon, e.g. if its account was just created.
const INVALID_TIME: Duration = Duration::from_secs(10);
/// Most bytes of a token.
const TOKEN_MAX: usize = 64 << 10;

/// User of a connection, from the client certificate.
#[derive(Clone, Debug)]
pub(super) struct Peer(pub(super) Option<Arc<User>>);

/// Authenticates and authorises requests.
pub(super) struct Guard {
    reviews: Box<dyn Reviews>,
    /// Name of the node.
    node: String,
    /// Whether requests without credentials get the anonymous user.
    anonymous: bool,
    /// Users by the digest of their token; `None`: the token is invalid.
    tokens: Cache<[u8; 32], Option<User>>,
    accesses: Cache<Access, bool>,
}

impl Guard {
    pub(super) fn new(reviews: Box<dyn Reviews>, node: String, anonymous: bool) -> Self {
        Self { reviews, node, anonymous, tokens: Cache::default(), accesses: Cache::default() }
    }

    /// Returns the user of a request: from the certificate, else from the token, else the anonymous user if enabled.
    async fn authenticate(&self, peer: &Peer, headers: &HeaderMap) -> Result<User, HttpFailure> {
        if let Some(user) = &peer.0 {
            return Ok(User::clone(user));
        }
        let token = match bearer(headers) {
            Some(token) => token,
            None if self.anonymous && !headers.contains_key(header::AUTHORIZATION) => {
                return Ok(User::anonymous());
            }
            None => return Err(HttpFailure::unauthorized()),
        };
        let digest = Sha256::digest(token).into();
        if let Some(known) = self.tokens.get(&digest) {
            return known.ok_or_else(HttpFailure::unauthorized);
        }
        let user = match self.reviews.token(token).await {
            Ok(user) => user,
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "review token failed");
                return Err(HttpFailure::unauthorized());
            }
        };
        let time = if user.is_some() { TOKEN_TIME } else { INVALID_TIME };
        self.tokens.put(digest, user.clone(), time);
        user.ok_or_else(HttpFailure::unauthorized)
    }

    async fn authorize(&self, user: User, attributes: Attributes) -> Result<(), HttpFailure> {
        let Attributes { verb, subresources } = attributes;
        for subresource in subresources {
            let (user, name) = (user.clone(), self.node.clone());
            let access = Access {
                user,
                verb,
                version: "v1",
                resource: "nodes",
                subresource,
                name,
                ..Access::default()
            };
            let allowed = match self.accesses.get(&access) {
                Some(known) => known,
                None => self.review(access).await?,
            };
            if allowed {
                return Ok(());
            }
        }
        let subresources = subresources.join(" ");
        let name = user.name;
        let message =
            format!("Forbidden (user={name}, verb={verb}, resource=nodes, subresource(s)=[{subresources}])");
        Err(HttpFailure { status: StatusCode::FORBIDDEN, message })
    }

    async fn review(&self, access: Access) -> Result<bool, HttpFailure> {
        match self.reviews.access(&access).await {
            Ok(allowed) => {
                self.accesses.put(access, allowed, if allowed { ALLOWED_TIME } else { DENIED_TIME });
                Ok(allowed)
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "review access failed");
                let (user, verb) = (access.user.name, access.verb);
                Err(HttpFailure::internal(format!(
                    "Authorization error (user={user}, verb={verb}, resource=nodes, subresource={})",
                    access.subresource
                )))
            }
        }
    }
}

/// Passes a request on, or responds with 401, 403 or 500.
pub(super) async fn guard(
    State(guard): State<Arc<Guard>>,
    Extension(peer): Extension<Peer>,
    request: Request,
    next: Next,
) -> Result<Response, HttpFailure> {
    let user = guard.authenticate(&peer, request.headers()).await?;
    let is_upgrade = request.headers().contains_key(header::UPGRADE);
    let attributes = attributes(request.method(), request.uri().path(), is_upgrade);
    guard.authorize(user, attributes).await?;
    Ok(next.run(request).await)
}

/// Returns the bearer token of a request.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    let fits = (1..=TOKEN_MAX).contains(&token.len());
    (scheme.eq_ignore_ascii_case("bearer") && fits).then_some(token)
}

#[cfg(test)]
mod tests;

//! Authorization. By default, reads are anonymous and writes need a token.

use std::collections::HashMap;

use aws_lc_rs::digest::{SHA256, digest};
use axum::http::{HeaderMap, header};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;

use crate::error::{Code, ErrorResponse, StoreError};
use crate::meta::{Meta, TokenRow};
use crate::rights::{Rights, Role, Target};

/// Time for which a valid token is cached, milliseconds.
const TOKEN_CACHE_MS: i64 = 30_000;
/// Limit of cached tokens.
const TOKEN_CACHE_MAX: usize = 1024;
/// Token for anonymous clients.
pub(crate) const ANONYMOUS: &str = "anonymous";

/// Access that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read: anonymous, unless reads need a token.
    Read,
    /// Read of pages and `/api/`: anonymous, unless these or all reads need a token.
    Browse,
    /// Push: a token with this right, unless writes are open.
    Push,
    /// Deletion: a token with this right, unless writes are open.
    Delete,
    /// Administration: always a token of an administrator.
    Admin,
}

impl Access {
    fn role(self) -> Role {
        match self {
            Self::Read | Self::Browse => Role::Read,
            Self::Push => Role::Push,
            Self::Delete => Role::Delete,
            Self::Admin => Role::Admin,
        }
    }
}

/// Required access, and the repositories that it concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need<'a> {
    pub(crate) access: Access,
    pub(crate) target: Target<'a>,
}

/// Valid token, without its secret.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    pub(crate) name: String,
    pub(crate) rights: Rights,
    pub(crate) expires: Option<i64>,
}

/// Sender of an admitted request.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// Token of the caller. `None`: anonymous.
    pub(crate) holder: Option<Holder>,
    /// True when reads of this kind need no token.
    open_reads: bool,
}

impl Caller {
    /// True when the caller may read this repository. Lists and mounts check each repository.
    pub(crate) fn can_read(&self, repo: &str) -> bool {
        self.open_reads || self.holder.as_ref().is_some_and(|holder| holder.rights.covers(repo))
    }

    /// True when the caller may read all repositories.
    pub(crate) fn can_read_all(&self) -> bool {
        self.open_reads || self.holder.as_ref().is_some_and(|holder| holder.rights.is_everywhere())
    }
}

#[derive(Clone, Debug)]
struct CachedToken {
    holder: Holder,
    at: i64,
}

/// Authorization of requests.
#[derive(Debug)]
pub(crate) struct Gate {
    private_reads: bool,
    private_pages: bool,
    open_writes: bool,
    /// Hash of the configured token, which is not in the database.
    given: Option<[u8; 32]>,
    cached: Mutex<HashMap<[u8; 32], CachedToken>>,
}

/// SHA-256 of a token: the form in which it is stored.
pub(crate) fn hash(token: &str) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    hash
}

/// Creates the secret of a new token.
pub(crate) fn secret() -> String {
    format!("cor_{}", hex::encode(rand::random::<[u8; 24]>()))
}

/// Token of a request: bearer token, or password of any user.
pub(crate) fn request_token(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, rest) = value.split_once(' ').unwrap_or((value, ""));
    let token = match scheme.to_ascii_lowercase().as_str() {
        "bearer" => rest.trim().to_owned(),
        "basic" => {
            let pair = String::from_utf8(STANDARD.decode(rest.trim()).ok()?).ok()?;
            pair.split_once(':')?.1.to_owned()
        }
        _ => return None,
    };
    (!token.is_empty() && token != ANONYMOUS).then_some(token)
}

/// Holder of a row's token. `None` when the rights in the row are invalid.
fn holder(row: &TokenRow) -> Option<Holder> {
    match row.rights() {
        Ok(rights) => Some(Holder { name: row.name.clone(), rights, expires: row.expires }),
        Err(error) => {
            tracing::warn!(token = row.id, %error, "read rights of token failed, token ignored");
            None
        }
    }
}

fn denied_error(need: Need<'_>) -> ErrorResponse {
    let role = need.access.role();
    ErrorResponse::new(
        Code::Denied,
        match need.target {
            Target::Repository(repo) => format!("the token does not have the role {role} for {repo}"),
            Target::Registry => format!("the token does not have the role {role} for all repositories"),
            Target::Listed => format!("the token does not have the role {role}"),
        },
    )
}

impl Gate {
    pub(crate) fn new(
        private_reads: bool,
        private_pages: bool,
        open_writes: bool,
        given: Option<&str>,
    ) -> Self {
        let given = given.filter(|t| !t.is_empty()).map(hash);
        Self { private_reads, private_pages, open_writes, given, cached: Mutex::default() }
    }

    /// True when some requests need a login.
    pub(crate) fn wants_login(&self) -> bool {
        self.private_reads || !self.open_writes
    }

    pub(crate) fn private_reads(&self) -> bool {
        self.private_reads
    }

    /// Admits a request, or returns the error response with the challenge.
    pub(crate) async fn admit(
        &self,
        meta: &Meta,
        headers: &HeaderMap,
        need: Need<'_>,
        now: i64,
    ) -> Result<Caller, ErrorResponse> {
        let closed_reads = self.private_reads || (need.access == Access::Browse && self.private_pages);
        let needed = match need.access {
            Access::Read | Access::Browse => closed_reads,
            Access::Push | Access::Delete => !self.open_writes,
            Access::Admin => true,
        };
        let holder = match request_token(headers) {
            Some(token) => self.holder(meta, &token, now).await?,
            None => None,
        };
        if needed {
            let Some(holder) = &holder else {
                return Err(ErrorResponse::new(Code::Unauthorized, "a token is needed"));
            };
            if !holder.rights.allow(need.access.role(), &need.target) {
                return Err(denied_error(need));
            }
        }
        Ok(Caller { holder, open_reads: !closed_reads })
    }

    /// Holder of a token. `None` when it is unknown or expired.
    pub(crate) async fn holder(
        &self,
        meta: &Meta,
        token: &str,
        now: i64,
    ) -> Result<Option<Holder>, StoreError> {
        let hash = hash(token);
        if self.given == Some(hash) {
            // Nodes and tools have a copy of this token, so it cannot manage tokens.
            let rights = Rights::everywhere(Role::Delete);
            return Ok(Some(Holder { name: "environment".to_owned(), rights, expires: None }));
        }
        let known = {
            let cached = self.cached.lock();
            cached.get(&hash).filter(|b| now - b.at < TOKEN_CACHE_MS).map(|b| b.holder.clone())
        };
        let holder = match known {
            Some(holder) => holder,
            None => {
                let Some(row) = meta.token(&hash).await? else { return Ok(None) };
                let Some(holder) = holder(&row) else { return Ok(None) };
                // On a full file system, a token stays valid for reads and deletions.
                if let Err(error) = meta.use_token(&row.id, now).await {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        token = row.id,
                        "note use of token failed"
                    );
                }
                self.cache_holder(hash, &holder, now);
                holder
            }
        };
        let live = holder.expires.is_none_or(|at| now < at);
        Ok(live.then_some(holder))
    }

    fn cache_holder(&self, hash: [u8; 32], holder: &Holder, at: i64) {
        let mut cached = self.cached.lock();
        if cached.len() >= TOKEN_CACHE_MAX {
            cached.retain(|_, b| at - b.at < TOKEN_CACHE_MS);
        }
        if cached.len() < TOKEN_CACHE_MAX {
            cached.insert(hash, CachedToken { holder: holder.clone(), at });
        }
    }

    /// Empties the cache after a token was removed. Other replicas stop accepting the token within 30 s.
    pub(crate) fn forget_all(&self) {
        self.cached.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::MetaAt;

    #[tokio::test]
    async fn token_is_valid_if_its_use_cannot_be_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let meta = Meta::open(&MetaAt::Sqlite(dir.path().join("registry.db"))).await.unwrap();
        let rights = Rights::everywhere(Role::Read);
        let row = TokenRow {
            id: "1".to_owned(),
            name: "reader".to_owned(),
            writes: 0,
            role: Some(rights.role().to_string()),
            repositories: Some(rights.globs().join(" ")),
            created_by: "test".to_owned(),
            created: 0,
            expires: None,
            last_used: None,
        };
        meta.put_token(&hash("secret"), &row).await.unwrap();
        // Simulates a full file system: the table accepts no change.
        let Meta::Sqlite { write, .. } = &meta else { panic!("it is SQLite") };
        let full = "CREATE TRIGGER full BEFORE UPDATE ON tokens BEGIN SELECT RAISE(ABORT, 'full'); END";
        sqlx::query(full).execute(write).await.unwrap();
        let gate = Gate::new(true, true, false, None);
        let holder = gate.holder(&meta, "secret", 1).await.unwrap();
        assert_eq!(holder.map(|holder| holder.name).as_deref(), Some("reader"));
    }

    #[test]
    fn presented_table() {
        for (value, want) in [
            ("Bearer cor_1", Some("cor_1")),
            ("bearer cor_1", Some("cor_1")),
            ("Bearer ", None),
            ("Bearer", None),
            ("Bearer anonymous", None),
            ("Basic dTpjb3JfMQ==", Some("cor_1")),
            ("Basic ???", None),
            ("Digest x", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            assert_eq!(request_token(&headers).as_deref(), want, "{value}");
        }
    }
}

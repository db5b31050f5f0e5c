//! Who may do what. Reads are anonymous and writes need a token, unless it was said otherwise.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use aws_lc_rs::digest::{SHA256, digest};
use axum::http::{HeaderMap, header};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::error::{Code, Problem, StoreError};
use crate::meta::{Meta, TokenRow};

/// How long a token is believed without asking the database, in milliseconds.
const BELIEVED_MS: i64 = 30_000;
/// Tokens that are remembered.
const REMEMBERED: usize = 1024;
/// What an anonymous client gets as a token.
pub(crate) const ANONYMOUS: &str = "anonymous";

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Anybody, unless reads are private.
    Read,
    /// Anybody, unless reads are private, or the pages and the routes for tools are.
    Browse,
    /// A token that may write, unless writes are open.
    Write,
    /// A token that may write, always.
    Tokens,
}

/// Who is asking.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    Anonymous,
    Token { name: String, writes: bool },
}

#[derive(Clone, Debug)]
struct Believed {
    token: TokenRow,
    at: i64,
}

/// The gate.
#[derive(Debug)]
pub(crate) struct Gate {
    private_reads: bool,
    private_pages: bool,
    open_writes: bool,
    /// Hash of a token that is given from outside, not stored.
    given: Option<[u8; 32]>,
    believed: Mutex<HashMap<[u8; 32], Believed>>,
}

/// What is stored of a token.
pub(crate) fn hash(token: &str) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    hash
}

/// A new secret.
pub(crate) fn secret() -> String {
    format!("cor_{}", hex::encode(rand::random::<[u8; 24]>()))
}

/// The token of a request: as a bearer, or as the password of whoever.
pub(crate) fn presented(headers: &HeaderMap) -> Option<String> {
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

impl Gate {
    pub(crate) fn new(
        private_reads: bool,
        private_pages: bool,
        open_writes: bool,
        given: Option<&str>,
    ) -> Self {
        let given = given.filter(|t| !t.is_empty()).map(hash);
        Self { private_reads, private_pages, open_writes, given, believed: Mutex::default() }
    }

    /// Must a client show who it is before it can do everything?
    pub(crate) fn wants_login(&self) -> bool {
        self.private_reads || !self.open_writes
    }

    pub(crate) fn private_reads(&self) -> bool {
        self.private_reads
    }

    /// Lets a request in, or says what it needs.
    pub(crate) async fn admit(
        &self,
        meta: &Meta,
        headers: &HeaderMap,
        access: Access,
        now: i64,
    ) -> Result<Caller, Problem> {
        let needed = match access {
            Access::Read => self.private_reads,
            Access::Browse => self.private_reads || self.private_pages,
            Access::Write => !self.open_writes,
            Access::Tokens => true,
        };
        let caller = match presented(headers) {
            Some(token) => self.caller(meta, &token, now).await?,
            None => None,
        };
        match caller {
            _ if !needed => Ok(caller.unwrap_or(Caller::Anonymous)),
            Some(Caller::Token { writes: false, .. }) if matches!(access, Access::Write | Access::Tokens) => {
                Err(Problem::new(Code::Denied, "the token may only read"))
            }
            Some(caller) => Ok(caller),
            None => Err(Problem::new(Code::Unauthorized, "a token is needed")),
        }
    }

    /// Who has this token. `None`: nobody, or it has run out.
    pub(crate) async fn caller(
        &self,
        meta: &Meta,
        token: &str,
        now: i64,
    ) -> Result<Option<Caller>, StoreError> {
        let hash = hash(token);
        if self.given == Some(hash) {
            return Ok(Some(Caller::Token { name: "environment".to_owned(), writes: true }));
        }
        let known = {
            let believed = self.believed.lock().unwrap_or_else(PoisonError::into_inner);
            believed.get(&hash).filter(|b| now - b.at < BELIEVED_MS).map(|b| b.token.clone())
        };
        let token = match known {
            Some(token) => token,
            None => match meta.token(&hash).await? {
                Some(token) => {
                    meta.use_token(&token.id, now).await?;
                    self.believe(hash, &token, now);
                    token
                }
                None => return Ok(None),
            },
        };
        let live = token.expires.is_none_or(|at| now < at);
        Ok(live.then_some(Caller::Token { name: token.name, writes: token.writes != 0 }))
    }

    fn believe(&self, hash: [u8; 32], token: &TokenRow, at: i64) {
        let mut believed = self.believed.lock().unwrap_or_else(PoisonError::into_inner);
        if believed.len() >= REMEMBERED {
            believed.retain(|_, b| at - b.at < BELIEVED_MS);
        }
        if believed.len() < REMEMBERED {
            believed.insert(hash, Believed { token: token.clone(), at });
        }
    }

    /// A token was removed: nobody is believed any longer. Other replicas find out within 30 s.
    pub(crate) fn forget_all(&self) {
        self.believed.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(presented(&headers).as_deref(), want, "{value}");
        }
    }
}

//! Tenants and permissions of callers, and their tokens.

use rand::RngCore;
use sha2::{Digest, Sha256};

/// Permission of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    Read = 1,
    Trade = 2,
    Supply = 4,
    Admin = 8,
    Audit = 16,
}

impl Scope {
    /// All scopes.
    pub(crate) const ALL: [Self; 5] = [Self::Read, Self::Trade, Self::Supply, Self::Admin, Self::Audit];

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

/// Bit mask of all scopes, for the first token.
pub(crate) const ALL: u8 = 31;

/// Tenant and permissions of the sender of a request.
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

/// SHA-256 of a token. The token itself is not stored.
pub(crate) fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

/// Generates a random token.
pub(crate) fn new_token() -> String {
    let mut bytes = [0u8; 24];
    rand::rng().fill_bytes(&mut bytes);
    format!("cmt_{}", hex::encode(bytes))
}

//! Credentials for registries: given, or from docker's configuration.

mod docker;
mod pull_secret;

use std::{fmt, path::PathBuf};

use crate::Digest;

pub(crate) use docker::lookup;
pub use pull_secret::{InvalidPullSecret, PullSecret};

/// Password or token. It has neither `Debug` nor `Display`, so that it cannot end up in a log.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

/// Source of credentials.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// From docker's configuration: `dir/config.json`, by default `$DOCKER_CONFIG` or `~/.docker`. Anonymous
    /// when it has none for the registry. Credential helpers named there (`docker-credential-…` in `PATH`)
    /// are run.
    Docker {
        /// Directory of `config.json`; `None` for docker's default.
        dir: Option<PathBuf>,
    },
    /// No credentials.
    Anonymous,
    /// User and password. Token servers exchange them for a token.
    Basic {
        /// User name.
        user: String,
        /// Password.
        password: Secret,
    },
    /// Bearer token, sent unchanged.
    Bearer(Secret),
    /// Refresh token. Token servers exchange it for a token.
    Identity(Secret),
}

impl Credentials {
    /// Digest by which a caller recognises these credentials without storing them.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        let parts = match self {
            Self::Docker { dir } => {
                ["docker", dir.as_ref().and_then(|dir| dir.to_str()).unwrap_or_default(), ""]
            }
            Self::Anonymous => ["anonymous", "", ""],
            Self::Basic { user, password } => ["basic", user, password.expose()],
            Self::Bearer(token) => ["bearer", token.expose(), ""],
            Self::Identity(token) => ["identity", token.expose(), ""],
        };
        // Prefixes each part with its length, so that different credentials never give the same text.
        Digest::of(parts.map(|part| format!("{}:{part}", part.len())).concat().as_bytes())
    }
}

impl Default for Credentials {
    fn default() -> Self {
        Self::Docker { dir: None }
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Docker { dir } => write!(f, "Docker({dir:?})"),
            Self::Anonymous => f.write_str("Anonymous"),
            Self::Basic { user, .. } => write!(f, "Basic({user:?})"),
            Self::Bearer(_) => f.write_str("Bearer"),
            Self::Identity(_) => f.write_str("Identity"),
        }
    }
}

/// Credentials for one server, after the lookup.
#[derive(Clone)]
pub(crate) enum Login {
    Anonymous,
    Basic {
        user: String,
        password: Secret,
    },
    Bearer(Secret),
    /// Refresh token, exchanged for tokens by OAuth 2.0.
    Identity(Secret),
}

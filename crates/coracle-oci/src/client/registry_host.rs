//! Settings of the servers of one registry.

use std::{fmt, time::Duration};

use reqwest::Url;

use crate::Secret;

/// Servers of one registry, from its `hosts.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryHosts {
    /// Mirrors, asked in this order before the registry itself.
    pub mirrors: Vec<RegistryHost>,
    /// The registry itself.
    pub server: RegistryHost,
}

/// One server of a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct RegistryHost {
    /// Scheme, host, optional port and path. `None`: the host of the reference.
    pub url: Option<Url>,
    /// True when the path of the URL is the root of the API. Otherwise `/v2` is appended.
    pub override_path: bool,
    /// Operations that the server is used for.
    pub capabilities: Capabilities,
    /// Trusted certificates, as PEM, in addition to those of the system.
    pub trust: Vec<u8>,
    /// Client certificate and its key, as PEM.
    pub identity: Option<Secret>,
    /// Skips verification of the server's certificate.
    pub skip_verify: bool,
    /// Headers of every request to this server.
    pub headers: Vec<(String, String)>,
    /// Time limit for opening a connection; `None`: [`Timeouts::connect`](crate::Timeouts::connect).
    pub dial_timeout: Option<Duration>,
}

/// Operations that a server is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Pulling manifests by digest, and blobs.
    pub pull: bool,
    /// Resolving tags to digests.
    pub resolve: bool,
    /// Pushing.
    pub push: bool,
}

impl Capabilities {
    /// Every capability.
    pub const ALL: Self = Self { pull: true, resolve: true, push: true };
}

impl Default for RegistryHost {
    fn default() -> Self {
        Self {
            url: None,
            override_path: false,
            capabilities: Capabilities::ALL,
            trust: Vec::new(),
            identity: None,
            skip_verify: false,
            headers: Vec::new(),
            dial_timeout: None,
        }
    }
}

/// Hides keys and header values.
impl fmt::Debug for RegistryHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers: Vec<_> = self.headers.iter().map(|(name, _)| name).collect();
        f.debug_struct("RegistryHost")
            .field("url", &self.url.as_ref().map(Url::as_str))
            .field("override_path", &self.override_path)
            .field("capabilities", &self.capabilities)
            .field("trust_bytes", &self.trust.len())
            .field("has_identity", &self.identity.is_some())
            .field("skip_verify", &self.skip_verify)
            .field("headers", &headers)
            .field("dial_timeout", &self.dial_timeout)
            .finish()
    }
}

impl RegistryHost {
    /// Server at a URL, with every capability.
    #[must_use]
    pub fn at(url: Url) -> Self {
        Self { url: Some(url), ..Self::default() }
    }

    /// True when TLS settings are configured.
    pub(crate) fn wants_tls(&self) -> bool {
        !self.trust.is_empty() || self.identity.is_some() || self.skip_verify
    }
}

//! Speaking with registries: where to go, and with what.
//!
//! Credentials are exchanged for tokens by `oci-client`. Manifests and blobs are fetched here: that client
//! reads a manifest whatever its size, and does not tell where a resumed blob begins.

mod blob;
mod file;
mod push;
mod session;

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

pub(crate) use blob::{fetch, fetch_small, fetch_small_of, fetch_whole};
pub(crate) use file::fetch_file;
pub(crate) use push::{Offered, Payload, Sent};
pub(crate) use session::{Operation, Session, client};

use crate::{ImageError, Reference};

/// How one registry is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryConfig {
    /// Hosts with optional port, asked in order before the registry itself. `http://` in front allows plain
    /// HTTP for that mirror.
    pub mirrors: Vec<String>,
    /// Speak plain HTTP with the registry. Loopback registries need no such word; `Some(false)` makes them
    /// speak TLS.
    pub plain_http: Option<bool>,
    /// Certificates, as PEM, that the registry itself may have besides those that the system trusts. Heeded by transfers
    /// of disks and snapshots.
    pub trust: Vec<u8>,
}

/// Bounds on waiting. Every request has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Until a connection stands. Default 10 s.
    pub connect: Duration,
    /// Without a byte arriving. Default 30 s.
    pub read_idle: Duration,
    /// For a whole manifest or token. Default 60 s.
    pub request: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            read_idle: Duration::from_secs(30),
            request: Duration::from_secs(60),
        }
    }
}

/// One server to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// Host and optional port.
    pub(crate) host: String,
    pub(crate) plain_http: bool,
    /// See [`RegistryConfig::trust`].
    pub(crate) trust: Vec<u8>,
}

/// Servers that may have the image, in the order to ask them: mirrors, then the registry. Pure.
pub(crate) fn endpoints(
    reference: &Reference,
    registries: &BTreeMap<String, RegistryConfig>,
) -> Vec<Endpoint> {
    let config = registries.get(reference.registry()).cloned().unwrap_or_default();
    let mut all: Vec<_> = config.mirrors.iter().map(|text| mirror(text)).collect();
    all.push(home(reference, registries));
    all
}

/// The registry itself. Pure.
pub(crate) fn home(reference: &Reference, registries: &BTreeMap<String, RegistryConfig>) -> Endpoint {
    let config = registries.get(reference.registry());
    let plain_http = config.and_then(|config| config.plain_http);
    let plain_http = plain_http.unwrap_or_else(|| is_loopback(reference.registry()));
    let trust = config.map(|config| config.trust.clone()).unwrap_or_default();
    Endpoint { host: reference.registry().to_owned(), plain_http, trust }
}

/// No client of HTTP can be had.
pub(crate) fn unprepared(reference: &Reference, error: reqwest::Error) -> ImageError {
    ImageError::Network {
        registry: reference.registry().to_owned(),
        operation: "prepare HTTP client".to_owned(),
        source: error.into(),
    }
}

fn mirror(text: &str) -> Endpoint {
    let text = text.trim_end_matches('/');
    let (host, plain_http) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
        (Some(host), _) => (host, true),
        (_, Some(host)) => (host, false),
        (None, None) => (text, is_loopback(text)),
    };
    Endpoint { host: host.to_owned(), plain_http, trust: Vec::new() }
}

/// True for `localhost` and loopback addresses, with or without a port. A name that merely resolves to
/// loopback is not meant.
fn is_loopback(host: &str) -> bool {
    let bare = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_table() {
        let listed = RegistryConfig {
            mirrors: vec!["http://m:1".into(), "n.io/".into(), "127.0.0.1:2".into()],
            ..RegistryConfig::default()
        };
        let lan = RegistryConfig { plain_http: Some(true), ..RegistryConfig::default() };
        let tls = RegistryConfig { plain_http: Some(false), ..RegistryConfig::default() };
        let map = BTreeMap::from([
            ("docker.io".to_owned(), listed),
            ("lan:5000".to_owned(), lan),
            ("localhost:5001".to_owned(), tls),
        ]);
        for (reference, want) in [
            ("nginx", "http m:1, https n.io, http 127.0.0.1:2, https docker.io"),
            ("ghcr.io/a/b", "https ghcr.io"),
            ("localhost:5000/a", "http localhost:5000"),
            ("localhost:5001/a", "https localhost:5001"),
            ("127.9.9.9/a", "http 127.9.9.9"),
            ("[::1]:5000/a", "http [::1]:5000"),
            ("localhost.evil.io/a", "https localhost.evil.io"),
            ("127.0.0.1.evil.io/a", "https 127.0.0.1.evil.io"),
            ("10.0.0.1:5000/a", "https 10.0.0.1:5000"),
            ("lan:5000/a", "http lan:5000"),
        ] {
            let word = |e: &Endpoint| format!("{} {}", if e.plain_http { "http" } else { "https" }, e.host);
            let got: Vec<_> = endpoints(&reference.parse().unwrap(), &map).iter().map(word).collect();
            assert_eq!(got.join(", "), want, "{reference}");
        }
    }
}

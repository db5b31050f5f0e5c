//! Address and settings of one server.

use std::{net::IpAddr, time::Duration};

use reqwest::{Url, header::HeaderMap};

use super::{
    address::{authority_of, origin_of},
    registry_host::{Capabilities, RegistryHost},
};
use crate::Secret;

/// Name of Docker Hub in references, and host of its API.
const HUB: (&str, &str) = ("docker.io", "registry-1.docker.io");

/// One server of a registry, as configured.
#[derive(Clone)]
pub struct Endpoint {
    /// Host and optional port: key of its credentials.
    pub(crate) host: String,
    /// Root of the API, without a trailing slash.
    pub(crate) root: Url,
    /// True when plain HTTP is configured or the server is on loopback.
    pub(crate) plain_http: bool,
    /// Operations that the server is used for.
    pub capabilities: Capabilities,
    pub(crate) tls: Tls,
    /// Headers of every request to this server.
    pub(crate) headers: HeaderMap,
    pub(crate) dial_timeout: Option<Duration>,
    /// Registry of the reference, if this server is a mirror of it: a caching mirror fetches missing content there.
    pub(crate) namespace: Option<String>,
}

/// TLS settings.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    pub(crate) trust: Vec<u8>,
    pub(crate) identity: Option<Secret>,
    pub(crate) skip_verify: bool,
}

impl Endpoint {
    /// Host and port.
    pub(crate) fn origin(&self) -> Option<(String, u16)> {
        origin_of(&self.root)
    }

    /// True for a URL of this server: same scheme, host and port.
    pub(crate) fn is_at(&self, url: &Url) -> bool {
        self.root.origin() == url.origin()
    }
}

/// Endpoint of a configured server of a registry. `None` if its address is invalid. Pure.
pub(super) fn of(registry: &str, host: &RegistryHost) -> Option<Endpoint> {
    let own = || {
        let plain = is_loopback(registry) && !host.wants_tls();
        let server = if registry == HUB.0 { HUB.1 } else { registry };
        Url::parse(&format!("{}://{server}", if plain { "http" } else { "https" })).ok()
    };
    let mut root = host.url.clone().or_else(own)?;
    let path = root.path().trim_end_matches('/').to_owned();
    let is_root = host.override_path || path.ends_with("/v2");
    root.set_path(&if is_root { path } else { format!("{path}/v2") });
    let authority = authority_of(&root)?;
    let name = if authority == HUB.1 { HUB.0.to_owned() } else { authority };
    let headers = host.headers.iter().filter_map(|(name, value)| {
        Some((name.parse::<reqwest::header::HeaderName>().ok()?, value.parse().ok()?))
    });
    let mut all = HeaderMap::new();
    for (name, value) in headers {
        all.append(name, value);
    }
    Some(Endpoint {
        plain_http: root.scheme() == "http",
        namespace: (name != registry).then(|| registry.to_owned()),
        host: name,
        root,
        capabilities: host.capabilities,
        tls: Tls {
            trust: host.trust.clone(),
            identity: host.identity.clone(),
            skip_verify: host.skip_verify,
        },
        headers: all,
        dial_timeout: host.dial_timeout,
    })
}

/// True for `localhost` and loopback addresses, with or without a port. Names that resolve to loopback do not count.
fn is_loopback(host: &str) -> bool {
    let bare = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

//! Registry configuration: mirrors, certificates and plain HTTP, in the form of containerd's `hosts.toml`.
//!
//! The configuration directory contains a directory per registry, named by its host: `registry.example`,
//! `registry.example:5000` or `registry.example_5000_`, and `_default` for all others. The format of the file is containerd's:
//! <https://github.com/containerd/containerd/blob/main/docs/hosts.md>.

mod load;
mod parse;

use std::collections::{BTreeMap, BTreeSet};

use reqwest::Url;

use super::{
    address::authority_of,
    endpoint::{self, Endpoint},
    policy::Operation,
    registry_host::{RegistryHost, RegistryHosts},
};
use crate::{OciError, Reference};

pub use parse::InvalidHosts;

/// Configured registries. All others are reached under their own name by TLS, or by plain HTTP on loopback.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registries {
    /// Servers by host and optional port, as in references.
    hosts: BTreeMap<String, RegistryHosts>,
    /// Servers of registries that are not in `hosts`.
    default: Option<RegistryHosts>,
    /// True when requests of a cluster reach private addresses of configured registries only.
    deny_private: bool,
}

impl Registries {
    /// Configures a registry, by its host and optional port as in references.
    #[must_use]
    pub fn with(mut self, registry: &str, hosts: RegistryHosts) -> Self {
        self.hosts.insert(registry.to_owned(), hosts);
        self
    }

    /// Adds the registry at `url` unless it is configured. Ignores URLs of other schemes than `http` and `https`.
    #[must_use]
    pub fn with_url(self, url: &str) -> Self {
        let text = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let Ok(url) = Url::parse(&text) else { return self };
        match authority_of(&url) {
            Some(registry) if !self.hosts.contains_key(&registry) => {
                let mut root = url.clone();
                root.set_path("");
                let server = RegistryHost::at(root);
                self.with(&registry, RegistryHosts { server, ..RegistryHosts::default() })
            }
            _ => self,
        }
    }

    /// Sets whether requests of a cluster reach private addresses (RFC 1918, RFC 6598, RFC 4193) of registries that are
    /// not configured.
    #[must_use]
    pub fn deny_private(mut self, deny: bool) -> Self {
        self.deny_private = deny;
        self
    }

    pub(crate) fn is_private_denied(&self) -> bool {
        self.deny_private
    }

    /// Servers to ask for an image, in order of preference. Pure.
    pub(crate) fn endpoints(&self, reference: &Reference, operation: Operation) -> Vec<Endpoint> {
        let registry = reference.registry();
        let hosts = self.of(registry);
        let mirrors = hosts.mirrors.iter().filter_map(|host| endpoint::of(registry, host));
        let all = mirrors.chain([endpoint::of(registry, &hosts.server)].into_iter().flatten());
        all.filter(|endpoint| match operation {
            Operation::Pull => endpoint.capabilities.pull,
            Operation::Push => endpoint.capabilities.push,
        })
        .collect()
    }

    /// Scheme, host and port of every server that the configuration names.
    pub(crate) fn configured_origins(&self) -> BTreeSet<(String, u16)> {
        let of = |registry: &str, hosts: &RegistryHosts| {
            let all = hosts.mirrors.iter().chain([&hosts.server]);
            let all = all.filter(|host| !registry.is_empty() || host.url.is_some());
            all.filter_map(|host| endpoint::of(registry, host)?.origin()).collect::<Vec<_>>()
        };
        let own = self.hosts.iter().flat_map(|(registry, hosts)| of(registry, hosts));
        own.chain(self.default.iter().flat_map(|hosts| of("", hosts))).collect()
    }

    fn of(&self, registry: &str) -> RegistryHosts {
        self.hosts.get(registry).or(self.default.as_ref()).cloned().unwrap_or_default()
    }
}

/// Error for a registry without a server for the operation.
pub(crate) fn no_server(reference: &Reference, operation: Operation) -> OciError {
    let what = match operation {
        Operation::Pull => "pull",
        Operation::Push => "push",
    };
    let registry = reference.registry();
    OciError::unsupported(format!("registry {registry}: no configured server has the capability {what:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(text: &str) -> RegistryHosts {
        RegistryHosts::parse(text).unwrap().hosts()
    }

    #[test]
    fn endpoint_table() {
        let map = Registries::default()
            .with(
                "docker.io",
                hosts("[host.\"http://m:1\"]\n[host.\"n.io\"]\n[host.\"https://p.io/hub\"]\ncapabilities = ['pull']"),
            )
            .with("lan:5000", hosts("server = 'http://lan:5000'"))
            .with("localhost:5001", hosts("server = 'https://localhost:5001'"))
            .with("moved.io", hosts("server = 'https://new.io/api'\noverride_path = true"))
            .with("localhost:5002", hosts("skip_verify = true"))
            .with("mirrors.io", hosts("capabilities = ['push']\nserver = 'https://mirrors.io'\n[host.'https://a.io']\ncapabilities = ['pull', 'resolve']"));
        for (reference, want) in [
            (
                "nginx",
                "http://m:1/v2 ns=docker.io, https://n.io/v2 ns=docker.io, https://p.io/hub/v2 ns=docker.io, https://registry-1.docker.io/v2",
            ),
            ("ghcr.io/a/b", "https://ghcr.io/v2"),
            ("localhost:5000/a", "http://localhost:5000/v2"),
            ("localhost:5001/a", "https://localhost:5001/v2"),
            ("localhost:5002/a", "https://localhost:5002/v2"),
            ("127.9.9.9/a", "http://127.9.9.9/v2"),
            ("[::1]:5000/a", "http://[::1]:5000/v2"),
            ("localhost.evil.io/a", "https://localhost.evil.io/v2"),
            ("127.0.0.1.evil.io/a", "https://127.0.0.1.evil.io/v2"),
            ("10.0.0.1:5000/a", "https://10.0.0.1:5000/v2"),
            ("lan:5000/a", "http://lan:5000/v2"),
            ("moved.io/a", "https://new.io/api ns=moved.io"),
            ("mirrors.io/a", "https://a.io/v2 ns=mirrors.io"),
        ] {
            let show = |e: &Endpoint| {
                e.namespace.as_ref().map_or_else(|| e.root.to_string(), |ns| format!("{} ns={ns}", e.root))
            };
            let all = map.endpoints(&reference.parse().unwrap(), Operation::Pull);
            assert_eq!(all.iter().map(show).collect::<Vec<_>>().join(", "), want, "{reference}");
        }
        let pushed = map.endpoints(&"mirrors.io/a".parse().unwrap(), Operation::Push);
        assert_eq!(pushed.iter().map(|e| e.root.as_str()).collect::<Vec<_>>(), ["https://mirrors.io/v2"]);
    }

    #[test]
    fn named_lists_configured_servers() {
        let default = hosts("[host.'https://cache.io']");
        let map = Registries { default: Some(default), ..Registries::default() }
            .with("lan:5000", RegistryHosts::default())
            .with("127.0.0.1:1", RegistryHosts::default())
            .with_url("http://10.0.0.5:8080/")
            .with_url("epoch.example")
            .with_url("ftp://nowhere");
        let named = map.configured_origins();
        let named: Vec<_> = named.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        assert_eq!(named, ["10.0.0.5:8080", "127.0.0.1:1", "cache.io:443", "epoch.example:80", "lan:5000"]);
    }
}

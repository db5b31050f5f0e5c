//! Host name, hosts file and resolver of a pod. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use coracle_record::HostsFile;
use k8s_openapi::api::core::v1::{Pod, PodDNSConfig, PodSpec};

use crate::node::{NodeFacts, ResolverConfig};

/// Limits of a resolver, which kubelets observe too (Kubernetes documentation, "DNS for Services and Pods").
const NAMESERVERS_MAX: usize = 3;
const SEARCHES_MAX: usize = 32;
const SEARCH_BYTES_MAX: usize = 2048;
/// Longest host name of the kernel (HOST_NAME_MAX of Linux, linux/utsname.h), and longest DNS label.
const HOSTNAME_MAX: usize = 64;
const LABEL_MAX: usize = 63;

/// Host name that the kernel does not accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid host name {0:?}: more than {HOSTNAME_MAX} bytes")]
pub struct InvalidHostname(String);

/// Returns the host name and the domain of a pod. The domain is empty without `subdomain`.
fn names(pod: &Pod, node: &NodeFacts) -> (String, String) {
    let spec = pod.spec.as_ref();
    let set = |value: Option<&String>| value.filter(|text| !text.is_empty()).cloned();
    if let Some(name) = set(spec.and_then(|spec| spec.hostname_override.as_ref())) {
        return (name, String::new());
    }
    let hostname = set(spec.and_then(|spec| spec.hostname.as_ref())).unwrap_or_else(|| {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let cut: String = name.chars().take(LABEL_MAX).collect();
        cut.trim_end_matches(['-', '.']).to_owned()
    });
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let subdomain = set(spec.and_then(|spec| spec.subdomain.as_ref()));
    let domain = subdomain.map(|sub| format!("{sub}.{namespace}.svc.{}", node.cluster_domain));
    (hostname, domain.unwrap_or_default())
}

/// Returns the host name of the guest: the name alone, or with its domain when the pod sets `setHostnameAsFQDN`.
///
/// # Errors
/// [`InvalidHostname`].
pub fn hostname(pod: &Pod, node: &NodeFacts) -> Result<String, InvalidHostname> {
    let (name, domain) = names(pod, node);
    let whole = pod.spec.as_ref().is_some_and(|spec| spec.set_hostname_as_fqdn == Some(true));
    let name = if whole && !domain.is_empty() { format!("{name}.{domain}") } else { name };
    if name.len() > HOSTNAME_MAX { Err(InvalidHostname(name)) } else { Ok(name) }
}

/// Returns the content of /etc/hosts, as a kubelet writes it.
#[must_use]
pub fn hosts_file(pod: &Pod, node: &NodeFacts) -> HostsFile {
    let (name, domain) = names(pod, node);
    let before = String::from(
        "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n",
    );
    let whole = (!domain.is_empty()).then(|| format!("{name}.{domain}"));
    let names = whole.into_iter().chain([name]).collect();
    let mut after = String::new();
    let aliases = pod.spec.iter().flat_map(|spec| spec.host_aliases.iter().flatten());
    let mut aliases = aliases.peekable();
    if aliases.peek().is_some() {
        after.push_str("\n# Entries added by HostAliases.\n");
    }
    for alias in aliases {
        let names = alias.hostnames.as_deref().unwrap_or_default();
        after.push_str(&format!("{}\t{}\n", alias.ip, names.join("\t")));
    }
    HostsFile { before, names, after }
}

/// Returns the resolver of a pod: that of its policy, with the additions of its `dnsConfig`.
#[must_use]
pub fn resolver(pod: &Pod, node: &NodeFacts) -> ResolverConfig {
    let spec = pod.spec.as_ref();
    let policy = spec.and_then(|spec| spec.dns_policy.as_deref()).unwrap_or("ClusterFirst");
    let mut config = match policy {
        "None" => ResolverConfig::default(),
        "Default" => node.resolver.clone(),
        _ if node.cluster_dns.is_empty() => node.resolver.clone(),
        _ => cluster_first(pod, node),
    };
    if let Some(own) = spec.and_then(own_config) {
        merge(&mut config, own);
    }
    limit_resolver_config(config)
}

fn own_config(spec: &PodSpec) -> Option<&PodDNSConfig> {
    spec.dns_config.as_ref()
}

fn cluster_first(pod: &Pod, node: &NodeFacts) -> ResolverConfig {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let domain = &node.cluster_domain;
    let mut searches = vec![];
    if !domain.is_empty() {
        searches = vec![format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.clone()];
    }
    searches.extend(node.resolver.searches.iter().cloned());
    ResolverConfig {
        nameservers: node.cluster_dns.iter().map(IpAddr::to_string).collect(),
        searches,
        options: vec!["ndots:5".to_owned()],
    }
}

fn merge(config: &mut ResolverConfig, own: &PodDNSConfig) {
    config.nameservers.extend(own.nameservers.iter().flatten().cloned());
    config.searches.extend(own.searches.iter().flatten().cloned());
    let split = |option: &String| match option.split_once(':') {
        Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
        None => (option.clone(), None),
    };
    let mut options: BTreeMap<_, _> = config.options.iter().map(split).collect();
    for option in own.options.iter().flatten() {
        options.insert(option.name.clone().unwrap_or_default(), option.value.clone());
    }
    let show = |(name, value): (String, Option<String>)| match value {
        Some(value) => format!("{name}:{value}"),
        None => name,
    };
    config.options = options.into_iter().map(show).collect();
}

/// Removes duplicates, and entries beyond the limits of resolvers.
fn limit_resolver_config(mut config: ResolverConfig) -> ResolverConfig {
    for list in [&mut config.nameservers, &mut config.searches] {
        let mut seen = std::collections::BTreeSet::new();
        list.retain(|entry| seen.insert(entry.clone()));
    }
    config.nameservers.truncate(NAMESERVERS_MAX);
    config.searches.truncate(SEARCHES_MAX);
    let mut bytes = 0;
    config.searches.retain(|domain| {
        bytes += domain.len() + 1;
        bytes <= SEARCH_BYTES_MAX
    });
    config
}

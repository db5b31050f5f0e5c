//! Properties of the node that pods depend on.

use std::net::IpAddr;

use coracle_types::MemoryMib;

/// Properties of the node that pods depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeFacts {
    /// Name of the Node object.
    pub name: String,
    /// Addresses of the node.
    pub addresses: Vec<IpAddr>,
    /// Domain of the cluster, e.g. `cluster.local`.
    pub cluster_domain: String,
    /// Name servers of the cluster.
    pub cluster_dns: Vec<IpAddr>,
    /// Resolver of the node, for pods with the DNS policy Default.
    pub resolver: ResolverConfig,
    /// CPUs that are allocatable to pods.
    pub allocatable_cpus: u32,
    /// Memory that is allocatable to pods.
    pub allocatable_memory: MemoryMib,
    /// Least memory for the containers of a pod in which one has no memory limit.
    pub default_memory: MemoryMib,
    /// Memory of the guest's kernel and agent, in addition to that of the containers.
    pub guest_overhead_mib: u32,
}

/// Content of resolv.conf(5).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolverConfig {
    /// Name servers.
    pub nameservers: Vec<String>,
    /// Search domains.
    pub searches: Vec<String>,
    /// Options, as `name` or `name:value`.
    pub options: Vec<String>,
}

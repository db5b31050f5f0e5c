//! What pods see of their node.

use std::net::IpAddr;

use coracle_types::MemoryMib;

/// What pods see of their node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeFacts {
    /// Name of the Node object.
    pub name: String,
    /// Addresses of the node.
    pub addresses: Vec<IpAddr>,
    /// Domain of the cluster, as `cluster.local`.
    pub cluster_domain: String,
    /// Name servers of the cluster.
    pub cluster_dns: Vec<IpAddr>,
    /// The resolver of the node, for pods with the policy Default.
    pub resolver: ResolverConfig,
    /// CPUs that pods may have.
    pub allocatable_cpus: u32,
    /// Memory that pods may have.
    pub allocatable_memory: MemoryMib,
    /// Memory of a pod that asks for none.
    pub default_memory: MemoryMib,
    /// Memory of the guest's kernel and agent, beside that of the containers.
    pub guest_overhead_mib: u32,
}

/// What resolv.conf(5) says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolverConfig {
    /// Name servers.
    pub nameservers: Vec<String>,
    /// Search domains.
    pub searches: Vec<String>,
    /// Options, as `name` or `name:value`.
    pub options: Vec<String>,
}

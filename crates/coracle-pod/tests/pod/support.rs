//! Shared helpers of the pod tests.

use coracle_pod::node::NodeFacts;
use coracle_pod::node::ResolverConfig;

/// Returns the properties of a node.
pub(crate) fn node() -> NodeFacts {
    NodeFacts {
        name: "node-1".to_owned(),
        addresses: vec!["192.0.2.1".parse().unwrap()],
        cluster_domain: "cluster.local".to_owned(),
        cluster_dns: vec!["10.0.0.10".parse().unwrap()],
        resolver: ResolverConfig {
            nameservers: vec!["192.0.2.53".to_owned()],
            searches: vec!["example.org".to_owned()],
            options: vec![],
        },
        allocatable_cpus: 8,
        allocatable_memory: 16_384.try_into().unwrap(),
        default_memory: 512.try_into().unwrap(),
        guest_overhead_mib: 64,
    }
}

//! Networks of guests: concurrent leases by nodes, and nodes with the same network.

use std::collections::BTreeSet;

use coracle_api::{MikromVMSpec, keys};
use coracle_microvm::subnets::{SubnetError, free_subnets, lease_subnet};
use coracle_testkit::cluster;
use ipnet::Ipv4Net;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::world::{World, message};

/// Number of pairs of nodes that start concurrently.
const TRIES: usize = 20;

/// Returns a function that chooses the first /24 of a range that no other node has.
fn first_free(range: &str) -> impl Fn(&[Ipv4Net]) -> Option<Ipv4Net> {
    let range: Ipv4Net = range.parse().unwrap();
    move |taken: &[Ipv4Net]| {
        let is_free = |network: &Ipv4Net| !taken.iter().any(|t| t.contains(network) || network.contains(t));
        range.subnets(24).unwrap().find(is_free)
    }
}

#[test]
fn nodes_that_start_at_once_lease_different_networks() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let mut seen = BTreeSet::new();
        for n in 0..TRIES {
            let (a, b) = (format!("a{n}"), format!("b{n}"));
            let lease = |node| lease_subnet(&w.client, &w.ns, node, None, first_free("10.100.0.0/16"));
            let (one, other) = tokio::join!(lease(&a), lease(&b));
            seen.extend([one?, other?]);
            assert_eq!(seen.len(), 2 * (n + 1), "no network twice");
        }
        let again = lease_subnet(&w.client, &w.ns, "a0", None, |taken| {
            assert_eq!(taken.len(), 2 * TRIES - 1);
            first_free("10.100.0.0/16")(taken)
        });
        assert!(seen.contains(&again.await?), "the same node again");
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn network_of_a_removed_node_is_leased_when_none_is_left() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let lease = |node| lease_subnet(&w.client, &w.ns, node, None, first_free("10.7.0.0/23"));
        w.announce("a", "127.0.0.1:1", 1, 512, 600).await?;
        w.announce("b", "127.0.0.1:2", 1, 512, 600).await?;
        assert_eq!(lease("a").await?.to_string(), "10.7.0.0/24");
        assert_eq!(lease("b").await?.to_string(), "10.7.1.0/24");
        assert!(matches!(lease("c").await, Err(SubnetError::Exhausted { .. })));
        free_subnets(&w.client, &w.ns, "b").await?;
        assert_eq!(lease("c").await?.to_string(), "10.7.1.0/24", "freed by name");
        free_subnets(&w.client, &w.ns, "c").await?;
        free_subnets(&w.client, &w.ns, "c").await?;
        assert_eq!(lease("b").await?.to_string(), "10.7.1.0/24", "the other one's stays");
        assert!(matches!(lease("c").await, Err(SubnetError::Exhausted { .. })));
        w.withdraw("a").await?;
        assert_eq!(lease("c").await?.to_string(), "10.7.0.0/24");
        w.announce("c", "127.0.0.1:3", 1, 512, 600).await?;
        assert!(matches!(lease("a").await, Err(SubnetError::Exhausted { .. })), "it comes back");
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn node_whose_network_overlaps_gets_no_vms() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let say = async |node: &str, subnet: &str| {
            let leases: Api<Lease> = Api::namespaced(w.client.clone(), &w.ns);
            let patch = json!({"metadata": {"annotations": {keys::node::GUEST_SUBNET: subnet}}});
            leases.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await
        };
        // The first node is older, but too small for the VM.
        w.announce("first", "127.0.0.1:1", 1, 512, 600).await?;
        say("first", "10.100.0.0/24").await?;
        w.announce("second", "127.0.0.1:2", 1, 512, 600).await?;
        say("second", "10.100.0.0/16").await?;
        let _operator = w.operator();
        w.create("web", MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        let both = "node second has guests in 10.100.0.0/16, which overlaps with 10.100.0.0/24 of node first";
        w.until("web", "refused", |vm| vm.is_some_and(|vm| message(vm).contains(both))).await?;
        w.announce("second", &w.agent.address, 8, 8192, 600).await?;
        say("second", "10.100.1.0/24").await?;
        let vm = w.until_running("web").await?;
        assert_eq!(vm.status.unwrap().node_name, "second");
        Ok::<_, anyhow::Error>(())
    });
}

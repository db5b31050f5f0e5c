//! Networks of guests. Each network is leased by one node of the cluster.
//!
//! All leases are annotations of one Lease ([`keys::GUEST_SUBNETS`]). A node takes a network by replacing the object under the
//! resource version that it read, so that of two nodes that choose at the same time one reads again. An entry stays when its
//! node stops, because its VMs keep their addresses. The operator removes an entry with the Lease of a node that has been gone
//! for a day. Where nodes may change each other's entries, an entry whose node has no Lease any more is also given to another
//! node when no other network is free.

use std::collections::BTreeMap;
use std::time::Duration;

use coracle_api::keys::node as keys;
use ipnet::Ipv4Net;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt as _};
use tokio::time::sleep;

/// Attempts to write the Lease while other nodes write it.
const ATTEMPTS: u32 = 60;
/// Longest pause between two attempts.
const PAUSE_MS: u64 = 100;

/// Reason why a network was not leased.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubnetError {
    /// Other nodes have every network that the node may choose.
    #[error("cannot lease a network of guests for node {node}: all are taken by other nodes")]
    Exhausted {
        /// Name of the node.
        node: String,
    },
    /// Other nodes wrote the Lease in every attempt.
    #[error("cannot lease a network of guests for node {node}: the Lease changed {ATTEMPTS} times")]
    Contended {
        /// Name of the node.
        node: String,
    },
    /// The API server refused a call.
    #[error("cannot lease a network of guests for node {node}")]
    Api {
        /// Name of the node.
        node: String,
        /// Error of the API server.
        source: Box<kube::Error>,
    },
}

/// Leases a network for a node and returns it. `choose` receives the networks of the other nodes and returns the network for
/// this node; it may be called again. The network that the node `holds` stays leased beside it, because VMs have addresses of
/// it. Other entries of the node are removed. Idempotent; cancel-safe.
///
/// # Errors
/// [`SubnetError`] when no network is free or the Lease cannot be written.
pub async fn lease_subnet(
    client: &Client,
    namespace: &str,
    node: &str,
    holds: Option<Ipv4Net>,
    choose: impl Fn(&[Ipv4Net]) -> Option<Ipv4Net>,
) -> Result<Ipv4Net, SubnetError> {
    let api = |source| SubnetError::Api { node: node.to_owned(), source: Box::new(source) };
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    for _ in 0..ATTEMPTS {
        let stored = leases.get_opt(keys::GUEST_SUBNETS).await.map_err(api)?;
        let mut entries = stored.as_ref().map(entries).unwrap_or_default();
        let before = entries.clone();
        let chosen = match choose(&networks_of_others(&entries, node)) {
            Some(chosen) => chosen,
            None => {
                for owner in owners(&entries, node) {
                    if leases.get_opt(&owner).await.map_err(api)?.is_none() {
                        entries.retain(|_, other| *other != owner);
                    }
                }
                let exhausted = || SubnetError::Exhausted { node: node.to_owned() };
                choose(&networks_of_others(&entries, node)).ok_or_else(exhausted)?
            }
        };
        replace_entries(&mut entries, node, holds, chosen);
        if stored.is_some() && entries == before {
            return Ok(chosen);
        }
        let written = match stored {
            Some(stored) => {
                leases
                    .replace(keys::GUEST_SUBNETS, &PostParams::default(), &with_entries(stored, &entries))
                    .await
            }
            None => leases.create(&PostParams::default(), &with_entries(empty(), &entries)).await,
        };
        match written {
            Ok(_) => return Ok(chosen),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                sleep(Duration::from_millis(rand::random_range(1..PAUSE_MS))).await;
            }
            Err(error) => return Err(api(error)),
        }
    }
    Err(SubnetError::Contended { node: node.to_owned() })
}

/// Frees the networks of a node that will not return. Idempotent; cancel-safe.
///
/// # Errors
/// [`SubnetError::Api`], [`SubnetError::Contended`].
pub async fn free_subnets(client: &Client, namespace: &str, node: &str) -> Result<(), SubnetError> {
    let api = |source| SubnetError::Api { node: node.to_owned(), source: Box::new(source) };
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    for _ in 0..ATTEMPTS {
        let Some(stored) = leases.get_opt(keys::GUEST_SUBNETS).await.map_err(api)? else { return Ok(()) };
        let mut entries = entries(&stored);
        if !entries.values().any(|owner| owner == node) {
            return Ok(());
        }
        entries.retain(|_, owner| owner != node);
        match leases
            .replace(keys::GUEST_SUBNETS, &PostParams::default(), &with_entries(stored, &entries))
            .await
        {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                sleep(Duration::from_millis(rand::random_range(1..PAUSE_MS))).await;
            }
            Err(error) => return Err(api(error)),
        }
    }
    Err(SubnetError::Contended { node: node.to_owned() })
}

/// Networks and their nodes.
type Entries = BTreeMap<Ipv4Net, String>;

fn entries(lease: &Lease) -> Entries {
    let entry = |(key, node): (&String, &String)| {
        let network = key.strip_prefix(keys::GUEST_SUBNETS_PREFIX)?.replace('-', "/").parse().ok()?;
        Some((network, node.clone()))
    };
    lease.annotations().iter().filter_map(entry).collect()
}

fn networks_of_others(entries: &Entries, node: &str) -> Vec<Ipv4Net> {
    entries.iter().filter(|(_, owner)| *owner != node).map(|(network, _)| *network).collect()
}

fn owners(entries: &Entries, node: &str) -> Vec<String> {
    let mut owners: Vec<_> = entries.values().filter(|owner| *owner != node).cloned().collect();
    owners.sort();
    owners.dedup();
    owners
}

/// Replaces the entries of `node`. A network that another node has leased stays that node's.
fn replace_entries(entries: &mut Entries, node: &str, holds: Option<Ipv4Net>, chosen: Ipv4Net) {
    entries.retain(|_, owner| owner != node);
    for network in holds.into_iter().chain([chosen]) {
        entries.entry(network).or_insert_with(|| node.to_owned());
    }
}

fn with_entries(mut lease: Lease, entries: &Entries) -> Lease {
    let annotations = lease.annotations_mut();
    annotations.retain(|key, _| !key.starts_with(keys::GUEST_SUBNETS_PREFIX));
    annotations.extend(entries.iter().map(|(network, node)| {
        let key = format!("{}{}", keys::GUEST_SUBNETS_PREFIX, network.to_string().replace('/', "-"));
        (key, node.clone())
    }));
    lease
}

fn empty() -> Lease {
    let labels = [("app.kubernetes.io/name", "coracle"), ("app.kubernetes.io/component", "node")];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let metadata =
        ObjectMeta { name: Some(keys::GUEST_SUBNETS.into()), labels: Some(labels), ..ObjectMeta::default() };
    Lease { metadata, ..Lease::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_a_node_table() {
        let network = |text: &str| text.parse::<Ipv4Net>().unwrap();
        for (why, before, holds, chosen, want) in [
            ("first", &[][..], None, "10.1.0.0/24", "10.1.0.0/24=a"),
            ("others stay", &[("10.1.0.0/24", "b")], None, "10.1.1.0/24", "10.1.0.0/24=b 10.1.1.0/24=a"),
            ("an old entry goes", &[("10.1.0.0/24", "a")], None, "10.1.1.0/24", "10.1.1.0/24=a"),
            (
                "what VMs have stays",
                &[("10.1.0.0/24", "a")],
                Some("10.1.0.0/24"),
                "10.1.1.0/24",
                "10.1.0.0/24=a 10.1.1.0/24=a",
            ),
            ("not taken from others", &[("10.1.0.0/24", "b")], None, "10.1.0.0/24", "10.1.0.0/24=b"),
        ] {
            let mut all: Entries =
                before.iter().map(|(text, node)| (network(text), (*node).to_owned())).collect();
            replace_entries(&mut all, "a", holds.map(network), network(chosen));
            let text: Vec<_> = all.iter().map(|(network, node)| format!("{network}={node}")).collect();
            assert_eq!(text.join(" "), want, "{why}");
            assert_eq!(entries(&with_entries(empty(), &all)), all, "{why}: as annotations");
        }
    }
}

//! Ends bids and allocations of BidNodes that no longer exist, and deletes their Nodes.
//!
//! Such leftovers exist after a finalizer was patched away, by `force-delete`, a deleted CRD or a restored etcd; and the stream
//! of this controller keeps renewing their leases.

use std::collections::{BTreeSet, HashMap};

use coracle_proto::market as pb;
use kube::{Api, ResourceExt as _, api::ListParams};
use tokio::time::sleep;

use crate::{Context, Error, error::api, execute::delete_node, observe::bids::Owner, triggers::Guarded};

/// Consecutive sweeps in which a BidNode must be missing before the API server is asked for it.
const LOOKS: u32 = 2;

/// Sweeps until the task is dropped; never returns.
pub(crate) async fn run(cx: &Context) {
    // The wait fails only if the writer of the store ended, and then this whole task ends as well.
    let _ = cx.objects.wait_until_ready().await;
    let mut missing: HashMap<String, u32> = HashMap::new();
    loop {
        sleep(cx.config.times.poll).await;
        if let Err(error) = sweep_once(cx, &mut missing).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "sweep BidNodes that are gone failed");
        }
    }
}

async fn sweep_once(cx: &Context, missing: &mut HashMap<String, u32>) -> Result<(), Error> {
    if !cx.mirror.is_synced() {
        missing.clear();
        return Ok(());
    }
    let objects = cx.objects.state();
    let uids: BTreeSet<_> = objects.iter().filter_map(|guard| guard.uid()).collect();
    let keys: BTreeSet<_> = objects.iter().map(|guard| key(guard)).collect();
    let is_watched = |key: &str| {
        let own = cx.config.namespace.as_deref();
        own.is_none_or(|own| key.split_once('/').is_some_and(|(namespace, _)| namespace == own))
    };
    let owners = cx.mirror.bidnodes().into_iter();
    let owners: Vec<_> = owners
        .filter(|(uid, owner)| !uids.contains(uid) && owner.bidnode.as_deref().is_some_and(is_watched))
        .collect();
    let nodes: Vec<_> = cx
        .cluster
        .all_nodes()
        .into_iter()
        .filter(|(key, _)| !keys.contains(key) && is_watched(key))
        .collect();
    let names = owners.iter().map(|(uid, _)| uid).chain(nodes.iter().map(|(key, _)| key));
    let now: HashMap<_, _> =
        names.map(|name| (name.clone(), missing.get(name).copied().unwrap_or(0).saturating_add(1))).collect();
    *missing = now;
    if missing.values().all(|looks| *looks < LOOKS) {
        return Ok(());
    }
    // Caches only trigger: a BidNode is considered deleted only if a fresh list lacks it.
    let api_of: Api<Guarded> = match &cx.config.namespace {
        Some(namespace) => Api::namespaced(cx.client.clone(), namespace),
        None => Api::all(cx.client.clone()),
    };
    let fresh = api_of.list(&ListParams::default()).await.map_err(api("list BidNodes", "all"))?;
    let is_due = |name: &String| missing.get(name).is_some_and(|looks| *looks >= LOOKS);
    for (uid, owner) in owners.iter().filter(|(uid, _)| is_due(uid)) {
        if !fresh.items.iter().any(|object| object.uid().as_ref() == Some(uid)) {
            end(cx, uid, owner).await?;
        }
    }
    for (key_of, nodes) in nodes.iter().filter(|(key, _)| is_due(key)) {
        if fresh.items.iter().any(|object| key(object) == *key_of) {
            continue;
        }
        for node in nodes.iter().filter(|node| !cx.mirror.has_allocation(&node.allocation)) {
            delete_node(cx, &node.name, &node.allocation).await?;
        }
    }
    Ok(())
}

fn key(object: &Guarded) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

async fn end(cx: &Context, uid: &str, owner: &Owner) -> Result<(), Error> {
    let bidnode = owner.bidnode.as_deref().unwrap_or_default();
    tracing::warn!(bidnode, uid, "BidNode is gone, ending its bids and allocations");
    let tenant = &owner.tenant;
    for (bid, row) in owner.bids.iter().filter(|(_, bid)| bid.open > 0) {
        let request =
            pb::CancelBidRequest { bid: bid.to_string(), if_owner_version: None, tenant: tenant.clone() };
        ignore_over(cx.market.cancel(&row.market, request).await)?;
    }
    for (allocation, row) in &owner.allocations {
        let request = pb::ReleaseAllocationRequest {
            allocation: allocation.to_string(),
            tenant: tenant.clone(),
            ..pb::ReleaseAllocationRequest::default()
        };
        ignore_over(cx.market.release(&row.market, request).await)?;
    }
    Ok(())
}

fn ignore_over(done: Result<pb::BidReply, crate::market::MarketError>) -> Result<(), Error> {
    match done {
        Err(refusal) if !refusal.is_over() => Err(refusal.into()),
        _ => Ok(()),
    }
}

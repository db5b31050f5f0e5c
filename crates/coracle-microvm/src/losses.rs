//! Queues the VMs of a node when the node counts as lost.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::context::Context;

/// Interval between checks of the nodes, which are all in memory.
const LOOK: Duration = Duration::from_secs(1);

/// Queues the VMs of each node when its grace period ends, until `stop`. By then they wait in their backoff, and no other event
/// queues them.
pub(crate) async fn wake_vms_of_lost_nodes(cx: &Context, stop: &CancellationToken) {
    let mut known = BTreeSet::new();
    while stop.run_until_cancelled(sleep(LOOK)).await.is_some() {
        let lost = cx.fleet.lost_nodes(&cx.policy);
        for node in lost.difference(&known) {
            warn!(node, "the node is lost; its VMs are placed anew");
            cx.fleet.enqueue_bound(node);
        }
        known = lost;
    }
}

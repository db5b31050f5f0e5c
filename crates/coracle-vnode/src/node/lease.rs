//! Lease by which the cluster detects that the node is alive.

use std::time::Duration;

use coracle_types::Clock;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::Registered;
use crate::FIELD_MANAGER;
use crate::options::Intervals;

/// Namespace of the Leases of nodes.
const NAMESPACE: &str = "kube-node-lease";

/// Renews the Lease of the node.
pub(crate) struct Renewer {
    /// Client with a connection of its own.
    pub(crate) client: Client,
    pub(crate) node: String,
    pub(crate) clock: Clock,
    pub(crate) intervals: Intervals,
    /// Registered Node object.
    pub(crate) registered: watch::Receiver<Registered>,
}

impl Renewer {
    /// Renews the Lease until `stop`. A renewal that times out is abandoned in favour of the next one.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut ticks = interval(self.intervals.renew.max(Duration::from_millis(10)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let renewed = timeout(self.intervals.renew.max(Duration::from_secs(5)), self.renew());
            match stop.run_until_cancelled(renewed).await {
                Some(Ok(Ok(()))) => tracing::debug!(node = self.node, "renewed the Lease of the node"),
                Some(Ok(Err(error))) => {
                    tracing::warn!(node = self.node, %error, "renew the Lease of the node failed")
                }
                Some(Err(_)) => tracing::warn!(node = self.node, "renew the Lease of the node timed out"),
                None => return,
            }
        }
    }

    async fn renew(&self) -> kube::Result<()> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), NAMESPACE);
        let now = Timestamp::from_millisecond(self.clock.now().0).unwrap_or_default();
        let owner = self.registered.borrow().uid.clone();
        let lease = lease(&self.node, owner.as_deref(), self.intervals.lease, now);
        let params = PatchParams::apply(FIELD_MANAGER).force();
        leases.patch(&self.node, &params, &Patch::Apply(&lease)).await.map(drop)
    }
}

/// Returns the Lease. The Node object is its owner, once it exists.
fn lease(node: &str, owner: Option<&str>, duration: Duration, now: Timestamp) -> Value {
    let owners = owner.map(|uid| json!([{"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}]));
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": node, "namespace": NAMESPACE, "ownerReferences": owners},
        "spec": {
            "holderIdentity": node,
            "leaseDurationSeconds": duration.as_secs().max(1),
            "renewTime": format!("{now:.6}"),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_names_its_holder_and_owner() {
        let now = Timestamp::from_millisecond(1_500).unwrap();
        let made = lease("vm-1", Some("u"), Duration::from_secs(40), now);
        assert_eq!(made["spec"]["holderIdentity"], "vm-1");
        assert_eq!(made["spec"]["leaseDurationSeconds"], 40);
        assert_eq!(made["spec"]["renewTime"], "1970-01-01T00:00:01.500000Z");
        assert_eq!(made["metadata"]["ownerReferences"][0]["uid"], "u");
        let typed: Lease = serde_json::from_value(lease("vm-1", None, Duration::ZERO, now)).unwrap();
        assert_eq!(
            (typed.metadata.owner_references, typed.spec.unwrap().lease_duration_seconds),
            (None, Some(1))
        );
    }
}

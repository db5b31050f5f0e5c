//! Announces a node and its capacity to the cluster: a `Lease` in `coracle-nodes`, renewed at half of its duration.

use std::time::Duration;

use coracle_api::keys::{NODE_NAMESPACE, node as keys};
use coracle_host::Host;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio_util::sync::CancellationToken;

/// Duration of the `Lease`: how long the node counts as alive after a renewal. Longer than a kubelet's, which renews six times
/// a minute: VMs of a silent node are moved only after minutes.
pub const LEASE: Duration = Duration::from_secs(60);

/// Interval of renewals: a fleet makes fewer than three calls a minute per node, including those of the operator.
const RENEW: Duration = Duration::from_secs(30);

/// Pause after a failed renewal: many tries fit into the rest of the duration.
const RETRY: Duration = Duration::from_secs(2);

/// Time that a stopping node waits for the API server.
const WITHDRAW: Duration = Duration::from_secs(2);

/// Addresses at which the cluster reaches a node: `host:port` of each frontend that listens.
#[derive(Clone, Debug)]
pub struct Endpoints {
    /// Address of the agent service.
    pub agent: String,
    /// Address of the host service.
    pub host: Option<String>,
    /// Server name in the certificate; `None`: the host of the address.
    pub server_name: Option<String>,
}

/// Task to complete before each renewal, which then announces its effects on the host.
pub trait BeforeRenewal: Send {
    /// Runs the task. The renewal waits for its end.
    fn prepare(&mut self, host: &Host) -> impl Future<Output = ()> + Send;
}

/// Does nothing.
impl BeforeRenewal for () {
    async fn prepare(&mut self, _: &Host) {}
}

impl<T: BeforeRenewal> BeforeRenewal for Option<T> {
    async fn prepare(&mut self, host: &Host) {
        if let Some(due) = self {
            due.prepare(host).await;
        }
    }
}

/// Renews the `Lease` of `node` until `stop`, despite outages of the API server, and then deletes it.
pub async fn announce(
    client: Client,
    (node, endpoints): (&str, &Endpoints),
    host: &Host,
    before: impl BeforeRenewal,
    stop: &CancellationToken,
) {
    let leases: Api<Lease> = Api::namespaced(client, NODE_NAMESPACE);
    let mut announcement = Announcement { leases: &leases, node, endpoints, host, before, is_known: false };
    if let Some(version) = renew_until(stop, &mut announcement).await {
        withdraw(&leases, node, version).await;
    }
}

trait Renew {
    /// Renews the `Lease` once. Returns its resource version, or `None` after a failure.
    fn renew(&mut self) -> impl Future<Output = Option<String>> + Send;
}

/// Renews until `stop` and returns the last resource version that was written.
async fn renew_until(stop: &CancellationToken, lease: &mut impl Renew) -> Option<String> {
    let mut last = None;
    loop {
        let renewed = lease.renew().await;
        let pause = if renewed.is_some() { RENEW } else { RETRY };
        last = renewed.or(last);
        if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            return last;
        }
    }
}

struct Announcement<'a, B> {
    leases: &'a Api<Lease>,
    node: &'a str,
    endpoints: &'a Endpoints,
    host: &'a Host,
    before: B,
    /// Whether the `Lease` was written at least once.
    is_known: bool,
}

impl<B: BeforeRenewal> Renew for Announcement<'_, B> {
    async fn renew(&mut self) -> Option<String> {
        self.before.prepare(self.host).await;
        let (node, endpoints) = (self.node, self.endpoints);
        let params = PatchParams::apply("coracle-node").force();
        let lease = lease(node, endpoints, self.host);
        match self.leases.patch(node, &params, &Patch::Apply(&lease)).await {
            Ok(lease) => {
                if !self.is_known {
                    tracing::info!(node, agent = endpoints.agent, host = endpoints.host, "node announced");
                }
                self.is_known = true;
                lease.resource_version()
            }
            Err(error) => {
                tracing::warn!(node, %error, "node not announced");
                None
            }
        }
    }
}

/// Deletes the `Lease` of a node that stops, so that no VM is placed on the node. Keeps a `Lease` that another process has
/// renewed since.
async fn withdraw(leases: &Api<Lease>, node: &str, version: String) {
    let unchanged = Preconditions { resource_version: Some(version), uid: None };
    let params = DeleteParams { preconditions: Some(unchanged), ..DeleteParams::default() };
    match tokio::time::timeout(WITHDRAW, leases.delete(node, &params)).await {
        Ok(Ok(_)) => tracing::info!(node, "node withdrawn"),
        Ok(Err(error)) => tracing::warn!(node, %error, "node not withdrawn"),
        Err(_) => tracing::warn!(node, "node not withdrawn: the API server does not answer"),
    }
}

fn lease(node: &str, endpoints: &Endpoints, host: &Host) -> serde_json::Value {
    let capacity = host.capacity();
    let now = jiff::Timestamp::from_millisecond(host.clock().now().0).unwrap_or_default();
    let first = host.probes().first();
    let accelerator =
        first.and_then(|(_, probe)| probe.accelerator).map_or("", coracle_hypervisor::Accelerator::as_str);
    let mut lease = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": node,
            "labels": {
                keys::AGENT_LABEL: "true",
                "app.kubernetes.io/name": "coracle",
                "app.kubernetes.io/component": "node",
            },
            "annotations": {
                keys::NODE: node,
                keys::AGENT_ADDRESS: endpoints.agent,
                keys::CAPACITY_VCPUS: capacity.cpus.to_string(),
                keys::CAPACITY_MEMORY_MIB: capacity.memory_allowed_mib.to_string(),
                keys::DRIVER: first.map(|(name, _)| *name),
                keys::ACCELERATOR: accelerator,
            },
        },
        "spec": {
            "holderIdentity": node,
            "leaseDurationSeconds": LEASE.as_secs(),
            "renewTime": format!("{now:.6}"),
        },
    });
    if let Some(subnet) = host.network().subnet() {
        lease["metadata"]["annotations"][keys::GUEST_SUBNET] = subnet.to_string().into();
    }
    if let Some(address) = &endpoints.host {
        lease["metadata"]["annotations"][keys::HOST_ADDRESS] = address.as_str().into();
    }
    if let Some(name) = &endpoints.server_name {
        lease["metadata"]["annotations"][keys::TLS_SERVER_NAME] = name.as_str().into();
    }
    lease
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// Answers in order, and cancels `stop` with the last one.
    struct Script<'a> {
        answers: std::slice::Iter<'a, Option<&'static str>>,
        began: Instant,
        times: Vec<u64>,
        stop: CancellationToken,
    }

    impl Renew for Script<'_> {
        async fn renew(&mut self) -> Option<String> {
            self.times.push(self.began.elapsed().as_secs());
            let answer = self.answers.next().copied().flatten();
            if self.answers.len() == 0 {
                self.stop.cancel();
            }
            answer.map(str::to_owned)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failed_renewals_are_tried_again_soon() {
        let stop = CancellationToken::new();
        let answers = [Some("1"), None, None, Some("2"), None];
        let mut script =
            Script { answers: answers.iter(), began: Instant::now(), times: vec![], stop: stop.clone() };
        assert_eq!(renew_until(&stop, &mut script).await.as_deref(), Some("2"));
        assert_eq!(script.times, [0, 30, 32, 34, 64]);
    }
}

//! Registers the node and reports its status: after a change, else at an interval.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_net::Assignment;
use coracle_pod::node::NodeFacts;
use coracle_types::Clock;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeStatus};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::facts::{Identity, Reader, Resources};
use super::{object, status};
use crate::FIELD_MANAGER;
use crate::options::{StartPolicy, VirtualNodeOptions};

/// Limit of a call to the API server.
const LIMIT: Duration = Duration::from_secs(20);
/// Delay after a failed registration or report.
const RETRY: Duration = Duration::from_secs(2);

/// Registered Node object, as the cluster has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Registered {
    /// Uid of the object; `None`: the node is not registered.
    pub(crate) uid: Option<String>,
    /// Labels of the object; users may add some.
    pub(crate) labels: BTreeMap<String, String>,
    /// Pod networks that the cluster assigned to the node.
    pub(crate) pod_cidrs: Vec<String>,
}

/// Keeps the Node object up to date.
pub(crate) struct Reporter {
    pub(crate) client: Client,
    pub(crate) options: Arc<VirtualNodeOptions>,
    pub(crate) identity: Identity,
    pub(crate) reader: Reader,
    pub(crate) clock: Clock,
    /// Whether the node can run pods.
    pub(crate) ready: watch::Receiver<bool>,
    pub(crate) registered: watch::Sender<Registered>,
    pub(crate) facts: watch::Sender<Arc<NodeFacts>>,
}

/// Last reported status and the time of the report.
struct Reported {
    status: NodeStatus,
    at: Instant,
}

impl Reporter {
    /// Reports until `stop`. Registers the node again if its object was removed.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        if self.options.start == StartPolicy::ExitUnlessReconciled {
            let known = async { self.ready.wait_for(|known| *known).await.is_ok() };
            if stop.run_until_cancelled(known).await != Some(true) {
                return;
            }
        }
        let mut reported = None;
        loop {
            let turn = timeout(LIMIT, self.report_once(&mut reported));
            let Some(turn) = stop.run_until_cancelled(turn).await else { return };
            let wait = match turn {
                Ok(Ok(())) => self.options.intervals.observe,
                Ok(Err(error)) => {
                    tracing::warn!(node = self.options.name, %error, "report the node failed");
                    RETRY
                }
                Err(_) => {
                    tracing::warn!(node = self.options.name, "report the node timed out");
                    RETRY
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                changed = self.ready.changed() => if changed.is_err() { return },
                () = sleep(wait) => {}
            }
        }
    }

    async fn report_once(&mut self, reported: &mut Option<Reported>) -> kube::Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        if reported.is_none() {
            let node = self.register(&nodes).await?;
            let status = node.status.clone().unwrap_or_default();
            self.publish(&node).await;
            *reported = Some(Reported { status, at: Instant::now() });
        }
        let resources = self.reader.read().await;
        self.update_facts(&resources);
        let Some(last) = reported.as_ref() else { return Ok(()) };
        let now = Timestamp::from_millisecond(self.clock.now().0).unwrap_or_default();
        let ready = *self.ready.borrow_and_update();
        let wanted = status::derive(&self.identity, &resources, ready, Some(&last.status), now);
        if !status::differs(&last.status, &wanted) && last.at.elapsed() < self.options.intervals.report {
            return Ok(());
        }
        match self.apply(&nodes, &wanted).await {
            Ok(node) => {
                self.publish(&node).await;
                *reported = Some(Reported { status: wanted, at: Instant::now() });
                Ok(())
            }
            Err(error) => {
                if is_not_found(&error) {
                    *reported = None;
                }
                Err(error)
            }
        }
    }

    async fn register(&self, nodes: &Api<Node>) -> kube::Result<Node> {
        let name = &self.options.name;
        let Some(node) = nodes.get_opt(name).await? else {
            let node = nodes.create(&PostParams::default(), &object::new_node(&self.options)).await?;
            tracing::info!(node = name, "registered the node");
            return Ok(node);
        };
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let mut node = if has_labels(&node, &object::labels(&self.options)) {
            node
        } else {
            nodes.patch(name, &params, &Patch::Apply(object::labels_patch(&self.options))).await?
        };
        if let Some(taints) = object::taints_patch(&self.options, &node) {
            node = nodes.patch(name, &PatchParams::default(), &Patch::Merge(taints)).await?;
        }
        tracing::info!(node = name, "found the node in the cluster");
        Ok(node)
    }

    async fn apply(&self, nodes: &Api<Node>, wanted: &NodeStatus) -> kube::Result<Node> {
        let name = &self.options.name;
        let patch = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": wanted});
        let params = PatchParams::apply(FIELD_MANAGER).force();
        nodes.patch_status(name, &params, &Patch::Apply(&patch)).await
    }

    async fn publish(&self, node: &Node) {
        let spec = node.spec.clone().unwrap_or_default();
        let seen = Registered {
            uid: node.metadata.uid.clone(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            pod_cidrs: spec.pod_cidrs.or(spec.pod_cidr.map(|cidr| vec![cidr])).unwrap_or_default(),
        };
        let assigned = seen.pod_cidrs.clone();
        let is_new = self.registered.borrow().pod_cidrs != assigned;
        self.registered.send_if_modified(|old| std::mem::replace(old, seen.clone()) != seen);
        if is_new {
            self.assign_subnet(&assigned).await;
        }
    }

    /// Gives future pods addresses of the network that the cluster assigned, if it is an IPv4 network.
    async fn assign_subnet(&self, assigned: &[String]) {
        let network = self.reader.host.network();
        let Some(subnet) = assigned.iter().find_map(|cidr| cidr.parse().ok()) else { return };
        let own = network.subnet().map(|own| own.to_string());
        match network.assign(subnet).await {
            Ok(Assignment::Current) => {
                tracing::info!(%subnet, "pods have addresses of the network of the node")
            }
            Ok(Assignment::Pending) => {
                tracing::warn!(own, %subnet, "pods get addresses of the assigned network when the last VM is removed");
            }
            Ok(Assignment::Fixed) if own.as_ref().is_none_or(|own| *own == subnet.to_string()) => {}
            Ok(Assignment::Fixed) => tracing::warn!(
                own,
                ?assigned,
                "pods have addresses of another network than the cluster assigned: start the node with it as --subnet"
            ),
            Err(error) => tracing::error!(%subnet, %error, "take the assigned network failed"),
        }
    }

    fn update_facts(&self, resources: &Resources) {
        let facts = self.identity.pod_facts(resources);
        self.facts.send_if_modified(|old| {
            let changed = **old != facts;
            if changed {
                *old = Arc::new(facts);
            }
            changed
        });
    }
}

fn has_labels(node: &Node, wanted: &BTreeMap<String, String>) -> bool {
    let present = node.metadata.labels.clone().unwrap_or_default();
    wanted.iter().all(|(key, value)| present.get(key) == Some(value))
}

fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

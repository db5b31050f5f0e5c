//! Assigns the name and the node of a pod's VM.

use std::collections::BTreeMap;

use coracle_api::cocoon::{bare_pod_vm_name, is_cocoon_pod, is_valid_vm_name, keys};
use coracle_reconcile::WallTime as _;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Pod},
};
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::{Value, json};

use super::{
    Webhook,
    placement::{self, NodeFact, PodFact, Reservation, SlotRequest},
    store,
};
use crate::error::{Error, api};

/// Attempts to write a reservation while other writers are faster.
const TRIES: usize = 5;
/// Namespace of the Leases of nodes.
const LEASES: &str = "kube-node-lease";
/// Default age in seconds after which a node's Lease is expired.
const LEASE_SECONDS: i64 = 40;
/// Nodes whose pods are counted concurrently.
const COUNTS: usize = 8;

/// Response to a creation.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    /// The pod is admitted unchanged.
    Unchanged,
    /// The pod is admitted with these operations of a JSON patch.
    Patched(Vec<Value>),
    /// The pod is denied, with this reason.
    Denied(String),
}

/// Pod to be created, and the user who requests it.
pub(super) struct Creation<'a> {
    pub(super) pod: &'a Pod,
    pub(super) namespace: &'a str,
    /// UID of the admission request.
    pub(super) uid: &'a str,
    pub(super) user: &'a str,
    /// True when the decision must have no side effects.
    pub(super) is_dry_run: bool,
}

/// Names the VM of a pod and binds the pod to a node.
///
/// # Errors
/// When the API server cannot be read, or the reservation cannot be written; the pod is admitted then.
pub(super) async fn decide(hook: &Webhook, creation: &Creation<'_>) -> Result<Decision, Error> {
    let Creation { pod, namespace, .. } = creation;
    let names_vm = pod.metadata.annotations.as_ref().is_some_and(|all| all.keys().any(|key| is_of_vm(key)));
    if !is_cocoon_pod(pod) || !(names_vm || hook.settings.every_pod) {
        return Ok(Decision::Unchanged);
    }
    if hook.settings.strict {
        let is_allowed =
            placement::is_of_set(pod) && hook.settings.pod_creators.iter().any(|u| u == creation.user);
        let why = "pods that run as VMs must be managed by a CocoonSet";
        return Ok(if is_allowed { Decision::Unchanged } else { Decision::Denied(why.into()) });
    }
    if placement::is_of_set(pod) {
        return Ok(Decision::Unchanged);
    }
    let slot_request = placement::slot_request(pod, namespace, creation.uid).filter(|_| hook.settings.sticky);
    let mut patch = Vec::new();
    match slot_request {
        Some(slot_request) => match reserve(hook, &slot_request, creation.is_dry_run).await? {
            Ok(reservation) => {
                annotate(&mut patch, pod, keys::VM_NAME, &reservation.vm_name);
                if !reservation.node.is_empty() {
                    patch.push(json!({"op": "add", "path": "/spec/nodeName", "value": reservation.node}));
                }
            }
            Err(why) => return Ok(Decision::Denied(why)),
        },
        None => {
            // Pods that name their node do not need a slot.
            if let Some(name) = pod.metadata.name.as_ref().filter(|name| !name.is_empty()) {
                let vm = bare_pod_vm_name(namespace, name);
                if !has(pod, keys::VM_NAME) && !is_valid_vm_name(&vm) {
                    let why = format!("invalid VM name {vm:?}: must have at most 63 characters");
                    return Ok(Decision::Denied(why));
                }
                annotate(&mut patch, pod, keys::VM_NAME, &vm);
            }
        }
    }
    let image = pod.spec.as_ref().and_then(|spec| spec.containers.first()?.image.clone());
    if let Some(image) = image.filter(|_| hook.settings.image_annotation) {
        annotate(&mut patch, pod, keys::IMAGE, &image);
    }
    Ok(if patch.is_empty() { Decision::Unchanged } else { Decision::Patched(patch) })
}

/// Annotations that only pods with a VM as container have. One of them is sufficient, here and on the node.
const MARKS: [&str; 5] = [keys::VM_NAME, keys::MODE, keys::IMAGE, keys::FORK_FROM, keys::MANAGED];

/// True for annotations that mark a pod as a VM.
pub(super) fn is_of_vm(key: &str) -> bool {
    MARKS.contains(&key)
}

fn has(pod: &Pod, key: &str) -> bool {
    pod.annotations().get(key).is_some_and(|value| !value.is_empty())
}

/// Adds an operation that sets an annotation, unless the pod has it.
fn annotate(patch: &mut Vec<Value>, pod: &Pod, key: &str, value: &str) {
    if has(pod, key) {
        return;
    }
    if pod.metadata.annotations.is_none() && patch.is_empty() {
        patch.push(json!({"op": "add", "path": "/metadata/annotations", "value": {}}));
    }
    let path = format!("/metadata/annotations/{}", key.replace('~', "~0").replace('/', "~1"));
    patch.push(json!({"op": "add", "path": path, "value": value}));
}

/// Reserves a slot for the pod. The inner error is the reason to deny the pod.
async fn reserve(
    hook: &Webhook,
    slot_request: &SlotRequest,
    is_dry_run: bool,
) -> Result<Result<Reservation, String>, Error> {
    let (client, home) = (&hook.client, &hook.settings.namespace);
    for _ in 0..TRIES {
        let now = hook.clock.timestamp();
        let pool = store::read(client, home, &slot_request.pool).await?;
        let pods = pods_of(hook, &slot_request.namespace).await?;
        let mut reservation = match placement::assign(slot_request, &pool.reservations, &pods, now) {
            Ok(reservation) => reservation,
            Err(why) => return Ok(Err(why)),
        };
        let nodes = nodes_of(hook, &slot_request.pool, now).await?;
        let is_alive = nodes.iter().any(|node| node.is_alive && node.name == reservation.node);
        if !is_alive {
            let counted = count(hook, nodes).await?;
            reservation.node = placement::choose(&counted).map(|node| node.name.clone()).unwrap_or_default();
        }
        if is_dry_run {
            return Ok(Ok(reservation));
        }
        let mut changes = claimed_reservations(&pool.reservations, &slot_request.namespace, &pods);
        changes.insert(reservation.key(), Some(reservation.clone()));
        if store::write(client, home, &pool, &changes).await? {
            hook.metrics.count_reservation(&slot_request.pool);
            return Ok(Ok(reservation));
        }
    }
    Err(Error::Contended { pool: slot_request.pool.clone() })
}

/// Returns reservations of a namespace whose pods appear for the first time. Their slots become free once the pods are gone.
pub(super) fn claimed_reservations(
    reservations: &[Reservation],
    namespace: &str,
    pods: &[PodFact],
) -> BTreeMap<String, Option<Reservation>> {
    let unseen = reservations.iter().filter(|r| r.namespace == namespace && r.pod_uid.is_empty());
    let met = unseen.filter_map(|reservation| {
        let pod = pods.iter().find(|pod| pod.vm_name == reservation.vm_name)?;
        let met = Reservation { pod: pod.name.clone(), pod_uid: pod.uid.clone(), ..reservation.clone() };
        Some((reservation.key(), Some(met)))
    });
    met.collect()
}

/// Returns the pods of a namespace that have VM names.
pub(super) async fn pods_of(hook: &Webhook, namespace: &str) -> Result<Vec<PodFact>, Error> {
    let pods: Api<Pod> = Api::namespaced(hook.client.clone(), namespace);
    let found = pods.list(&ListParams::default()).await.map_err(api("list pods of", namespace))?;
    Ok(found.iter().filter_map(PodFact::of).collect())
}

/// Returns the nodes of a pool that run pods as VMs, without pod counts.
async fn nodes_of(hook: &Webhook, pool: &str, now: Timestamp) -> Result<Vec<NodeFact>, Error> {
    let of_pool = ListParams::default().labels(&format!("{}={pool}", keys::POOL_LABEL));
    let nodes: Api<Node> = Api::all(hook.client.clone());
    let nodes = nodes.list(&of_pool).await.map_err(api("list nodes of pool", pool))?;
    let leases: Api<Lease> = Api::namespaced(hook.client.clone(), LEASES);
    let leases = leases.list(&ListParams::default()).await.map_err(api("list Leases of", LEASES))?;
    let fact = |node: &Node| {
        let lease = leases.iter().find(|lease| lease.name_any() == node.name_any());
        NodeFact { name: node.name_any(), is_alive: is_alive(node, lease, now), pods: 0 }
    };
    Ok(nodes.iter().filter(|node| is_ours(node)).map(fact).collect())
}

fn is_ours(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints.into_iter().flatten().any(|taint| taint.key == keys::TAINT_KEY)
}

/// True for a node that is Ready, not cordoned, and renews its Lease: without a controller manager a dead node stays Ready.
fn is_alive(node: &Node, lease: Option<&Lease>, now: Timestamp) -> bool {
    let is_cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let is_ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    let spec = lease.and_then(|lease| lease.spec.as_ref());
    let is_fresh = spec.and_then(|spec| spec.renew_time.as_ref()).is_none_or(|renewed| {
        let limit = spec.and_then(|spec| spec.lease_duration_seconds).map_or(LEASE_SECONDS, i64::from);
        now.as_second().saturating_sub(renewed.0.as_second()) <= limit
    });
    is_ready && is_fresh && !is_cordoned && node.metadata.deletion_timestamp.is_none()
}

/// Counts the pods of live nodes.
async fn count(hook: &Webhook, nodes: Vec<NodeFact>) -> Result<Vec<NodeFact>, Error> {
    let pods: Api<Pod> = Api::all(hook.client.clone());
    let count = |mut node: NodeFact| {
        let pods = pods.clone();
        async move {
            let of_node = format!("spec.nodeName={},status.phase!=Succeeded,status.phase!=Failed", node.name);
            let found = pods.list_metadata(&ListParams::default().fields(&of_node)).await;
            node.pods = found.map_err(api("count pods of node", &node.name))?.items.len();
            Ok(node)
        }
    };
    let alive = nodes.into_iter().filter(|node| node.is_alive);
    stream::iter(alive.map(count)).buffer_unordered(COUNTS).try_collect().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_life_table() {
        let now = Timestamp::from_second(100_000).unwrap();
        let node = |ready: &str, cordoned: bool| -> Node {
            let value = json!({"metadata": {"name": "n"}, "spec": {"unschedulable": cordoned},
                "status": {"conditions": [{"type": "Ready", "status": ready}]}});
            serde_json::from_value(value).unwrap()
        };
        let lease = |age: i64| -> Lease {
            let at = Timestamp::from_second(100_000 - age).unwrap();
            serde_json::from_value(json!({"metadata": {"name": "n"},
                "spec": {"renewTime": format!("{at:.6}"), "leaseDurationSeconds": 40}}))
            .unwrap()
        };
        for (why, node, lease, want) in [
            ("ready", node("True", false), Some(lease(10)), true),
            ("without a Lease", node("True", false), None, true),
            ("silent for long", node("True", false), Some(lease(41)), false),
            ("not ready", node("Unknown", false), Some(lease(10)), false),
            ("cordoned", node("True", true), Some(lease(10)), false),
        ] {
            assert_eq!(is_alive(&node, lease.as_ref(), now), want, "{why}");
        }
    }

    #[test]
    fn annotations_are_added_once() {
        let pod = |annotations: Value| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": "p", "annotations": annotations}})).unwrap()
        };
        let mut patch = Vec::new();
        annotate(&mut patch, &pod(Value::Null), keys::VM_NAME, "v");
        assert_eq!(patch[0]["path"], "/metadata/annotations");
        assert_eq!(patch[1]["path"], "/metadata/annotations/vm.cocoonstack.io~1name");
        let mut patch = Vec::new();
        annotate(&mut patch, &pod(json!({"vm.cocoonstack.io/name": "mine"})), keys::VM_NAME, "v");
        assert!(patch.is_empty());
        annotate(&mut patch, &pod(json!({"other": "x"})), keys::VM_NAME, "v");
        assert_eq!(patch.len(), 1);
    }
}

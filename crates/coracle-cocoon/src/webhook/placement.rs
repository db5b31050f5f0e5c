//! Assigns slots, VM names and nodes to pods. Pure.

use coracle_api::cocoon::{agent_vm_name, bare_pod_vm_name, is_cocoon_pod, is_valid_vm_name, keys, pool_of};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde::{Deserialize, Serialize};

/// Placeholder for the owner of pods without a Deployment, in keys of reservations.
const BARE: &str = "_pod";
/// Seconds until an admitted pod appears in lists, since other webhooks may take that long. Until then its slot is not free.
const APPEARS: i64 = 30;

/// Slot of an owner, as stored in the ConfigMap.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Reservation {
    pub(super) pool: String,
    pub(super) namespace: String,
    /// Name of the Deployment, or [`BARE`].
    pub(super) deployment: String,
    pub(super) slot: u32,
    pub(super) vm_name: String,
    /// Name of the pod; empty while it is not generated yet.
    pub(super) pod: String,
    pub(super) node: String,
    pub(super) updated_at: Option<Timestamp>,
    /// UID of the pod once it was observed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) pod_uid: String,
    /// Time when the pod was first found missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) gone_since: Option<Timestamp>,
}

impl Reservation {
    /// Returns the key in the ConfigMap.
    pub(super) fn key(&self) -> String {
        format!("{}.{}.{}", self.namespace, self.deployment, self.slot)
    }
}

/// Pod that has a VM name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodFact {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) vm_name: String,
    /// True when the pod ended, or is being deleted: its slot is free.
    pub(super) is_going: bool,
}

impl PodFact {
    /// Reads a pod; `None` without a VM name.
    pub(super) fn of(pod: &Pod) -> Option<Self> {
        let vm_name = pod.annotations().get(keys::VM_NAME).filter(|name| !name.is_empty())?.clone();
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let is_going =
            pod.metadata.deletion_timestamp.is_some() || matches!(phase, Some("Succeeded" | "Failed"));
        Some(Self { name: pod.name_any(), uid: pod.uid().unwrap_or_default(), vm_name, is_going })
    }
}

/// Node of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeFact {
    pub(super) name: String,
    /// True when the node is Ready, has a fresh Lease, and is not cordoned.
    pub(super) is_alive: bool,
    /// Number of pods that have not ended.
    pub(super) pods: usize,
}

/// Request of a pod for a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlotRequest {
    pub(super) pool: String,
    pub(super) namespace: String,
    /// Name of the Deployment, or [`BARE`].
    pub(super) deployment: String,
    /// Name of the pod; `None`: generated later.
    pub(super) pod: Option<String>,
    /// Prefix of the generated name.
    pub(super) generate_name: String,
    /// UID of the admission request, which distinguishes pods without a name.
    pub(super) request: String,
    /// VM name that the pod has already.
    pub(super) vm_name: Option<String>,
}

/// Returns the request of a pod. `None`: the pod names its node, or a set controls it.
pub(super) fn slot_request(pod: &Pod, namespace: &str, request: &str) -> Option<SlotRequest> {
    let bound =
        pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).is_some_and(|node| !node.is_empty());
    if !is_cocoon_pod(pod) || bound || is_of_set(pod) {
        return None;
    }
    Some(SlotRequest {
        pool: pool_of(pod),
        namespace: namespace.to_owned(),
        deployment: deployment(pod).unwrap_or_else(|| BARE.to_owned()),
        pod: pod.metadata.name.clone().filter(|name| !name.is_empty()),
        generate_name: pod.metadata.generate_name.clone().unwrap_or_default(),
        request: request.to_owned(),
        vm_name: pod.annotations().get(keys::VM_NAME).filter(|name| !name.is_empty()).cloned(),
    })
}

/// True for pods that a CocoonSet controls.
pub(super) fn is_of_set(pod: &Pod) -> bool {
    crate::context::owner_of(pod).is_some()
}

/// Returns the Deployment of a pod: the name of its ReplicaSet without the hash, which is also a label of the pod. A ReplicaSet
/// without a Deployment has no hash and keeps its whole name, so that two ReplicaSets have different names.
fn deployment(pod: &Pod) -> Option<String> {
    let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true))?;
    if owner.kind != "ReplicaSet" {
        return None;
    }
    let hash = pod.labels().get("pod-template-hash").map(|hash| format!("-{hash}"));
    let name = hash.and_then(|hash| owner.name.strip_suffix(&hash)).filter(|name| !name.is_empty());
    Some(name.unwrap_or(&owner.name).to_owned())
}

/// True when the slot of a reservation is in use.
pub(super) fn is_held(reservation: &Reservation, pods: &[PodFact], now: Timestamp) -> bool {
    if pods.iter().any(|pod| pod.vm_name == reservation.vm_name && !pod.is_going) {
        return true;
    }
    let was_seen =
        !reservation.pod_uid.is_empty() || pods.iter().any(|pod| pod.vm_name == reservation.vm_name);
    let age = reservation.updated_at.map_or(i64::MAX, |at| now.as_second().saturating_sub(at.as_second()));
    !was_seen && age < APPEARS
}

/// Assigns a slot to a pod: the one that it has, else one whose pod is gone, else the lowest one without a reservation. The
/// node is the earlier node of the slot, or empty.
///
/// # Errors
/// A sentence for the pod's creator when its VM cannot be named.
pub(super) fn assign(
    slot_request: &SlotRequest,
    reservations: &[Reservation],
    pods: &[PodFact],
    now: Timestamp,
) -> Result<Reservation, String> {
    let own: Vec<_> = reservations
        .iter()
        .filter(|r| r.namespace == slot_request.namespace && r.deployment == slot_request.deployment)
        .collect();
    let is_bare = slot_request.deployment == BARE;
    let same = slot_request.pod.as_ref().and_then(|pod| own.iter().find(|r| r.pod == *pod));
    let given = slot_request.vm_name.as_ref().and_then(|vm| own.iter().find(|r| r.vm_name == *vm));
    // A bare pod is its own owner: it inherits no slot of another pod.
    let mut free: Vec<_> =
        own.iter().filter(|r| !is_bare && slot_request.vm_name.is_none() && !is_held(r, pods, now)).collect();
    free.sort_by_key(|r| r.slot);
    let kept = same
        .or(given)
        .or_else(|| free.into_iter().find(|r| is_ours(&r.vm_name, slot_request, reservations, pods)));
    let reservation = match kept {
        Some(kept) => (*kept).clone(),
        None => new_reservation(slot_request, &own, reservations, pods)?,
    };
    if !is_valid_vm_name(&reservation.vm_name) {
        return Err(format!(
            "invalid VM name {:?}: must have at most 63 characters; use shorter names",
            reservation.vm_name
        ));
    }
    let live = pods.iter().find(|pod| {
        pod.vm_name == reservation.vm_name && !pod.is_going && slot_request.pod.as_ref() != Some(&pod.name)
    });
    if let Some(other) = live {
        // Two pods with one VM would overwrite each other's saved state.
        return Err(format!(
            "VM name {:?} belongs to pod {}: use another name",
            reservation.vm_name, other.name
        ));
    }
    Ok(Reservation {
        pool: slot_request.pool.clone(),
        pod: slot_request.pod.clone().unwrap_or_default(),
        updated_at: Some(now),
        pod_uid: String::new(),
        gone_since: None,
        ..reservation
    })
}

/// Returns a slot without a reservation of the owner, with a VM name that no other owner has.
fn new_reservation(
    slot_request: &SlotRequest,
    own: &[&Reservation],
    all: &[Reservation],
    pods: &[PodFact],
) -> Result<Reservation, String> {
    let slots = (0..=u32::MAX).filter(|slot| own.iter().all(|r| r.slot != *slot));
    let named = |slot: u32| {
        let vm_name = slot_request.vm_name.clone().unwrap_or_else(|| {
            match (&slot_request.pod, slot_request.deployment == BARE) {
                (Some(pod), true) => bare_pod_vm_name(&slot_request.namespace, pod),
                (None, true) => {
                    let part: String =
                        slot_request.request.chars().filter(char::is_ascii_alphanumeric).take(8).collect();
                    bare_pod_vm_name(
                        &slot_request.namespace,
                        &format!("{}{part}", slot_request.generate_name),
                    )
                }
                (_, false) => agent_vm_name(&slot_request.namespace, &slot_request.deployment, slot),
            }
        });
        Reservation {
            namespace: slot_request.namespace.clone(),
            deployment: slot_request.deployment.clone(),
            slot,
            vm_name,
            ..Reservation::default()
        }
    };
    let is_fixed = slot_request.deployment == BARE || slot_request.vm_name.is_some();
    // Every slot that is skipped belongs to another owner, so there are at most as many as reservations and pods.
    let tries = if is_fixed { 1 } else { all.len() + pods.len() + 1 };
    let mut candidates = slots.take(tries).map(named);
    candidates
        .find(|candidate| is_ours(&candidate.vm_name, slot_request, all, pods))
        .ok_or_else(|| format!("no VM name is free for a pod of {:?}", slot_request.deployment))
}

/// True when no other owner has the VM name. Dashes join namespace, owner and slot, so names of two owners can collide.
fn is_ours(vm_name: &str, slot_request: &SlotRequest, all: &[Reservation], pods: &[PodFact]) -> bool {
    let mine =
        |r: &&Reservation| r.namespace == slot_request.namespace && r.deployment == slot_request.deployment;
    let is_reserved = all.iter().filter(|r| !mine(r)).any(|r| r.vm_name == vm_name);
    let has_reservation = all.iter().filter(mine).any(|r| r.vm_name == vm_name);
    let is_used = pods.iter().any(|pod| {
        pod.vm_name == vm_name
            && !pod.is_going
            && !has_reservation
            && slot_request.pod.as_ref() != Some(&pod.name)
    });
    !is_reserved && !is_used
}

/// Returns the node with the fewest pods, by name among equals. `None`: the scheduler decides.
pub(super) fn choose(nodes: &[NodeFact]) -> Option<&NodeFact> {
    nodes.iter().filter(|node| node.is_alive).min_by_key(|node| (node.pods, &node.name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn now() -> Timestamp {
        Timestamp::from_second(100_000).unwrap()
    }

    fn of_deployment(name: &str) -> SlotRequest {
        SlotRequest {
            pool: "default".into(),
            namespace: "prod".into(),
            deployment: name.into(),
            pod: None,
            generate_name: format!("{name}-abc-"),
            request: "uid".into(),
            vm_name: None,
        }
    }

    fn bare_pod_request(pod: &str) -> SlotRequest {
        SlotRequest { pod: Some(pod.into()), ..of_deployment(BARE) }
    }

    /// Returns a reservation with that age in seconds.
    fn aged_reservation(slot_request: &SlotRequest, slot: u32, vm: &str, age: i64) -> Reservation {
        Reservation {
            pool: "default".into(),
            namespace: slot_request.namespace.clone(),
            deployment: slot_request.deployment.clone(),
            slot,
            vm_name: vm.into(),
            pod: slot_request.pod.clone().unwrap_or_default(),
            node: format!("n{slot}"),
            updated_at: Some(now() - jiff::SignedDuration::from_secs(age)),
            ..Reservation::default()
        }
    }

    fn pod(name: &str, vm: &str, is_going: bool) -> PodFact {
        PodFact { name: name.into(), uid: format!("uid-{name}"), vm_name: vm.into(), is_going }
    }

    fn placement_text(slot_request: &SlotRequest, reservations: &[Reservation], pods: &[PodFact]) -> String {
        match assign(slot_request, reservations, pods, now()) {
            Ok(r) => format!("{} {} {}", r.slot, r.vm_name, r.node),
            Err(error) => error,
        }
    }

    /// Naive implementation: the key of an unnamed pod is the prefix of its name, and all replicas get one slot.
    #[test]
    fn replicas_of_a_deployment_get_slots_of_their_own() {
        let slot_request = of_deployment("web");
        let (zero, one) = (
            aged_reservation(&slot_request, 0, "vk-prod-web-0", 1),
            aged_reservation(&slot_request, 1, "vk-prod-web-1", 1),
        );
        assert_eq!(placement_text(&slot_request, &[], &[]), "0 vk-prod-web-0 ");
        assert_eq!(
            placement_text(&slot_request, std::slice::from_ref(&zero), &[]),
            "1 vk-prod-web-1 ",
            "the first is not visible yet"
        );
        assert_eq!(placement_text(&slot_request, &[zero, one], &[]), "2 vk-prod-web-2 ");
    }

    #[test]
    fn replacement_gets_slot_name_and_node() {
        let slot_request = of_deployment("web");
        let all = [
            aged_reservation(&slot_request, 0, "vk-prod-web-0", 500),
            aged_reservation(&slot_request, 1, "vk-prod-web-1", 5),
        ];
        let live = |name: &str, slot: u32| pod(name, &format!("vk-prod-web-{slot}"), false);
        for (why, pods, want) in [
            (
                "its pod is being deleted",
                vec![pod("a", "vk-prod-web-0", true), live("b", 1)],
                "0 vk-prod-web-0 n0",
            ),
            ("its pod is gone", vec![live("b", 1)], "0 vk-prod-web-0 n0"),
            (
                "the young one was seen",
                vec![live("a", 0), pod("b", "vk-prod-web-1", true)],
                "1 vk-prod-web-1 n1",
            ),
            ("the young one is not visible yet", vec![live("a", 0)], "2 vk-prod-web-2 "),
            ("all are in use", vec![live("a", 0), live("b", 1)], "2 vk-prod-web-2 "),
        ] {
            assert_eq!(placement_text(&slot_request, &all, &pods), want, "{why}");
        }
    }

    /// Naive implementation: all bare pods share one key, and the last pod determines the node of all.
    #[test]
    fn bare_pods_do_not_share_a_slot() {
        let (a, b) = (bare_pod_request("a"), bare_pod_request("b"));
        let first = aged_reservation(&a, 0, "vk-prod-a", 500);
        assert_eq!(placement_text(&a, std::slice::from_ref(&first), &[]), "0 vk-prod-a n0", "its own again");
        assert_eq!(placement_text(&b, &[first], &[]), "1 vk-prod-b ", "not the slot of a pod that is gone");
        let unnamed = SlotRequest {
            pod: None,
            generate_name: "job-".into(),
            request: "1b2c-3d4e-5f".into(),
            ..bare_pod_request("")
        };
        assert_eq!(placement_text(&unnamed, &[], &[]), "0 vk-prod-job-1b2c3d4e ");
    }

    /// Deployment `web-1` has the same VM names as the bare pods `web-1-0`, as set `web-1`, and as owners in other namespaces.
    #[test]
    fn vm_name_of_another_owner_is_skipped() {
        let slot_request = of_deployment("web-1");
        let set = [pod("web-1-0", "vk-prod-web-1-0", false)];
        assert_eq!(placement_text(&slot_request, &[], &set), "1 vk-prod-web-1-1 ");
        let mut other = aged_reservation(&of_deployment("1"), 0, "vk-prod-web-1-0", 500);
        other.namespace = "prod-web".into();
        assert_eq!(placement_text(&slot_request, &[other.clone()], &[]), "1 vk-prod-web-1-1 ");
        let taken = placement_text(&bare_pod_request("web-1-0"), &[other], &[]);
        assert!(taken.contains("no VM name is free"), "{taken}");
    }

    /// A VM name in a Deployment's template applies to all of its pods.
    #[test]
    fn given_vm_name_is_for_one_pod() {
        let slot_request = SlotRequest { vm_name: Some("golden".into()), ..of_deployment("web") };
        assert_eq!(placement_text(&slot_request, &[], &[]), "0 golden ");
        let first = aged_reservation(&slot_request, 0, "golden", 500);
        let second =
            placement_text(&slot_request, std::slice::from_ref(&first), &[pod("a", "golden", false)]);
        assert!(second.contains("belongs to pod a"), "{second}");
        assert_eq!(placement_text(&slot_request, &[first], &[pod("a", "golden", true)]), "0 golden n0");
    }

    #[test]
    fn long_name_is_refused() {
        let error = placement_text(&of_deployment(&"x".repeat(60)), &[], &[]);
        assert!(error.contains("at most 63 characters"), "{error}");
    }

    #[test]
    fn node_with_the_fewest_pods_is_chosen() {
        let node = |name: &str, is_alive, pods| NodeFact { name: name.into(), is_alive, pods };
        let nodes = [node("c", true, 2), node("b", true, 1), node("a", true, 1), node("dead", false, 0)];
        assert_eq!(choose(&nodes).map(|n| n.name.as_str()), Some("a"));
        assert_eq!(choose(&nodes[3..]), None);
    }

    #[test]
    fn owner_is_the_deployment_of_a_replica_set() {
        let pod = |labels: serde_json::Value, owner: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"generateName": "x-", "labels": labels, "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": "u", "controller": true}]},
                "spec": {"containers": [], "tolerations": [{"key": keys::TAINT_KEY, "operator": "Exists"}]}}))
            .unwrap()
        };
        let hash = json!({"pod-template-hash": "5d9f"});
        let of = |pod: &Pod| slot_request(pod, "prod", "uid").unwrap().deployment;
        assert_eq!(of(&pod(hash, "web-5d9f")), "web");
        assert_eq!(of(&pod(json!({}), "web-5d9f")), "web-5d9f", "a ReplicaSet of its own");
    }

    #[test]
    fn pods_with_a_node_or_a_set_are_left_alone() {
        let pod = |spec: serde_json::Value, meta: serde_json::Value| -> Pod {
            serde_json::from_value(json!({"metadata": meta, "spec": spec})).unwrap()
        };
        let tolerations = json!([{"key": keys::TAINT_KEY, "operator": "Exists"}]);
        let bound = json!({"containers": [], "tolerations": tolerations, "nodeName": "n"});
        let free = json!({"containers": [], "tolerations": tolerations});
        let set = json!({"name": "x", "ownerReferences": [{"apiVersion": "cocoonset.cocoonstack.io/v1",
            "kind": "CocoonSet", "name": "s", "uid": "u", "controller": true}]});
        assert_eq!(slot_request(&pod(bound, json!({"name": "x"})), "prod", "uid"), None);
        assert_eq!(slot_request(&pod(free.clone(), set), "prod", "uid"), None);
        assert_eq!(slot_request(&pod(json!({"containers": []}), json!({"name": "x"})), "prod", "uid"), None);
        assert!(slot_request(&pod(free, json!({"name": "x"})), "prod", "uid").is_some());
    }

    #[test]
    fn reservations_of_the_original_are_read() {
        let text = r#"{"pool":"default","namespace":"prod","deployment":"web","slot":2,"vmName":"vk-prod-web-2",
            "pod":"web-abc-x","node":"n1","updatedAt":"2026-04-01T10:00:00Z"}"#;
        let read: Reservation = serde_json::from_str(text).unwrap();
        assert_eq!((read.key().as_str(), read.node.as_str()), ("prod.web.2", "n1"));
        let written = serde_json::to_value(&read).unwrap();
        assert_eq!(written["updatedAt"], "2026-04-01T10:00:00Z");
        assert!(written.get("podUid").is_none() && written.get("goneSince").is_none());
    }
}

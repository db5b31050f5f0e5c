//! Admission of pods, as a kubelet does it. Pure, apart from the ledger of admitted pods.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_api::Amount;
use coracle_pod::node::NodeFacts;
use coracle_pod::resources::vm_size;
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;

use super::requests::{Requests, requests};
use super::selector::may_run;

/// Reason and message of the status of a refused pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AdmissionFailure {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl AdmissionFailure {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

/// Resource requests of admitted pods, by uid. Clones share the ledger.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger(Arc<Mutex<BTreeMap<String, Requests>>>);

impl Ledger {
    /// Adds a pod that runs already.
    pub(super) fn reserve_running(&self, uid: &str, pod: &Pod) {
        self.0.lock().insert(uid.to_owned(), requests(pod));
    }

    /// Adds a pod if it fits besides the others. Idempotent.
    pub(super) fn admit(
        &self,
        uid: &str,
        pod: &Pod,
        node: &NodeFacts,
        pods_max: u32,
    ) -> Result<(), AdmissionFailure> {
        let mut taken = self.0.lock();
        if taken.contains_key(uid) {
            return Ok(());
        }
        check_fit(&taken.values().copied().collect::<Vec<_>>(), pod, node, pods_max)?;
        taken.insert(uid.to_owned(), requests(pod));
        Ok(())
    }

    /// Removes a pod that has ended.
    pub(super) fn release(&self, uid: &str) {
        self.0.lock().remove(uid);
    }
}

/// Checks whether a pod fits besides the others.
fn check_fit(taken: &[Requests], pod: &Pod, node: &NodeFacts, pods_max: u32) -> Result<(), AdmissionFailure> {
    let wanted = requests(pod);
    let sum = |part: fn(&Requests) -> Amount| taken.iter().map(part).fold(Amount::ZERO, Amount::plus);
    let short = |reason, what: &str, wanted: u64, used: u64, capacity: u64| {
        let message = format!(
            "Node didn't have enough resource: {what}, requested: {wanted}, used: {used}, capacity: {capacity}"
        );
        Err(AdmissionFailure::new(reason, message))
    };
    let count = u32::try_from(taken.len()).unwrap_or(u32::MAX);
    if count >= pods_max {
        return short("OutOfpods", "pods", 1, count.into(), pods_max.into());
    }
    let (used, capacity) = (sum(|one| one.cpu), Amount::of_units(node.allocatable_cpus.into()));
    if !wanted.cpu.is_zero() && wanted.cpu.plus(used) > capacity {
        return short("OutOfcpu", "cpu", wanted.cpu.millis(), used.millis(), capacity.millis());
    }
    let (used, capacity) = (sum(|one| one.memory), Amount::of_units(node.allocatable_memory.bytes()));
    if !wanted.memory.is_zero() && wanted.memory.plus(used) > capacity {
        return short("OutOfmemory", "memory", wanted.memory.units(), used.units(), capacity.units());
    }
    // Starting a VM that does not fit even an empty node would be retried forever.
    let (_, vm) = vm_size(pod, node);
    if vm > node.allocatable_memory {
        return short("OutOfmemory", "memory", vm.bytes(), 0, capacity.units());
    }
    Ok(())
}

/// Checks whether the pod may run on this node: by node affinity and operating system.
pub(super) fn is_for(
    pod: &Pod,
    node: &str,
    labels: &BTreeMap<String, String>,
) -> Result<(), AdmissionFailure> {
    if !may_run(pod, node, labels) {
        return Err(AdmissionFailure::new(
            "NodeAffinity",
            "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ));
    }
    let os = pod.spec.as_ref().and_then(|spec| spec.os.as_ref()).map(|os| os.name.as_str());
    match os.filter(|os| *os != "linux") {
        Some(os) => {
            let message =
                format!("Failed to admit pod as the OS field doesn't match node OS: {os:?} is not \"linux\"");
            Err(AdmissionFailure::new("PodOSNotSupported", message))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use coracle_pod::node::ResolverConfig;
    use serde_json::json;

    use super::*;

    fn node() -> NodeFacts {
        NodeFacts {
            name: "vm-1".into(),
            addresses: vec![],
            cluster_domain: String::new(),
            cluster_dns: vec![],
            resolver: ResolverConfig::default(),
            allocatable_cpus: 4,
            allocatable_memory: 4096.try_into().unwrap(),
            default_memory: 512.try_into().unwrap(),
            guest_overhead_mib: 64,
        }
    }

    fn pod(cpu: &str, memory: &str) -> Pod {
        let requests = json!({"cpu": cpu, "memory": memory});
        serde_json::from_value(
            json!({"spec": {"containers": [{"name": "a", "resources": {"requests": requests}}]}}),
        )
        .unwrap()
    }

    #[test]
    fn pods_are_taken_while_they_fit() {
        let ledger = Ledger::default();
        let take =
            |uid: &str, pod: &Pod| ledger.admit(uid, pod, &node(), 3).map_err(|failure| failure.reason);
        ledger.reserve_running("running", &pod("2", "1Gi"));
        for (why, uid, pod, want) in [
            ("fits", "a", pod("1", "1Gi"), Ok(())),
            ("again: counted once", "a", pod("1", "1Gi"), Ok(())),
            ("too many CPUs", "b", pod("1500m", "0"), Err("OutOfcpu")),
            ("too much memory", "c", pod("0", "3Gi"), Err("OutOfmemory")),
            ("asks for nothing", "d", pod("0", "0"), Ok(())),
            ("too many pods", "e", pod("0", "0"), Err("OutOfpods")),
        ] {
            assert_eq!(take(uid, &pod), want, "{why}");
        }
        ledger.release("a");
        ledger.release("a");
        assert_eq!(take("f", &pod("2", "3Gi")), Ok(()), "what ended is free");
    }

    #[test]
    fn vm_larger_than_the_node_is_refused() {
        let limits = json!({"memory": "4090Mi"});
        let pod = json!({"spec": {"containers": [{"name": "a", "resources": {"limits": limits, "requests": {"memory": "1Mi"}}}]}});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let failure = Ledger::default().admit("a", &pod, &node(), 10).unwrap_err();
        assert_eq!(failure.reason, "OutOfmemory");
    }

    #[test]
    fn pods_for_other_nodes_are_refused() {
        let labels = BTreeMap::new();
        for (spec, want) in [
            (json!({"containers": []}), None),
            (json!({"containers": [], "os": {"name": "linux"}}), None),
            (json!({"containers": [], "os": {"name": "windows"}}), Some("PodOSNotSupported")),
            (json!({"containers": [], "nodeSelector": {"a": "b"}}), Some("NodeAffinity")),
        ] {
            let pod = serde_json::from_value(json!({"spec": spec})).unwrap();
            assert_eq!(is_for(&pod, "vm-1", &labels).err().map(|failure| failure.reason), want, "{spec}");
        }
    }
}

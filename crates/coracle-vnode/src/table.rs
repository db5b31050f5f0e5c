//! Table of the pods of this node, for its API.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use coracle_proto::guest::Statistics;
use coracle_record::{ContainerId, ContainerState};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use parking_lot::RwLock;
use tokio::sync::Notify;

/// Pods of this node by uid. The tasks of pods write the table, the API reads it. Neither waits for the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodTable(Arc<RwLock<BTreeMap<String, Arc<PodEntry>>>>, Arc<Notify>);

/// Entry of a pod.
#[derive(Clone, Debug)]
pub(crate) struct PodEntry {
    /// Object, as it was read last.
    pub(crate) pod: Arc<Pod>,
    /// Status as this node sees it, after the first observation; the API server gets it a moment later.
    pub(crate) own_status: Option<Arc<PodStatus>>,
    /// Name of the pod's VM in the host core, while the VM exists.
    pub(crate) vm: Option<String>,
    /// The pod's container is a VM; else its containers run in the VM.
    pub(crate) is_vm: bool,
    /// Last statistics of the VM, if the pod's container is a VM.
    pub(crate) statistics: Option<Arc<Statistics>>,
    /// Counts of probe results.
    pub(crate) probes: BTreeMap<ProbeCount, u64>,
    /// Existing containers, sorted by name.
    pub(crate) containers: Vec<ContainerEntry>,
}

/// Results that are counted together: container, kind of the probe, result.
pub(crate) type ProbeCount = (String, &'static str, &'static str);

impl PodEntry {
    /// Returns the entry of a pod without a VM.
    pub(crate) fn new(pod: Arc<Pod>) -> Self {
        let (probes, containers) = (BTreeMap::new(), Vec::new());
        Self { pod, own_status: None, vm: None, is_vm: false, statistics: None, probes, containers }
    }

    /// Returns the status: that of this node, else that of the object.
    pub(crate) fn status(&self) -> Option<&PodStatus> {
        self.own_status.as_deref().or(self.pod.status.as_ref())
    }

    /// Returns the newest attempt of a container.
    pub(crate) fn container(&self, name: &str) -> Option<&ContainerEntry> {
        self.containers.iter().find(|container| container.name == name)
    }

    /// Returns the pod with this node's status.
    pub(crate) fn pod_with_status(&self) -> Pod {
        let Pod { metadata, spec, .. } = &*self.pod;
        Pod { metadata: metadata.clone(), spec: spec.clone(), status: self.status().cloned() }
    }
}

/// Newest attempt of a container.
#[derive(Clone, Debug)]
pub(crate) struct ContainerEntry {
    /// Name of the container in the pod.
    pub(crate) name: String,
    /// Id of the attempt in the VM.
    pub(crate) id: ContainerId,
    /// State of the attempt.
    pub(crate) state: ContainerState,
    /// CRI log file.
    pub(crate) log: PathBuf,
    /// Previous attempt, with its log file.
    pub(crate) previous: Option<(ContainerId, PathBuf)>,
}

impl PodTable {
    /// Returns all pods, sorted by uid.
    pub(crate) fn list(&self) -> Vec<Arc<PodEntry>> {
        self.0.read().values().cloned().collect()
    }

    /// Returns the pod with this name, and with this uid if one is given. While an earlier pod of the same name is being ended,
    /// both exist: without a uid, the pod that is not being deleted is returned, else the newest.
    pub(crate) fn find(&self, namespace: &str, name: &str, uid: Option<&str>) -> Option<Arc<PodEntry>> {
        let pods = self.0.read();
        let named = pods.values().filter(|entry| {
            let metadata = &entry.pod.metadata;
            metadata.namespace.as_deref() == Some(namespace)
                && metadata.name.as_deref() == Some(name)
                && uid.is_none_or(|uid| metadata.uid.as_deref() == Some(uid))
        });
        let age = |entry: &&Arc<PodEntry>| {
            let metadata = &entry.pod.metadata;
            (metadata.deletion_timestamp.is_none(), metadata.creation_timestamp.as_ref().map(|time| time.0))
        };
        named.max_by_key(age).cloned()
    }

    /// Returns whether a pod with this uid exists.
    pub(crate) fn has(&self, uid: &str) -> bool {
        self.0.read().contains_key(uid)
    }

    /// Returns whether this node has determined the status of the pod itself.
    pub(crate) fn has_own_status(&self, uid: &str) -> bool {
        self.0.read().get(uid).is_some_and(|entry| entry.own_status.is_some())
    }

    /// Returns the number of VM pods whose VM exists.
    pub(crate) fn vm_pods(&self) -> usize {
        self.0.read().values().filter(|entry| entry.is_vm && entry.vm.is_some()).count()
    }

    /// Adds or replaces a pod. A pod without a uid is not stored.
    pub(crate) fn put(&self, entry: Arc<PodEntry>) {
        if let Some(uid) = entry.pod.metadata.uid.clone() {
            let has_vm = entry.is_vm && entry.vm.is_some();
            let before = self.0.write().insert(uid, entry);
            if has_vm != before.is_some_and(|before| before.is_vm && before.vm.is_some()) {
                self.1.notify_one();
            }
        }
    }

    /// Waits until a VM pod gets or loses its VM. Cancel-safe. Changes before the call count as one.
    pub(crate) async fn vm_pods_changed(&self) {
        self.1.notified().await;
    }

    /// Removes a pod, if it exists.
    pub(crate) fn remove(&self, uid: &str) {
        self.0.write().remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(name: &str, uid: &str, created: &str, deleted: Option<&str>) -> Arc<PodEntry> {
        let pod = json!({"metadata": {
            "namespace": "shop", "name": name, "uid": uid, "creationTimestamp": created, "deletionTimestamp": deleted,
        }});
        let pod = Arc::new(serde_json::from_value(pod).unwrap());
        Arc::new(PodEntry::new(pod))
    }

    #[test]
    fn table_finds_the_pod_that_a_name_means() {
        let table = PodTable::default();
        table.put(entry("web", "u1", "2026-01-02T00:00:00Z", Some("2026-01-03T00:00:00Z")));
        table.put(entry("web", "u2", "2026-01-01T00:00:00Z", None));
        table.put(entry("db", "u3", "2026-01-01T00:00:00Z", None));
        let find = |namespace, name, uid| {
            table.find(namespace, name, uid).and_then(|entry| entry.pod.metadata.uid.clone())
        };
        for (why, namespace, name, uid, want) in [
            ("the one that stays", "shop", "web", None, Some("u2")),
            ("the one with the uid", "shop", "web", Some("u1"), Some("u1")),
            ("a uid of another pod", "shop", "web", Some("u3"), None),
            ("another namespace", "bank", "web", None, None),
            ("another name", "shop", "db", None, Some("u3")),
        ] {
            assert_eq!(find(namespace, name, uid).as_deref(), want, "{why}");
        }
        table.remove("u2");
        table.remove("u2");
        assert_eq!(find("shop", "web", None).as_deref(), Some("u1"), "the one that is being deleted is left");
        assert_eq!(table.list().len(), 2);
    }
}

//! Entry of one pod in the table that the API reads.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use coracle_host::{Access, Host, View};
use coracle_pod::container_spec::key;
use coracle_proto::guest::Statistics;
use coracle_record::{ContainerId, ContainerRecord, ContainerState};
use coracle_types::{VmId, VmState};
use coracle_vm_pod::output::log_path;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use parking_lot::Mutex;

use crate::table::{ContainerEntry, PodEntry, PodTable};

/// Entry of one pod. The task of the pod and its runtime write it; each write replaces the whole entry.
#[derive(Debug)]
pub(super) struct Row {
    table: PodTable,
    host: Host,
    entry: Mutex<Arc<PodEntry>>,
}

impl Row {
    pub(super) fn new(table: PodTable, host: Host, pod: Arc<Pod>) -> Self {
        let row = Self { table, host, entry: Mutex::new(Arc::new(PodEntry::new(pod))) };
        row.put(|_| {});
        row
    }

    fn put(&self, change: impl FnOnce(&mut PodEntry)) {
        let mut entry = self.entry.lock();
        change(Arc::make_mut(&mut entry));
        self.table.put(entry.clone());
    }

    /// Sets a new version of the object.
    pub(super) fn set_pod(&self, pod: &Arc<Pod>) {
        self.put(|entry| entry.pod = pod.clone());
    }

    /// Sets the status as this node sees it; the API server gets it a moment later.
    pub(super) fn set_status(&self, status: &Arc<PodStatus>) {
        if self.entry.lock().own_status.as_ref() == Some(status) {
            return;
        }
        self.put(|entry| entry.own_status = Some(status.clone()));
    }

    /// Updates the entry of a pod whose container is `vm`. The logs of the VM are below `logs`.
    pub(super) fn update_from_vm(&self, vm: Option<&VmId>, logs: &Path) {
        let view = vm.and_then(|vm| self.host.find(vm.as_str(), Access::Change).ok());
        self.put(|entry| {
            let first = entry.pod.spec.as_ref().and_then(|spec| spec.containers.first());
            let name = first.map(|container| container.name.clone());
            let container = name.zip(view.as_ref()).and_then(|(name, view)| vm_container(name, view, logs));
            entry.is_vm = true;
            entry.vm = view.as_ref().map(|view| view.record.id.to_string());
            entry.containers = container.into_iter().collect();
        });
    }

    /// Sets the last statistics of that VM.
    pub(super) fn set_statistics(&self, statistics: Option<Arc<Statistics>>) {
        self.put(|entry| entry.statistics = statistics);
    }

    /// Counts the result of a probe.
    pub(super) fn probed(&self, container: &str, kind: &'static str, result: &'static str) {
        self.put(|entry| {
            let key = (container.to_owned(), kind, result);
            *entry.probes.entry(key).or_default() += 1;
        });
    }

    /// Updates the entry from the sandbox VM and its containers.
    pub(super) fn update_from_sandbox(&self, vm: &str) {
        let view = self.host.find(vm, Access::Change).ok();
        let vms = self.host.config().state_dir.join("vms");
        self.put(|entry| {
            entry.vm = view.as_ref().map(|_| vm.to_owned());
            entry.containers = view.map(|view| containers(&view, &vms)).unwrap_or_default();
        });
    }
}

/// Returns the entry of a VM as a container. Each start of the VM is an attempt.
fn vm_container(name: String, view: &View, logs: &Path) -> Option<ContainerEntry> {
    let record = &view.record;
    let id = |boot: u32| format!("boot-{boot}").parse::<ContainerId>().ok();
    let state = match record.state {
        VmState::Creating | VmState::Created | VmState::Starting => ContainerState::Created,
        VmState::Stopped | VmState::Failed | VmState::Deleting => ContainerState::Exited,
        _ => ContainerState::Running,
    };
    let before = record.boots.checked_sub(1).filter(|boot| *boot > 0);
    Some(ContainerEntry {
        name,
        id: id(record.boots)?,
        state,
        log: log_path(logs, record.boots),
        previous: before.and_then(|boot| Some((id(boot)?, log_path(logs, boot)))),
    })
}

fn containers(view: &View, vms: &Path) -> Vec<ContainerEntry> {
    let mut attempts: BTreeMap<String, Vec<&ContainerRecord>> = BTreeMap::new();
    for record in view.containers.values() {
        if let Some(name) = record.spec.metadata.get(key::NAME) {
            attempts.entry(name.clone()).or_default().push(record);
        }
    }
    let log = |record: &ContainerRecord| {
        let own = || vms.join(view.record.id.as_str()).join("containers").join(format!("{}.log", record.id));
        record.spec.log_path.clone().unwrap_or_else(own)
    };
    let entry = |(name, mut attempts): (String, Vec<&ContainerRecord>)| {
        attempts.sort_by_key(|record| std::cmp::Reverse(record.spec.attempt));
        let mut attempts = attempts.into_iter();
        let newest = attempts.next()?;
        Some(ContainerEntry {
            name,
            id: newest.id.clone(),
            state: newest.state,
            log: log(newest),
            previous: attempts.next().map(|record| (record.id.clone(), log(record))),
        })
    };
    attempts.into_iter().filter_map(entry).collect()
}

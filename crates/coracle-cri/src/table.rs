//! Table of sandboxes and containers for lists and statuses, decoded once for each change of a VM. The table is rebuilt from
//! the host core and therefore always consistent with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use coracle_host::{ContainerRecord, ContainerRecords, Host, Record, View};
use coracle_logs::CriLog;
use coracle_proto::cri::{Container, ContainerState, PodSandbox, PodSandboxState};
use coracle_proto::guest::Statistics;
use coracle_types::VmId;
use prost::Message as _;
use tokio::sync::watch;

use crate::facts::{ContainerFacts, SandboxFacts, pod_of};
use crate::refusal::Refusal;
use crate::status;
use crate::vm_container::container_record;

/// Sandbox with its containers.
#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub(crate) view: Arc<View>,
    pub(crate) facts: Arc<SandboxFacts>,
    /// List entry.
    pub(crate) entry: PodSandbox,
    /// Encoded list entry.
    pub(crate) encoded: Bytes,
    pub(crate) containers: Arc<Vec<ContainerEntry>>,
    /// VMs of a disk pod's containers, in the order of the containers.
    pub(crate) vms: Vec<ContainerVm>,
}

/// VM that is a container of a disk pod.
#[derive(Clone, Debug)]
pub(crate) struct ContainerVm {
    pub(crate) view: Arc<View>,
    /// A task attends the VM: its log is not complete yet.
    attended: bool,
}

impl ContainerVm {
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.view, &other.view) && self.attended == other.attended
    }
}

/// State of a container's VM while a task attends it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attended {
    /// Log of the container; `None`: it has none.
    pub(crate) log: Option<Arc<Mutex<CriLog>>>,
    /// Last report of the guest.
    pub(crate) statistics: Option<Arc<Statistics>>,
}

/// Container.
#[derive(Clone, Debug)]
pub(crate) struct ContainerEntry {
    pub(crate) record: Arc<ContainerRecord>,
    pub(crate) facts: ContainerFacts,
    /// List entry.
    pub(crate) entry: Container,
    /// Encoded list entry.
    pub(crate) encoded: Bytes,
}

impl Pod {
    pub(crate) fn id(&self) -> &str {
        &self.entry.id
    }

    pub(crate) fn record(&self) -> &Record {
        &self.view.record
    }

    pub(crate) fn namespace(&self) -> &str {
        self.facts.config.metadata.as_ref().map_or("", |metadata| &metadata.namespace)
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.entry.state == i32::from(PodSandboxState::SandboxReady)
    }

    pub(crate) fn container(&self, id: &str) -> Option<&ContainerEntry> {
        self.containers.iter().find(|container| container.entry.id == id)
    }

    /// Returns the name of the VM that contains a container, or is the container.
    pub(crate) fn vm<'a>(&'a self, container: &'a ContainerEntry) -> &'a str {
        if self.facts.disk { &container.entry.id } else { self.id() }
    }

    /// Returns whether the pod was built from these versions.
    fn is_of(&self, view: &Arc<View>, vms: &[ContainerVm]) -> bool {
        let same_vms = self.vms.len() == vms.len() && self.vms.iter().zip(vms).all(|(a, b)| a.is(b));
        Arc::ptr_eq(&self.view, view) && same_vms
    }

    fn new(view: Arc<View>, vms: Vec<ContainerVm>, known: Option<&Self>) -> Option<Arc<Self>> {
        let facts = match known {
            Some(known) => known.facts.clone(), // facts never change
            None => Arc::new(SandboxFacts::of(&view.record)?),
        };
        let entry = status::pod_sandbox(&view.record, &facts);
        let same = known.filter(|known| Arc::ptr_eq(&known.view.containers, &view.containers) && !facts.disk);
        let (containers, vms) = match same {
            Some(known) => (known.containers.clone(), vms),
            None if facts.disk => {
                let of = |vm: ContainerVm| Some((ContainerEntry::of_vm(&entry.id, &vm, &facts)?, vm));
                let (containers, vms) = vms.into_iter().filter_map(of).unzip();
                (Arc::new(containers), vms)
            }
            None => (Arc::new(ContainerEntry::all(&entry.id, &view.containers)), vms),
        };
        let encoded = entry.encode_to_vec().into();
        Some(Arc::new(Self { view, facts, entry, encoded, containers, vms }))
    }
}

impl ContainerEntry {
    fn all(sandbox: &str, records: &ContainerRecords) -> Vec<Self> {
        let one = |record: &Arc<ContainerRecord>| {
            Some(Self::new(sandbox, record.clone(), ContainerFacts::of(record)?))
        };
        records.values().filter_map(one).collect()
    }

    fn of_vm(sandbox: &str, vm: &ContainerVm, pod: &SandboxFacts) -> Option<Self> {
        let record = &vm.view.record;
        let facts = ContainerFacts::of_metadata(&record.metadata)?;
        let record = container_record(record, &facts, &pod.config, vm.attended)?;
        Some(Self::new(sandbox, Arc::new(record), facts))
    }

    fn new(sandbox: &str, record: Arc<ContainerRecord>, facts: ContainerFacts) -> Self {
        let entry = status::container(sandbox, &record, &facts);
        let encoded = entry.encode_to_vec().into();
        Self { record, facts, entry, encoded }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.entry.state == i32::from(ContainerState::ContainerRunning)
    }
}

/// Table of all sandboxes of the kubelet.
#[derive(Debug, Default)]
pub(crate) struct Table {
    known: Mutex<HashMap<VmId, Arc<Pod>>>,
    /// VMs of containers that tasks attend, by name.
    attended: Mutex<HashMap<String, Attended>>,
    /// Notified when a task has stopped attending a VM.
    unattended: watch::Sender<()>,
}

impl Table {
    /// Returns all current sandboxes. Never waits for a guest or a file.
    pub(crate) fn pods(&self, host: &Host) -> Vec<Arc<Pod>> {
        let views = host.list();
        let mut vms = self.container_vms(&views);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pods = Vec::with_capacity(views.len());
        for view in views {
            let vms = vms.remove(view.record.name.as_str()).unwrap_or_default();
            let before = known.get(&view.record.id);
            let pod = match before {
                Some(pod) if pod.is_of(&view, &vms) => Some(pod.clone()),
                before => Pod::new(view, vms, before.map(Arc::as_ref)),
            };
            pods.extend(pod.filter(|pod| status::is_acknowledged(&pod.view.record, &pod.facts)));
        }
        if known.len() != pods.len() || pods.iter().any(|pod| !is_known(&known, pod)) {
            *known = pods.iter().map(|pod| (pod.view.record.id.clone(), pod.clone())).collect();
        }
        pods
    }

    /// Returns the VMs of disk pods' containers, by sandbox.
    fn container_vms(&self, views: &[Arc<View>]) -> HashMap<String, Vec<ContainerVm>> {
        let attended = self.lock_attended();
        let mut of_pods: HashMap<String, Vec<ContainerVm>> = HashMap::new();
        for view in views {
            let Some(pod) = pod_of(&view.record) else { continue };
            let attended = attended.contains_key(view.record.name.as_str());
            of_pods.entry(pod.to_owned()).or_default().push(ContainerVm { view: view.clone(), attended });
        }
        of_pods
    }

    fn lock_attended(&self) -> MutexGuard<'_, HashMap<String, Attended>> {
        self.attended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a task attends this VM; returns false if another task does already.
    pub(crate) fn attend(&self, vm: &str, by: Attended) -> bool {
        let mut attended = self.lock_attended();
        let new = !attended.contains_key(vm);
        if new {
            attended.insert(vm.to_owned(), by);
        }
        new
    }

    /// Returns the state of a VM that a task attends.
    pub(crate) fn attended_by(&self, vm: &str) -> Option<Attended> {
        self.lock_attended().get(vm).cloned()
    }

    /// Stores the last report of the guest of an attended VM.
    pub(crate) fn report(&self, vm: &str, statistics: Arc<Statistics>) {
        if let Some(attended) = self.lock_attended().get_mut(vm) {
            attended.statistics = Some(statistics);
        }
    }

    /// Records that the log of this VM is complete and no task attends it. Idempotent.
    pub(crate) fn detach_task(&self, vm: &str) {
        self.lock_attended().remove(vm);
        self.unattended.send_replace(());
    }

    /// Resolves when no task attends the VM.
    pub(crate) async fn wait_unattended(&self, vm: &str) {
        let mut unattended = self.unattended.subscribe();
        while self.lock_attended().contains_key(vm) && unattended.changed().await.is_ok() {}
    }

    /// Returns a receiver of container changes that are not in a record.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.unattended.subscribe()
    }

    /// Returns a sandbox by its id.
    ///
    /// # Errors
    /// [`Refusal::NotFound`].
    pub(crate) fn pod(&self, host: &Host, id: &str) -> Result<Arc<Pod>, Refusal> {
        let found = self.pods(host).into_iter().find(|pod| pod.id() == id);
        found.ok_or_else(|| Refusal::NotFound { what: "sandbox", id: id.to_owned() })
    }

    /// Returns a container by its id, with its sandbox.
    ///
    /// # Errors
    /// [`Refusal::NotFound`].
    pub(crate) fn container(&self, host: &Host, id: &str) -> Result<(Arc<Pod>, ContainerEntry), Refusal> {
        for pod in self.pods(host) {
            if let Some(container) = pod.container(id).cloned() {
                return Ok((pod, container));
            }
        }
        Err(Refusal::NotFound { what: "container", id: id.to_owned() })
    }
}

fn is_known(known: &HashMap<VmId, Arc<Pod>>, pod: &Arc<Pod>) -> bool {
    known.get(&pod.view.record.id).is_some_and(|known| Arc::ptr_eq(known, pod))
}

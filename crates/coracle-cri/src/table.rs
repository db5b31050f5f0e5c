//! Sandboxes and containers as lists and statuses need them, decoded once for each change of a VM. Rebuilt from the host
//! core, so that it never differs from it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use coracle_host::{ContainerId, ContainerRecord, Host, Record, View};
use coracle_proto::cri::{Container, ContainerState, PodSandbox, PodSandboxState};
use coracle_types::VmId;
use prost::Message as _;

use crate::facts::{ContainerFacts, SandboxFacts};
use crate::refusal::Refusal;
use crate::status;

/// A sandbox with its containers.
#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub(crate) view: Arc<View>,
    pub(crate) facts: Arc<SandboxFacts>,
    /// Its entry in a list.
    pub(crate) entry: PodSandbox,
    /// The entry, encoded.
    pub(crate) encoded: Bytes,
    pub(crate) containers: Arc<Vec<Ctr>>,
}

/// A container.
#[derive(Clone, Debug)]
pub(crate) struct Ctr {
    pub(crate) record: ContainerRecord,
    pub(crate) facts: ContainerFacts,
    /// Its entry in a list.
    pub(crate) entry: Container,
    /// The entry, encoded.
    pub(crate) encoded: Bytes,
}

impl Pod {
    pub(crate) fn id(&self) -> &str {
        &self.entry.id
    }

    pub(crate) fn record(&self) -> &Record {
        &self.view.record
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.entry.state == i32::from(PodSandboxState::SandboxReady)
    }

    pub(crate) fn container(&self, id: &str) -> Option<&Ctr> {
        self.containers.iter().find(|container| container.entry.id == id)
    }

    fn new(view: Arc<View>, known: Option<&Self>) -> Option<Arc<Self>> {
        let facts = match known {
            Some(known) => known.facts.clone(), // never change
            None => Arc::new(SandboxFacts::of(&view.record)?),
        };
        let entry = status::pod_sandbox(&view.record, &facts);
        let same = known.filter(|known| Arc::ptr_eq(&known.view.containers, &view.containers));
        let containers = match same {
            Some(known) => known.containers.clone(),
            None => Arc::new(Ctr::all(&entry.id, &view.containers)),
        };
        let encoded = entry.encode_to_vec().into();
        Some(Arc::new(Self { view, facts, entry, encoded, containers }))
    }
}

impl Ctr {
    fn all(sandbox: &str, records: &BTreeMap<ContainerId, ContainerRecord>) -> Vec<Self> {
        let one = |record: &ContainerRecord| {
            let facts = ContainerFacts::of(record)?;
            let entry = status::container(sandbox, record, &facts);
            let encoded = entry.encode_to_vec().into();
            Some(Self { record: record.clone(), facts, entry, encoded })
        };
        records.values().filter_map(one).collect()
    }

    pub(crate) fn is_running(&self) -> bool {
        self.entry.state == i32::from(ContainerState::ContainerRunning)
    }
}

/// All sandboxes that the kubelet knows.
#[derive(Debug, Default)]
pub(crate) struct Table(Mutex<HashMap<VmId, Arc<Pod>>>);

impl Table {
    /// All sandboxes as they are now. Never waits for a guest or a file.
    pub(crate) fn pods(&self, host: &Host) -> Vec<Arc<Pod>> {
        let views = host.list();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pods = Vec::with_capacity(views.len());
        for view in views {
            let before = known.get(&view.record.id);
            let pod = match before {
                Some(pod) if Arc::ptr_eq(&pod.view, &view) => Some(pod.clone()),
                before => Pod::new(view, before.map(Arc::as_ref)),
            };
            pods.extend(pod.filter(|pod| status::is_acknowledged(&pod.view.record)));
        }
        if known.len() != pods.len() || pods.iter().any(|pod| !is_known(&known, pod)) {
            *known = pods.iter().map(|pod| (pod.view.record.id.clone(), pod.clone())).collect();
        }
        pods
    }

    /// A sandbox by its id.
    ///
    /// # Errors
    /// [`Refusal::NotFound`].
    pub(crate) fn pod(&self, host: &Host, id: &str) -> Result<Arc<Pod>, Refusal> {
        let found = self.pods(host).into_iter().find(|pod| pod.id() == id);
        found.ok_or_else(|| Refusal::NotFound { what: "sandbox", id: id.to_owned() })
    }

    /// A container by its id, with its sandbox.
    ///
    /// # Errors
    /// [`Refusal::NotFound`].
    pub(crate) fn container(&self, host: &Host, id: &str) -> Result<(Arc<Pod>, Ctr), Refusal> {
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

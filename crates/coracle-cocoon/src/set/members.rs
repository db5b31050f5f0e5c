//! Pods of a set, sorted by what they are in it.

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::cocoon::{LifecycleState, Role, VmRuntimeAnnotations, VmSpecAnnotations, keys};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::step::PodId;

/// A pod of a set, with what its annotations say.
#[derive(Clone, Debug)]
pub(crate) struct Member<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) spec: VmSpecAnnotations,
    pub(crate) runtime: VmRuntimeAnnotations,
}

impl<'a> Member<'a> {
    pub(crate) fn of(pod: &'a Pod) -> Self {
        Self { pod, spec: VmSpecAnnotations::from_pod(pod), runtime: VmRuntimeAnnotations::from_pod(pod) }
    }

    pub(crate) fn id(&self) -> PodId {
        PodId { name: self.pod.name_any(), uid: self.pod.uid().unwrap_or_default() }
    }

    pub(crate) fn phase(&self) -> &str {
        self.pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
    }

    pub(crate) fn node(&self) -> Option<&str> {
        let spec = self.pod.spec.as_ref()?;
        spec.node_name.as_deref().filter(|name| !name.is_empty())
    }

    pub(crate) fn is_ready(&self) -> bool {
        let conditions = self.pod.status.as_ref().and_then(|status| status.conditions.as_ref());
        let ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        ready && self.phase() == "Running" && !self.is_ending()
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.pod.metadata.deletion_timestamp.is_some()
    }

    /// It ended, or its node gave up.
    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self.phase(), "Failed" | "Succeeded")
            || self.runtime.lifecycle_state == Some(LifecycleState::Failed)
    }

    /// Its container runs: that of a hibernated VM waits.
    pub(crate) fn is_running(&self) -> bool {
        is_container_running(self.pod)
    }

    /// The node reports the hibernation that was asked for last, or reports no states at all.
    pub(crate) fn reports_hibernated(&self) -> bool {
        match self.runtime.lifecycle_state {
            None => true,
            Some(LifecycleState::Hibernated) => self.spec.generation.is_none_or(|asked| {
                self.runtime.lifecycle_observed_generation.is_none_or(|seen| seen >= asked)
            }),
            Some(_) => false,
        }
    }
}

/// True when a container of the pod runs.
pub(crate) fn is_container_running(pod: &Pod) -> bool {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    let mut statuses = statuses.into_iter().flatten();
    statuses.any(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
}

/// The pods of a set.
#[derive(Debug, Default)]
pub(crate) struct Members<'a> {
    /// Slot 0.
    pub(crate) main: Option<Member<'a>>,
    /// By slot, from 1 on.
    pub(crate) subs: BTreeMap<u32, Member<'a>>,
    /// By name in the spec.
    pub(crate) toolboxes: BTreeMap<String, Member<'a>>,
    /// Pods that are being deleted. Their names are not free yet, and their VMs may be running.
    pub(crate) ending: Vec<Member<'a>>,
    ending_names: BTreeSet<String>,
}

impl<'a> Members<'a> {
    /// Sorts pods by their labels; one without the labels of a set is left alone.
    pub(crate) fn sort(pods: &'a [Pod]) -> Self {
        let mut all = Self::default();
        for pod in pods {
            let member = Member::of(pod);
            if member.is_ending() {
                all.ending_names.insert(pod.name_any());
                all.ending.push(member);
                continue;
            }
            let label = |key: &str| pod.labels().get(key).map(String::as_str).unwrap_or_default();
            let slot = label(keys::SET_SLOT_LABEL);
            match (Role::parse(label(keys::SET_ROLE_LABEL)), slot.parse::<u32>()) {
                (Some(Role::Main), _) => all.main = Some(member),
                (Some(Role::SubAgent), Ok(slot)) => drop(all.subs.insert(slot, member)),
                (Some(Role::Toolbox), _) => drop(all.toolboxes.insert(slot.to_owned(), member)),
                (Some(Role::SubAgent), Err(_)) | (None, _) => {}
            }
        }
        all
    }

    /// All that are not being deleted, the main agent first.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Member<'a>> {
        self.main.iter().chain(self.subs.values()).chain(self.toolboxes.values())
    }

    /// The pod of that name is being deleted.
    pub(crate) fn is_ending(&self, pod: &str) -> bool {
        self.ending_names.contains(pod)
    }
}

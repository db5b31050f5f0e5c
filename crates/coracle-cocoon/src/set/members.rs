//! Pods of a set, sorted by their role.

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::cocoon::{LifecycleState, Role, VmRuntimeAnnotations, VmSpecAnnotations, keys};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::step::PodId;

/// Pod of a set, with its parsed annotations.
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

    /// True when the pod ended, or its node reports a failure.
    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self.phase(), "Failed" | "Succeeded")
            || self.runtime.lifecycle_state == Some(LifecycleState::Failed)
    }

    /// True when the pod's container runs. The container of a hibernated VM waits.
    pub(crate) fn is_running(&self) -> bool {
        is_container_running(self.pod)
    }

    /// True when the node reports the hibernation that was requested last, or reports no states at all.
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

/// Pods of a set.
#[derive(Debug, Default)]
pub(crate) struct Members<'a> {
    /// Main agent, slot 0.
    pub(crate) main: Option<Member<'a>>,
    /// Sub-agents by slot, from 1 on.
    pub(crate) subs: BTreeMap<u32, Member<'a>>,
    /// Toolboxes by name in the spec.
    pub(crate) toolboxes: BTreeMap<String, Member<'a>>,
    /// Pods that are being deleted. Their names are not free yet, and their VMs may be running.
    pub(crate) ending: Vec<Member<'a>>,
    ending_names: BTreeSet<String>,
}

impl<'a> Members<'a> {
    /// Sorts pods by their labels. A pod without the labels of a set is ignored.
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

    /// Returns all pods that are not being deleted, the main agent first.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Member<'a>> {
        self.main.iter().chain(self.subs.values()).chain(self.toolboxes.values())
    }

    /// True when the pod of that name is being deleted.
    pub(crate) fn is_ending(&self, pod: &str) -> bool {
        self.ending_names.contains(pod)
    }
}

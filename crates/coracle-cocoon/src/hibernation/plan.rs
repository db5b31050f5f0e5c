//! Next step for the hibernation of a pod, and its status. Pure.
//!
//! The tag in the registry is the only copy of a hibernated VM. It is removed only when the VM is observed to run again: a
//! running container without a VM is a wake that was interrupted.

use coracle_api::CocoonHibernation;
use coracle_api::cocoon::{
    CocoonHibernationStatus, Desire, HibernationPhase, LifecycleState, VmRuntimeAnnotations,
    VmSpecAnnotations, keys,
};
use coracle_reconcile::{Desired, Event, Kind, merge};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use std::time::Duration;

use crate::config::Times;
use crate::set::{PodId, is_container_running};

/// Input of a plan.
#[derive(Debug)]
pub(crate) struct Observed<'a> {
    pub(crate) hibernation: &'a CocoonHibernation,
    pub(crate) pod: Option<&'a Pod>,
    /// True when the saved state of the VM is in the registry.
    pub(crate) is_saved: bool,
    /// Name of the set that owns the pod, when the set is suspended.
    pub(crate) suspended_by: Option<&'a str>,
    /// Older hibernation of the same pod, or pod of another namespace with the same VM name.
    pub(crate) rival: Option<&'a str>,
    /// Time when this generation was first observed.
    pub(crate) since: Timestamp,
    pub(crate) now: Timestamp,
    pub(crate) times: &'a Times,
}

/// One effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Adds the annotation for hibernation to the pod.
    Hibernate(PodId),
    /// Removes that annotation from the pod.
    Wake(PodId),
    /// Removes the saved state of a running VM.
    DropTag { pod: PodId, vm: String },
    /// Removes the finalizer of the deleted object.
    RemoveFinalizer,
}

/// A step, if there is one, and the status.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) step: Option<Step>,
    pub(crate) phase: HibernationPhase,
    pub(crate) vm: String,
    pub(crate) message: String,
    pub(crate) requeue: Duration,
}

impl Plan {
    fn new(o: &Observed<'_>, phase: HibernationPhase, message: impl Into<String>) -> Self {
        let is_done = matches!(phase, HibernationPhase::Hibernated | HibernationPhase::Active);
        let requeue = if is_done { o.times.resync } else { o.times.poll };
        let vm = o.pod.map(|pod| VmSpecAnnotations::from_pod(pod).vm_name).unwrap_or_default();
        Self { step: None, phase, vm, message: message.into(), requeue }
    }

    fn with(mut self, step: Step) -> Self {
        self.step = Some(step);
        self
    }
}

/// Plans the next step, from any state.
pub(crate) fn plan(o: &Observed<'_>) -> Plan {
    use HibernationPhase::{Failed, Pending};
    if o.hibernation.metadata.deletion_timestamp.is_some() {
        let plan = Plan::new(o, Pending, "being deleted");
        let held = o.hibernation.finalizers().iter().any(|name| name == keys::HIBERNATION_FINALIZER);
        return if held { plan.with(Step::RemoveFinalizer) } else { plan };
    }
    let name = &o.hibernation.spec.pod_ref.name;
    let Some(pod) = o.pod else { return Plan::new(o, Failed, format!("pod {name:?} not found")) };
    let spec = VmSpecAnnotations::from_pod(pod);
    if spec.vm_name.is_empty() {
        return Plan::new(o, Failed, format!("pod {name:?} has no VM name (annotation {})", keys::VM_NAME));
    }
    if let Some(rival) = o.rival {
        return Plan::new(o, Failed, format!("the VM of pod {name:?} is held by {rival}"));
    }
    if spec.mode == coracle_api::cocoon::Mode::Static {
        return Plan::new(o, Failed, format!("the VM of pod {name:?} is static and cannot be hibernated"));
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return Plan::new(o, Pending, format!("pod {name:?} is being deleted"));
    }
    let vm = Vm {
        id: PodId { name: pod.name_any(), uid: pod.uid().unwrap_or_default() },
        runtime: VmRuntimeAnnotations::from_pod(pod),
        is_running: is_container_running(pod),
        phase: pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default(),
        spec,
    };
    match o.hibernation.spec.desire {
        Desire::Hibernate => hibernate(o, &vm),
        Desire::Wake => wake(o, vm),
    }
}

/// Observed state of the VM.
struct Vm {
    id: PodId,
    spec: VmSpecAnnotations,
    runtime: VmRuntimeAnnotations,
    is_running: bool,
    phase: String,
}

impl Vm {
    fn has_failed(&self) -> bool {
        self.runtime.lifecycle_state == Some(LifecycleState::Failed)
    }

    /// True when the node reports the state for the requested generation, or when it reports no states at all.
    fn reports(&self, state: LifecycleState) -> bool {
        let is_recent = match (self.spec.generation, self.runtime.lifecycle_observed_generation) {
            (Some(asked), Some(seen)) => seen >= asked,
            _ => true,
        };
        self.runtime.lifecycle_state.is_none_or(|is| is == state && is_recent)
    }
}

fn hibernate(o: &Observed<'_>, vm: &Vm) -> Plan {
    use HibernationPhase::{Failed, Hibernated, Hibernating, Pending};
    let is_asked = vm.spec.hibernate;
    if !is_asked && vm.phase != "Running" {
        // A VM that does not run yet has no state to save.
        return Plan::new(o, Pending, "the VM does not run yet");
    }
    if !is_asked {
        return Plan::new(o, Hibernating, "hibernation requested").with(Step::Hibernate(vm.id.clone()));
    }
    if vm.has_failed() {
        let message =
            format!("cannot hibernate VM {:?}: {}", vm.spec.vm_name, vm.runtime.lifecycle_state_message);
        return Plan::new(o, Failed, message);
    }
    if o.is_saved && vm.reports(LifecycleState::Hibernated) {
        let message = format!("saved as {}:{}", vm.spec.vm_name, keys::TAG_HIBERNATE);
        return Plan::new(o, Hibernated, message);
    }
    match is_late(o, o.times.hibernate_limit) {
        true => Plan::new(o, Failed, "not saved in time; still waiting"),
        false => Plan::new(o, Hibernating, "the VM is being saved"),
    }
}

fn wake(o: &Observed<'_>, vm: Vm) -> Plan {
    use HibernationPhase::{Active, Failed, Waking};
    if vm.spec.hibernate {
        // The set would request the hibernation again.
        return match o.suspended_by {
            Some(set) => Plan::new(o, Failed, format!("CocoonSet {set:?} is suspended: resume it first")),
            None => Plan::new(o, Waking, "wake requested").with(Step::Wake(vm.id)),
        };
    }
    if vm.has_failed() {
        let message = format!("cannot wake VM {:?}: {}", vm.spec.vm_name, vm.runtime.lifecycle_state_message);
        return Plan::new(o, Failed, message);
    }
    let has_vm = vm.is_running && !vm.runtime.id.is_empty() && vm.reports(LifecycleState::Ready);
    if has_vm && o.is_saved {
        return Plan::new(o, Active, "the VM runs").with(Step::DropTag { pod: vm.id, vm: vm.spec.vm_name });
    }
    // A node of the first release writes no id, and removes the tag itself once the VM runs.
    if has_vm || (vm.is_running && !o.is_saved) {
        return Plan::new(o, Active, "the VM runs");
    }
    match is_late(o, o.times.wake_limit) {
        true => Plan::new(o, Failed, "not awake in time; the saved state is kept, still waiting"),
        false => Plan::new(o, Waking, "the VM is being restored"),
    }
}

fn is_late(o: &Observed<'_>, limit: Duration) -> bool {
    let limit = SignedDuration::try_from(limit).unwrap_or(SignedDuration::MAX);
    o.now.duration_since(o.since) > limit
}

/// Derives the status from the plan.
pub(crate) fn status(
    hibernation: &CocoonHibernation,
    plan: &Plan,
    now: Timestamp,
) -> CocoonHibernationStatus {
    use HibernationPhase::{Active, Failed, Hibernated, Hibernating, Pending, Waking};
    let (is_ready, reason) = match plan.phase {
        Hibernated | Active => (true, "Done"),
        Failed => (false, "Failed"),
        Pending | Hibernating | Waking => (false, "Pending"),
    };
    let ready = Desired { kind: "Ready", status: Some(is_ready), reason, message: plan.message.clone() };
    let stored = hibernation.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    CocoonHibernationStatus {
        observed_generation: hibernation.metadata.generation,
        phase: Some(plan.phase),
        vm_name: plan.vm.clone(),
        conditions: merge(stored, &[ready], hibernation.metadata.generation, now),
    }
}

/// Returns the Event when the phase changes.
pub(crate) fn phase_event(hibernation: &CocoonHibernation, plan: &Plan) -> Option<Event> {
    use HibernationPhase::{Active, Failed, Hibernated};
    let before = hibernation.status.as_ref().and_then(|status| status.phase);
    let observed = hibernation.status.as_ref().and_then(|status| status.observed_generation);
    let is_retry = before == Some(Failed) && observed != hibernation.metadata.generation;
    let (kind, reason) = match (plan.phase, hibernation.spec.desire) {
        (phase, _) if before == Some(phase) && !is_retry => return None,
        (Hibernated, _) => (Kind::Normal, "Hibernated"),
        (Active, _) => (Kind::Normal, "WokenActive"),
        (Failed, Desire::Hibernate) if plan.message.contains("in time") => {
            (Kind::Warning, "HibernateTimedOut")
        }
        (Failed, Desire::Wake) if plan.message.contains("in time") => (Kind::Warning, "WakeTimedOut"),
        (Failed, _) => (Kind::Warning, "Failed"),
        _ if is_retry => (Kind::Normal, "RetryRequested"),
        _ => return None,
    };
    Some(Event { kind, reason, action: "Reconcile", note: plan.message.clone() })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn hibernation(desire: &str) -> CocoonHibernation {
        serde_json::from_value(json!({
            "apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonHibernation",
            "metadata": {"name": "h", "namespace": "prod", "uid": "h-uid", "generation": 1},
            "spec": {"podRef": {"name": "demo-0"}, "desire": desire},
        }))
        .unwrap()
    }

    /// Pod from words: annotations as `key=value` with short keys; `run`: a container runs; `wait`: the container waits.
    fn pod(words: &str) -> Pod {
        let mut annotations = json!({keys::VM_NAME: "vk-prod-demo-0", keys::GENERATION: "4"});
        let mut status = json!({"phase": "Running"});
        for word in words.split_whitespace() {
            match word.split_once('=') {
                Some(("state", value)) => annotations[keys::LIFECYCLE_STATE] = json!(value),
                Some(("seen", value)) => annotations[keys::LIFECYCLE_OBSERVED_GENERATION] = json!(value),
                Some(("id", value)) => annotations[keys::VM_ID] = json!(value),
                Some(("mode", value)) => annotations[keys::MODE] = json!(value),
                Some(("phase", value)) => status["phase"] = json!(value),
                Some(_) => panic!("{word}"),
                None if word == "asked" => annotations[keys::HIBERNATE] = json!("true"),
                None if word == "unnamed" => annotations[keys::VM_NAME] = Value::Null,
                None => {
                    let state = if word == "run" { json!({"running": {}}) } else { json!({"waiting": {}}) };
                    status["containerStatuses"] = json!([{"name": "agent", "image": "", "imageID": "",
                        "ready": false, "restartCount": 0, "state": state}]);
                }
            }
        }
        if annotations[keys::VM_NAME].is_null() {
            annotations.as_object_mut().unwrap().remove(keys::VM_NAME);
        }
        serde_json::from_value(json!({
            "metadata": {"name": "demo-0", "namespace": "prod", "uid": "p", "annotations": annotations}, "status": status,
        }))
        .unwrap()
    }

    fn plan_text(
        desire: &str,
        words: Option<&str>,
        is_saved: bool,
        minutes: i64,
        set: Option<&str>,
    ) -> String {
        let (hibernation, pod) = (hibernation(desire), words.map(pod));
        let now = Timestamp::from_second(100_000).unwrap();
        let plan = plan(&Observed {
            hibernation: &hibernation,
            pod: pod.as_ref(),
            is_saved,
            suspended_by: set,
            rival: None,
            since: now - SignedDuration::from_mins(minutes),
            now,
            times: &Times::default(),
        });
        let step = match plan.step {
            None => "",
            Some(Step::Hibernate(_)) => " +annotate",
            Some(Step::Wake(_)) => " -annotate",
            Some(Step::DropTag { .. }) => " drop-tag",
            Some(Step::RemoveFinalizer) => " remove-finalizer",
        };
        format!("{}{step}", plan.phase.as_str())
    }

    #[test]
    fn hibernate_table() {
        for (why, words, is_saved, minutes, want) in [
            ("no pod", None, false, 0, "Failed"),
            ("no VM name", Some("unnamed"), false, 0, "Failed"),
            ("a static VM stays", Some("mode=static run id=1"), false, 0, "Failed"),
            ("a VM that does not run has no state", Some("phase=Pending"), false, 0, "Pending"),
            ("ask", Some("run id=1"), false, 0, "Hibernating +annotate"),
            ("an old tag does not count", Some("asked run id=1 state=ready seen=3"), true, 0, "Hibernating"),
            ("being saved", Some("asked state=hibernating"), false, 0, "Hibernating"),
            ("the tag of an old node is enough", Some("asked wait"), true, 0, "Hibernated"),
            ("saved", Some("asked wait state=hibernated seen=4"), true, 0, "Hibernated"),
            ("of an earlier request", Some("asked wait state=hibernated seen=3"), true, 0, "Hibernating"),
            ("the tag is missing", Some("asked wait state=hibernated seen=4"), false, 0, "Hibernating"),
            ("late", Some("asked wait"), false, 4, "Failed"),
            ("late, and done", Some("asked wait"), true, 4, "Hibernated"),
            ("the node cannot", Some("asked state=failed"), false, 0, "Failed"),
        ] {
            assert_eq!(plan_text("Hibernate", words, is_saved, minutes, None), want, "{why}");
        }
    }

    #[test]
    fn wake_table() {
        for (why, words, is_saved, minutes, set, want) in [
            ("ask", Some("asked wait"), true, 0, None, "Waking -annotate"),
            ("the set would ask again", Some("asked wait"), true, 0, Some("demo"), "Failed"),
            ("being restored", Some("wait"), true, 0, None, "Waking"),
            ("a container runs without a VM: interrupted", Some("run"), true, 0, None, "Waking"),
            ("the VM is not ready yet", Some("run id=1 state=creating"), true, 0, None, "Waking"),
            ("of before the hibernation", Some("run id=1 state=ready seen=3"), true, 0, None, "Waking"),
            ("it runs", Some("run id=1 state=ready seen=4"), true, 0, None, "Active drop-tag"),
            ("its node reports no states", Some("run id=1"), true, 0, None, "Active drop-tag"),
            ("its node dropped the tag", Some("run id=1 state=ready seen=4"), false, 0, None, "Active"),
            ("a node that writes no id dropped the tag", Some("run"), false, 0, None, "Active"),
            ("the saved state is kept", Some("wait"), true, 6, None, "Failed"),
            ("late, and done", Some("run id=1"), true, 6, None, "Active drop-tag"),
        ] {
            assert_eq!(plan_text("Wake", words, is_saved, minutes, set), want, "{why}");
        }
    }

    #[test]
    fn events_report_changes_once() {
        let mut object = hibernation("Hibernate");
        let plan = Plan {
            step: None,
            phase: HibernationPhase::Hibernated,
            vm: "v".into(),
            message: "saved".into(),
            requeue: Duration::ZERO,
        };
        assert_eq!(phase_event(&object, &plan).unwrap().reason, "Hibernated");
        object.status = Some(status(&object, &plan, Timestamp::UNIX_EPOCH));
        assert_eq!(phase_event(&object, &plan), None);
        let late =
            Plan { phase: HibernationPhase::Failed, message: "not saved in time".into(), ..plan.clone() };
        assert_eq!(phase_event(&object, &late).unwrap().reason, "HibernateTimedOut");
        object.status = Some(status(&object, &late, Timestamp::UNIX_EPOCH));
        object.metadata.generation = Some(2);
        let again = Plan { phase: HibernationPhase::Hibernating, ..plan };
        assert_eq!(phase_event(&object, &again).unwrap().reason, "RetryRequested");
    }
}

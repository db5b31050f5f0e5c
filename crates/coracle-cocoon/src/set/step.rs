//! Steps of a plan.

use coracle_api::cocoon::SetPhase;
use coracle_reconcile::{Event, Kind};
use k8s_openapi::api::core::v1::Pod;
use std::time::Duration;

/// Pod by name and UID: a step for a deleted pod must not affect another pod of that name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodId {
    /// Name of the pod.
    pub(crate) name: String,
    /// UID of the pod.
    pub(crate) uid: String,
}

/// One effect with everything that it needs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// Adds the finalizer, before any pod exists.
    AddFinalizer,
    /// Stores names of VMs on the set, because they must outlive the pods.
    RecordVms(Vec<String>),
    /// Creates a pod.
    CreatePod(Box<Pod>),
    /// Deletes a pod; its node saves and removes the VM.
    DeletePod(PodId),
    /// Adds the annotation for hibernation to a pod.
    Hibernate(PodId),
    /// Removes that annotation from a pod.
    Wake(PodId),
    /// Annotates a pod whose place on the node is released: the node keeps its snapshot.
    KeepSnapshot(PodId),
    /// Stores or removes (`None`) an annotation of the set.
    Annotate(&'static str, Option<String>),
    /// Marks a pod that was rebuilt too often.
    DeadLetter(PodId),
    /// Removes a tag of a VM from the registry.
    DeleteTag {
        /// Name of the VM.
        vm: String,
        /// Tag to remove.
        tag: &'static str,
    },
    /// Removes the finalizer, after everything else is gone.
    RemoveFinalizer,
}

impl Step {
    /// Returns verb and object, for logs and tables.
    pub(crate) fn verb(&self) -> String {
        match self {
            Self::AddFinalizer => "add-finalizer".into(),
            Self::RecordVms(names) => format!("record:{}", names.join("+")),
            Self::CreatePod(pod) => format!("create:{}", pod.metadata.name.as_deref().unwrap_or_default()),
            Self::DeletePod(pod) => format!("delete:{}", pod.name),
            Self::Hibernate(pod) => format!("hibernate:{}", pod.name),
            Self::Wake(pod) => format!("wake:{}", pod.name),
            Self::KeepSnapshot(pod) => format!("keep-snapshot:{}", pod.name),
            Self::Annotate(key, Some(value)) => {
                format!("annotate:{}={value}", key.rsplit('/').next().unwrap_or(key))
            }
            Self::Annotate(key, None) => format!("unannotate:{}", key.rsplit('/').next().unwrap_or(key)),
            Self::DeadLetter(pod) => format!("dead-letter:{}", pod.name),
            Self::DeleteTag { vm, tag } => format!("untag:{vm}:{tag}"),
            Self::RemoveFinalizer => "remove-finalizer".into(),
        }
    }
}

/// Steps, and the status after them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// Steps in order. The first failure ends the reconcile.
    pub(crate) steps: Vec<Step>,
    /// Summary for humans.
    pub(crate) phase: SetPhase,
    /// Reasons why members are missing, for the message of the conditions.
    pub(crate) problems: Vec<String>,
    /// Events about the set.
    pub(crate) events: Vec<Event>,
    /// Time until the next reconcile without a trigger.
    pub(crate) requeue: Duration,
}

impl Plan {
    pub(crate) fn new(phase: SetPhase, requeue: Duration) -> Self {
        Self { steps: Vec::new(), phase, problems: Vec::new(), events: Vec::new(), requeue }
    }

    pub(crate) fn event(&mut self, kind: Kind, reason: &'static str, note: String) {
        self.events.push(Event { kind, reason, action: "Reconcile", note });
    }
}

//! What a plan has done.

use coracle_api::cocoon::SetPhase;
use coracle_reconcile::{Event, Kind};
use k8s_openapi::api::core::v1::Pod;
use std::time::Duration;

/// A pod by name and UID: a step meant for one that is gone does nothing to another of its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodId {
    /// Its name.
    pub(crate) name: String,
    /// Its UID.
    pub(crate) uid: String,
}

/// One effect, with every choice that it needs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// Before any pod exists.
    AddFinalizer,
    /// Stores names of VMs on the set: they outlive the pods.
    RecordVms(Vec<String>),
    /// Creates a pod.
    CreatePod(Box<Pod>),
    /// Deletes a pod; its node saves and removes the VM.
    DeletePod(PodId),
    /// Annotates a pod: its VM is to be hibernated.
    Hibernate(PodId),
    /// Removes that annotation.
    Wake(PodId),
    /// Annotates a pod whose place on the node is given up: the node keeps its snapshot.
    KeepSnapshot(PodId),
    /// Stores or removes (`None`) an annotation of the set.
    Annotate(&'static str, Option<String>),
    /// Marks a pod that was rebuilt too often.
    DeadLetter(PodId),
    /// Removes a tag of a VM from the registry.
    DeleteTag {
        /// Name of the VM.
        vm: String,
        /// The tag.
        tag: &'static str,
    },
    /// After all else is gone.
    RemoveFinalizer,
}

impl Step {
    /// Verb and object, for logs and tables.
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

/// Steps, and what the status says when they are done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// In order; the first failure ends the pass.
    pub(crate) steps: Vec<Step>,
    /// Summary for people.
    pub(crate) phase: SetPhase,
    /// Why members are missing, for the message of the conditions.
    pub(crate) problems: Vec<String>,
    /// Events about the set.
    pub(crate) events: Vec<Event>,
    /// Time until the next pass without a trigger.
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

//! CocoonHibernation: hibernates and wakes the VM of one pod.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hibernation of the VM of a pod.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "cocoonset.cocoonstack.io",
    version = "v1",
    kind = "CocoonHibernation",
    plural = "cocoonhibernations",
    singular = "cocoonhibernation",
    shortname = "ch",
    shortname = "cocoonhibernations",
    category = "cocoon",
    namespaced,
    status = "CocoonHibernationStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "Whether the VM of a pod is hibernated or runs.",
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.podRef.name"),
    printcolumn(name = "Desire", type_ = "string", json_path = ".spec.desire"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct CocoonHibernationSpec {
    /// Pod of the VM, in the same namespace.
    #[x_kube(validation = Rule::new("self == oldSelf").message("podRef cannot change"))]
    pub pod_ref: PodRef,
    /// Hibernate or Wake.
    pub desire: Desire,
}

/// Reference to a pod of the same namespace.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRef {
    /// Name of the pod.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// Desired state of a VM.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Desire {
    /// The VM's memory is in the registry, and no VM runs.
    #[default]
    Hibernate,
    /// The VM runs.
    Wake,
}

impl Desire {
    /// Returns the value in manifests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hibernate => "Hibernate",
            Self::Wake => "Wake",
        }
    }
}

/// Observed state of a CocoonHibernation.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CocoonHibernationStatus {
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Summary for humans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<HibernationPhase>,
    /// Name of the VM.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub vm_name: String,
    /// Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Summary of a CocoonHibernation for `kubectl get`.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the contract's and say it")]
pub enum HibernationPhase {
    Pending,
    Hibernating,
    Hibernated,
    Waking,
    Active,
    Failed,
}

impl HibernationPhase {
    /// Returns the value in manifests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Hibernating => "Hibernating",
            Self::Hibernated => "Hibernated",
            Self::Waking => "Waking",
            Self::Active => "Active",
            Self::Failed => "Failed",
        }
    }
}

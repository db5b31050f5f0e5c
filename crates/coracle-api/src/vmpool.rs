//! `coracle.dev/v1alpha1` MikromVMPool: a number of VMs from one template.

#![expect(unreachable_pub, reason = "KubeSchema repeats the struct inside a function")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::MikromVMSpec;

/// The template must have the labels of the selector, or the pool would not find its VMs again.
const SELECTED: &str = "self.selector.matchLabels.all(k, has(self.template.metadata) && has(self.template.metadata.labels) \
    && k in self.template.metadata.labels && self.template.metadata.labels[k] == self.selector.matchLabels[k])";

/// A number of VMs from one template.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "coracle.dev",
    version = "v1alpha1",
    kind = "MikromVMPool",
    plural = "mikromvmpools",
    singular = "mikromvmpool",
    shortname = "mvmpool",
    category = "coracle",
    namespaced,
    status = "MikromVMPoolStatus",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    derive = "PartialEq",
    derive = "Default",
    doc = "So many MikromVMs from one template.",
    printcolumn(name = "DESIRED", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "CURRENT", type_ = "integer", json_path = ".status.replicas"),
    printcolumn(name = "READY", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "UPDATED", type_ = "integer", json_path = ".status.updatedReplicas"),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.size() <= 40").message("names of VMs are made from the name of the pool, which has at most 40 characters")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(SELECTED).message("template.metadata.labels must have the labels of selector.matchLabels"),
    validation = Rule::new("(has(self.maxUnavailable) ? self.maxUnavailable : 1) + (has(self.maxSurge) ? self.maxSurge : 1) > 0").message("maxUnavailable and maxSurge cannot both be 0")
)]
pub struct MikromVMPoolSpec {
    /// Desired number of VMs.
    #[serde(default = "default_one")]
    #[schemars(range(min = 0, max = 1000))]
    pub replicas: i32,
    /// Labels of the pool's VMs.
    #[x_kube(validation = Rule::new("self == oldSelf").message("selector cannot change"))]
    pub selector: PoolSelector,
    /// Template that the VMs are created from. VMs of an older template are replaced.
    pub template: VmTemplate,
    /// Number of VMs that may be down at the same time while VMs are replaced, and while their nodes are drained.
    #[serde(default = "default_one")]
    #[schemars(range(min = 0, max = 1000))]
    pub max_unavailable: i32,
    /// Number of VMs beyond replicas that may exist while VMs are replaced.
    #[serde(default = "default_one")]
    #[schemars(range(min = 0, max = 1000))]
    pub max_surge: i32,
    /// RollingUpdate, or OnDelete: VMs of an older template stay until they are deleted.
    #[serde(default)]
    pub update_strategy: UpdateStrategy,
}

fn default_one() -> i32 {
    1
}

/// Labels that VMs must have.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PoolSelector {
    /// Labels with exactly these values.
    #[schemars(extend("minProperties" = 1, "maxProperties" = 16))]
    pub match_labels: BTreeMap<String, String>,
}

/// Template that the VMs of a pool are created from.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
pub struct VmTemplate {
    /// Labels and annotations of the VMs.
    #[serde(default)]
    pub metadata: TemplateMetadata,
    /// Spec of the VMs.
    pub spec: MikromVMSpec,
}

/// Labels and annotations of the VMs of a pool.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
pub struct TemplateMetadata {
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub annotations: BTreeMap<String, String>,
}

/// Treatment of VMs of an older template.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateStrategy {
    /// The VMs are replaced, within maxUnavailable and maxSurge.
    #[default]
    RollingUpdate,
    /// The VMs stay until they are deleted.
    OnDelete,
}

/// Observed state of a pool.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MikromVMPoolStatus {
    /// VMs that are not being deleted.
    #[serde(default)]
    pub replicas: i32,
    /// Number of these VMs that are Ready.
    #[serde(default)]
    pub ready_replicas: i32,
    /// Number of these VMs that have the present template.
    #[serde(default)]
    pub updated_replicas: i32,
    /// Labels of the VMs, for the scale subresource.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub selector: String,
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Available` (enough VMs are Ready) and `Ready` (all VMs are Ready and have the present template).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Reasons of a pool's conditions.
pub mod pool_reason {
    /// Condition Ready is True: all VMs are Ready and have the present template.
    pub const COMPLETE: &str = "Complete";
    /// Condition Ready is False: VMs are being created, replaced or deleted.
    pub const PROGRESSING: &str = "Progressing";
    /// Condition Available is True: at most maxUnavailable VMs are down.
    pub const ENOUGH_READY: &str = "EnoughReady";
    /// Condition Available is False: more than maxUnavailable VMs are down.
    pub const TOO_FEW_READY: &str = "TooFewReady";
}

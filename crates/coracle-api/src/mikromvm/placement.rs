//! Constraints on the nodes of a MikromVM. The shapes and meanings are those of Pods.

use std::collections::BTreeMap;

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Constraints in addition to nodeSelector.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Affinity {
    /// Constraints by labels of nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_affinity: Option<NodeAffinity>,
    /// Run only where VMs with these labels run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_affinity: Option<VmAffinity>,
    /// Run only where no VM with these labels runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_anti_affinity: Option<VmAffinity>,
}

/// Constraints by labels of nodes.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodeAffinity {
    /// Required terms: one of them must match when the VM is placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub required_during_scheduling_ignored_during_execution: Option<NodeSelector>,
    /// Preferred terms: nodes with a higher sum of weights are chosen first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub preferred_during_scheduling_ignored_during_execution: Vec<PreferredTerm>,
}

/// Terms of which one must match.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodeSelector {
    /// Terms of the selector.
    #[schemars(length(min = 1, max = 16))]
    pub node_selector_terms: Vec<NodeSelectorTerm>,
}

/// Expressions that must all match. An empty term never matches.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodeSelectorTerm {
    /// Expressions about labels of the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub match_expressions: Vec<Requirement>,
}

/// A term with a weight.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
pub struct PreferredTerm {
    /// Weight of the term, 1 to 100.
    #[schemars(range(min = 1, max = 100))]
    pub weight: i32,
    /// Term that adds the weight to matching nodes.
    pub preference: NodeSelectorTerm,
}

/// Expression about one label.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[x_kube(validation = Rule::new("self.operator in ['Exists', 'DoesNotExist'] ? (!has(self.values) || self.values.size() == 0) : (has(self.values) && self.values.size() > 0)").message("In, NotIn, Gt and Lt need values; Exists and DoesNotExist have none"))]
pub struct Requirement {
    /// Key of the label.
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    /// Comparison: In, NotIn, Exists, DoesNotExist, Gt or Lt.
    pub operator: Operator,
    /// Values to compare with; one whole number for Gt and Lt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 63)))]
    pub values: Vec<String>,
}

/// Comparison of a label.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Operator {
    /// The label has one of the values.
    #[default]
    In,
    /// The label has none of the values, or does not exist.
    NotIn,
    /// The label exists.
    Exists,
    /// The label does not exist.
    DoesNotExist,
    /// The label is a larger whole number.
    Gt,
    /// The label is a smaller whole number.
    Lt,
}

/// Constraints by other VMs of the same namespace.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VmAffinity {
    /// Terms that must all match when the VM is placed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub required_during_scheduling_ignored_during_execution: Vec<VmAffinityTerm>,
}

/// VMs that a VM is placed near to, or apart from.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VmAffinityTerm {
    /// Labels of the MikromVMs.
    pub label_selector: LabelSelector,
    /// Label of nodes: nodes with the same value are one topology domain. kubernetes.io/hostname: each node is a domain.
    #[schemars(length(min = 1, max = 317))]
    pub topology_key: String,
}

/// Labels that objects must have.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels with exactly these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub match_labels: BTreeMap<String, String>,
    /// Expressions about labels. Gt and Lt do not apply to labels of VMs, and never match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub match_expressions: Vec<Requirement>,
}

/// A taint that the VM tolerates.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')").message("a toleration without a key needs operator Exists"), validation = Rule::new("!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''").message("a toleration with operator Exists has no value"))]
pub struct Toleration {
    /// Key of the taint. Empty with operator Exists: every taint.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 317))]
    pub key: String,
    /// Comparison of the taint: Equal or Exists.
    #[serde(default)]
    pub operator: TolerationOperator,
    /// Value of the taint.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub value: String,
    /// Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute. Absent: all effects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<TaintEffect>,
}

/// Comparison of a taint.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TolerationOperator {
    /// Key and value are equal.
    #[default]
    Equal,
    /// The key is equal.
    Exists,
}

/// Effect of a taint.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of Kubernetes and say it")]
pub enum TaintEffect {
    NoSchedule,
    PreferNoSchedule,
    NoExecute,
}

impl TaintEffect {
    /// Returns the value in manifests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::PreferNoSchedule => "PreferNoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

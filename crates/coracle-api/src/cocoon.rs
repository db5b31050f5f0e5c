//! `cocoonset.cocoonstack.io/v1`: CocoonSet and CocoonHibernation, with the names of existing manifests, and the annotations by
//! which pods configure the VMs of their node.

#![expect(unreachable_pub, reason = "KubeSchema repeats the struct inside a function")]
#![expect(clippy::duplicated_attributes, reason = "columns of a table have types, and some the same")]

mod annotations;
mod hibernation;
pub mod keys;
mod names;
mod quantity;
mod values;

use k8s_openapi::api::core::v1::EnvFromSource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use annotations::{InvalidAnnotation, VmRuntimeAnnotations, VmSpecAnnotations, invalid_annotations};
pub use hibernation::{
    CocoonHibernation, CocoonHibernationSpec, CocoonHibernationStatus, Desire, HibernationPhase, PodRef,
};
pub use names::{
    VM_NAME_MAX, agent_pod_name, agent_vm_name, bare_pod_vm_name, fork_snapshot, hibernate_import,
    is_cocoon_pod, is_valid_vm_name, legacy_toolbox_vm_name, pool_of, slot_of, slot_of_pod, toolbox_pod_name,
    toolbox_vm_name,
};
pub use quantity::{QuantityText, VmResources};
pub use values::{Backend, ConnType, HibernatePolicy, LifecycleState, Mode, Os, Role, SnapshotPolicy};

/// Only a set with one agent can release its place on the node.
const RELEASE: &str = "!has(self.hibernatePolicy) || self.hibernatePolicy != 'release' || (\
    (!has(self.agent.replicas) || self.agent.replicas == 0) && (!has(self.toolboxes) || size(self.toolboxes) == 0))";
/// The class cannot change once it is set: a snapshot of another class cannot be restored.
const CLASS: &str = "!has(oldSelf.snapshotCompatibilityClass) || oldSelf.snapshotCompatibilityClass == '' || \
    (has(self.snapshotCompatibilityClass) && self.snapshotCompatibilityClass == oldSelf.snapshotCompatibilityClass)";
/// Pattern of a label value, or empty.
const LABEL_VALUE: &str = "^$|^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$";

/// A main VM, sub-agents forked from it, and toolboxes beside them, each behind a pod.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "cocoonset.cocoonstack.io",
    version = "v1",
    kind = "CocoonSet",
    plural = "cocoonsets",
    singular = "cocoonset",
    shortname = "cs",
    shortname = "cocoonsets",
    category = "cocoon",
    namespaced,
    status = "CocoonSetStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "One main VM, sub-agents forked from it, and toolboxes beside them.",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyAgents"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desiredAgents"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(RELEASE).message("hibernatePolicy release needs agent.replicas 0 and no toolboxes"),
    validation = Rule::new(CLASS).message("snapshotCompatibilityClass cannot change once it is set")
)]
pub struct CocoonSetSpec {
    /// Hibernate every VM of the set.
    #[serde(default)]
    pub suspend: bool,
    /// VMs that are saved when their pods are deleted.
    #[serde(default)]
    pub snapshot_policy: SnapshotPolicy,
    /// Pool of nodes that the pods run on.
    #[serde(default = "default_pool")]
    #[schemars(length(max = 63), regex(pattern = LABEL_VALUE))]
    pub node_pool: String,
    /// Whether a suspended set keeps its pods (retain) or releases their place on the node (release).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hibernate_policy: Option<HibernatePolicy>,
    /// Node that the main agent must run on. Empty: any node of the pool.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub node_name: String,
    /// CPU class of the nodes that can restore the snapshots of the set.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63), regex(pattern = LABEL_VALUE))]
    pub snapshot_compatibility_class: String,
    /// Main VM and sub-agents.
    pub agent: AgentSpec,
    /// VMs beside the agents.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub toolboxes: Vec<ToolboxSpec>,
}

fn default_pool() -> String {
    keys::DEFAULT_POOL.into()
}

/// The main VM of a set, and its sub-agents.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AgentSpec {
    /// Number of sub-agents beside the main agent.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// mode clone: snapshot as `repository[:tag]`; mode run: OCI reference of an image, or URL of a disk.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,
    /// Creation of the main VM: clone or run.
    #[serde(default)]
    #[schemars(with = "String", extend("enum" = ["clone", "run"]))]
    pub mode: Mode,
    /// Operating system of the guest.
    #[serde(default)]
    pub os: Os,
    /// Name of the CNI network. Empty: the node's default.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub network: String,
    /// Size of the root disk. Absent: the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<QuantityText>,
    /// CPU and memory of each VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<VmResources>,
    /// Environment sources, copied to the pods; the guest does not receive them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub env_from: Vec<EnvFromSource>,
    /// Service account of the pods.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub service_account_name: String,
    /// Hypervisor.
    #[serde(default)]
    pub backend: Backend,
    /// Protocol by which users reach the guest. Absent: by its operating system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conn_type: Option<ConnType>,
    /// Pull the image even when the node has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force_pull: bool,
    /// Buffer writes of disks on the node (Cloud Hypervisor).
    #[serde(rename = "noDirectIO", default, skip_serializing_if = "std::ops::Not::not")]
    pub no_direct_io: bool,
    /// TCP port that accepts connections when the VM is ready. 0: an ICMP echo.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = 65_535))]
    pub probe_port: i32,
}

/// A VM beside the agents of a set.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.mode != 'static' || (has(self.staticIP) && self.staticIP != '' && has(self.staticVMID) && self.staticVMID != '')").message("a static toolbox needs staticIP and staticVMID"),
    validation = Rule::new("self.mode == 'static' || (has(self.image) && self.image != '')").message("a toolbox that is not static needs an image"),
    validation = Rule::new("!self.name.matches('^[0-9]+$')").message("a toolbox name of digits only is the name of an agent")
)]
pub struct ToolboxSpec {
    /// Name, unique in the set.
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// Creation of the VM: run, clone, or static for an existing VM.
    #[serde(default = "run_mode")]
    #[schemars(with = "String", extend("enum" = ["run", "clone", "static"]))]
    pub mode: Mode,
    /// Image or snapshot, like the image of an agent; not for a static toolbox.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub image: String,
    /// Address of a static toolbox.
    #[serde(rename = "staticIP", default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub static_ip: String,
    /// VM id of a static toolbox.
    #[serde(rename = "staticVMID", default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub static_vm_id: String,
    /// VNC port of a static toolbox. 0: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = 65_535))]
    pub vnc_port: i32,
    /// Operating system of the guest.
    #[serde(default)]
    pub os: Os,
    /// Size of the root disk. Absent: the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<QuantityText>,
    /// CPU and memory of the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<VmResources>,
    /// Hypervisor; must equal that of the agent. Absent: the agent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<Backend>,
    /// Protocol by which users reach the guest. Absent: by its operating system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conn_type: Option<ConnType>,
    /// Name of the CNI network. Empty: the node's default.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub network: String,
    /// Pull the image even when the node has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force_pull: bool,
    /// Buffer writes of disks on the node (Cloud Hypervisor).
    #[serde(rename = "noDirectIO", default, skip_serializing_if = "std::ops::Not::not")]
    pub no_direct_io: bool,
    /// TCP port that accepts connections when the VM is ready. 0: an ICMP echo.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = 65_535))]
    pub probe_port: i32,
}

fn run_mode() -> Mode {
    Mode::Run
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(value: &i32) -> bool {
    *value == 0
}

/// Observed state of a CocoonSet.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CocoonSetStatus {
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Summary for humans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<SetPhase>,
    /// Agents that are ready, the main agent included.
    #[serde(default)]
    pub ready_agents: i32,
    /// Desired number of agents: `spec.agent.replicas` and the main agent.
    #[serde(default)]
    pub desired_agents: i32,
    /// Toolboxes that are ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_toolboxes: Option<i32>,
    /// Desired number of toolboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_toolboxes: Option<i32>,
    /// Agents, one entry each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["slot"]))]
    pub agents: Vec<AgentStatus>,
    /// Toolboxes, one entry each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub toolboxes: Vec<ToolboxStatus>,
    /// Ready and Progressing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// An agent of a set.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// Slot of the agent; 0 is the main agent.
    pub slot: i32,
    /// Role of the agent: main or sub-agent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub role: String,
    /// Name of the pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod_name: String,
    /// Name of the VM.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub vm_name: String,
    /// Id of the VM on its node; empty while the VM does not exist.
    #[serde(rename = "vmID", default, skip_serializing_if = "String::is_empty")]
    pub vm_id: String,
    /// Address of the guest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ip: String,
    /// Phase of the pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub phase: String,
    /// VM that this VM was forked from.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub forked_from: String,
}

/// A toolbox of a set.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ToolboxStatus {
    /// Name of the toolbox in the spec.
    pub name: String,
    /// Name of the pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod_name: String,
    /// Name of the VM.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub vm_name: String,
    /// Id of the VM on its node.
    #[serde(rename = "vmID", default, skip_serializing_if = "String::is_empty")]
    pub vm_id: String,
    /// Address of the guest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ip: String,
    /// Phase of the pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub phase: String,
    /// Protocol by which users reach the guest: ssh, rdp, vnc or adb.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub conn_type: String,
    /// VNC port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnc_port: Option<i32>,
}

/// Summary of a set for `kubectl get`.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the contract's and say it")]
pub enum SetPhase {
    Pending,
    Running,
    Scaling,
    Suspending,
    Suspended,
    Waking,
    Migrating,
    Failed,
}

impl SetPhase {
    /// Returns the value in manifests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Scaling => "Scaling",
            Self::Suspending => "Suspending",
            Self::Suspended => "Suspended",
            Self::Waking => "Waking",
            Self::Migrating => "Migrating",
            Self::Failed => "Failed",
        }
    }
}

impl CocoonSetSpec {
    /// Returns the desired number of agents, the main agent included.
    #[must_use]
    pub fn desired_agents(&self) -> i32 {
        self.agent.replicas.max(0).saturating_add(1)
    }
}

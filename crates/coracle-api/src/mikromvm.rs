//! `vm.mikrom.es/v1alpha1` MikromVM, with the names that existing manifests use.

#![expect(unreachable_pub, reason = "KubeSchema repeats the struct inside a function")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema, ResourceExt as _};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The spec cannot change what a live VM was built from; a rule of the whole object because it looks at the status.
const FROZEN: &str = "!has(oldSelf.status) || !has(oldSelf.status.vmID) || oldSelf.status.vmID == '' || (\
    self.spec.vcpuCount == oldSelf.spec.vcpuCount && self.spec.memoryMB == oldSelf.spec.memoryMB && \
    (has(self.spec.image) ? self.spec.image : '') == (has(oldSelf.spec.image) ? oldSelf.spec.image : '') && \
    (has(self.spec.kernelPath) ? self.spec.kernelPath : '') == (has(oldSelf.spec.kernelPath) ? oldSelf.spec.kernelPath : ''))";

/// Desired state of one microVM.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "vm.mikrom.es",
    version = "v1alpha1",
    kind = "MikromVM",
    plural = "mikromvms",
    singular = "mikromvm",
    shortname = "mvm",
    category = "coracle",
    namespaced,
    status = "MikromVMStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A microVM: the image it runs, its size, and where it runs.",
    printcolumn(name = "PHASE", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "IMAGE", type_ = "string", json_path = ".spec.image"),
    printcolumn(name = "VCPU", type_ = "integer", json_path = ".spec.vcpuCount"),
    printcolumn(name = "RAM(MB)", type_ = "integer", json_path = ".spec.memoryMB"),
    printcolumn(name = "IP", type_ = "string", json_path = ".status.ipAddress"),
    printcolumn(name = "NODE", type_ = "string", json_path = ".status.nodeName"),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new(FROZEN).message("image, vcpuCount, memoryMB and kernelPath cannot change once the VM exists (status.vmID is set): delete the object and create a new one")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.image) && self.image != '') || (has(self.kernelPath) && self.kernelPath != '') || (has(self.cloneFrom) && self.cloneFrom != '')").message("give an image (or a kernelPath, for a root file system that the node has; or cloneFrom, for a snapshot that it has)"))]
pub struct MikromVMSpec {
    /// OCI reference of the image that the VM runs.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub image: String,
    /// Number of virtual CPUs.
    #[schemars(range(min = 1, max = 32))]
    pub vcpu_count: i32,
    /// Guest memory in MiB. (The wire name says MB; it is kept for existing manifests.)
    #[serde(rename = "memoryMB")]
    #[schemars(range(min = 128))]
    pub memory_mib: i32,
    /// Address of the agent as `host:port`. Empty: found from nodeName, or placed where it fits.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[x_kube(validation = Rule::new("self == '' || self.matches('^(\\\\[[0-9a-fA-F:.]+\\\\]|[^:/ ]+):[0-9]{1,5}$')").message("agentAddress must be host:port"))]
    #[schemars(length(max = 261))]
    pub agent_address: String,
    /// The node that the VM must run on. Empty: any that fits.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub node_name: String,
    /// Kernel on the node, in a folder that the node allows. Empty: the node's default.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[x_kube(validation = Rule::new("self == '' || self.startsWith('/')").message("kernelPath must be absolute"))]
    #[schemars(length(max = 4096))]
    pub kernel_path: String,
    /// When the node asks the registry: Always, IfNotPresent or Never. Empty: IfNotPresent, and `latest` re-resolves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// What happens when the VM is down without having been asked to: Always, OnFailure (not after a clean end) or Never.
    #[serde(default)]
    pub restart_policy: RestartPolicy,
    /// What the VM shall do: Running, Paused (CPUs held, memory kept), Stopped, or Hibernated (memory on the node's disk,
    /// no VMM). Empty: Running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_state: Option<PowerState>,
    /// Time after which a VM that became Ready hibernates by itself, like 30m or 1h30m, while powerState is empty. It sleeps
    /// until powerState says something else; Running wakes it. Empty: never.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 32), regex(pattern = DURATION))]
    pub hibernate_after: String,
    /// Snapshot on the node that the VM goes on from, with an identity of its own, instead of booting its image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 128))]
    pub clone_from: String,
}

/// Hours, minutes and seconds, each at most once; or nothing.
const DURATION: &str = "^([0-9]{1,9}h)?([0-9]{1,9}m)?([0-9]{1,9}s)?$";

/// What a VM does, or shall do.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PowerState {
    /// Its guest runs.
    #[default]
    Running,
    /// Its CPUs are held; memory and VMM stay.
    Paused,
    /// It is powered off; the disk stays.
    Stopped,
    /// Its memory is on the node's disk, and it has no VMM.
    Hibernated,
}

impl PowerState {
    /// As it is written.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "Running",
            Self::Paused => "Paused",
            Self::Stopped => "Stopped",
            Self::Hibernated => "Hibernated",
        }
    }

    /// The one that is written so.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Running, Self::Paused, Self::Stopped, Self::Hibernated]
            .into_iter()
            .find(|p| p.as_str() == text)
    }
}

/// When a node asks the registry for an image.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImagePullPolicy {
    /// At every start.
    Always,
    /// When the node has no such image.
    IfNotPresent,
    /// Never: the node must have it.
    Never,
}

impl ImagePullPolicy {
    /// As it is written.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

/// What happens when a VM is down without having been asked to.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// It is started again.
    #[default]
    Always,
    /// It is started again unless it ended by itself (state STOPPED).
    OnFailure,
    /// It stays down.
    Never,
}

/// Observed state of one microVM.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MikromVMStatus {
    /// Summary for people; nothing decides by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// `<namespace>-<name>`; empty until the VM exists.
    #[serde(rename = "vmID", default, skip_serializing_if = "String::is_empty")]
    pub vm_id: String,
    /// Address of the guest, once the guest has acknowledged it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ip_address: String,
    /// The node that the VM is bound to.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// The agent that the VM was created by, so that deletion finds it when the spec changes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub agent_address: String,
    /// When the VM was first created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Time>,
    /// Digest of the image that runs, as the node reports it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image_digest: String,
    /// What the VM does, as the node says it. Nodes of other kinds do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_state: Option<PowerState>,
    /// How often the VM was started again by restartPolicy.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0))]
    pub restarts: i32,
    /// `metadata.generation` that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Available` and `Ready`, always written together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
fn is_zero(n: &i32) -> bool {
    *n == 0
}

/// Summary of a VM's life for `kubectl get`.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the contract's and say it")]
pub enum Phase {
    Pending,
    Creating,
    Running,
    Stopping,
    Stopped,
    Deleting,
    Failed,
}

/// Types of a MikromVM's conditions.
pub mod condition {
    /// The VM runs.
    pub const AVAILABLE: &str = "Available";
    /// The VM runs, and its guest has acknowledged its configuration.
    pub const READY: &str = "Ready";
}

/// Reasons of a MikromVM's conditions and events.
pub mod reason {
    /// True: the VM runs.
    pub const VM_RUNNING: &str = "VMRunning";
    /// No node was found for it yet; the message says why each was refused.
    pub const UNSCHEDULABLE: &str = "Unschedulable";
    /// Bound to a node; being created there.
    pub const CREATING: &str = "Creating";
    /// The agent reports a state on the way to another one.
    pub const IN_TRANSITION: &str = "InTransition";
    /// The VM ended.
    pub const VM_STOPPED: &str = "VMStopped";
    /// Its CPUs are held, as spec.powerState asks.
    pub const PAUSED: &str = "Paused";
    /// Its memory is on the node's disk, as spec.powerState asks.
    pub const HIBERNATED: &str = "Hibernated";
    /// It was powered off, as spec.powerState asks.
    pub const POWERED_OFF: &str = "PoweredOff";
    /// The node did not bring it into spec.powerState; the message says why. It is tried again.
    pub const POWER_STATE_FAILED: &str = "PowerStateFailed";
    /// The agent reports an error of the VM.
    pub const VM_FAILED: &str = "VMFailed";
    /// The agent no longer knows the VM.
    pub const VM_VANISHED: &str = "VMVanished";
    /// The agent refused; the message is the agent's.
    pub const AGENT_ERROR: &str = "AgentError";
    /// The node cannot get the image, or cannot use it; the message names the image and says why.
    pub const IMAGE_PULL_FAILED: &str = "ImagePullFailed";
    /// The node has no room now: memory, disk or addresses. It is tried again.
    pub const NO_SPACE: &str = "NoSpace";
    /// The VMM or the guest did not come up; the message has the guest's last words. It is tried again.
    pub const BOOT_FAILED: &str = "BootFailed";
    /// The agent answered INTERNAL ten times in a row to a create.
    pub const AGENT_INTERNAL_ERROR: &str = "AgentInternalError";
    /// The agent's id of this object belongs to a VM of another object.
    pub const VM_ID_CONFLICT: &str = "VMIDConflict";
    /// The agent has not answered for a while; what is known of the VM is old.
    pub const AGENT_UNREACHABLE: &str = "AgentUnreachable";
    /// The node has been gone for longer than the grace period.
    pub const NODE_LOST: &str = "NodeLost";
    /// Being deleted.
    pub const DELETING: &str = "Deleting";
}

/// Reasons of events that are no reason of a condition.
pub mod event {
    /// Normal: a node was chosen and stored.
    pub const SCHEDULED: &str = "Scheduled";
    /// Normal: the agent made the VM.
    pub const CREATED: &str = "Created";
    /// Normal: the VM runs.
    pub const STARTED: &str = "Started";
    /// Normal: the VM was down and runs again, by restartPolicy.
    pub const RESTARTED: &str = "Restarted";
    /// Warning: the agent refused for good; the condition's reason is AgentError.
    pub const FAILED: &str = "Failed";
    /// Warning: the object was let go although its VM may still be somewhere.
    pub const RELEASED: &str = "Released";
}

impl MikromVM {
    /// The VM's id on the agent's wire: `<namespace>-<name>`.
    #[must_use]
    pub fn vm_id(&self) -> String {
        format!("{}-{}", self.namespace().unwrap_or_default(), self.name_any())
    }

    /// True once the agent has confirmed that the VM exists.
    #[must_use]
    pub fn is_provisioned(&self) -> bool {
        self.status.as_ref().is_some_and(|s| !s.vm_id.is_empty())
    }
}

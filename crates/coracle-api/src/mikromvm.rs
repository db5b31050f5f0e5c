//! `vm.mikrom.es/v1alpha1` MikromVM, with the names that existing manifests use.

#![expect(unreachable_pub, reason = "KubeSchema repeats the struct inside a function")]

mod inputs;
mod placement;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema, ResourceExt as _};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Migration;

pub use inputs::{
    ClaimSource, ConfigMapSource, DiskSource, EnvFromSource, EnvVar, EnvVarSource, FieldSelector,
    KeySelector, KeyToPath, LocalObjectReference, ObjectSelector, PortProtocol, SecretSource, UserData,
    UserDataSecret, VmPort, VmVolume,
};
pub use placement::{
    Affinity, LabelSelector, NodeAffinity, NodeSelector, NodeSelectorTerm, Operator, PreferredTerm,
    Requirement, TaintEffect, Toleration, TolerationOperator, VmAffinity, VmAffinityTerm,
};

/// Refuses changes of the fields that a live VM was created from and that its guest received. The rule is on the whole object
/// because it reads the status. The API server evaluates it at each write of the status, and builds a map of all fields of the
/// spec for each field that the rule names; the comparison of the whole specs ends the evaluation early.
const FROZEN: &str = "!has(oldSelf.status) || !has(oldSelf.status.vmID) || oldSelf.status.vmID == '' || self.spec == oldSelf.spec || (\
    self.spec.vcpuCount == oldSelf.spec.vcpuCount && self.spec.memoryMB == oldSelf.spec.memoryMB && \
    (has(self.spec.image) ? self.spec.image : '') == (has(oldSelf.spec.image) ? oldSelf.spec.image : '') && \
    (has(self.spec.kernelPath) ? self.spec.kernelPath : '') == (has(oldSelf.spec.kernelPath) ? oldSelf.spec.kernelPath : '') && \
    (has(self.spec.command) ? self.spec.command : []) == (has(oldSelf.spec.command) ? oldSelf.spec.command : []) && \
    (has(self.spec.args) ? self.spec.args : []) == (has(oldSelf.spec.args) ? oldSelf.spec.args : []) && \
    (has(self.spec.env) ? self.spec.env : []) == (has(oldSelf.spec.env) ? oldSelf.spec.env : []) && \
    (has(self.spec.envFrom) ? self.spec.envFrom : []) == (has(oldSelf.spec.envFrom) ? oldSelf.spec.envFrom : []) && \
    has(self.spec.userData) == has(oldSelf.spec.userData) && \
    (!has(self.spec.userData) || self.spec.userData == oldSelf.spec.userData) && \
    (has(self.spec.hostname) ? self.spec.hostname : '') == (has(oldSelf.spec.hostname) ? oldSelf.spec.hostname : '') && \
    (has(self.spec.sshAuthorizedKeys) ? self.spec.sshAuthorizedKeys : []) == \
        (has(oldSelf.spec.sshAuthorizedKeys) ? oldSelf.spec.sshAuthorizedKeys : []) && \
    (has(self.spec.volumes) ? self.spec.volumes : []) == (has(oldSelf.spec.volumes) ? oldSelf.spec.volumes : []) && \
    (has(self.spec.driver) ? self.spec.driver : '') == (has(oldSelf.spec.driver) ? oldSelf.spec.driver : ''))";

/// The guest of a clone runs already and cannot receive these fields.
const CLONE: &str = "!has(self.cloneFrom) || self.cloneFrom == '' || !([has(self.command), has(self.args), has(self.env), \
    has(self.envFrom), has(self.userData), has(self.hostname), has(self.sshAuthorizedKeys), has(self.volumes), \
    has(self.imagePullSecrets)].exists(given, given))";

/// The Service has the name of the VM, and names of Services are DNS labels.
const SERVICE_NAME: &str = "!has(self.spec.ports) || self.spec.ports.size() == 0 || \
    self.metadata.name.matches('^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$')";

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
    printcolumn(name = "READY", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status", priority = 1),
    printcolumn(name = "RESTARTS", type_ = "integer", json_path = ".status.restarts", priority = 1),
    printcolumn(name = "POWER", type_ = "string", json_path = ".status.powerState", priority = 1),
    printcolumn(name = "REASON", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].reason", priority = 1),
    validation = Rule::new(FROZEN).message("image, vcpuCount, memoryMB, kernelPath, command, args, env, envFrom, userData, hostname, sshAuthorizedKeys, volumes and driver cannot change once the VM exists (status.vmID is set): delete the object and create a new one"),
    validation = Rule::new(SERVICE_NAME).message("a VM with ports has a Service of its name: the name must start with a letter and have only a-z, 0-9 and -, at most 63 characters")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.image) && self.image != '') || (has(self.kernelPath) && self.kernelPath != '') || (has(self.cloneFrom) && self.cloneFrom != '')").message("give an image (or a kernelPath, for a root file system that the node has; or cloneFrom, for a snapshot that it has)"))]
#[x_kube(validation = Rule::new(CLONE).message("a clone continues the guest of its snapshot: cloneFrom excludes command, args, env, envFrom, userData, hostname, sshAuthorizedKeys, volumes and imagePullSecrets"))]
pub struct MikromVMSpec {
    /// OCI reference of the image that the VM runs.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub image: String,
    /// Number of virtual CPUs.
    #[schemars(range(min = 1, max = 32))]
    pub vcpu_count: i32,
    /// Guest memory in MiB. (The field name says MB; it is kept for existing manifests.)
    #[serde(rename = "memoryMB")]
    #[schemars(range(min = 128))]
    pub memory_mib: i32,
    /// Address of the agent as `host:port`. Empty: found by nodeName, or chosen by the operator.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[x_kube(validation = Rule::new("self == '' || self.matches('^(\\\\[[0-9a-fA-F:.]+\\\\]|[^:/ ]+):[0-9]{1,5}$')").message("agentAddress must be host:port"))]
    #[schemars(length(max = 261))]
    pub agent_address: String,
    /// Node that the VM must run on. Empty: any node with enough resources.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub node_name: String,
    /// Path of a kernel on the node, in a directory that the node allows. Empty: the node's default.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[x_kube(validation = Rule::new("self == '' || self.startsWith('/')").message("kernelPath must be absolute"))]
    #[schemars(length(max = 4096))]
    pub kernel_path: String,
    /// When the node pulls from the registry: Always, IfNotPresent or Never. Empty: IfNotPresent, and
    /// `latest` is resolved again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// When a VM that ended without a request is started again: Always, OnFailure (not after a clean end) or Never.
    #[serde(default)]
    pub restart_policy: RestartPolicy,
    /// Desired power state: Running, Paused (vCPUs stopped, memory kept), Stopped, or Hibernated (memory on
    /// the node's disk, no VMM). Empty: Running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_state: Option<PowerState>,
    /// Time from Ready to automatic hibernation, like 30m or 1h30m, while powerState is empty. The VM stays
    /// hibernated until powerState is set; Running wakes it. Empty: never.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 32), regex(pattern = DURATION))]
    pub hibernate_after: String,
    /// Snapshot on the node that the VM is cloned from, with its own identity, instead of booting an image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 128))]
    pub clone_from: String,
    /// Replaces the entrypoint of a container image. `$(NAME)` is replaced by the value of a variable in env.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 32768)))]
    pub command: Vec<String>,
    /// Replaces the arguments of a container image. `$(NAME)` is replaced as in command.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 512), inner(length(max = 32768)))]
    pub args: Vec<String>,
    /// Environment variables of the guest's first process, added to those of the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub env: Vec<EnvVar>,
    /// Secrets and ConfigMaps whose keys all become environment variables. Variables in env take precedence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub env_from: Vec<EnvFromSource>,
    /// User data for cloud-init, in VMs of disk images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<UserData>,
    /// Host name of the guest. Empty: the name of the object.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63), regex(pattern = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"))]
    pub hostname: String,
    /// SSH public keys that may log in: as root in a VM of a container image, as cloud-init's default user in a VM of a disk
    /// image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 8192), regex(pattern = "^[^\\n]+$")))]
    pub ssh_authorized_keys: Vec<String>,
    /// Disks and directories in addition to the VM's root disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub volumes: Vec<VmVolume>,
    /// Ports of the guest. The VM gets a Service with its name, and an EndpointSlice that follows its address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["port", "protocol"]))]
    #[x_kube(validation = Rule::new("self.size() < 2 || self.all(p, has(p.name) && p.name != '' && self.exists_one(q, has(q.name) && q.name == p.name))").message("several ports need names that differ"))]
    pub ports: Vec<VmPort>,
    /// Hypervisor driver: qemu, firecracker, cloud-hypervisor. Empty: annotation coracle.dev/driver, or the node's
    /// default.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63), regex(pattern = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"))]
    pub driver: String,
    /// Labels that the node must have when the VM is placed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub node_selector: BTreeMap<String, String>,
    /// Further constraints on the node when the VM is placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Taints of nodes that do not exclude the VM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub tolerations: Vec<Toleration>,
    /// Seconds that the guest has to power off when the VM is deleted or powered off. Absent: 30 seconds at power-off, none at
    /// deletion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub termination_grace_period_seconds: Option<i64>,
    /// Secrets with credentials for the image's registry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub image_pull_secrets: Vec<LocalObjectReference>,
}

impl MikromVMSpec {
    /// True for a VM with disks or directories besides its root disk, or with SSH keys: a snapshot does not contain them.
    #[must_use]
    pub fn has_volumes(&self) -> bool {
        !self.volumes.is_empty() || !self.ssh_authorized_keys.is_empty()
    }

    /// Returns the names of the fields that a VM is created from and that differ, in the order of the spec. The definition
    /// refuses the same changes of a live VM.
    #[must_use]
    pub fn changed_inputs(&self, other: &Self) -> Vec<&'static str> {
        [
            ("image", self.image != other.image),
            ("vcpuCount", self.vcpu_count != other.vcpu_count),
            ("memoryMB", self.memory_mib != other.memory_mib),
            ("kernelPath", self.kernel_path != other.kernel_path),
            ("command", self.command != other.command),
            ("args", self.args != other.args),
            ("env", self.env != other.env),
            ("envFrom", self.env_from != other.env_from),
            ("userData", self.user_data != other.user_data),
            ("hostname", self.hostname != other.hostname),
            ("sshAuthorizedKeys", self.ssh_authorized_keys != other.ssh_authorized_keys),
            ("volumes", self.volumes != other.volumes),
            ("driver", self.driver != other.driver),
        ]
        .into_iter()
        .filter_map(|(name, changed)| changed.then_some(name))
        .collect()
    }
}

/// Pattern of a duration: hours, minutes and seconds, each at most once; or empty.
const DURATION: &str = "^([0-9]{1,9}h)?([0-9]{1,9}m)?([0-9]{1,9}s)?$";

/// Power state of a VM, observed or desired.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PowerState {
    /// The guest runs.
    #[default]
    Running,
    /// The vCPUs are stopped; memory and VMM stay.
    Paused,
    /// Powered off; the disk stays.
    Stopped,
    /// The memory is on the node's disk, and no VMM runs.
    Hibernated,
}

impl PowerState {
    /// Returns the value in manifests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "Running",
            Self::Paused => "Paused",
            Self::Stopped => "Stopped",
            Self::Hibernated => "Hibernated",
        }
    }

    /// Parses a value of manifests.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Running, Self::Paused, Self::Stopped, Self::Hibernated]
            .into_iter()
            .find(|p| p.as_str() == text)
    }
}

/// When a node pulls an image.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImagePullPolicy {
    /// Pull at every start.
    Always,
    /// Pull when the image is missing on the node.
    IfNotPresent,
    /// Do not pull: the node must have the image.
    Never,
}

impl ImagePullPolicy {
    /// Returns the value in manifests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

/// When a VM that ended without a request is started again.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// Always.
    #[default]
    Always,
    /// After a failure, not after a clean end (state STOPPED).
    OnFailure,
    /// Never.
    Never,
}

/// Observed state of one microVM.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MikromVMStatus {
    /// Summary for humans; no decision depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Id of the VM, `<namespace>-<name>`; empty until the VM exists.
    #[serde(rename = "vmID", default, skip_serializing_if = "String::is_empty")]
    pub vm_id: String,
    /// Address of the guest, once the guest has acknowledged it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ip_address: String,
    /// Node that the VM is bound to.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// Agent that created the VM. Deletion uses this address, also when the spec has changed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub agent_address: String,
    /// Time when the VM was first created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Time>,
    /// Digest of the running image, as the node reports it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image_digest: String,
    /// Power state as the node reports it. Empty when a first-generation agent does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_state: Option<PowerState>,
    /// True while the VM is powered off because spec.powerState was Stopped: restartPolicy does not apply to
    /// it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub powered_off: bool,
    /// Number of restarts by restartPolicy.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0))]
    pub restarts: i32,
    /// Move to another node that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub migration: Option<Migration>,
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Available` and `Ready`, and the parts that they wait for: `Scheduled`, `ImageReady`, `AgentReachable`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
}

/// Schema of the conditions. Each condition is atomic and so has one field manager: the API server stores managed fields in the
/// object, and an entry for each field would be as long as the status itself.
fn conditions(generator: &mut SchemaGenerator) -> Schema {
    let mut list = <Vec<Condition>>::json_schema(generator);
    list.insert("x-kubernetes-list-type".into(), json!("map"));
    list.insert("x-kubernetes-list-map-keys".into(), json!(["type"]));
    if let Some(Value::Object(items)) = list.get_mut("items") {
        items.insert("x-kubernetes-map-type".into(), json!("atomic"));
    }
    list
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
fn is_zero(n: &i32) -> bool {
    *n == 0
}

/// Summary of a VM's lifecycle for `kubectl get`.
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
    /// The VM is bound to a node.
    pub const SCHEDULED: &str = "Scheduled";
    /// The node has the image.
    pub const IMAGE_READY: &str = "ImageReady";
    /// The node responds to calls about the VM.
    pub const AGENT_REACHABLE: &str = "AgentReachable";
}

/// Reasons of a MikromVM's conditions and events.
pub mod reason {
    /// True: the VM runs.
    pub const VM_RUNNING: &str = "VMRunning";
    /// No node accepts the VM yet, or it exceeds a quota of its namespace; the message has the reason.
    pub const UNSCHEDULABLE: &str = "Unschedulable";
    /// The agent in spec.agentAddress neither belongs to a node nor is on the operator's allow-list. The operator does not call
    /// it.
    pub const AGENT_NOT_ALLOWED: &str = "AgentNotAllowed";
    /// The VM is bound to a node and is being created there.
    pub const CREATING: &str = "Creating";
    /// The agent reports a transitional state.
    pub const IN_TRANSITION: &str = "InTransition";
    /// The VM ended.
    pub const VM_STOPPED: &str = "VMStopped";
    /// The VM is paused, as spec.powerState requires.
    pub const PAUSED: &str = "Paused";
    /// The VM is hibernated, as spec.powerState requires.
    pub const HIBERNATED: &str = "Hibernated";
    /// The VM is powered off, as spec.powerState requires.
    pub const POWERED_OFF: &str = "PoweredOff";
    /// The VM is hibernated or powered off because its node is cordoned, by annotation coracle.dev/on-drain.
    pub const DRAINED: &str = "Drained";
    /// The node is cordoned and the VM should move, but no node accepts it. Status True or False, depending on whether the VM
    /// runs.
    pub const DRAIN_BLOCKED: &str = "DrainBlocked";
    /// The VM is moving to another node, because its node is cordoned.
    pub const MOVING: &str = "Moving";
    /// A move of the VM failed; the message has the reason. The move is retried a few times, and then postponed.
    pub const MOVE_FAILED: &str = "MoveFailed";
    /// The VM did not reach spec.powerState; the message has the reason. The call is retried.
    pub const POWER_STATE_FAILED: &str = "PowerStateFailed";
    /// The agent reports an error of the VM.
    pub const VM_FAILED: &str = "VMFailed";
    /// The agent no longer knows the VM.
    pub const VM_VANISHED: &str = "VMVanished";
    /// The agent refused a call; the message is the agent's.
    pub const AGENT_ERROR: &str = "AgentError";
    /// The node cannot pull or use the image; the message has the image and the reason.
    pub const IMAGE_PULL_FAILED: &str = "ImagePullFailed";
    /// The node lacks memory, disk or addresses. The call is retried.
    pub const NO_SPACE: &str = "NoSpace";
    /// The VMM or the guest did not boot; the message has the end of the guest's console. The call is retried.
    pub const BOOT_FAILED: &str = "BootFailed";
    /// Ten creations in a row failed with the gRPC code INTERNAL.
    pub const AGENT_INTERNAL_ERROR: &str = "AgentInternalError";
    /// A VM of another object has the VM id of this object at the agent.
    pub const VM_ID_CONFLICT: &str = "VMIDConflict";
    /// Several calls in a row got no response; the status may be out of date.
    pub const AGENT_UNREACHABLE: &str = "AgentUnreachable";
    /// The node has been gone for longer than the grace period.
    pub const NODE_LOST: &str = "NodeLost";
    /// The VM is being deleted.
    pub const DELETING: &str = "Deleting";
    /// A Secret, ConfigMap, claim or key that the spec names does not exist or cannot be used. The message names it. The
    /// operator reads it again later.
    pub const CONFIG_ERROR: &str = "ConfigError";
    /// Condition Scheduled is True: the VM is bound to a node.
    pub const BOUND: &str = "Bound";
    /// Condition ImageReady is True: the node created the VM from the image.
    pub const PULLED: &str = "Pulled";
    /// Conditions ImageReady and AgentReachable are Unknown: the node was not called yet.
    pub const WAITING: &str = "Waiting";
    /// Condition AgentReachable is True: the node responds.
    pub const ANSWERS: &str = "Answers";
}

/// Reasons that only events have.
pub mod event {
    /// Normal: a node was chosen and stored.
    pub const SCHEDULED: &str = "Scheduled";
    /// Normal: the VM runs; the message tells whether the VM was created for this start.
    pub const STARTED: &str = "Started";
    /// Normal: restartPolicy started the VM again.
    pub const RESTARTED: &str = "Restarted";
    /// Warning: the agent refused a call; the condition's reason is AgentError.
    pub const FAILED: &str = "Failed";
    /// Warning: the finalizer was removed although the VM may still exist.
    pub const RELEASED: &str = "Released";
}

impl MikromVM {
    /// Returns the VM's id at the agent: `<namespace>-<name>`.
    #[must_use]
    pub fn vm_id(&self) -> String {
        format!("{}-{}", self.namespace().unwrap_or_default(), self.name_any())
    }

    /// Returns `<namespace>/<name>`, which is unambiguous, unlike [`Self::vm_id`].
    #[must_use]
    pub fn object_name(&self) -> String {
        format!("{}/{}", self.namespace().unwrap_or_default(), self.name_any())
    }

    /// True once the agent has confirmed that the VM exists.
    #[must_use]
    pub fn is_provisioned(&self) -> bool {
        self.status.as_ref().is_some_and(|s| !s.vm_id.is_empty())
    }
}

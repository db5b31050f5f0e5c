//! `coracle.dev/v1alpha1` VMSnapshot and VMRestore: saved states of MikromVMs as objects.

#![expect(unreachable_pub, reason = "KubeSchema repeats the struct inside a function")]
#![expect(clippy::duplicated_attributes, reason = "columns of a table have types, and some the same")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Memory and disk of a MikromVM at one instant.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "coracle.dev",
    version = "v1alpha1",
    kind = "VMSnapshot",
    plural = "vmsnapshots",
    singular = "vmsnapshot",
    shortname = "vmsnap",
    category = "coracle",
    namespaced,
    status = "VMSnapshotStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "Memory and disk of a MikromVM at one instant, kept on its node.",
    printcolumn(name = "VM", type_ = "string", json_path = ".spec.vmName"),
    printcolumn(name = "PHASE", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "MEMORY", type_ = "integer", json_path = ".status.memoryBytes"),
    printcolumn(name = "DISK", type_ = "integer", json_path = ".status.diskBytes"),
    printcolumn(name = "NODE", type_ = "string", json_path = ".status.nodeName"),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct VMSnapshotSpec {
    /// The MikromVM, in the same namespace. It continues while it is saved.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("vmName cannot change"))]
    pub vm_name: String,
    /// Once this snapshot is Ready, so many of the VM's snapshots with this field are kept; older ones are deleted.
    /// Absent: it deletes none, and is deleted by none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub retain: Option<i32>,
    /// Whether the node's snapshot goes with the object: Delete or Retain.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}

/// What becomes of the node's snapshot when its object is deleted.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeletionPolicy {
    /// It is deleted.
    #[default]
    Delete,
    /// It stays.
    Retain,
}

/// Observed state of a snapshot.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VMSnapshotStatus {
    /// Summary for people; no decision depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<SnapshotPhase>,
    /// Node that has the snapshot, or saves it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// Its name on that node, for spec.cloneFrom of a MikromVM.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub snapshot_name: String,
    /// UID of the MikromVM that it was taken of.
    #[serde(rename = "vmUID", default, skip_serializing_if = "String::is_empty")]
    pub vm_uid: String,
    /// Digest of the image of its VM.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image_digest: String,
    /// CPUs of its VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu_count: Option<i32>,
    /// Memory of its VM, in MiB.
    #[serde(rename = "memoryMB", default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<i32>,
    /// Bytes of memory and devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<i64>,
    /// Bytes that its disk takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<i64>,
    /// When it was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_at: Option<Time>,
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Summary of a snapshot's life.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotPhase {
    /// It waits for its VM.
    Pending,
    /// Its node copies memory and disk.
    Saving,
    /// It can be restored.
    Ready,
    /// It cannot be taken, or is lost; the condition has the reason.
    Failed,
}

/// A VM that continues from a VMSnapshot.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "coracle.dev",
    version = "v1alpha1",
    kind = "VMRestore",
    plural = "vmrestores",
    singular = "vmrestore",
    shortname = "vmrest",
    category = "coracle",
    namespaced,
    status = "VMRestoreStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A VM that continues from a VMSnapshot: a new one, or the snapshot's own.",
    printcolumn(name = "SNAPSHOT", type_ = "string", json_path = ".spec.snapshotName"),
    printcolumn(name = "VM", type_ = "string", json_path = ".spec.vmName"),
    printcolumn(name = "PHASE", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf").message("a VMRestore cannot change: create another one"))]
pub struct VMRestoreSpec {
    /// The VMSnapshot, in the same namespace.
    #[schemars(length(min = 1, max = 253))]
    pub snapshot_name: String,
    /// Name of the MikromVM. With identity New it is created; with Same it is the snapshot's VM.
    #[schemars(length(min = 1, max = 253))]
    pub vm_name: String,
    /// New: a VM with an identity of its own. Same: the snapshot's VM itself goes back to the snapshot, and what it did
    /// since is lost.
    #[serde(default)]
    pub identity: RestoreIdentity,
}

/// Identity of a restored VM.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestoreIdentity {
    /// Its own.
    #[default]
    New,
    /// That of the snapshot's VM.
    Same,
}

/// Observed state of a restore.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VMRestoreStatus {
    /// Summary for people; Restored and Failed are final.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<RestorePhase>,
    /// UID of the MikromVM.
    #[serde(rename = "vmUID", default, skip_serializing_if = "String::is_empty")]
    pub vm_uid: String,
    /// `Ready`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Summary of a restore's life.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestorePhase {
    /// It waits for its snapshot.
    Pending,
    /// The VM is being made.
    Restoring,
    /// The VM runs from the snapshot. Final.
    Restored,
    /// It cannot be restored; the condition has the reason. Final.
    Failed,
}

/// Reasons of the condition Ready of VMSnapshots and VMRestores.
pub mod snapshot_reason {
    /// True: it can be restored.
    pub const SAVED: &str = "Saved";
    /// Its node copies memory and disk.
    pub const SAVING: &str = "Saving";
    /// The MikromVM does not exist.
    pub const VM_NOT_FOUND: &str = "VMNotFound";
    /// The MikromVM has no memory to save: it was not created, or is powered off.
    pub const VM_NOT_RUNNING: &str = "VMNotRunning";
    /// The MikromVM has volumes or SSH keys, of which a snapshot has no copy.
    pub const VM_HAS_VOLUMES: &str = "VMHasVolumes";
    /// The node cannot save it; the message has the reason. The call is repeated.
    pub const SAVE_FAILED: &str = "SaveFailed";
    /// The node that has it does not answer, or is gone.
    pub const NODE_UNREACHABLE: &str = "NodeUnreachable";
    /// True: the VM runs from the snapshot.
    pub const RESTORED: &str = "Restored";
    /// The VM is being made.
    pub const RESTORING: &str = "Restoring";
    /// The VMSnapshot does not exist or is not Ready.
    pub const SNAPSHOT_NOT_READY: &str = "SnapshotNotReady";
    /// A MikromVM of that name exists already.
    pub const VM_EXISTS: &str = "VMExists";
    /// The MikromVM is not the one that the snapshot was taken of, or is on another node.
    pub const VM_DIFFERS: &str = "VMDiffers";
    /// The node cannot restore it; the message has the reason. The call is repeated.
    pub const RESTORE_FAILED: &str = "RestoreFailed";
}

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
    /// MikromVM to save, in the same namespace. The VM continues while it is saved.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("vmName cannot change"))]
    pub vm_name: String,
    /// Number of the VM's snapshots with this field that are kept once this snapshot is Ready; older ones are deleted. Absent:
    /// the snapshot deletes no others, and no other snapshot deletes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub retain: Option<i32>,
    /// Whether the node's snapshot is deleted with the object: Delete or Retain.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}

/// Treatment of the node's snapshot when its object is deleted.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeletionPolicy {
    /// The node's snapshot is deleted.
    #[default]
    Delete,
    /// The node's snapshot stays.
    Retain,
}

/// Observed state of a snapshot.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VMSnapshotStatus {
    /// Summary for humans; no decision depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<SnapshotPhase>,
    /// Node that has the snapshot, or is saving it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// Name of the snapshot on that node, for spec.cloneFrom of a MikromVM.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub snapshot_name: String,
    /// UID of the MikromVM that the snapshot was taken from.
    #[serde(rename = "vmUID", default, skip_serializing_if = "String::is_empty")]
    pub vm_uid: String,
    /// Digest of the VM's image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image_digest: String,
    /// vCPUs of the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu_count: Option<i32>,
    /// Memory of the VM, in MiB.
    #[serde(rename = "memoryMB", default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<i32>,
    /// Size of memory and device state, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<i64>,
    /// Size of the disk, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<i64>,
    /// Time when the snapshot was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_at: Option<Time>,
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions: `Ready`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Summary of a snapshot's life.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotPhase {
    /// The snapshot waits for its VM.
    Pending,
    /// The node copies memory and disk.
    Saving,
    /// The snapshot can be restored.
    Ready,
    /// The snapshot cannot be taken, or is lost; the condition has the reason.
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
    /// VMSnapshot to restore, in the same namespace.
    #[schemars(length(min = 1, max = 253))]
    pub snapshot_name: String,
    /// Name of the MikromVM. With identity New it is created; with Same it is the VM of the snapshot.
    #[schemars(length(min = 1, max = 253))]
    pub vm_name: String,
    /// New: a VM with its own identity. Same: the VM of the snapshot is reset to the snapshot, and its later changes are lost.
    #[serde(default)]
    pub identity: RestoreIdentity,
}

/// Identity of a restored VM.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestoreIdentity {
    /// Identity of its own.
    #[default]
    New,
    /// Identity of the VM that the snapshot was taken from.
    Same,
}

/// Observed state of a restore.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VMRestoreStatus {
    /// Summary for humans; Restored and Failed are final.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<RestorePhase>,
    /// UID of the MikromVM.
    #[serde(rename = "vmUID", default, skip_serializing_if = "String::is_empty")]
    pub vm_uid: String,
    /// Conditions: `Ready`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Summary of a restore's life.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestorePhase {
    /// The restore waits for its snapshot.
    Pending,
    /// The VM is being created.
    Restoring,
    /// The VM runs from the snapshot. Final.
    Restored,
    /// The VM cannot be restored; the condition has the reason. Final.
    Failed,
}

/// Reasons of the condition Ready of VMSnapshots and VMRestores.
pub mod snapshot_reason {
    /// True: the snapshot can be restored.
    pub const SAVED: &str = "Saved";
    /// The node copies memory and disk.
    pub const SAVING: &str = "Saving";
    /// The MikromVM does not exist.
    pub const VM_NOT_FOUND: &str = "VMNotFound";
    /// The MikromVM has no memory to save: it was not created, or it is powered off.
    pub const VM_NOT_RUNNING: &str = "VMNotRunning";
    /// The MikromVM has volumes or SSH keys, which a snapshot does not contain.
    pub const VM_HAS_VOLUMES: &str = "VMHasVolumes";
    /// The node cannot save the VM; the message has the reason. The call is retried.
    pub const SAVE_FAILED: &str = "SaveFailed";
    /// The node that has the snapshot does not respond, or no longer exists.
    pub const NODE_UNREACHABLE: &str = "NodeUnreachable";
    /// True: the VM runs from the snapshot.
    pub const RESTORED: &str = "Restored";
    /// The VM is being created.
    pub const RESTORING: &str = "Restoring";
    /// The VMSnapshot does not exist or is not Ready.
    pub const SNAPSHOT_NOT_READY: &str = "SnapshotNotReady";
    /// A MikromVM with that name exists already.
    pub const VM_EXISTS: &str = "VMExists";
    /// The MikromVM is not the VM that the snapshot was taken from, or is on another node.
    pub const VM_DIFFERS: &str = "VMDiffers";
    /// The node cannot restore the snapshot; the message has the reason. The call is retried.
    pub const RESTORE_FAILED: &str = "RestoreFailed";
}

//! `agent-forge.containeroo.ch/v1alpha1`: VsphereAgentPool and VsphereAgent, with the names of existing manifests, and views of
//! the objects of other projects that they refer to.

#![expect(unreachable_pub, reason = "KubeSchema repeats the struct inside a function")]
#![expect(clippy::duplicated_attributes, reason = "columns of a table have types, and some the same")]

pub mod foreign;
pub mod names;

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::ObjectReference,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// Pattern of a Kubernetes object name (RFC 1123 subdomain).
const NAME: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// Pattern of a namespace.
const NAMESPACE: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// Pattern of a namespace, or empty.
const NAMESPACE_OR_EMPTY: &str = "^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// Pattern of a name in vSphere.
const TOKEN: &str = "^[A-Za-z0-9_.-]+$";
/// Pattern of a path on a datastore, or empty.
const PATH: &str = r"^$|^[^/\s][^\s]*$";
/// Pattern of a node role.
const ROLE: &str = "^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$";

/// Deserializes a value; `null`, which Go writes for empty values, counts as absent.
fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(d: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(d)?.unwrap_or_default())
}

/// VMs on vSphere for the nodes that one HyperShift NodePool asks for.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "agent-forge.containeroo.ch",
    version = "v1alpha1",
    kind = "VsphereAgentPool",
    plural = "vsphereagentpools",
    singular = "vsphereagentpool",
    shortname = "vap",
    namespaced,
    status = "VsphereAgentPoolStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "VMs on vSphere for the nodes that one HyperShift NodePool asks for.",
    printcolumn(name = "Waiting", type_ = "integer", json_path = ".status.waitingAgentMachines"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desiredReplicas"),
    printcolumn(name = "Agents", type_ = "integer", json_path = ".status.matchingAgents"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct VsphereAgentPoolSpec {
    /// HostedCluster, in the pool's namespace.
    pub hosted_cluster_ref: NameRef,
    /// NodePool whose demand the pool meets, in the pool's namespace.
    pub node_pool_ref: NameRef,
    /// InfraEnv whose discovery ISO the VMs boot, in the pool's namespace.
    pub infra_env_ref: NameRef,
    /// Namespace of the NodePool's Machines and AgentMachines.
    #[schemars(length(min = 1, max = 63), regex(pattern = NAMESPACE))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("controlPlaneNamespace cannot change"))]
    pub control_plane_namespace: String,
    /// Placement of the VMs in vSphere.
    pub vsphere: VsphereSpec,
    /// Size of the VMs.
    pub template: TemplateSpec,
    /// Preparation of the VMs' Agents.
    pub agent: AgentSpec,
    /// Storage of the discovery ISO on a datastore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iso: Option<IsoSpec>,
    /// Whether VMs that are no longer needed are destroyed.
    #[serde(default)]
    pub cleanup_policy: CleanupPolicy,
}

/// Reference to an object of the same namespace, by name.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NameRef {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253), regex(pattern = NAME))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("a reference cannot change"))]
    pub name: String,
}

/// Reference to a Secret.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct SecretRef {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253), regex(pattern = NAME))]
    pub name: String,
    /// Namespace of the Secret; empty: the pool's namespace.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    #[schemars(length(max = 63), regex(pattern = NAMESPACE_OR_EMPTY))]
    pub namespace: String,
}

/// Placement of VMs, in names of vSphere.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VsphereSpec {
    /// Secret with the keys server, username, password, insecure, ca.crt, thumbprint.
    #[x_kube(validation = Rule::new("self == oldSelf").message("credentialsSecretRef cannot change"))]
    pub credentials_secret_ref: SecretRef,
    /// Inventory path of the datacenter.
    #[serde(default = "datacenter")]
    #[schemars(length(min = 1, max = 256))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("datacenter cannot change"))]
    pub datacenter: String,
    /// Datastore cluster, or datastore, of the disks.
    #[schemars(length(min = 1, max = 256))]
    pub datastore_cluster: String,
    /// Datastore of the ISO images.
    #[schemars(length(min = 1, max = 256))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("isoDatastore cannot change"))]
    pub iso_datastore: String,
    /// Resource pool, relative to the host folder, as `cluster/Resources`.
    #[schemars(length(min = 1, max = 512))]
    pub resource_pool: String,
    /// VM folder, relative to the datacenter's; empty: the hosted cluster's name. Created when it is missing.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    #[schemars(length(max = 512))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("folder cannot change"))]
    pub folder: String,
    /// Network of the VMs.
    #[schemars(length(min = 1, max = 256))]
    pub network: String,
    /// Tags of the VMs, by name or id.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    #[schemars(length(max = 64))]
    pub vm_tags: Vec<String>,
    /// Guest operating system.
    #[serde(rename = "guestID", default = "guest_id")]
    #[schemars(length(max = 64), regex(pattern = TOKEN))]
    pub guest_id: String,
    /// Disk controller: pvscsi, lsilogic, lsilogic-sas, buslogic, nvme, sata or ide.
    #[serde(default = "scsi_type")]
    #[schemars(length(max = 64), regex(pattern = TOKEN))]
    pub scsi_type: String,
    /// Firmware.
    #[serde(default)]
    pub firmware: Firmware,
    /// Network card: vmxnet3, e1000, e1000e, vmxnet2, vmxnet3vrdma, pcnet32 or sriov.
    #[serde(default = "network_adapter_type")]
    #[schemars(length(max = 64), regex(pattern = TOKEN))]
    pub network_adapter_type: String,
    /// Thick disks, zeroed when they are created.
    #[serde(default)]
    pub disk_eagerly_scrub: bool,
}

fn datacenter() -> String {
    "dc1".into()
}

fn guest_id() -> String {
    "rhel9_64Guest".into()
}

fn scsi_type() -> String {
    "pvscsi".into()
}

fn network_adapter_type() -> String {
    "vmxnet3".into()
}

impl Default for VsphereSpec {
    fn default() -> Self {
        Self {
            credentials_secret_ref: SecretRef::default(),
            datacenter: datacenter(),
            datastore_cluster: String::new(),
            iso_datastore: String::new(),
            resource_pool: String::new(),
            folder: String::new(),
            network: String::new(),
            vm_tags: Vec::new(),
            guest_id: guest_id(),
            scsi_type: scsi_type(),
            firmware: Firmware::default(),
            network_adapter_type: network_adapter_type(),
            disk_eagerly_scrub: false,
        }
    }
}

/// Firmware of a VM.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Firmware {
    /// UEFI.
    #[default]
    Efi,
    /// BIOS.
    Bios,
}

impl Firmware {
    /// Returns the firmware as vSphere spells it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Efi => "efi",
            Self::Bios => "bios",
        }
    }
}

/// Size of the VMs.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TemplateSpec {
    /// Not used: a VM has the name of its AgentMachine.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    #[schemars(length(max = 58), regex(pattern = NAMESPACE_OR_EMPTY))]
    pub name_prefix: String,
    /// Processors.
    #[serde(rename = "numCPUs", default = "num_cpus")]
    #[schemars(range(min = 1, max = 128))]
    pub num_cpus: i32,
    /// Memory in MiB.
    #[serde(rename = "memoryMiB", default = "memory_mib")]
    #[schemars(range(min = 1024, max = 1_048_576))]
    pub memory_mib: i32,
    /// Disk in GiB.
    #[serde(rename = "diskGiB", default = "disk_gib")]
    #[schemars(range(min = 20, max = 65_536))]
    pub disk_gib: i32,
}

fn num_cpus() -> i32 {
    4
}

fn memory_mib() -> i32 {
    16_384
}

fn disk_gib() -> i32 {
    100
}

impl Default for TemplateSpec {
    fn default() -> Self {
        let name_prefix = String::new();
        Self { name_prefix, num_cpus: num_cpus(), memory_mib: memory_mib(), disk_gib: disk_gib() }
    }
}

/// Preparation of the VMs' Agents.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct AgentSpec {
    /// Role of the nodes.
    #[serde(default = "role")]
    #[schemars(length(min = 1, max = 63), regex(pattern = ROLE))]
    pub role: String,
    /// Labels of the Agents; they must satisfy the NodePool's agentLabelSelector.
    #[schemars(extend("minProperties" = 1, "maxProperties" = 32))]
    pub labels: BTreeMap<String, String>,
    /// Approve the Agents.
    #[serde(default = "approve", skip_serializing_if = "Option::is_none")]
    pub approve: Option<bool>,
}

fn role() -> String {
    "worker".into()
}

#[expect(clippy::unnecessary_wraps, reason = "serde's default has the type of the field")]
fn approve() -> Option<bool> {
    Some(true)
}

impl Default for AgentSpec {
    fn default() -> Self {
        Self { role: role(), labels: BTreeMap::new(), approve: approve() }
    }
}

/// Storage of the discovery ISO.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IsoSpec {
    /// Empty the CD-ROM drive of a VM once its node is installed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub eject_after_install: bool,
    /// Time between two requests for the ISO, as `10m` or `1h30m`; empty or `0s`: 10 minutes.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub check_interval: String,
    /// Number of versions that stay on the datastore.
    #[serde(default = "retain_versions")]
    #[schemars(range(min = 1, max = 20))]
    pub retain_versions: i32,
    /// Folder on the datastore; empty: `agent-forge/<namespace>/<pool>`.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    #[schemars(length(max = 512), regex(pattern = PATH))]
    pub path_prefix: String,
}

fn retain_versions() -> i32 {
    2
}

impl Default for IsoSpec {
    fn default() -> Self {
        Self {
            eject_after_install: false,
            check_interval: String::new(),
            retain_versions: retain_versions(),
            path_prefix: String::new(),
        }
    }
}

/// Whether unneeded VMs and Agents are removed.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CleanupPolicy {
    /// VMs are destroyed once their Machines are gone.
    #[default]
    Delete,
    /// VMs and Agents are never removed.
    Retain,
}

/// Observed state of a pool.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VsphereAgentPoolStatus {
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// All AgentMachines.
    #[serde(default, deserialize_with = "null_as_default")]
    pub desired_replicas: i32,
    /// AgentMachines of the NodePool.
    #[serde(default, deserialize_with = "null_as_default")]
    pub agent_machines: i32,
    /// AgentMachines without a suitable Agent.
    #[serde(default, deserialize_with = "null_as_default")]
    pub waiting_agent_machines: i32,
    /// AgentMachines that are not Ready.
    #[serde(default, deserialize_with = "null_as_default")]
    pub unready_agent_machines: i32,
    /// AgentMachines without an Agent.
    #[serde(default, deserialize_with = "null_as_default")]
    pub agent_machines_without_agent: i32,
    /// Agents of the pool.
    #[serde(default, deserialize_with = "null_as_default")]
    pub matching_agents: i32,
    /// Agents that a Machine has claimed.
    #[serde(default, deserialize_with = "null_as_default")]
    pub bound_agents: i32,
    /// Agents without a Machine.
    #[serde(default, deserialize_with = "null_as_default")]
    pub available_agents: i32,
    /// VMs of the pool.
    #[serde(
        rename = "ownedVMs",
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "null_as_default"
    )]
    pub owned_vms: Vec<OwnedVm>,
    /// Actions decided by the last reconcile.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub planned_actions: Vec<PlannedAction>,
    /// ISO that new VMs boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iso: Option<IsoStatus>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// One VM of a pool.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct OwnedVm {
    /// Name of the VM in vSphere.
    #[serde(default, deserialize_with = "null_as_default")]
    #[schemars(required)]
    pub name: String,
    /// UID of the VsphereAgent that the VM belongs to.
    #[serde(
        rename = "ownerUID",
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "null_as_default"
    )]
    pub owner_uid: String,
    /// Origin of the entry: VsphereAgent or DiscoveredAgent.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub source: String,
    /// BIOS UUID of the VM.
    #[serde(
        rename = "biosUUID",
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "null_as_default"
    )]
    pub bios_uuid: String,
    /// MAC address of the VM, with hyphens.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub mac_address: String,
    /// Agent that was matched to the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub agent_ref: Option<ObjectReference>,
    /// Machine that claimed the Agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub machine_ref: Option<ObjectReference>,
    /// Provisioning, Available, Bound, Released or Orphaned.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub phase: String,
    /// Reason of the phase.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub reason: String,
    /// Time of the last change of the phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
}

/// One action decided by a reconcile.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedAction {
    /// DemandDeficit, PatchAgent, DeleteVM, DeleteAgent or Noop.
    #[serde(rename = "type")]
    pub kind: String,
    /// Reason of the action.
    pub reason: String,
    /// Name of the object of the action.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub name: String,
}

/// Discovery ISO of a pool.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IsoStatus {
    /// URL of the source, without its token.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub url: String,
    /// SHA-256 of the whole URL.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub url_hash: String,
    /// Path on the ISO datastore.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub path: String,
    /// SHA-256 of the ISO's content.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub sha256: String,
    /// Size of the ISO in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<i64>,
    /// `Last-Modified` of the image service.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub last_modified: String,
    /// `ETag` of the image service.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub etag: String,
    /// Time of the last request for the ISO.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked_at: Option<Time>,
    /// Time of the upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uploaded_at: Option<Time>,
    /// Value of the last force-iso-refresh that was carried out.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub force_refresh_token: String,
    /// Versions on the datastore, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub history: Vec<IsoVersion>,
}

/// One uploaded version of an ISO.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IsoVersion {
    /// Path on the ISO datastore.
    pub path: String,
    /// SHA-256 of the ISO's content.
    pub sha256: String,
    /// Size of the ISO in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<i64>,
    /// Time of the upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uploaded_at: Option<Time>,
}

/// Request for one VM of a pool.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "agent-forge.containeroo.ch",
    version = "v1alpha1",
    kind = "VsphereAgent",
    plural = "vsphereagents",
    singular = "vsphereagent",
    shortname = "va",
    namespaced,
    status = "VsphereAgentStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "One VM of a VsphereAgentPool.",
    printcolumn(name = "Pool", type_ = "string", json_path = ".spec.poolRef.name"),
    printcolumn(name = "VM", type_ = "string", json_path = ".status.vm.name"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.vm.phase"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct VsphereAgentSpec {
    /// Pool that the VM belongs to.
    pub pool_ref: NameRef,
}

/// Observed state of a VsphereAgent.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VsphereAgentStatus {
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// VM, once it runs and its identity is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<OwnedVm>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Ejection of the ISO that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iso_ejection: Option<IsoEjection>,
}

/// Progress of the ejection of an ISO from a CD-ROM drive.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IsoEjection {
    /// Name of the VM.
    pub vm_name: String,
    /// BIOS UUID of the VM.
    #[serde(rename = "biosUUID")]
    pub bios_uuid: String,
    /// UID of the VsphereAgent in the VM's notes.
    #[serde(
        rename = "ownerUID",
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "null_as_default"
    )]
    pub owner_uid: String,
    /// Datacenter of the VM.
    pub datacenter: String,
    /// Device key of the CD-ROM drive.
    pub device_key: i32,
    /// Path of the image in the drive.
    pub iso_path: String,
    /// Time when the ejection began.
    pub started_at: Time,
    /// True when the drive was requested to disconnect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disconnect_started: Option<bool>,
    /// Id of the VM's question that was answered.
    #[serde(
        rename = "questionID",
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "null_as_default"
    )]
    pub question_id: String,
}

impl VsphereAgent {
    /// Returns the VM in the status; the empty object that Go writes counts as absent.
    #[must_use]
    pub fn vm(&self) -> Option<&OwnedVm> {
        self.status.as_ref()?.vm.as_ref().filter(|vm| !vm.name.is_empty())
    }
}

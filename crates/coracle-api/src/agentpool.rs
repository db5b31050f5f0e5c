//! `agent-forge.containeroo.ch/v1alpha1`: VsphereAgentPool and VsphereAgent, with the names of existing
//! manifests, and views of the objects of other projects that they refer to.

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

/// A name of Kubernetes (RFC 1123 subdomain).
const NAME: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// A namespace.
const NAMESPACE: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// A namespace, or empty.
const NAMESPACE_OR_EMPTY: &str = "^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// A name in vSphere.
const TOKEN: &str = "^[A-Za-z0-9_.-]+$";
/// A path on a datastore, or empty.
const PATH: &str = r"^$|^[^/\s][^\s]*$";
/// A role.
const ROLE: &str = "^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$";

/// Go writes `null` for empty values: equal to absent.
fn lenient<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(d: D) -> Result<T, D::Error> {
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
    /// The hosted cluster, in the pool's namespace.
    pub hosted_cluster_ref: NameRef,
    /// The NodePool whose demand is met, in the pool's namespace.
    pub node_pool_ref: NameRef,
    /// The InfraEnv whose discovery ISO the VMs boot, in the pool's namespace.
    pub infra_env_ref: NameRef,
    /// Where the Machines and AgentMachines of the NodePool are.
    #[schemars(length(min = 1, max = 63), regex(pattern = NAMESPACE))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("controlPlaneNamespace cannot change"))]
    pub control_plane_namespace: String,
    /// Where the VMs are made.
    pub vsphere: VsphereSpec,
    /// Their size.
    pub template: TemplateSpec,
    /// How their Agents are prepared.
    pub agent: AgentSpec,
    /// How the discovery ISO is kept on a datastore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iso: Option<IsoSpec>,
    /// Whether unneeded VMs are destroyed.
    #[serde(default)]
    pub cleanup_policy: CleanupPolicy,
}

/// An object of the same namespace, by name.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NameRef {
    /// Its name.
    #[schemars(length(min = 1, max = 253), regex(pattern = NAME))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("a reference cannot change"))]
    pub name: String,
}

/// A Secret.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct SecretRef {
    /// Its name.
    #[schemars(length(min = 1, max = 253), regex(pattern = NAME))]
    pub name: String,
    /// Its namespace; empty: the pool's.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    #[schemars(length(max = 63), regex(pattern = NAMESPACE_OR_EMPTY))]
    pub namespace: String,
}

/// Where VMs are made, in names of vSphere.
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
    /// VM folder, relative to the datacenter's; empty: the hosted cluster's name. Made when it is missing.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    #[schemars(length(max = 512))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("folder cannot change"))]
    pub folder: String,
    /// Network of the VMs.
    #[schemars(length(min = 1, max = 256))]
    pub network: String,
    /// Tags of the VMs, by name or id.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "lenient")]
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
    /// Thick disks, zeroed when they are made.
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
    /// As vSphere spells it.
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
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
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

/// How the Agents of the VMs are prepared.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct AgentSpec {
    /// Role of the nodes.
    #[serde(default = "role")]
    #[schemars(length(min = 1, max = 63), regex(pattern = ROLE))]
    pub role: String,
    /// Labels of the Agents; they must satisfy the NodePool's agentLabelSelector.
    #[schemars(extend("minProperties" = 1, "maxProperties" = 32))]
    pub labels: BTreeMap<String, String>,
    /// Whether the Agents are approved.
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

/// How the discovery ISO is kept.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IsoSpec {
    /// Empty the CD-ROM drive of a VM once its node is installed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub eject_after_install: bool,
    /// How often the ISO is asked for anew, as `10m` or `1h30m`; empty or `0s`: 10 minutes.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub check_interval: String,
    /// How many versions stay on the datastore.
    #[serde(default = "retain_versions")]
    #[schemars(range(min = 1, max = 20))]
    pub retain_versions: i32,
    /// Folder on the datastore; empty: `agent-forge/<namespace>/<pool>`.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
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
    #[serde(default, deserialize_with = "lenient")]
    pub desired_replicas: i32,
    /// AgentMachines of the NodePool.
    #[serde(default, deserialize_with = "lenient")]
    pub agent_machines: i32,
    /// AgentMachines without a suitable Agent.
    #[serde(default, deserialize_with = "lenient")]
    pub waiting_agent_machines: i32,
    /// AgentMachines that are not Ready.
    #[serde(default, deserialize_with = "lenient")]
    pub unready_agent_machines: i32,
    /// AgentMachines without an Agent.
    #[serde(default, deserialize_with = "lenient")]
    pub agent_machines_without_agent: i32,
    /// Agents of the pool.
    #[serde(default, deserialize_with = "lenient")]
    pub matching_agents: i32,
    /// Agents that a Machine has claimed.
    #[serde(default, deserialize_with = "lenient")]
    pub bound_agents: i32,
    /// Agents without a Machine.
    #[serde(default, deserialize_with = "lenient")]
    pub available_agents: i32,
    /// VMs of the pool.
    #[serde(
        rename = "ownedVMs",
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "lenient"
    )]
    pub owned_vms: Vec<OwnedVm>,
    /// Decisions of the last pass.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "lenient")]
    pub planned_actions: Vec<PlannedAction>,
    /// The ISO that new VMs boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iso: Option<IsoStatus>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "lenient")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// One VM of a pool.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct OwnedVm {
    /// Its name in vSphere.
    #[serde(default, deserialize_with = "lenient")]
    #[schemars(required)]
    pub name: String,
    /// UID of the VsphereAgent that it is for.
    #[serde(
        rename = "ownerUID",
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "lenient"
    )]
    pub owner_uid: String,
    /// Where the row comes from: VsphereAgent or DiscoveredAgent.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub source: String,
    /// BIOS UUID.
    #[serde(
        rename = "biosUUID",
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "lenient"
    )]
    pub bios_uuid: String,
    /// MAC address, with hyphens.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub mac_address: String,
    /// The Agent that was recognised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub agent_ref: Option<ObjectReference>,
    /// The Machine that claimed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub machine_ref: Option<ObjectReference>,
    /// Provisioning, Available, Bound, Released or Orphaned.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub phase: String,
    /// Why.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub reason: String,
    /// Since when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
}

/// One decision of a pass.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedAction {
    /// DemandDeficit, PatchAgent, DeleteVM, DeleteAgent or Noop.
    #[serde(rename = "type")]
    pub kind: String,
    /// Why.
    pub reason: String,
    /// Object of the action.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub name: String,
}

/// The ISO of a pool.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IsoStatus {
    /// URL of the source, without its token.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub url: String,
    /// SHA-256 of the whole URL.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub url_hash: String,
    /// Path on the ISO datastore.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub path: String,
    /// SHA-256 of its content.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub sha256: String,
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<i64>,
    /// The image service's `Last-Modified`.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub last_modified: String,
    /// The image service's `ETag`.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub etag: String,
    /// When it was last asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked_at: Option<Time>,
    /// When it was uploaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uploaded_at: Option<Time>,
    /// The last force-iso-refresh that was carried out.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "lenient")]
    pub force_refresh_token: String,
    /// Versions on the datastore, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "lenient")]
    pub history: Vec<IsoVersion>,
}

/// One version of an ISO.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IsoVersion {
    /// Path on the ISO datastore.
    pub path: String,
    /// SHA-256 of its content.
    pub sha256: String,
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<i64>,
    /// When it was uploaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uploaded_at: Option<Time>,
}

/// One VM of a pool, as a request.
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
    /// The pool that it belongs to.
    pub pool_ref: NameRef,
}

/// Observed state of a VM.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VsphereAgentStatus {
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The VM, once it runs and its identity is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<OwnedVm>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "lenient")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// An ejection that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iso_ejection: Option<IsoEjection>,
}

/// Progress of an ejection from a CD-ROM drive.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IsoEjection {
    /// The VM.
    pub vm_name: String,
    /// Its BIOS UUID.
    #[serde(rename = "biosUUID")]
    pub bios_uuid: String,
    /// UID of the VsphereAgent in its notes.
    #[serde(
        rename = "ownerUID",
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "lenient"
    )]
    pub owner_uid: String,
    /// Its datacenter.
    pub datacenter: String,
    /// The drive.
    pub device_key: i32,
    /// Image in the drive.
    pub iso_path: String,
    /// When it began.
    pub started_at: Time,
    /// The drive was requested to disconnect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disconnect_started: Option<bool>,
    /// The question that was answered.
    #[serde(
        rename = "questionID",
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "lenient"
    )]
    pub question_id: String,
}

impl VsphereAgent {
    /// The VM in its status; the empty object that Go writes counts as absent.
    #[must_use]
    pub fn vm(&self) -> Option<&OwnedVm> {
        self.status.as_ref()?.vm.as_ref().filter(|vm| !vm.name.is_empty())
    }
}

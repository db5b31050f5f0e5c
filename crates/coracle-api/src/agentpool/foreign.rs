//! Views of objects of other projects, with only the fields that are read. Other fields are neither kept in memory nor written
//! back.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, api::ApiResource, core::DynamicResourceScope};
use serde::{Deserialize, Serialize};

/// Object with only the fields that are read. Discovery finds its API version.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Foreign<View> {
    /// Metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// Fields that are read.
    #[serde(flatten)]
    pub view: View,
}

impl<View> Resource for Foreign<View> {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(dt: &ApiResource) -> Cow<'_, str> {
        dt.kind.as_str().into()
    }

    fn group(dt: &ApiResource) -> Cow<'_, str> {
        dt.group.as_str().into()
    }

    fn version(dt: &ApiResource) -> Cow<'_, str> {
        dt.version.as_str().into()
    }

    fn api_version(dt: &ApiResource) -> Cow<'_, str> {
        dt.api_version.as_str().into()
    }

    fn plural(dt: &ApiResource) -> Cow<'_, str> {
        dt.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Group, versions, kind and plural of an object of another project. The first version that is served is used.
#[derive(Clone, Copy, Debug)]
pub struct ForeignKind {
    /// API group.
    pub group: &'static str,
    /// Supported versions, preferred first.
    pub versions: &'static [&'static str],
    /// Kind of the object.
    pub kind: &'static str,
    /// Plural of the kind, as in URLs.
    pub plural: &'static str,
}

impl ForeignKind {
    /// Returns the resource in `version`, in the form of kube.
    #[must_use]
    pub fn resource(&self, version: &str) -> ApiResource {
        ApiResource {
            group: self.group.into(),
            version: version.into(),
            api_version: format!("{}/{version}", self.group),
            kind: self.kind.into(),
            plural: self.plural.into(),
        }
    }
}

/// Machine of Cluster API.
pub const MACHINE: ForeignKind = ForeignKind {
    group: "cluster.x-k8s.io",
    versions: &["v1beta2", "v1beta1"],
    kind: "Machine",
    plural: "machines",
};
/// AgentMachine of the Agent provider of Cluster API.
pub const AGENT_MACHINE: ForeignKind = ForeignKind {
    group: "capi-provider.agent-install.openshift.io",
    versions: &["v1beta1", "v1alpha1"],
    kind: "AgentMachine",
    plural: "agentmachines",
};
/// InfraEnv (discovery environment) of Assisted Installer.
pub const INFRA_ENV: ForeignKind = ForeignKind {
    group: "agent-install.openshift.io",
    versions: &["v1beta1"],
    kind: "InfraEnv",
    plural: "infraenvs",
};
/// Agent (host) of Assisted Installer.
pub const AGENT: ForeignKind = ForeignKind {
    group: "agent-install.openshift.io",
    versions: &["v1beta1"],
    kind: "Agent",
    plural: "agents",
};

/// Condition of an object of another project.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ForeignCondition {
    /// Type of the condition.
    #[serde(rename = "type")]
    pub kind: String,
    /// True, False or Unknown.
    pub status: String,
    /// Reason of the status.
    pub reason: String,
}

/// Returns status and reason of the condition of type `kind`.
#[must_use]
pub fn condition<'a>(all: &'a [ForeignCondition], kind: &str) -> Option<(&'a str, &'a str)> {
    all.iter().find(|c| c.kind == kind).map(|c| (c.status.as_str(), c.reason.as_str()))
}

/// Reference with name and namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ForeignRef {
    /// Name of the object.
    pub name: String,
    /// Namespace of the object.
    pub namespace: String,
}

/// A Machine.
pub type Machine = Foreign<MachineView>;

/// Fields of a Machine that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MachineView {
    /// Status of the Machine.
    pub status: MachineStatus,
}

/// Fields of a Machine's status that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MachineStatus {
    /// Phase of the Machine; `Deleting` while it is being deleted.
    pub phase: String,
}

impl Machine {
    /// True while the Machine is being deleted.
    #[must_use]
    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some() || self.view.status.phase == "Deleting"
    }
}

/// An AgentMachine.
pub type AgentMachine = Foreign<AgentMachineView>;

/// Fields of an AgentMachine that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentMachineView {
    /// Spec of the AgentMachine.
    pub spec: AgentMachineSpec,
    /// Status of the AgentMachine.
    pub status: AgentMachineStatus,
}

/// Fields of an AgentMachine's spec that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AgentMachineSpec {
    /// Selector of the Agents that the AgentMachine accepts.
    pub agent_label_selector: Option<LabelSelector>,
    /// `agent://<Agent>` once the AgentMachine has an Agent.
    #[serde(rename = "providerID")]
    pub provider_id: Option<String>,
}

/// Label selector, with `matchLabels` only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels that must all match.
    pub match_labels: Option<BTreeMap<String, String>>,
}

/// Fields of an AgentMachine's status that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AgentMachineStatus {
    /// Agent that the AgentMachine reserved.
    pub agent_ref: Option<ForeignRef>,
    /// Conditions.
    pub conditions: Option<Vec<ForeignCondition>>,
}

impl AgentMachine {
    /// Returns the conditions of the AgentMachine.
    #[must_use]
    pub fn conditions(&self) -> &[ForeignCondition] {
        self.view.status.conditions.as_deref().unwrap_or_default()
    }

    /// Returns the name of the Machine that owns the AgentMachine.
    #[must_use]
    pub fn machine(&self) -> Option<&str> {
        let owners = self.metadata.owner_references.as_deref().unwrap_or_default();
        owners.iter().find(|o| o.kind == "Machine").map(|o| o.name.as_str())
    }

    /// Returns the value of a label in the AgentMachine's selector.
    #[must_use]
    pub fn selected(&self, key: &str) -> Option<&str> {
        Some(self.view.spec.agent_label_selector.as_ref()?.match_labels.as_ref()?.get(key)?.as_str())
    }
}

/// An InfraEnv.
pub type InfraEnv = Foreign<InfraEnvView>;

/// Fields of an InfraEnv that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InfraEnvView {
    /// Spec of the InfraEnv.
    pub spec: InfraEnvSpec,
    /// Status of the InfraEnv.
    pub status: InfraEnvStatus,
}

/// Fields of an InfraEnv's spec that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct InfraEnvSpec {
    /// Requested version of the OS image.
    pub os_image_version: Option<String>,
}

/// Fields of an InfraEnv's status that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct InfraEnvStatus {
    /// URL of the discovery ISO, with a token in its query.
    #[serde(rename = "isoDownloadURL")]
    pub iso_download_url: Option<String>,
    /// Conditions.
    pub conditions: Option<Vec<ForeignCondition>>,
}

/// An Agent.
pub type Agent = Foreign<AgentView>;

/// Fields of an Agent that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentView {
    /// Spec of the Agent.
    pub spec: AgentViewSpec,
    /// Status of the Agent.
    pub status: AgentViewStatus,
}

/// Fields of an Agent's spec that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AgentViewSpec {
    /// True when the Agent may be used.
    pub approved: bool,
    /// Role of the node.
    pub role: String,
    /// Hostname that the node gets.
    pub hostname: Option<String>,
    /// Cluster deployment that claimed the Agent.
    pub cluster_deployment_name: Option<ForeignRef>,
}

/// Fields of an Agent's status that are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AgentViewStatus {
    /// Inventory reported by the host; not trusted.
    pub inventory: Option<Inventory>,
    /// Conditions.
    pub conditions: Option<Vec<ForeignCondition>>,
}

/// Inventory of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Inventory {
    /// Hostname.
    pub hostname: Option<String>,
    /// Manufacturer and serial number.
    pub system_vendor: Option<SystemVendor>,
    /// Network cards.
    pub interfaces: Option<Vec<Interface>>,
}

/// Manufacturer and serial number of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SystemVendor {
    /// `VMware-…` on vSphere.
    pub serial_number: Option<String>,
}

/// A network card of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Interface {
    /// MAC address.
    pub mac_address: Option<String>,
    /// MAC address, in the field name of some versions.
    pub mac: Option<String>,
}

impl Agent {
    /// Returns the conditions of the Agent.
    #[must_use]
    pub fn conditions(&self) -> &[ForeignCondition] {
        self.view.status.conditions.as_deref().unwrap_or_default()
    }
}

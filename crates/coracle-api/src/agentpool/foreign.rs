//! Views of objects of other projects: only the fields that are read. Other fields are neither kept in memory
//! nor written back.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, api::ApiResource, core::DynamicResourceScope};
use serde::{Deserialize, Serialize};

/// An object with only the fields that are read. Its version is found by discovery.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Foreign<View> {
    /// Metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The fields that are read.
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

/// Group, versions (the first that is served is used), kind and plural.
#[derive(Clone, Copy, Debug)]
pub struct ForeignKind {
    /// API group.
    pub group: &'static str,
    /// Supported versions, best first.
    pub versions: &'static [&'static str],
    /// Kind.
    pub kind: &'static str,
    /// Plural.
    pub plural: &'static str,
}

impl ForeignKind {
    /// As kube names it, in that version.
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

/// Cluster API's Machine.
pub const MACHINE: ForeignKind = ForeignKind {
    group: "cluster.x-k8s.io",
    versions: &["v1beta2", "v1beta1"],
    kind: "Machine",
    plural: "machines",
};
/// The Agent provider's machine.
pub const AGENT_MACHINE: ForeignKind = ForeignKind {
    group: "capi-provider.agent-install.openshift.io",
    versions: &["v1beta1", "v1alpha1"],
    kind: "AgentMachine",
    plural: "agentmachines",
};
/// Assisted Installer's discovery environment.
pub const INFRA_ENV: ForeignKind = ForeignKind {
    group: "agent-install.openshift.io",
    versions: &["v1beta1"],
    kind: "InfraEnv",
    plural: "infraenvs",
};
/// Assisted Installer's host.
pub const AGENT: ForeignKind = ForeignKind {
    group: "agent-install.openshift.io",
    versions: &["v1beta1"],
    kind: "Agent",
    plural: "agents",
};

/// A condition of an object that is not ours.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ForeignCondition {
    /// Its type.
    #[serde(rename = "type")]
    pub kind: String,
    /// True, False or Unknown.
    pub status: String,
    /// Why.
    pub reason: String,
}

/// Status and reason of the condition of that type.
#[must_use]
pub fn condition<'a>(all: &'a [ForeignCondition], kind: &str) -> Option<(&'a str, &'a str)> {
    all.iter().find(|c| c.kind == kind).map(|c| (c.status.as_str(), c.reason.as_str()))
}

/// A namespaced name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ForeignRef {
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
}

/// A Machine.
pub type Machine = Foreign<MachineView>;

/// What is known of a Machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MachineView {
    /// Its status.
    pub status: MachineStatus,
}

/// What is known of a Machine's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MachineStatus {
    /// `Deleting` while it is deleted.
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

/// What is known of an AgentMachine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentMachineView {
    /// Its spec.
    pub spec: AgentMachineSpec,
    /// Its status.
    pub status: AgentMachineStatus,
}

/// What is known of an AgentMachine's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AgentMachineSpec {
    /// Which Agents it takes.
    pub agent_label_selector: Option<LabelSelector>,
    /// `agent://<Agent>` once it has one.
    #[serde(rename = "providerID")]
    pub provider_id: Option<String>,
}

/// The labels of a selector.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LabelSelector {
    /// All of these.
    pub match_labels: Option<BTreeMap<String, String>>,
}

/// What is known of an AgentMachine's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AgentMachineStatus {
    /// The Agent that it reserved.
    pub agent_ref: Option<ForeignRef>,
    /// Conditions.
    pub conditions: Option<Vec<ForeignCondition>>,
}

impl AgentMachine {
    /// Conditions.
    #[must_use]
    pub fn conditions(&self) -> &[ForeignCondition] {
        self.view.status.conditions.as_deref().unwrap_or_default()
    }

    /// The Machine that owns it.
    #[must_use]
    pub fn machine(&self) -> Option<&str> {
        let owners = self.metadata.owner_references.as_deref().unwrap_or_default();
        owners.iter().find(|o| o.kind == "Machine").map(|o| o.name.as_str())
    }

    /// A label of its selector.
    #[must_use]
    pub fn selected(&self, key: &str) -> Option<&str> {
        Some(self.view.spec.agent_label_selector.as_ref()?.match_labels.as_ref()?.get(key)?.as_str())
    }
}

/// An InfraEnv.
pub type InfraEnv = Foreign<InfraEnvView>;

/// What is known of an InfraEnv.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InfraEnvView {
    /// Its spec.
    pub spec: InfraEnvSpec,
    /// Its status.
    pub status: InfraEnvStatus,
}

/// What is known of an InfraEnv's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct InfraEnvSpec {
    /// The version of the image that was asked for.
    pub os_image_version: Option<String>,
}

/// What is known of an InfraEnv's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct InfraEnvStatus {
    /// Where the discovery ISO is, with a token in its query.
    #[serde(rename = "isoDownloadURL")]
    pub iso_download_url: Option<String>,
    /// Conditions.
    pub conditions: Option<Vec<ForeignCondition>>,
}

/// An Agent.
pub type Agent = Foreign<AgentView>;

/// What is known of an Agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentView {
    /// Its spec.
    pub spec: AgentViewSpec,
    /// Its status.
    pub status: AgentViewStatus,
}

/// What is known of an Agent's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AgentViewSpec {
    /// It may be used.
    pub approved: bool,
    /// Its role.
    pub role: String,
    /// The hostname that it gets.
    pub hostname: Option<String>,
    /// The cluster that claimed it.
    pub cluster_deployment_name: Option<ForeignRef>,
}

/// What is known of an Agent's status.
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
    /// Maker and serial number.
    pub system_vendor: Option<SystemVendor>,
    /// Network cards.
    pub interfaces: Option<Vec<Interface>>,
}

/// Maker and serial number of a host.
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
    /// Its address.
    pub mac_address: Option<String>,
    /// Its address, as some versions spell the field.
    pub mac: Option<String>,
}

impl Agent {
    /// Conditions.
    #[must_use]
    pub fn conditions(&self) -> &[ForeignCondition] {
        self.view.status.conditions.as_deref().unwrap_or_default()
    }
}

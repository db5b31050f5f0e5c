//! Names that fit their limits, and the identity by which a VM and an Agent are recognised as the same machine (pure).

use std::collections::BTreeMap;

use coracle_api::agentpool::{
    OwnedVm, VsphereAgent,
    foreign::{Agent, condition},
    names,
};
use coracle_vsphere::{bios_uuid, mac, uuid_v5};
use kube::ResourceExt as _;
use sha2::{Digest as _, Sha256};

/// Longest label value and DNS host name.
const LABEL_MAX: usize = 63;
/// Characters of a long name that stay before its digest.
const LABEL_KEPT: usize = 52;
/// Characters of a second name that stay before its digest.
const SECOND_KEPT: usize = 242;

/// Returns `name`, or its beginning and a digest if it is too long for a label, a VM or a host name.
#[must_use]
pub fn label_value(name: &str) -> String {
    if name.len() <= LABEL_MAX {
        return name.to_owned();
    }
    format!("{}-{}", truncate(name, LABEL_KEPT), digest(name))
}

/// Name of a VsphereAgent if the AgentMachine's own name is taken by another object.
#[must_use]
pub fn second_name(pool_ns: &str, pool: &str, am_ns: &str, am: &str) -> String {
    let whole = format!("{am}-{pool}");
    format!("{}-{}", truncate(&whole, SECOND_KEPT), digest(&format!("{pool_ns}/{pool}/{am_ns}/{am}")))
}

fn truncate(text: &str, at: usize) -> &str {
    let end = (0..=at.min(text.len())).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    &text[..end]
}

fn digest(text: &str) -> String {
    hex::encode(Sha256::digest(text)).chars().take(10).collect()
}

/// BIOS UUID of a VsphereAgent's VM. It is known before the VM exists.
#[must_use]
pub fn vm_uuid(owner_uid: &str) -> String {
    uuid_v5(&format!("agent-forge.containeroo.ch/vm/{owner_uid}"))
}

/// vCenter's UUID of a VsphereAgent's VM.
#[must_use]
pub fn instance_uuid(owner_uid: &str) -> String {
    uuid_v5(&format!("agent-forge.containeroo.ch/vm-instance/{owner_uid}"))
}

/// Notes of a VsphereAgent's VM.
#[must_use]
pub fn owner_note(owner_uid: &str) -> String {
    format!("{}{owner_uid}", names::OWNER_NOTE)
}

/// Name of a VsphereAgent's VM.
#[must_use]
pub fn vm_name(agent: &VsphereAgent) -> String {
    let named = agent.annotations().get(names::VM_NAME).filter(|n| !n.is_empty());
    label_value(&named.cloned().unwrap_or_else(|| agent.name_any()))
}

/// Hardware identity of a machine: UUID, MAC address, or both. Empty: unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HardwareId {
    /// BIOS UUID.
    pub uuid: String,
    /// MAC address.
    pub mac: String,
}

impl HardwareId {
    /// Identity of a row of the pool's status.
    #[must_use]
    pub fn of_row(row: &OwnedVm) -> Self {
        Self { uuid: bios_uuid(&row.bios_uuid).unwrap_or_default(), mac: mac(&row.mac_address) }
    }

    /// Whether both are certainly the same machine. UUIDs decide if both are known, because MAC addresses repeat, in simulators
    /// and behind cloned adapters.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        self.compare(other) == Some(true)
    }

    /// Whether both are certainly different machines.
    #[must_use]
    pub fn conflicts(&self, other: &Self) -> bool {
        self.compare(other) == Some(false)
    }

    fn compare(&self, other: &Self) -> Option<bool> {
        same(&self.uuid, &other.uuid).or_else(|| same(&self.mac, &other.mac))
    }
}

fn same(a: &str, b: &str) -> Option<bool> {
    (!a.is_empty() && !b.is_empty()).then(|| a == b)
}

/// Fields of an Agent that decisions are based on. The guest reports its own inventory: it may serve to recognise an Agent, but
/// never to choose what is destroyed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentFacts {
    /// Name of the Agent.
    pub name: String,
    /// UID of the Agent.
    pub uid: String,
    /// Resource version that was read.
    pub resource_version: String,
    /// Labels of the Agent.
    pub labels: BTreeMap<String, String>,
    /// Whether the Agent, or its VM, is being deleted.
    pub is_going: bool,
    /// Whether the destruction of its VM has begun, so that the Agent can no longer be claimed.
    pub is_fenced: bool,
    /// Whether the Agent is approved for use.
    pub approved: bool,
    /// Role in the Agent's spec.
    pub role: String,
    /// Host name in the Agent's spec.
    pub hostname: String,
    /// Host name that the guest reports.
    pub observed_hostname: String,
    /// UUID and MAC address that the guest reports.
    pub identity: HardwareId,
    /// Whether a Machine has claimed the Agent.
    pub is_bound: bool,
    /// Cluster that claimed the Agent.
    pub cluster: String,
    /// InfraEnv of the Agent.
    pub infra_env: String,
    /// Whether the provider would accept the Agent.
    pub is_usable: bool,
    /// Whether the operating system is installed.
    pub is_installed: bool,
}

impl AgentFacts {
    /// Reads an Agent.
    #[must_use]
    pub fn of(agent: &Agent) -> Self {
        let (spec, status) = (&agent.view.spec, &agent.view.status);
        let inventory = status.inventory.clone().unwrap_or_default();
        let serial = inventory.system_vendor.and_then(|v| v.serial_number).unwrap_or_default();
        let macs = inventory.interfaces.unwrap_or_default();
        let macs = macs.into_iter().map(|i| i.mac_address.or(i.mac).unwrap_or_default());
        let cluster = spec.cluster_deployment_name.as_ref().map_or("", |c| c.name.as_str()).to_owned();
        let labels = agent.labels().clone();
        let owner = agent.owner_references().iter().find(|o| o.kind == "InfraEnv").map(|o| o.name.clone());
        let is_fenced = agent.annotations().contains_key(names::CLEANUP_VM);
        let is = |kind, status| condition(agent.conditions(), kind).is_some_and(|(s, _)| s == status);
        Self {
            name: agent.name_any(),
            uid: agent.uid().unwrap_or_default(),
            resource_version: agent.resource_version().unwrap_or_default(),
            is_going: agent.metadata.deletion_timestamp.is_some() || is_fenced,
            is_fenced,
            approved: spec.approved,
            role: spec.role.clone(),
            hostname: spec.hostname.clone().unwrap_or_default(),
            observed_hostname: inventory.hostname.unwrap_or_default(),
            identity: HardwareId {
                uuid: bios_uuid(&serial).unwrap_or_default(),
                mac: macs.map(|m| mac(&m)).find(|m| !m.is_empty()).unwrap_or_default(),
            },
            is_bound: labels.contains_key(names::AGENT_MACHINE_REF) || !cluster.is_empty(),
            cluster,
            infra_env: labels.get(names::INFRAENV_LABEL).cloned().or(owner).unwrap_or_default(),
            is_usable: !is("Connected", "False") && !is("Validated", "False"),
            is_installed: is("Installed", "True"),
            labels,
        }
    }

    /// Effective host name: that of the spec, or else the reported one.
    #[must_use]
    pub fn known_hostname(&self) -> &str {
        if self.hostname.is_empty() { &self.observed_hostname } else { &self.hostname }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlong_name_is_shortened_and_stays_unique() {
        assert_eq!(label_value("worker-1"), "worker-1");
        let long = "a".repeat(200);
        let value = label_value(&long);
        assert_eq!((value.len(), &value[..53]), (63, format!("{}-", "a".repeat(52)).as_str()));
        assert_ne!(value, label_value(&"a".repeat(201)));
        let second = second_name("ns", "pool", "cp", &long);
        assert!(second.len() <= 253 && second.starts_with(&long));
        assert_ne!(second, second_name("ns", "pool", "cp2", &long));
    }

    #[test]
    fn uuid_or_mac_identifies_a_machine() {
        let id = |uuid: &str, mac: &str| HardwareId { uuid: uuid.into(), mac: mac.into() };
        for (why, a, b, is, conflicts) in [
            ("the same UUID", id("u", ""), id("u", "m"), true, false),
            ("the same MAC", id("u", "m"), id("", "m"), true, false),
            ("another MAC does not spoil the same UUID", id("u", "m"), id("u", "n"), true, false),
            ("nothing to compare", id("u", ""), id("", "m"), false, false),
            ("another UUID", id("u", ""), id("v", ""), false, true),
            ("the same MAC and another UUID", id("u", "m"), id("v", "m"), false, true),
            ("all differ", id("u", "m"), id("v", "n"), false, true),
        ] {
            assert_eq!((a.is(&b), a.conflicts(&b)), (is, conflicts), "{why}");
        }
    }
}

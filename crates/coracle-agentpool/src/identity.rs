//! Names that fit, and how a VM and an Agent are recognised as one machine (pure).

use std::collections::BTreeMap;

use coracle_api::agentpool::{
    OwnedVm, VsphereAgent,
    foreign::{Agent, condition},
    names,
};
use coracle_vsphere::{bios_uuid, mac, uuid_v5};
use kube::ResourceExt as _;
use sha2::{Digest as _, Sha256};

/// Longest label value, and host name in DNS.
const LABEL_MAX: usize = 63;
/// Length of a long name before its digest.
const LABEL_KEPT: usize = 52;
/// Length of a second name before its digest.
const SECOND_KEPT: usize = 242;

/// `name`, or its beginning and a digest when it is too long for a label, a VM or a host name.
#[must_use]
pub fn label_value(name: &str) -> String {
    if name.len() <= LABEL_MAX {
        return name.to_owned();
    }
    format!("{}-{}", cut(name, LABEL_KEPT), digest(name))
}

/// The name of a VsphereAgent when the AgentMachine's own is taken by another's.
#[must_use]
pub fn second_name(pool_ns: &str, pool: &str, am_ns: &str, am: &str) -> String {
    let whole = format!("{am}-{pool}");
    format!("{}-{}", cut(&whole, SECOND_KEPT), digest(&format!("{pool_ns}/{pool}/{am_ns}/{am}")))
}

fn cut(text: &str, at: usize) -> &str {
    let end = (0..=at.min(text.len())).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    &text[..end]
}

fn digest(text: &str) -> String {
    hex::encode(Sha256::digest(text)).chars().take(10).collect()
}

/// BIOS UUID of the VM of a VsphereAgent: known before the VM is.
#[must_use]
pub fn vm_uuid(owner_uid: &str) -> String {
    uuid_v5(&format!("agent-forge.containeroo.ch/vm/{owner_uid}"))
}

/// vCenter's UUID of it.
#[must_use]
pub fn instance_uuid(owner_uid: &str) -> String {
    uuid_v5(&format!("agent-forge.containeroo.ch/vm-instance/{owner_uid}"))
}

/// The notes of its VM.
#[must_use]
pub fn owner_note(owner_uid: &str) -> String {
    format!("{}{owner_uid}", names::OWNER_NOTE)
}

/// The name of its VM.
#[must_use]
pub fn vm_name(agent: &VsphereAgent) -> String {
    let named = agent.annotations().get(names::VM_NAME).filter(|n| !n.is_empty());
    label_value(&named.cloned().unwrap_or_else(|| agent.name_any()))
}

/// Identity of a machine: UUID, MAC, or both. Empty: unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HardwareId {
    /// BIOS UUID.
    pub uuid: String,
    /// MAC address.
    pub mac: String,
}

impl HardwareId {
    /// Identity of a row.
    #[must_use]
    pub fn of_row(row: &OwnedVm) -> Self {
        Self { uuid: bios_uuid(&row.bios_uuid).unwrap_or_default(), mac: mac(&row.mac_address) }
    }

    /// The same machine for certain. UUIDs decide where both are known: MAC addresses repeat, in simulators and behind
    /// cloned adapters.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        self.compared(other) == Some(true)
    }

    /// Another machine for certain.
    #[must_use]
    pub fn conflicts(&self, other: &Self) -> bool {
        self.compared(other) == Some(false)
    }

    fn compared(&self, other: &Self) -> Option<bool> {
        same(&self.uuid, &other.uuid).or_else(|| same(&self.mac, &other.mac))
    }
}

fn same(a: &str, b: &str) -> Option<bool> {
    (!a.is_empty() && !b.is_empty()).then(|| a == b)
}

/// What decisions are made from of an Agent. Its inventory is the guest's word: good for recognising, never for choosing
/// what is destroyed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentFacts {
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    /// Version that was read.
    pub resource_version: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Being deleted, or the VM under it is.
    pub is_going: bool,
    /// The destruction of the VM under it has begun: it cannot be claimed any more.
    pub is_fenced: bool,
    /// May be used.
    pub approved: bool,
    /// Role in its spec.
    pub role: String,
    /// Host name in its spec.
    pub hostname: String,
    /// Host name that it says it has.
    pub observed_hostname: String,
    /// UUID and MAC that it says it has.
    pub identity: HardwareId,
    /// Claimed by a Machine.
    pub is_bound: bool,
    /// The cluster that claimed it.
    pub cluster: String,
    /// Its InfraEnv.
    pub infra_env: String,
    /// The provider would not refuse it.
    pub is_usable: bool,
    /// Its operating system is installed.
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

    /// The host name that counts.
    #[must_use]
    pub fn known_hostname(&self) -> &str {
        if self.hostname.is_empty() { &self.observed_hostname } else { &self.hostname }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_too_long_keeps_its_beginning_and_fits() {
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

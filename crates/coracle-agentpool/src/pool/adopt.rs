//! Adoption (opt-in) of VMs that are older than the pool: VMs of discovered Agents that no VsphereAgent owns.
//!
//! The guest controls what an Agent reports. So a VM is adopted only if vSphere shows a VM of that name in the pool's folder,
//! with that UUID and MAC address, and without an owner in its notes.

use std::sync::Arc;

use coracle_api::agentpool::{NameRef, OwnedVm, VsphereAgent, VsphereAgentPool, VsphereAgentSpec, names};
use coracle_vsphere::{SiteVms, Vm};
use kube::ResourceExt as _;

use super::plan::Adoption;
use crate::{
    Context,
    identity::{HardwareId, label_value},
};

/// Whether the pool adopts VMs of discovered Agents.
#[must_use]
pub(crate) fn manages(pool: &VsphereAgentPool) -> bool {
    pool.annotations().get(names::ADOPT).is_some_and(|v| v == "manage")
}

/// Rows of discovered Agents whose VM vSphere confirms, each with that VM (pure).
pub(crate) fn confirmed_rows<'a>(
    rows: &'a [OwnedVm],
    seen: &'a SiteVms,
) -> impl Iterator<Item = (&'a OwnedVm, &'a Arc<Vm>)> {
    let all = rows.iter().filter(|r| seen.is_current && r.source == names::source::DISCOVERED_AGENT);
    all.filter_map(|row| {
        let id = HardwareId::of_row(row);
        let mut named = seen.vms.values().filter(|vm| vm.name == row.name);
        let vm = named.next().filter(|_| named.next().is_none())?;
        let same = !id.uuid.is_empty() && vm.uuid == id.uuid && (id.mac.is_empty() || vm.mac == id.mac);
        (same && vm.unreadable.is_empty() && !vm.annotation.starts_with(names::OWNER_NOTE))
            .then_some((row, vm))
    })
}

/// VMs of discovered Agents that the pool may adopt. Reads the VMs from the watch of vCenter.
pub(super) async fn adoptable(cx: &Context, pool: &VsphereAgentPool, rows: &[OwnedVm]) -> Vec<Adoption> {
    if !manages(pool) || !rows.iter().any(|r| r.source == names::source::DISCOVERED_AGENT) {
        return Vec::new();
    }
    // The VsphereAgents that wait for vCenter report why it is unreachable.
    let Ok(provider) = cx.vcenters.provider(&cx.client, pool).await else { return Vec::new() };
    let machines = provider.vcenter.api.machines(&provider.site).borrow().clone();
    let adoption = |(row, vm): (&OwnedVm, &Arc<Vm>)| Adoption {
        request: request(pool, row),
        note: format!("VM {} ({}) is adopted with its Agent", vm.name, vm.uuid),
    };
    confirmed_rows(rows, &machines).map(adoption).collect()
}

fn request(pool: &VsphereAgentPool, row: &OwnedVm) -> VsphereAgent {
    let spec = VsphereAgentSpec { pool_ref: NameRef { name: pool.name_any() } };
    let mut agent = VsphereAgent::new(&row.name, spec);
    agent.metadata.namespace = pool.namespace();
    agent.metadata.finalizers = Some(vec![names::AGENT_FINALIZER.to_owned()]);
    agent.metadata.labels = Some(
        [
            (names::POOL_LABEL, label_value(&pool.name_any())),
            (names::CREATED_FOR, names::FOR_ADOPTED.to_owned()),
        ]
        .map(|(k, v)| (k.to_owned(), v))
        .into(),
    );
    agent.metadata.annotations = Some([(names::VM_NAME.to_owned(), row.name.clone())].into());
    agent.metadata.owner_references =
        kube::Resource::controller_owner_ref(pool, &()).map(|owner| vec![owner]);
    agent
}

#[cfg(test)]
mod tests {
    use coracle_vsphere::Object;

    use super::*;

    const UUID: &str = "42000000-0000-0000-0000-000000000001";
    const OTHER: &str = "42000000-0000-0000-0000-000000000002";

    fn vm(id: &str, name: &str, uuid: &str, mac: &str, annotation: &str) -> (String, Arc<Vm>) {
        let vm = Vm {
            object: Object { kind: "VirtualMachine".into(), id: id.into() },
            name: name.into(),
            uuid: uuid.into(),
            mac: mac.into(),
            annotation: annotation.into(),
            folder: None,
            instance_uuid: String::new(),
            powered_on: true,
            cdrom: None,
            question: None,
            unreadable: String::new(),
        };
        (id.to_owned(), Arc::new(vm))
    }

    #[test]
    fn unconfirmed_or_owned_vms_are_not_adopted() {
        let (mac, note) = ("00-50-56-00-00-01", "agent-forge.containeroo.ch/vsphere-agent-uid=x");
        let row = |source: &str, mac: &str| OwnedVm {
            name: "old".into(),
            source: source.into(),
            bios_uuid: UUID.into(),
            mac_address: mac.into(),
            ..OwnedVm::default()
        };
        let ours = || row(names::source::DISCOVERED_AGENT, mac);
        for (why, row, vms, current, want) in [
            ("all agree", ours(), vec![vm("1", "old", UUID, mac, "")], true, 1),
            (
                "notes of a person are not an owner",
                ours(),
                vec![vm("1", "old", UUID, mac, "rack 7")],
                true,
                1,
            ),
            ("another UUID", ours(), vec![vm("1", "old", OTHER, mac, "")], true, 0),
            ("another MAC", ours(), vec![vm("1", "old", UUID, "00-50-56-00-00-02", "")], true, 0),
            ("another name", ours(), vec![vm("1", "new", UUID, mac, "")], true, 0),
            ("it has an owner", ours(), vec![vm("1", "old", UUID, mac, note)], true, 0),
            (
                "two of that name",
                ours(),
                vec![vm("1", "old", UUID, mac, ""), vm("2", "old", OTHER, "", "")],
                true,
                0,
            ),
            ("the inventory is not current", ours(), vec![vm("1", "old", UUID, mac, "")], false, 0),
            (
                "a row of our own",
                row(names::source::VSPHERE_AGENT, mac),
                vec![vm("1", "old", UUID, mac, "")],
                true,
                0,
            ),
        ] {
            let seen = SiteVms { is_current: current, vms: vms.into_iter().collect() };
            assert_eq!(confirmed_rows(&[row], &seen).count(), want, "{why}");
        }
    }
}

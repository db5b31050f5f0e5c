//! Specifications as XML. vCenter's parser requires the children of a type in the order of its schema, those of the base type
//! first. The simulator does not check the order, so golden files do.

use super::xml::{el, reference, text, typed};
use crate::{Cdrom, Change, Network, Object, Site, Store, VmConfigSpec, VsphereError};

/// Devices of a new VM have negative keys until vCenter assigns others.
const CONTROLLER_KEY: i32 = -1;
const DISK_KEY: i32 = -2;
const CDROM_KEY: i32 = -3;
const NIC_KEY: i32 = -4;
/// Key of the first of the two IDE controllers that every VM has.
const IDE_KEY: i32 = 200;
/// vSphere expects disk sizes in KiB.
const KIB_PER_GIB: i64 = 1_048_576;

/// Names of disk controllers in a specification, with their vSphere types.
const CONTROLLERS: [(&str, &str); 9] = [
    ("pvscsi", "ParaVirtualSCSIController"),
    ("lsilogic", "VirtualLsiLogicController"),
    ("scsi", "VirtualLsiLogicController"),
    ("lsilogic-sas", "VirtualLsiLogicSASController"),
    ("buslogic", "VirtualBusLogicController"),
    ("nvme", "VirtualNVMEController"),
    ("sata", "VirtualAHCIController"),
    ("ahci", "VirtualAHCIController"),
    ("ide", ""),
];

/// Names of network cards in a specification, with their vSphere types.
const ADAPTERS: [(&str, &str); 7] = [
    ("e1000", "VirtualE1000"),
    ("e1000e", "VirtualE1000e"),
    ("vmxnet2", "VirtualVmxnet2"),
    ("vmxnet3", "VirtualVmxnet3"),
    ("vmxnet3vrdma", "VirtualVmxnet3Vrdma"),
    ("pcnet32", "VirtualPCNet32"),
    ("sriov", "VirtualSriovEthernetCard"),
];

fn map_keyword(
    field: &'static str,
    value: &str,
    words: &[(&'static str, &'static str)],
    allowed: &'static str,
) -> Result<&'static str, VsphereError> {
    let found = words.iter().find(|(name, _)| name.eq_ignore_ascii_case(value)).map(|(_, kind)| *kind);
    found.ok_or_else(|| VsphereError::Unsupported { field, value: value.to_owned(), allowed })
}

/// `VirtualMachineConfigSpec` of a new VM. Without a datastore it is the one of a placement request.
pub(super) fn config(
    name: &str,
    vm: &VmConfigSpec,
    site: &Site,
    store: Option<&Store>,
) -> Result<String, VsphereError> {
    let path = store.map(|s| match vm.directory.as_str() {
        "" => format!("[{}]", s.name),
        directory => format!("[{}] {directory}/{}.vmx", s.name, vm.name),
    });
    let mut inner = String::new();
    inner += &text("name", &vm.name);
    inner += &text("uuid", &vm.uuid);
    inner += &text("instanceUuid", &vm.instance_uuid);
    inner += &text("guestId", &vm.guest_id);
    inner += &text("annotation", &vm.annotation);
    if let Some(path) = path {
        inner += &el("files", text("vmPathName", path));
    }
    inner += &text("numCPUs", vm.cpus);
    inner += &text("memoryMB", vm.memory_mib);
    inner += &devices(vm, site, store)?;
    let value = typed("value", "xsd:string", "TRUE");
    inner += &el("extraConfig", text("key", "disk.EnableUUID") + &value);
    inner += &text("firmware", &vm.firmware);
    Ok(el(name, inner))
}

fn devices(vm: &VmConfigSpec, site: &Site, store: Option<&Store>) -> Result<String, VsphereError> {
    let allowed = "pvscsi, lsilogic, lsilogic-sas, buslogic, nvme, sata, ide";
    let controller = map_keyword("vsphere.scsiType", &vm.controller, &CONTROLLERS, allowed)?;
    let mut all = String::new();
    let mut disk_controller = IDE_KEY;
    if !controller.is_empty() {
        disk_controller = CONTROLLER_KEY;
        let mut inner = text("key", CONTROLLER_KEY) + &text("busNumber", 0);
        if controller.contains("SCSI") || controller.contains("Logic") {
            inner += &text("sharedBus", "noSharing");
        }
        all += &device_change(None, typed("device", controller, inner));
    }
    all += &device_change(Some("create"), typed("device", "VirtualDisk", disk(vm, store, disk_controller)));
    // On IDE, the disk is unit 0 of the controller.
    let unit = i32::from(disk_controller == IDE_KEY);
    all += &device_change(
        None,
        typed(
            "device",
            "VirtualCdrom",
            cdrom(CDROM_KEY, IDE_KEY, unit, &iso_backing(&vm.iso, Some(&site.iso)), true),
        ),
    );
    let allowed = "e1000, e1000e, vmxnet2, vmxnet3, vmxnet3vrdma, pcnet32, sriov";
    let adapter = map_keyword("vsphere.networkAdapterType", &vm.adapter, &ADAPTERS, allowed)?;
    let card = text("key", NIC_KEY)
        + &network_backing(&site.network)
        + &connectable(true, true, true)
        + &text("addressType", "generated");
    all += &device_change(None, typed("device", adapter, card));
    Ok(all)
}

fn device_change(file: Option<&str>, device: String) -> String {
    let file = file.map(|f| text("fileOperation", f)).unwrap_or_default();
    el("deviceChange", text("operation", "add") + &file + &device)
}

fn disk(vm: &VmConfigSpec, store: Option<&Store>, controller: i32) -> String {
    let kib = i64::from(vm.disk_gib) * KIB_PER_GIB;
    text("key", DISK_KEY)
        + &disk_backing("backing", vm, store)
        + &text("controllerKey", controller)
        + &text("unitNumber", 0)
        + &text("capacityInKB", kib)
}

fn disk_backing(name: &str, vm: &VmConfigSpec, store: Option<&Store>) -> String {
    let file = store.map(|s| format!("[{}]", s.name)).unwrap_or_default();
    let mut inner = text("fileName", file);
    if let Some(store) = store {
        inner += &reference("datastore", &store.object);
    }
    inner += &text("diskMode", "persistent");
    // Eager zeroing needs a thick disk and has no effect on a thin one.
    inner += &text("thinProvisioned", !vm.eager_disk);
    if vm.eager_disk {
        inner += &text("eagerlyScrub", true);
    }
    typed(name, "VirtualDiskFlatVer2BackingInfo", inner)
}

fn cdrom(key: i32, controller: i32, unit: i32, backing: &str, connected: bool) -> String {
    text("key", key)
        + backing
        + &connectable(connected, true, connected)
        + &text("controllerKey", controller)
        + &text("unitNumber", unit)
}

fn iso_backing(path: &str, store: Option<&Store>) -> String {
    let store = store.map(|s| reference("datastore", &s.object)).unwrap_or_default();
    typed("backing", "VirtualCdromIsoBackingInfo", text("fileName", path) + &store)
}

fn connectable(start: bool, guest: bool, now: bool) -> String {
    let inner = text("startConnected", start) + &text("allowGuestControl", guest) + &text("connected", now);
    el("connectable", inner)
}

fn network_backing(network: &Network) -> String {
    match network {
        Network::Standard { object, name } => typed(
            "backing",
            "VirtualEthernetCardNetworkBackingInfo",
            text("deviceName", name) + &reference("network", object),
        ),
        Network::Distributed { switch_uuid, portgroup } => typed(
            "backing",
            "VirtualEthernetCardDistributedVirtualPortBackingInfo",
            el("port", text("switchUuid", switch_uuid) + &text("portgroupKey", portgroup)),
        ),
        Network::Opaque { id, kind } => typed(
            "backing",
            "VirtualEthernetCardOpaqueNetworkBackingInfo",
            text("opaqueNetworkId", id) + &text("opaqueNetworkType", kind),
        ),
    }
}

/// `StoragePlacementSpec` for a new VM in a datastore cluster.
pub(super) fn placement(vm: &VmConfigSpec, site: &Site, pod: &Object) -> Result<String, VsphereError> {
    let disk = el("disk", text("diskId", DISK_KEY) + &disk_backing("diskBackingInfo", vm, None));
    let initial = el("initialVmConfig", reference("storagePod", pod) + &disk);
    let selection = el("podSelectionSpec", initial + &reference("storagePod", pod));
    let inner = text("type", "create")
        + &selection
        + &config("configSpec", vm, site, None)?
        + &reference("resourcePool", &site.pool)
        + &reference("folder", &site.folder);
    Ok(el("storageSpec", inner))
}

/// `VirtualMachineConfigSpec` of a change.
pub(super) fn change(change: &Change) -> String {
    let edit = |drive: &Cdrom, backing: &str, connected: bool| {
        let device = cdrom(drive.key, drive.controller_key, drive.unit, backing, connected);
        el("deviceChange", text("operation", "edit") + &typed("device", "VirtualCdrom", device))
    };
    let inner = match change {
        Change::Annotation(note) => text("annotation", note),
        Change::InsertIso { cdrom, iso } => edit(cdrom, &iso_backing(iso, None), true),
        Change::Disconnect(drive) => {
            let backing = iso_backing(drive.iso.as_deref().unwrap_or_default(), None);
            edit(drive, &backing, false)
        }
        Change::Empty(drive) => {
            let inner = text("deviceName", "") + &text("exclusive", false);
            edit(drive, &typed("backing", "VirtualCdromRemotePassthroughBackingInfo", inner), false)
        }
    };
    el("spec", inner)
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;

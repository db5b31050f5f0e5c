//! Configurations of VMs. Pure; covered by golden tests (Cloud Hypervisor `vmm/src/api/openapi/cloud-hypervisor.yaml`).

use std::path::PathBuf;

use coracle_hypervisor::{
    Disk, JAIL_BOOT_FILES, JAIL_RUN_DIR, KERNEL_PARAMETERS, Nic, NicBackend, VmmConfig, slot_in_jail,
};
use serde_json::{Map, Value, json};

/// Vsock socket of the guest.
pub(crate) const GUEST_SOCKET: &str = "guest.sock";
/// Socket of the serial console.
pub(crate) const CONSOLE_SOCKET: &str = "console.sock";
/// Id of the only NIC.
const NIC: &str = "eth0";
/// Guest CID. Any number is valid, because each VM has a socket of its own.
const GUEST_CID: u32 = 3;

/// Kernel command line. A reboot of the guest would restart the VM, so the guest agent powers it off instead.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 coracle.end=poweroff";

/// Returns a VMM config with the paths that a VMM in a jail sees.
#[must_use]
pub(crate) fn in_jail(vmm_config: &VmmConfig) -> VmmConfig {
    let [kernel, initrd] = JAIL_BOOT_FILES.map(PathBuf::from);
    let disks = vmm_config.disks.iter().map(disk_in_jail).collect();
    VmmConfig { kernel, initrd, disks, run_dir: JAIL_RUN_DIR.into(), ..vmm_config.clone() }
}

/// Returns a disk with the path that a VMM in a jail sees.
#[must_use]
pub(crate) fn disk_in_jail(disk: &Disk) -> Disk {
    Disk { path: slot_in_jail(disk.slot), ..disk.clone() }
}

/// Way in which the VMM gets its tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapBy {
    /// The VMM opens the tap by name.
    Name,
    /// A call of its own passes the descriptor: the configuration has no NIC.
    Call,
    /// The restore call passes the descriptor: the configuration has a NIC.
    Descriptor,
}

/// Returns the NIC without its tap, which is passed with the call as a descriptor.
///
/// # Errors
/// Same as [`vm_config`].
pub(crate) fn nic_without_tap(nic: &Nic) -> Result<Value, String> {
    tap(nic)?;
    Ok(json!({"id": NIC, "mac": nic.mac.to_string()}))
}

/// Returns the NIC of the restore call, whose tap is passed with the call as a descriptor.
pub(crate) fn restored_nics(vmm_config: &VmmConfig) -> Value {
    vmm_config.nic.as_ref().map_or(json!([]), |_| json!([{"id": NIC, "num_fds": 1}]))
}

/// Returns the configuration of a VM. Empty slots are left out, because a disk can be hot-plugged.
///
/// # Errors
/// When the VMM config needs a feature that Cloud Hypervisor lacks, with the alternative.
pub fn vm_config(vmm_config: &VmmConfig, tap_by: TapBy) -> Result<Value, String> {
    let disks: Vec<_> = vmm_config.disks.iter().map(disk_config).collect();
    let socket = |name: &str| vmm_config.run_dir.join(name);
    let command_line = format!("{COMMAND_LINE} {KERNEL_PARAMETERS}");
    let mut config = json!({
        "payload": {"kernel": vmm_config.kernel, "initramfs": vmm_config.initrd, "cmdline": command_line},
        "cpus": {"boot_vcpus": vmm_config.vcpus.get(), "max_vcpus": vmm_config.vcpus.get()},
        "memory": {"size": u64::from(vmm_config.memory.get()) << 20},
        "disks": disks,
        "rng": {"src": "/dev/urandom"},
        "vsock": {"id": "vsock", "cid": GUEST_CID, "socket": socket(GUEST_SOCKET)},
        "serial": {"mode": "Socket", "socket": socket(CONSOLE_SOCKET)},
        "console": {"mode": "Off"},
    });
    if let Some(nic) = &vmm_config.nic {
        let mac = nic.mac.to_string();
        match (tap(nic)?, tap_by) {
            (name, TapBy::Name) => config["net"] = json!([{"id": NIC, "tap": name, "mac": mac}]),
            (_, TapBy::Call) => {}
            // The number is meaningless to another process, so Cloud Hypervisor writes and reads this one.
            (_, TapBy::Descriptor) => config["net"] = json!([{"id": NIC, "fds": [-1], "mac": mac}]),
        }
    }
    Ok(config)
}

/// Returns the configuration of a disk in a slot. The guest identifies it by its serial number.
#[must_use]
pub(crate) fn disk_config(disk: &Disk) -> Value {
    let name = slot_name(disk.slot);
    json!({"id": name, "serial": name, "path": disk.path, "readonly": disk.read_only, "image_type": "Raw"})
}

/// Returns the id of a slot's disk.
#[must_use]
pub(crate) fn slot_name(slot: usize) -> String {
    format!("slot{slot}")
}

fn tap(nic: &Nic) -> Result<&str, String> {
    match &nic.backend {
        NicBackend::Tap { name } => Ok(name),
        NicBackend::User { .. } => {
            Err("Cloud Hypervisor needs a tap device: run the node as root, or use the qemu driver"
                .to_owned())
        }
    }
}

/// Keys that are kept of each section of a saved configuration: they tell where the saved state of the VM is found, and its
/// layout. All other values, every path among them, are those of the present VM.
const KEPT: [(&str, &[&str]); 8] = [
    (
        "cpus",
        &["topology", "kvm_hyperv", "max_phys_bits", "affinity", "features", "nested", "core_scheduling"],
    ),
    (
        "memory",
        &[
            "mergeable",
            "hotplug_method",
            "hugepages",
            "prefault",
            "thp",
            "shared",
            "hotplug_size",
            "hotplugged_size",
            "zones",
        ],
    ),
    (
        "disks",
        &[
            "num_queues",
            "queue_size",
            "pci_segment",
            "iommu",
            "direct",
            "disable_io_uring",
            "disable_aio",
            "sparse",
        ],
    ),
    (
        "net",
        &[
            "num_queues",
            "queue_size",
            "pci_segment",
            "iommu",
            "mtu",
            "offload_tso",
            "offload_ufo",
            "offload_csum",
        ],
    ),
    ("rng", &["iommu"]),
    ("vsock", &["iommu", "pci_segment"]),
    ("serial", &["iommu"]),
    ("console", &["iommu"]),
];

/// Converts a saved configuration to that of the VM that `vmm_config` describes.
///
/// # Errors
/// When the saved VM has another disk or NIC than the VMM config, or a device that no VM of this driver has.
pub fn rewritten(saved: &Value, vmm_config: &VmmConfig, tap_by: TapBy) -> Result<Value, String> {
    let saved = saved.as_object().ok_or("not a JSON object")?;
    let mut config = vm_config(vmm_config, tap_by)?;
    for (section, value) in saved {
        let kept = KEPT.iter().find(|(name, _)| name == section).map(|(_, keys)| *keys);
        let ours = config.get_mut(section);
        match (ours, kept) {
            // The present VM determines the whole section.
            (Some(_), None) => {}
            (Some(Value::Array(ours)), Some(keys)) => merge_devices(ours, value, keys, section)?,
            (Some(Value::Object(ours)), Some(keys)) => copy_keys(ours, value, keys),
            _ if is_nothing(value) => {}
            _ => return Err(format!("it has a section {section}, which no machine of ours has")),
        }
    }
    Ok(config)
}

/// Merges devices with the same id, in the saved order, which is the order of their state.
fn merge_devices(ours: &mut Vec<Value>, saved: &Value, keys: &[&str], section: &str) -> Result<(), String> {
    let saved = saved.as_array().map(Vec::as_slice).unwrap_or_default();
    let id = |device: &Value| device.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut merged = Vec::new();
    for device in saved {
        let name = id(device);
        let at = ours.iter().position(|own| id(own) == name);
        let at = at.ok_or_else(|| format!("its {section} have {name}, which this VM has not"))?;
        let mut own = ours.swap_remove(at);
        if let Value::Object(own) = &mut own {
            copy_keys(own, device, keys);
        }
        merged.push(own);
    }
    if let Some(missing) = ours.first() {
        return Err(format!("its {section} have no {}, which this VM has", id(missing)));
    }
    *ours = merged;
    Ok(())
}

fn copy_keys(ours: &mut Map<String, Value>, saved: &Value, keys: &[&str]) {
    for key in keys {
        if let Some(value) = saved.get(key) {
            ours.insert((*key).to_owned(), value.clone());
        }
    }
}

/// Returns whether a section is empty, or only a switch or a number.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        Value::String(_) => false,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use coracle_hypervisor::{Accelerator, Slots};
    use coracle_types::{InstanceId, MacAddr, VmId};

    use super::*;

    pub(crate) fn vmm_config(name: &str) -> VmmConfig {
        let id = InstanceId::from(VmId::of_name(&name.parse().unwrap()));
        VmmConfig {
            vcpus: 2.try_into().unwrap(),
            memory: 256.try_into().unwrap(),
            kernel: "/boot/vmlinuz".into(),
            initrd: "/boot/initrd".into(),
            disks: vec![
                Disk::raw(0, "/images/a.erofs", true),
                Disk::raw(2, format!("/vms/{name}/overlay.ext4"), false),
            ],
            slots: Slots { read_only: 2, writable: 1 },
            machine_type: Default::default(),
            nic: Some(Nic { mac: MacAddr::of(&id), backend: NicBackend::Tap { name: format!("ct-{name}") } }),
            display: None,
            state_dir: format!("/state/vms/{name}").into(),
            run_dir: format!("/run/coracle/{name}").into(),
            accelerator: Accelerator::Kvm,
            driver: String::new(),
            uid: None,
            id,
        }
    }

    #[test]
    fn golden_config() {
        let config = vm_config(&vmm_config("web"), TapBy::Name).unwrap();
        insta::assert_snapshot!(serde_json::to_string_pretty(&config).unwrap());
    }

    #[test]
    fn jailed_vm_config_contains_no_host_path() {
        let vmm_config = in_jail(&vmm_config("web"));
        for (tap_by, nics) in [(TapBy::Call, Value::Null), (TapBy::Descriptor, json!([-1]))] {
            let config = vm_config(&vmm_config, tap_by).unwrap();
            assert_eq!(config["net"][0]["fds"], nics);
            assert_eq!(config["disks"][1]["path"], "/run/slot2");
            assert_eq!(config["payload"]["kernel"], "/vmm/kernel");
            let text = config.to_string();
            assert!(!text.contains("/web") && !text.contains("ct-web"), "{text}");
        }
    }

    #[test]
    fn nic_without_tap_is_refused_naming_the_qemu_driver() {
        let mut vmm_config = vmm_config("web");
        vmm_config.nic.as_mut().unwrap().backend = NicBackend::User { forwards: vec![], isolated: true };
        assert!(vm_config(&vmm_config, TapBy::Name).unwrap_err().contains("qemu driver"));
    }

    #[test]
    fn restored_config_has_own_tap_mac_disks_and_sockets() {
        let mut saved = vm_config(&vmm_config("web"), TapBy::Name).unwrap();
        saved["disks"].as_array_mut().unwrap().reverse();
        saved["disks"][0]["queue_size"] = json!(64);
        saved["net"][0]["num_queues"] = json!(2);
        for nothing in ["fs", "devices", "balloon"] {
            saved[nothing] = Value::Null;
        }
        saved["iommu"] = json!(false);
        let copy = rewritten(&saved, &vmm_config("copy"), TapBy::Name).unwrap();
        let text = copy.to_string();
        assert!(!text.contains("/web") && !text.contains("ct-web"), "{text}");
        assert_eq!(copy["disks"][0]["path"], "/vms/copy/overlay.ext4");
        assert_eq!((&copy["disks"][0]["queue_size"], &copy["net"][0]["num_queues"]), (&json!(64), &json!(2)));
    }

    #[test]
    fn saved_config_with_unexpected_devices_is_refused() {
        let good = || vm_config(&vmm_config("web"), TapBy::Name).unwrap();
        let with = |pointer: &str, value: Value| {
            let mut config = good();
            config[pointer] = value;
            config
        };
        let mut more = good();
        more["disks"].as_array_mut().unwrap().push(json!({"id": "slot7", "path": "/etc/shadow"}));
        let mut fewer = good();
        fewer["disks"].as_array_mut().unwrap().pop();
        for (why, saved, word) in [
            ("a host directory", with("fs", json!([{"tag": "x", "socket": "/run/x"}])), "fs"),
            ("a host device", with("devices", json!([{"path": "/sys/bus/pci/devices/0"}])), "devices"),
            ("a disk too many", more, "slot7"),
            ("a disk too few", fewer, "slot2"),
            ("no object", json!([]), "object"),
        ] {
            let refused = rewritten(&saved, &vmm_config("web"), TapBy::Name).unwrap_err();
            assert!(refused.contains(word), "{why}: {refused}");
        }
        // A path in a known section is not refused, but is dropped.
        let kernel =
            rewritten(&with("payload", json!({"kernel": "/etc/shadow"})), &vmm_config("web"), TapBy::Name)
                .unwrap();
        let serial = rewritten(
            &with("serial", json!({"mode": "File", "file": "/etc/passwd"})),
            &vmm_config("web"),
            TapBy::Name,
        )
        .unwrap();
        assert_eq!([kernel, serial], [good(), good()]);
    }
}

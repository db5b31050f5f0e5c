//! API calls from a VMM config, in Firecracker's order. Pure; covered by golden tests.

use coracle_hypervisor::{KERNEL_PARAMETERS, Nic, NicBackend, VmmConfig};
use hyper::Method;
use serde_json::{Value, json};

/// Name of the only NIC, whose tap is replaced when a snapshot is loaded.
pub(crate) const NIC: &str = "eth0";
/// Vsock socket of the guest, in the working directory of the process.
pub(crate) const GUEST_SOCKET: &str = "guest.sock";
/// Guest CID. Any number is valid, because each VM has a socket of its own.
const GUEST_CID: u32 = 3;

/// Call of the API (Firecracker `src/firecracker/swagger/firecracker.yaml`).
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// HTTP method, PUT or PATCH.
    pub method: Method,
    /// Request path.
    pub path: String,
    /// Request body.
    pub body: Value,
    /// Whether the call writes or reads the whole memory of the VM.
    pub moves_memory: bool,
}

impl Call {
    fn put(path: impl Into<String>, body: Value) -> Self {
        Self { method: Method::PUT, path: path.into(), body, moves_memory: false }
    }

    fn patch(path: impl Into<String>, body: Value) -> Self {
        Self { method: Method::PATCH, path: path.into(), body, moves_memory: false }
    }
}

/// Paths of the files that the process opens itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootPaths {
    /// Path of the kernel, an ELF file.
    pub kernel: String,
    /// Path of the initramfs.
    pub initrd: String,
}

/// Returns the calls that configure and boot a VM, up to and including `InstanceStart`.
///
/// # Errors
/// When the VMM config needs a feature that Firecracker lacks, with the alternative.
pub fn boot_calls(vmm_config: &VmmConfig, paths: &BootPaths) -> Result<Vec<Call>, String> {
    let mut calls = vec![
        Call::put(
            "/machine-config",
            json!({"vcpu_count": vmm_config.vcpus.get(), "mem_size_mib": vmm_config.memory.get()}),
        ),
        Call::put(
            "/boot-source",
            json!({
                "kernel_image_path": paths.kernel, "initrd_path": paths.initrd,
                "boot_args": format!("{COMMAND_LINE} {KERNEL_PARAMETERS}"),
            }),
        ),
    ];
    calls.extend((0..vmm_config.slots.total()).map(|slot| {
        Call::put(
            format!("/drives/slot{slot}"),
            json!({
                "drive_id": format!("slot{slot}"), "path_on_host": slot_path(slot), "is_root_device": false,
                "is_read_only": vmm_config.slots.is_read_only(slot),
            }),
        )
    }));
    if let Some(nic) = &vmm_config.nic {
        let tap = tap(nic)?;
        calls.push(Call::put(
            format!("/network-interfaces/{NIC}"),
            json!({"iface_id": NIC, "host_dev_name": tap, "guest_mac": nic.mac.to_string()}),
        ));
    }
    calls.push(Call::put("/vsock", json!({"guest_cid": GUEST_CID, "uds_path": GUEST_SOCKET})));
    calls.push(Call::put("/entropy", json!({})));
    calls.push(Call::put("/actions", json!({"action_type": "InstanceStart"})));
    Ok(calls)
}

/// Returns the calls that load a saved VMM, paused. The disks are read anew, since the guest knows those of the template
/// (`PATCH /drives/{id}` reads the size again and notifies the guest).
///
/// # Errors
/// Same as [`boot_calls`].
pub fn load_calls(
    vmm_config: &VmmConfig,
    state: &str,
    memory: &str,
    refilled: bool,
) -> Result<Vec<Call>, String> {
    let mut load = json!({
        "snapshot_path": state, "mem_backend": {"backend_type": "File", "backend_path": memory}, "resume_vm": false,
    });
    if let Some(nic) = &vmm_config.nic {
        load["network_overrides"] = json!([{"iface_id": NIC, "host_dev_name": tap(nic)?}]);
    }
    let mut calls = vec![Call { moves_memory: true, ..Call::put("/snapshot/load", load) }];
    let filled = vmm_config.disks.iter().filter(|_| refilled);
    calls.extend(filled.map(|disk| refill(disk.slot)));
    Ok(calls)
}

/// Returns the call that makes a paused VMM write its state and its memory to these files.
pub(crate) fn save_call(state: &str, memory: &str) -> Call {
    let body = json!({"snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory});
    Call { moves_memory: true, ..Call::put("/snapshot/create", body) }
}

/// Returns the call that makes the VMM reopen a slot's file and report its size to the guest.
pub(crate) fn refill(slot: usize) -> Call {
    let body = json!({"drive_id": format!("slot{slot}"), "path_on_host": slot_path(slot)});
    Call::patch(format!("/drives/slot{slot}"), body)
}

/// Returns the name of a slot's disk in the working directory of the process.
#[must_use]
pub(crate) fn slot_path(slot: usize) -> String {
    format!("slot{slot}")
}

fn tap(nic: &Nic) -> Result<&str, String> {
    match &nic.backend {
        NicBackend::Tap { name } => Ok(name),
        NicBackend::User { .. } => {
            Err("Firecracker needs a tap device: run the node as root, or use the qemu driver".to_owned())
        }
    }
}

/// Kernel command line. With `reboot=k` a reboot of the guest, by the keyboard controller, ends the process. With
/// `--enable-pci`, `pci=off` must be absent. Firecracker's default has `nomodule`, but the project's guest has its virtio
/// drivers as modules. The other options save the guest the search for absent devices (docs, "Default kernel args").
const COMMAND_LINE: &str = "console=ttyS0 quiet reboot=k panic=-1 8250.nr_uarts=1 i8042.noaux i8042.nomux \
     i8042.dumbkbd swiotlb=noforce";

#[cfg(test)]
mod tests {
    use coracle_hypervisor::{Accelerator, Disk, Slots};
    use coracle_types::{InstanceId, MacAddr, VmId};

    use super::*;

    fn vmm_config(backend: NicBackend) -> VmmConfig {
        let id = InstanceId::from(VmId::of_name(&"web".parse().unwrap()));
        VmmConfig {
            vcpus: 2.try_into().unwrap(),
            memory: 256.try_into().unwrap(),
            kernel: "/boot/vmlinuz".into(),
            initrd: "/boot/initrd".into(),
            disks: vec![Disk::raw(0, "/images/a.erofs", true), Disk::raw(2, "/vms/web/overlay.ext4", false)],
            slots: Slots { read_only: 2, writable: 1 },
            machine_type: Default::default(),
            nic: Some(Nic { mac: MacAddr::of(&id), backend }),
            display: None,
            state_dir: "/state/vms/web".into(),
            run_dir: "/run/coracle/0123/abc".into(),
            accelerator: Accelerator::Kvm,
            driver: String::new(),
            uid: None,
            id,
        }
    }

    fn tap() -> VmmConfig {
        vmm_config(NicBackend::Tap { name: "ct0123".into() })
    }

    fn text(calls: &[Call]) -> String {
        let line = |c: &Call| format!("{} {} {}", c.method, c.path, c.body);
        calls.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn golden_boot() {
        let paths = BootPaths { kernel: "/boot/vmlinux".into(), initrd: "/boot/initrd".into() };
        insta::assert_snapshot!(text(&boot_calls(&tap(), &paths).unwrap()));
    }

    #[test]
    fn golden_clone() {
        insta::assert_snapshot!(text(
            &load_calls(&tap(), "/proc/self/fd/7", "/proc/self/fd/8", true).unwrap()
        ));
    }

    #[test]
    fn nic_without_tap_is_refused_naming_the_qemu_driver() {
        let paths = BootPaths { kernel: String::new(), initrd: String::new() };
        let why = boot_calls(&vmm_config(NicBackend::User { forwards: vec![], isolated: true }), &paths)
            .unwrap_err();
        assert!(why.contains("qemu driver"), "{why}");
    }
}

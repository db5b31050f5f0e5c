//! Disks of a running VM. A microvm has its devices from the start, and the block nodes of its slots are replaced. A PC has
//! ports, to which devices are hot-plugged.

use std::time::Duration;

use coracle_hypervisor::{Disk, DriverError, MachineType, VmmConfig};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::argv::EMPTY_SLOT_BYTES;
use crate::monitor::{FdSet, Monitor};

/// Time limit for a guest to release a device, and interval of the checks.
const UNPLUG_LIMIT: Duration = Duration::from_secs(24);
const UNPLUG_POLL: Duration = Duration::from_millis(50);
/// Time after which the unplug request is repeated: a kernel that was still booting may have missed it. Not sooner: with PCI
/// Express the kernel first blinks the power indicator for five seconds, and a second request in that time cancels the removal
/// (PCI Express Base Specification, "Attention Button").
const UNPLUG_AGAIN: Duration = Duration::from_secs(8);
/// QOM path of the devices that have an id.
const DEVICES: &str = "/machine/peripheral";

impl Monitor<'_> {
    /// Attaches a disk to its empty slot, and notifies the guest of the size if it is to be shown.
    ///
    /// A resize notifies the guest of a new size, but a read-only node cannot be resized. Therefore a read-only slot is first
    /// writable for a moment, on an empty file of the disk's size, never on the disk itself.
    pub(crate) async fn attach_slot(
        &mut self,
        vmm_config: &VmmConfig,
        disk: &Disk,
    ) -> Result<(), DriverError> {
        if let MachineType::Q35(_) = vmm_config.machine_type {
            return self.plug(disk).await;
        }
        let slot = disk.slot;
        let fd_set = self.add_disk_fd_set(disk).await?;
        let (bytes, node) = (fd_set.bytes(), format!("disk{slot}"));
        let in_place = [add(&node, &fd_set, disk.read_only), reopen(slot, &node, disk.read_only)];
        let mut commands = Vec::new();
        match (disk.shows_size, disk.read_only) {
            (false, _) => commands.extend(in_place),
            (true, false) => {
                commands.extend(in_place);
                commands.push(resize(slot, bytes));
            }
            (true, true) => {
                let resize_file = self.open_resize_file(vmm_config, slot, bytes).await?;
                commands.extend(show_size(slot, &resize_file, bytes));
                commands.extend(in_place);
                commands.extend([remove(&resize_node(slot)), resize_file.remove_command()]);
            }
        }
        commands.push(fd_set.remove_command());
        self.run_all(commands).await
    }

    /// Detaches the disk of a slot: the guest sees the size of an empty slot. Also works after an interrupted attachment or
    /// detachment, whose remains are removed first.
    pub(crate) async fn detach_slot(
        &mut self,
        vmm_config: &VmmConfig,
        slot: usize,
    ) -> Result<(), DriverError> {
        if let MachineType::Q35(_) = vmm_config.machine_type {
            return self.unplug(vmm_config, slot).await;
        }
        let empty = format!("empty{slot}");
        let nothing = json!({
            "driver": "null-co", "node-name": empty, "size": EMPTY_SLOT_BYTES, "read-zeroes": true,
        });
        // The node does not exist in a slot that was filled from the start; it still exists in a slot that was filled later.
        let there = self.run("blockdev-add", nothing).await;
        let empty = reopen(slot, &empty, vmm_config.slots.is_read_only(slot));
        let reopened = self.run_all(vec![empty.clone()]).await;
        if reopened.is_err() {
            there?;
        }
        reopened?;
        for node in [resize_node(slot), format!("disk{slot}")] {
            self.try_remove(vmm_config, &node).await;
        }
        let resize_file = self.open_resize_file(vmm_config, slot, EMPTY_SLOT_BYTES).await?;
        let shown = show_size(slot, &resize_file, EMPTY_SLOT_BYTES).into_iter();
        self.run_all(shown.chain([empty, remove(&resize_node(slot)), resize_file.remove_command()]).collect())
            .await
    }

    /// Lends the VMM an empty file of this size that has no name any more.
    async fn open_resize_file(
        &mut self,
        vmm_config: &VmmConfig,
        slot: usize,
        bytes: u64,
    ) -> Result<FdSet, DriverError> {
        let io = |source| DriverError::Io {
            operation: format!("show the size of disk {slot} of VMM {}", vmm_config.id),
            source,
        };
        let path = vmm_config.run_dir.join(resize_node(slot));
        std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).map_err(io)?;
        let fd_set = self.add_fd_set(&path, false).await?;
        std::fs::remove_file(&path).map_err(io)?;
        Ok(fd_set)
    }

    /// Removes a node; returns true if it existed and was removed.
    async fn try_remove(&mut self, vmm_config: &VmmConfig, node: &str) -> bool {
        let removed = self.run_all(vec![remove(node)]).await;
        if let Err(error) = &removed {
            tracing::debug!(vm = %vmm_config.id, node, %error, "not removed; it may never have been there");
        }
        removed.is_ok()
    }

    async fn plug(&mut self, disk: &Disk) -> Result<(), DriverError> {
        let slot = disk.slot;
        let fd_set = self.add_disk_fd_set(disk).await?;
        self.run_all(vec![add(&format!("disk{slot}"), &fd_set, disk.read_only), fd_set.remove_command()])
            .await?;
        let node = format!("slot{slot}");
        let raw = json!({
            "driver": "raw", "node-name": node, "file": format!("disk{slot}"), "read-only": disk.read_only,
            "discard": "unmap",
        });
        self.run("blockdev-add", raw).await?;
        let device = json!({
            "driver": "virtio-blk-pci", "id": node, "drive": node, "serial": node, "bus": format!("port{slot}"),
        });
        self.run("device_add", device).await.map(drop)
    }

    /// Makes the guest release the disk in a slot, also after an interrupted plug or unplug. Idempotent.
    async fn unplug(&mut self, vmm_config: &VmmConfig, slot: usize) -> Result<(), DriverError> {
        let device = format!("slot{slot}");
        let deadline = Instant::now() + UNPLUG_LIMIT;
        let (mut asked, mut ask_at) = (Ok(Value::Null), Instant::now());
        while self.has_device(&device).await? {
            let now = Instant::now();
            if now >= deadline {
                asked?;
                return Err(DriverError::Io {
                    operation: format!("unplug disk {slot} of VMM {}", vmm_config.id),
                    source: std::io::Error::new(
                        std::io::ErrorKind::TimedOut,
                        "the guest does not release it",
                    ),
                });
            }
            if now >= ask_at {
                asked = self.run("device_del", json!({"id": device})).await;
                // The guest refuses the request while it is busy.
                ask_at = if asked.is_ok() { now + UNPLUG_AGAIN } else { now };
            }
            sleep(UNPLUG_POLL).await;
        }
        for node in [device, format!("disk{slot}")] {
            // A device that was just removed may hold its disk for a moment.
            while !self.try_remove(vmm_config, &node).await
                && self.has_node(&node).await?
                && Instant::now() < deadline
            {
                sleep(UNPLUG_POLL).await;
            }
        }
        Ok(())
    }

    async fn has_node(&mut self, name: &str) -> Result<bool, DriverError> {
        let nodes = self.run("query-named-block-nodes", json!({"flat": true})).await?;
        let named = |node: &Value| node.get("node-name").and_then(Value::as_str) == Some(name);
        Ok(nodes.as_array().is_some_and(|nodes| nodes.iter().any(named)))
    }

    async fn has_device(&mut self, id: &str) -> Result<bool, DriverError> {
        let devices = self.run("qom-list", json!({"path": DEVICES})).await?;
        let named = |device: &Value| device.get("name").and_then(Value::as_str) == Some(id);
        Ok(devices.as_array().is_some_and(|devices| devices.iter().any(named)))
    }
}

/// QMP command and its arguments.
type Command = (&'static str, Value);

/// Returns the commands that attach a writable file of this size to the slot, and notify the guest.
fn show_size(slot: usize, file: &FdSet, bytes: u64) -> [Command; 3] {
    let node = resize_node(slot);
    [add(&node, file, false), reopen(slot, &node, false), resize(slot, bytes)]
}

fn add(node: &str, file: &FdSet, read_only: bool) -> Command {
    let file = json!({
        "driver": "file", "node-name": node, "filename": file.name(), "read-only": read_only, "discard": "unmap",
    });
    ("blockdev-add", file)
}

fn remove(node: &str) -> Command {
    ("blockdev-del", json!({"node-name": node}))
}

fn reopen(slot: usize, node: &str, read_only: bool) -> Command {
    let raw =
        json!({"driver": "raw", "node-name": format!("slot{slot}"), "file": node, "read-only": read_only});
    ("blockdev-reopen", json!({"options": [raw]}))
}

fn resize(slot: usize, bytes: u64) -> Command {
    ("block_resize", json!({"node-name": format!("slot{slot}"), "size": bytes}))
}

/// Returns the name of the node that shows a size for a moment. Each slot has its own, so that an interrupted change of one
/// slot does not affect the others.
fn resize_node(slot: usize) -> String {
    format!("gauge{slot}")
}

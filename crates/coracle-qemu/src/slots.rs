//! Disks of a running machine. A microvm has its devices from the start, and the nodes of its slots are swapped; a PC has
//! ports, and devices are plugged in and out.

use std::time::Duration;

use coracle_hypervisor::{Disk, DriverError, Machine, VmRecipe};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::argv::EMPTY_SLOT_BYTES;
use crate::monitor::Monitor;

/// How long a guest may take to let go of a device, and how often it is looked for. PCI Express has it blink its light
/// for five seconds first.
const UNPLUG_LIMIT: Duration = Duration::from_secs(20);
const UNPLUG_POLL: Duration = Duration::from_millis(50);
/// Where QEMU keeps the devices that have an id.
const DEVICES: &str = "/machine/peripheral";

impl Monitor<'_> {
    /// Puts a disk into its empty slot and tells the guest its size.
    ///
    /// A read-only node cannot be resized, and a resize is how the guest hears of a new size. So a read-only slot is
    /// first writable for a moment, on an empty file of the disk's size, and never on the disk itself.
    pub(crate) async fn insert(&mut self, recipe: &VmRecipe, disk: &Disk) -> Result<(), DriverError> {
        if let Machine::Pc(_) = recipe.machine {
            return self.plug(disk).await;
        }
        let slot = disk.slot;
        let io =
            |source| DriverError::Io { operation: format!("size disk {slot} of VM {}", recipe.id), source };
        let bytes = std::fs::metadata(&disk.path).map_err(io)?.len();
        if disk.read_only {
            self.show_size(recipe, slot, bytes).await?;
        }
        let node = format!("disk{slot}");
        self.add(&node, &disk.path, disk.read_only).await?;
        self.reopen(slot, &node, disk.read_only).await?;
        if disk.read_only { self.remove(&gauge(slot)).await } else { self.resize(slot, bytes).await }
    }

    /// Takes the disk out of a slot: the guest sees it become as large as an empty slot is. Also when an insertion or an
    /// ejection was cut off anywhere: what it left is taken away first.
    pub(crate) async fn eject(&mut self, recipe: &VmRecipe, slot: usize) -> Result<(), DriverError> {
        if let Machine::Pc(_) = recipe.machine {
            return self.unplug(recipe, slot).await;
        }
        let empty = format!("empty{slot}");
        let nothing = json!({
            "driver": "null-co", "node-name": empty, "size": EMPTY_SLOT_BYTES, "read-zeroes": true,
        });
        // One that was filled from the start has never had it; one that was filled later still has.
        let there = self.run("blockdev-add", nothing).await;
        let read_only = recipe.slots.is_read_only(slot);
        let reopened = self.reopen(slot, &empty, read_only).await;
        if reopened.is_err() {
            there?;
        }
        reopened?;
        for node in [gauge(slot), format!("disk{slot}")] {
            if let Err(error) = self.remove(&node).await {
                tracing::debug!(vm = %recipe.id, node, %error, "not removed; it may never have been there");
            }
        }
        self.show_size(recipe, slot, EMPTY_SLOT_BYTES).await?;
        self.reopen(slot, &empty, read_only).await?;
        self.remove(&gauge(slot)).await
    }

    async fn plug(&mut self, disk: &Disk) -> Result<(), DriverError> {
        let slot = disk.slot;
        self.add(&format!("disk{slot}"), &disk.path, disk.read_only).await?;
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

    /// Has the guest let go of the disk in a slot. Also when a plugging or an unplugging was cut off anywhere.
    async fn unplug(&mut self, recipe: &VmRecipe, slot: usize) -> Result<(), DriverError> {
        let device = format!("slot{slot}");
        let deadline = Instant::now() + UNPLUG_LIMIT;
        let mut asked = Ok(Value::Null);
        while self.has_device(&device).await? {
            if Instant::now() >= deadline {
                asked?;
                return Err(DriverError::Io {
                    operation: format!("unplug disk {slot} of VM {}", recipe.id),
                    source: std::io::Error::new(
                        std::io::ErrorKind::TimedOut,
                        "the guest does not let go of it",
                    ),
                });
            }
            // Asked again: a guest whose kernel has not come up yet has not heard. While it is busy, that is refused.
            asked = self.run("device_del", json!({"id": device})).await;
            sleep(UNPLUG_POLL).await;
        }
        for node in [device, format!("disk{slot}")] {
            if let Err(error) = self.remove(&node).await {
                tracing::debug!(vm = %recipe.id, node, %error, "not removed; it may never have been there");
            }
        }
        Ok(())
    }

    async fn has_device(&mut self, id: &str) -> Result<bool, DriverError> {
        let devices = self.run("qom-list", json!({"path": DEVICES})).await?;
        let named = |device: &Value| device.get("name").and_then(Value::as_str) == Some(id);
        Ok(devices.as_array().is_some_and(|devices| devices.iter().any(named)))
    }

    /// Puts an empty file of that size into the slot, writable, and has the guest look at it.
    async fn show_size(&mut self, recipe: &VmRecipe, slot: usize, bytes: u64) -> Result<(), DriverError> {
        let io =
            |source| DriverError::Io { operation: format!("size disk {slot} of VM {}", recipe.id), source };
        let node = gauge(slot);
        let path = recipe.run_dir.join(&node);
        std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).map_err(io)?;
        self.add(&node, &path, false).await?;
        self.reopen(slot, &node, false).await?;
        self.resize(slot, bytes).await?;
        std::fs::remove_file(&path).map_err(io)
    }

    async fn remove(&mut self, node: &str) -> Result<(), DriverError> {
        self.run("blockdev-del", json!({"node-name": node})).await.map(drop)
    }

    async fn add(&mut self, node: &str, path: &std::path::Path, read_only: bool) -> Result<(), DriverError> {
        let file = json!({
            "driver": "file", "node-name": node, "filename": path, "read-only": read_only, "discard": "unmap",
        });
        self.run("blockdev-add", file).await.map(drop)
    }

    async fn reopen(&mut self, slot: usize, node: &str, read_only: bool) -> Result<(), DriverError> {
        let slot = format!("slot{slot}");
        let raw = json!({"driver": "raw", "node-name": slot, "file": node, "read-only": read_only});
        self.run("blockdev-reopen", json!({"options": [raw]})).await.map(drop)
    }

    async fn resize(&mut self, slot: usize, bytes: u64) -> Result<(), DriverError> {
        let arguments = json!({"node-name": format!("slot{slot}"), "size": bytes});
        self.run("block_resize", arguments).await.map(drop)
    }
}

/// The node that shows a size for a moment. Each slot has its own, so that what was cut off in one is in no other's way.
fn gauge(slot: usize) -> String {
    format!("gauge{slot}")
}

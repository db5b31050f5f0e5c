//! Disks of a running machine: the nodes of its slots are swapped, since no device can be added to it.

use coracle_hypervisor::{Disk, DriverError, VmRecipe};
use serde_json::json;

use crate::argv::EMPTY_SLOT_BYTES;
use crate::monitor::Monitor;

impl Monitor<'_> {
    /// Puts a disk into its empty slot and tells the guest its size.
    ///
    /// A read-only node cannot be resized, and a resize is how the guest hears of a new size. So a read-only slot is
    /// first writable for a moment, on an empty file of the disk's size, and never on the disk itself.
    pub(crate) async fn insert(&mut self, recipe: &VmRecipe, disk: &Disk) -> Result<(), DriverError> {
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

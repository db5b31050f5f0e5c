//! Shared memory for simultaneous copies of a snapshot: the saved memory is read once, and each copy holds only its own
//! changes.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_hypervisor::{Driver as _, Nic, Template, VmmConfig};
use coracle_types::MacAddr;

use crate::instances::InstanceOwner;
use crate::node::Node;
use crate::vmm_config::backend;
use crate::{HostError, SnapshotName};

/// Shared memory images, by snapshot.
#[derive(Debug, Default)]
pub struct MemoryImages(Mutex<HashMap<SnapshotName, Arc<Template>>>);

impl MemoryImages {
    /// Returns the shared memory of a snapshot; `None`: its file has to be read.
    pub fn get(&self, name: &SnapshotName) -> Option<Arc<Template>> {
        self.known().get(name).cloned()
    }

    fn known(&self) -> MutexGuard<'_, HashMap<SnapshotName, Arc<Template>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a shared memory available for new copies until it is dropped; existing copies keep the memory.
#[derive(Debug)]
pub struct SharedMemory {
    memory_images: Arc<MemoryImages>,
    name: SnapshotName,
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.memory_images.known().remove(&self.name);
    }
}

/// Reads the memory of snapshot `name` from the file `memory`, for a VM of this shape. `None`: the driver cannot share it, or
/// did not read it. Each copy then reads the file itself, and fails or succeeds by itself.
pub async fn materialize(
    node: &Node,
    memory_images: &Arc<MemoryImages>,
    name: &SnapshotName,
    shape: VmmConfig,
    memory: &Path,
) -> Option<SharedMemory> {
    let read = read(node, name, shape, memory).await;
    let template = match read {
        Ok(template) => template?,
        Err(error) => {
            tracing::warn!(snapshot = %name, error = error.chain(), "its memory is not shared by its copies");
            return None;
        }
    };
    memory_images.known().insert(name.clone(), Arc::new(template));
    Some(SharedMemory { memory_images: memory_images.clone(), name: name.clone() })
}

async fn read(
    node: &Node,
    name: &SnapshotName,
    shape: VmmConfig,
    memory: &Path,
) -> Result<Option<Template>, HostError> {
    let vmm_config = node.instances.create(InstanceOwner::Reader(name.clone()), shape).await?;
    let template = read_plugged(node, &vmm_config, memory).await;
    node.instances.end(&vmm_config.id, None).await?;
    template
}

/// Reads with a NIC like the VM's, because the capabilities of a NIC are part of a saved state and depend on its backend. The
/// tap of the reader leads nowhere.
async fn read_plugged(
    node: &Node,
    vmm_config: &VmmConfig,
    memory: &Path,
) -> Result<Option<Template>, HostError> {
    let network = |source| HostError::Network { name: vmm_config.id.to_string(), source };
    let attachment = node.network.create_interface(&vmm_config.id).await.map_err(network)?;
    let nic = Nic { mac: MacAddr::of(&vmm_config.id), backend: backend(&node.config, &attachment, &[]) };
    let vmm_config = VmmConfig { nic: Some(nic), ..vmm_config.clone() };
    let Some(snapshots) = node.driver.snapshots(&vmm_config) else { return Ok(None) };
    let open =
        |source| HostError::State { operation: format!("open the memory {}", memory.display()), source };
    let file = File::open(memory).map_err(open)?;
    let memory_images = snapshots.materialize(&vmm_config, &file).await;
    memory_images.map_err(|source| HostError::Driver { name: vmm_config.id.to_string(), source })
}

//! One memory for the copies that are made of a snapshot at once: what is saved is read once, and each copy holds only
//! what it changes.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_hypervisor::{Driver as _, Nic, Template, VmRecipe};
use coracle_types::{MacAddr, VmId, VmName};

use super::SnapshotName;
use crate::recipe::backend;
use crate::vm::Shared;
use crate::{HostError, files};

/// What the folder of a VMM that reads a saved memory is called: this and a number of its own.
const RUN_PREFIX: &str = "unfold-";

/// The memories that are shared now, by snapshot.
#[derive(Debug, Default)]
pub(crate) struct Unfolded(Mutex<HashMap<SnapshotName, Arc<Template>>>);

impl Unfolded {
    /// That of a snapshot; `None`: its file has to be read.
    pub(crate) fn get(&self, name: &SnapshotName) -> Option<Arc<Template>> {
        self.known().get(name).cloned()
    }

    fn known(&self) -> MutexGuard<'_, HashMap<SnapshotName, Arc<Template>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A memory that new copies share for as long as this lives; those that are there keep it.
#[derive(Debug)]
pub(crate) struct Shares {
    unfolded: Arc<Unfolded>,
    name: SnapshotName,
}

impl Drop for Shares {
    fn drop(&mut self) {
        self.unfolded.known().remove(&self.name);
    }
}

/// Reads the memory of snapshot `name`, a file at `memory`, of a machine of this shape. `None`: its driver cannot share
/// it, or did not read it, and copies read the file themselves, which fails or not for each.
pub(crate) async fn unfold(
    shared: &Shared,
    name: &SnapshotName,
    shape: VmRecipe,
    memory: &Path,
) -> Option<Shares> {
    let reader: VmName = format!("{RUN_PREFIX}{:016x}", rand::random::<u64>()).parse().ok()?;
    let run_dir = shared.config.run_dir.join(reader.as_str());
    let id = VmId::of_name(&reader);
    let recipe = VmRecipe { id, state_dir: run_dir.clone(), run_dir, ..shape };
    let read = read(shared, recipe, memory).await;
    let template = match read {
        Ok(template) => template?,
        Err(error) => {
            tracing::warn!(snapshot = %name, error = error.chain(), "its memory is not shared by its copies");
            return None;
        }
    };
    shared.unfolded.known().insert(name.clone(), Arc::new(template));
    Some(Shares { unfolded: shared.unfolded.clone(), name: name.clone() })
}

/// What a NIC can do is part of a saved state, and depends on its other end: the reader has one like the VM's.
async fn read(shared: &Shared, mut recipe: VmRecipe, memory: &Path) -> Result<Option<Template>, HostError> {
    let network = |source| HostError::Network { name: recipe.id.to_string(), source };
    let (id, mac) = (recipe.id.clone(), MacAddr::of(&recipe.id));
    let lease = shared.network.lease(&id, None).map_err(network)?;
    let plug = shared.network.attach(&id, mac, lease).await.map_err(network);
    let template = match plug {
        Ok(plug) => {
            recipe.nic = Some(Nic { mac, backend: backend(&plug, &[]) });
            read_plugged(shared, &recipe, memory).await
        }
        Err(error) => Err(error),
    };
    let detached = shared.network.detach(&id).await;
    shared.network.release(&id);
    detached.map_err(|source| HostError::Network { name: id.to_string(), source })?;
    template
}

async fn read_plugged(
    shared: &Shared,
    recipe: &VmRecipe,
    memory: &Path,
) -> Result<Option<Template>, HostError> {
    let Some(snapshots) = shared.driver.snapshots(recipe) else { return Ok(None) };
    let io = |operation| move |source| HostError::Files { operation, id: recipe.id.clone(), source };
    let file = File::open(memory).map_err(io("open the memory"))?;
    std::fs::create_dir_all(&recipe.run_dir).map_err(io("make the folder"))?;
    let unfolded = snapshots.unfold(recipe, &file).await;
    files::remove_tree(&recipe.run_dir).map_err(io("remove the folder"))?;
    unfolded.map_err(|source| HostError::Driver { name: recipe.id.to_string(), source })
}

/// Ends VMMs that a crash left reading, and removes their folders.
pub(crate) async fn sweep(shared: &Shared) {
    let folders = std::fs::read_dir(&shared.config.run_dir).into_iter().flatten().flatten();
    for folder in folders.filter(|entry| entry.file_name().to_string_lossy().starts_with(RUN_PREFIX)) {
        if let Err(error) = end(shared, &folder.path()).await {
            tracing::warn!(dir = %folder.path().display(), error = error.chain(), "a VMM that was cut off is not swept");
        }
    }
}

async fn end(shared: &Shared, run_dir: &Path) -> Result<(), HostError> {
    let recipe = VmRecipe {
        run_dir: run_dir.to_owned(),
        ..crate::recipe::of_shape(&shared.config, shared.accelerator(""))
    };
    let failed = |source| HostError::Driver { name: recipe.id.to_string(), source };
    for driver in shared.driver.all() {
        while let Some(vmm) = driver.find(&recipe).await.map_err(failed)? {
            driver.kill(vmm).await.map_err(failed)?;
        }
    }
    let id = recipe.id.clone();
    files::remove_tree(run_dir).map_err(|source| HostError::Files {
        operation: "remove the folder",
        id,
        source,
    })
}

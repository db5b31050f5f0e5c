//! The end of a VM: nothing is left of it.

use std::io;

use coracle_types::{VmId, VmState};

use super::Actor;
use crate::events::EventKind;
use crate::vmm_config::VmPaths;
use crate::{HostError, files};

impl Actor {
    /// Removes every trace; may be repeated after a crash at any point. A full disk does not refuse it, since it makes
    /// room: cut off then, the VM is as before or gone, because nothing of its state goes before the whole of it does.
    pub(super) async fn remove(&mut self) -> Result<(), HostError> {
        match self.change(VmState::Deleting, String::new()).await {
            Err(HostError::Files { source, .. }) if files::is_out_of_space(&source) => {
                tracing::warn!(vm = %self.record.id, error = %source, "write record failed, deleting without it");
                self.publish(EventKind::Updated);
            }
            recorded => recorded?,
        }
        self.jobs.shutdown().await;
        self.guest = None;
        for reply in self.starters.drain(..).chain(self.stoppers.drain(..)) {
            let _caller_gone = reply.send(Err(HostError::NotFound { name: self.record.name.to_string() }));
        }
        self.end_vmm().await?;
        let (paths, id) = (self.paths.clone(), self.record.id.clone());
        files::blocking(move || erase(&paths, &id)).await.map_err(|source| HostError::Files {
            operation: "remove the files",
            id: self.record.id.clone(),
            source,
        })?;
        self.shared.node.network.release(&self.record.id);
        self.shared.claims.release_all(&self.record.id);
        if let Some(gone) = self.gone.take() {
            gone();
        }
        self.publish(EventKind::Deleted);
        Ok(())
    }
}

/// Removes a VM's directories. Its record goes first, by a rename or where a full disk has no room for one by its removal:
/// a directory without a record is never taken for a VM.
fn erase(paths: &VmPaths, id: &VmId) -> io::Result<()> {
    let doomed = paths.state.with_file_name(format!(".deleting-{id}"));
    files::remove_tree(&doomed)?;
    match std::fs::rename(&paths.state, &doomed) {
        Err(error) if files::is_out_of_space(&error) => {
            files::remove_file(&paths.record())?;
            files::sync_parent(&paths.record())?;
            files::remove_tree(&paths.state)
        }
        renamed => {
            renamed?;
            files::sync_parent(&doomed)?;
            files::remove_tree(&doomed)
        }
    }
}

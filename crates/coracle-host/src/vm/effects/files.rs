//! Records, logs and other files of a VM.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use coracle_logs::CriLog;
use coracle_record::ContainerRecord;
use coracle_types::VmId;

use super::{Context, lock};
use crate::files::{self, blocking};
use crate::own_volumes::{class_dirs, remove_class_dirs};
use crate::vmm_config::VmPaths;
use crate::volumes::VolumeSource;
use crate::{ContainerId, HostError, Record, Volume};
use coracle_lifecycle::WriteId;

/// Size at which a log rotates if the node chose its path; other logs are rotated by those who chose the path.
const LOG_ROTATE_BYTES: u64 = 10 << 20;

/// Serialises the writes of a VM's records. A write that timed out may be executed late: it never overwrites a later one, and
/// never creates files of a VM that was erased.
#[derive(Debug, Default)]
pub(in crate::vm) struct Writer(Mutex<Written>);

#[derive(Debug, Default)]
struct Written {
    /// Latest write of the VM's record and of each container's record.
    latest: BTreeMap<Option<ContainerId>, WriteId>,
    is_erased: bool,
}

impl Writer {
    /// Executes a write, unless a later one was executed. Blocking, also while another write is under way.
    fn write(
        &self,
        what: Option<ContainerId>,
        id: WriteId,
        write: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let mut written = lock(&self.0);
        if written.is_erased || written.latest.get(&what).is_some_and(|latest| *latest > id) {
            return Ok(());
        }
        write()?;
        written.latest.insert(what, id);
        Ok(())
    }

    fn erase(&self, erase: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut written = lock(&self.0);
        erase()?;
        written.is_erased = true;
        Ok(())
    }
}

impl Context {
    pub(super) async fn save_record(&self, write: WriteId, record: Record) -> Result<(), HostError> {
        let (writer, path) = (self.writer.clone(), self.paths.record());
        let saved = blocking(move || writer.write(None, write, || record.save(&path)));
        saved.await.map_err(self.files_error("write the record"))
    }

    pub(super) async fn save_container(
        &self,
        write: WriteId,
        record: Arc<ContainerRecord>,
    ) -> Result<(), HostError> {
        let (writer, dir) = (self.writer.clone(), self.paths.containers());
        let saved = blocking(move || {
            writer.write(Some(record.id.clone()), write, || {
                std::fs::create_dir_all(&dir)?;
                record.save(&dir.join(format!("{}.json", record.id)))
            })
        });
        saved.await.map_err(self.files_error("write the record of a container"))
    }

    pub(super) async fn remove_container_files(
        &self,
        write: WriteId,
        id: ContainerId,
    ) -> Result<(), HostError> {
        self.container_logs.lock().remove(&id);
        let (writer, dir) = (self.writer.clone(), self.paths.containers());
        let removed = blocking(move || {
            let names = ["json", "log", "log.1", "position"].map(|kind| dir.join(format!("{id}.{kind}")));
            writer.write(Some(id), write, || names.iter().try_for_each(|path| files::remove_file(path)))
        });
        removed.await.map_err(self.files_error("remove the files of a container"))
    }

    /// Opens the logs of containers. A failure is logged and does not prevent the adoption of the VM.
    pub(super) async fn open_logs(&self, records: Vec<Arc<ContainerRecord>>) -> Result<(), HostError> {
        for record in records {
            let id = record.id.clone();
            if let Err(error) = self.open_log(record).await {
                tracing::warn!(vm = %self.record.id, container = %id, error = error.chain(), "container log not opened");
            }
        }
        Ok(())
    }

    pub(super) async fn open_log(&self, record: Arc<ContainerRecord>) -> Result<(), HostError> {
        let dir = self.paths.containers();
        let id = record.id.clone();
        let opened = blocking(move || {
            let own = dir.join(format!("{}.log", record.id));
            let position = dir.join(format!("{}.position", record.id));
            let (path, rotate) = match &record.spec.log_path {
                Some(path) => (path, None),
                None => (&own, Some(LOG_ROTATE_BYTES)),
            };
            CriLog::open(path, &position, rotate).map(Box::new)
        });
        let log = opened.await.map_err(self.files_error("open a container's log"))?;
        self.container_logs.lock().insert(id, log);
        Ok(())
    }

    pub(super) async fn remove_saved_memory(&self) -> Result<(), HostError> {
        let dir = self.paths.saved();
        let removed = blocking(move || files::remove_tree(&dir)).await;
        removed.map_err(self.files_error("remove the used memory"))
    }

    pub(super) async fn remove_node_table(&self, volume: &str) -> Result<(), HostError> {
        let table = self.paths.folder_table(volume);
        let removed = blocking(move || files::remove_file(&table)).await;
        removed.map_err(self.files_error("remove the node table of a shared directory"))
    }

    pub(super) fn claim(&self, volume: &Volume, found: &VolumeSource) -> Result<(), HostError> {
        let claimed = self.shared.claims.claim(&self.record.id, volume, found);
        claimed.map_err(|message| HostError::Invalid { message })
    }

    /// Opens a shared directory. Idempotent.
    pub(super) async fn open_shared_dir(&self, volume: &Volume) -> Result<(), HostError> {
        let opened = self.shared_dirs.open(volume, self.paths.folder_table(&volume.name)).await;
        opened.map_err(self.files_error("open a shared directory"))
    }

    pub(super) async fn erase(&self) -> Result<(), HostError> {
        let (writer, paths, id) = (self.writer.clone(), self.paths.clone(), self.record.id.clone());
        let outside = class_dirs(&self.shared.node.config, &self.record.id);
        let erased = blocking(move || {
            remove_class_dirs(&outside)?;
            writer.erase(|| erase(&paths, &id))
        });
        let erased = erased.await;
        erased.map_err(self.files_error("remove the files"))
    }
}

/// Removes a VM's directories. The record is removed first: by a rename, or, if the disk is too full for that, by its deletion.
/// A directory without a record is never taken for a VM.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_write_does_not_undo_a_later_one() {
        let writer = Writer::default();
        let ran = std::cell::Cell::new(0);
        let note = |id| {
            ran.set(id);
            Ok(())
        };
        let write = |id| writer.write(None, id, || note(id)).unwrap();
        write(1);
        write(3);
        write(2);
        assert_eq!(ran.get(), 3);
        writer.write(Some("web".parse().unwrap()), 2, || note(20)).unwrap();
        assert_eq!(ran.get(), 20, "a container has a file of its own");
        writer.erase(|| Ok(())).unwrap();
        write(4);
        assert_eq!(ran.get(), 20, "nothing is made of a VM that is gone");
    }
}

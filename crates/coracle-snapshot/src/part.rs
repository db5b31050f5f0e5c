//! Snapshots that are being written, and the rule that decides what is kept after a failure.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::{Duration, SystemTime};

use coracle_types::UnixMillis;

use crate::{MANIFEST_FILE, SnapshotInfo, SnapshotStore};
use coracle_files as files;
use coracle_record::SnapshotName;

/// Prefix of the directory of a snapshot that is being written, followed by its name.
const PART: &str = ".part-";
/// Prefix of the directory while a pull writes it.
const PULL: &str = ".pull-";
/// Time for which an interrupted pull is kept.
const PULL_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Snapshot that is being written. On drop its files are removed, unless a later pull can continue it.
#[derive(Debug)]
pub struct Part {
    store: SnapshotStore,
    name: SnapshotName,
    dir: PathBuf,
    /// Whether the files stay for the next pull of the same name.
    stays: bool,
}

impl SnapshotStore {
    /// Reserves the name until the part is dropped; `None` when the name is taken.
    pub fn begin(&self, name: SnapshotName) -> Option<Part> {
        self.take(name, PART, false)
    }

    /// Like [`SnapshotStore::begin`], for a pull: the part contains the files of an earlier pull, and its own files stay.
    pub fn begin_pull(&self, name: SnapshotName) -> Option<Part> {
        self.take(name, PULL, true)
    }

    fn take(&self, name: SnapshotName, prefix: &str, stays: bool) -> Option<Part> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if self.place(&name).exists() || !taken.insert(name.clone()) {
            return None;
        }
        drop(taken);
        let dir = self.dir.join(format!("{prefix}{name}"));
        Some(Part { store: self.clone(), name, dir, stays })
    }

    /// Removes the remains of a pull, unless a pull is writing them now. Returns false when there are none. Blocking.
    pub(crate) fn forget_pull(&self, name: &SnapshotName) -> io::Result<bool> {
        let left = self.dir.join(format!("{PULL}{name}"));
        let doomed = self.dir.join(format!(".removed-{name}"));
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.contains(name) || !left.exists() {
            return Ok(false);
        }
        // Renamed under the lock, before another pull can begin to write the directory.
        std::fs::rename(left, &doomed)?;
        drop(taken);
        files::remove_tree(&doomed).map(|()| true)
    }
}

impl Part {
    /// Returns the directory of the part, which its user creates.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the reserved name.
    #[must_use]
    pub fn name(&self) -> &SnapshotName {
        &self.name
    }

    /// Discards the part with its files, because they are unusable. Blocking.
    ///
    /// # Errors
    /// When the files cannot be removed.
    pub fn discard(mut self) -> io::Result<()> {
        self.stays = false;
        files::remove_tree(&self.dir)
    }

    /// Renames the complete snapshot to its final path; synced to disk before this returns. The caller has synced its files.
    /// Blocking.
    ///
    /// # Errors
    /// For example when the disk is full; then no files are left.
    pub fn seal(mut self, info: &SnapshotInfo) -> io::Result<()> {
        self.stays = false;
        files::write_atomic(&self.dir.join(MANIFEST_FILE), &serde_json::to_vec_pretty(info)?)?;
        let place = self.store.place(&self.name);
        std::fs::rename(&self.dir, &place)?;
        files::sync_parent(&place)?;
        // A pull under this name can never complete.
        files::remove_tree(&self.store.dir.join(format!("{PULL}{}", self.name)))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.stays
            && let Err(error) = files::remove_tree(&self.dir)
        {
            tracing::warn!(dir = %self.dir.display(), %error, "part of a snapshot not removed");
        }
        self.store.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

/// Returns whether the hidden directory `dir` is an interrupted pull that may still be continued.
pub(crate) fn is_resumable_pull(name: &str, dir: &Path, now: UnixMillis) -> io::Result<bool> {
    if !name.starts_with(PULL) {
        return Ok(false);
    }
    // Files in the directory grow without a change of its modification time.
    let mut last = std::fs::metadata(dir)?.modified()?;
    for entry in std::fs::read_dir(dir)? {
        last = last.max(entry?.metadata()?.modified()?);
    }
    let last = last.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = Duration::from_millis(u64::try_from(now.0).unwrap_or(0));
    Ok(now.saturating_sub(last) < PULL_KEPT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{fill, info};

    fn hidden_entries(store: &SnapshotStore) -> Vec<String> {
        let entries = std::fs::read_dir(&store.dir).unwrap();
        let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with('.')).collect()
    }

    /// Simulates a pull that got a file and was interrupted.
    fn interrupt_pull(store: &SnapshotStore, name: &str) {
        let part = store.begin_pull(name.parse().unwrap()).unwrap();
        std::fs::create_dir_all(part.dir()).unwrap();
        std::fs::write(part.dir().join("memory"), "memory").unwrap();
    }

    #[test]
    fn partial_pull_stays_until_completed_or_superseded() {
        let state = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(state.path(), UnixMillis(0)).unwrap();
        interrupt_pull(&store, "one");
        assert_eq!((hidden_entries(&store), store.list().unwrap()), (vec![".pull-one".to_owned()], vec![]));
        let again = store.begin_pull("one".parse().unwrap()).unwrap();
        assert!(store.begin("one".parse().unwrap()).is_none(), "the name is taken meanwhile");
        assert!(!store.remove(again.name()).unwrap(), "a snapshot that is being written cannot be removed");
        again.seal(&info("one")).unwrap();
        assert_eq!(std::fs::read(store.memory_of(&"one".parse().unwrap())).unwrap(), b"memory");
        assert!(hidden_entries(&store).is_empty());

        interrupt_pull(&store, "wrong");
        store.begin_pull("wrong".parse().unwrap()).unwrap().discard().unwrap();
        assert!(hidden_entries(&store).is_empty(), "given up");
        interrupt_pull(&store, "two");
        fill(&store, "two");
        assert!(hidden_entries(&store).is_empty(), "another snapshot has the name");
        interrupt_pull(&store, "three");
        assert!(store.remove(&"three".parse().unwrap()).unwrap(), "removed by its name");
        assert!(!store.remove(&"three".parse().unwrap()).unwrap());
        assert!(hidden_entries(&store).is_empty());
    }

    #[test]
    fn partial_pull_survives_restarts_for_a_week() {
        let state = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(state.path(), UnixMillis(0)).unwrap();
        interrupt_pull(&store, "one");
        let written = std::fs::metadata(store.dir.join(".pull-one/memory")).unwrap().modified().unwrap();
        let written = written.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let after = |days: u32| {
            UnixMillis((written + days * Duration::from_secs(86_400)).as_millis().try_into().unwrap())
        };
        for (days, stays) in [(0, true), (6, true), (8, false)] {
            let store = SnapshotStore::open(state.path(), after(days)).unwrap();
            assert_eq!(!hidden_entries(&store).is_empty(), stays, "after {days} days");
        }
    }
}

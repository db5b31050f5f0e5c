//! A snapshot in a registry: its two files in chunks, and its manifest in front.
//!
//! The registry is not trusted: what it says of the snapshot is checked before anything is moved, every chunk by its
//! digest, and nothing of it is ever a path.

use std::io;

use coracle_disk::{RemoteSnapshot, SnapshotFile};
use coracle_record::SnapshotName;
use serde_json::Value;

use crate::{DISK_FILE, MEMORY_FILE, Part, SnapshotInfo, SnapshotStore, archive};

/// The files of a snapshot in a registry.
pub const FILES: [&str; 2] = [MEMORY_FILE, DISK_FILE];

/// The files of the snapshot `info`, as a registry gets them.
pub fn files(store: &SnapshotStore, info: &SnapshotInfo) -> Vec<SnapshotFile> {
    let file = |name: &str, path| SnapshotFile { name: name.to_owned(), path };
    vec![file(MEMORY_FILE, store.memory_of(&info.name)), file(DISK_FILE, store.disk_of(&info.name))]
}

/// What a registry gets to know of a snapshot.
///
/// # Errors
/// Never for a manifest that was read.
pub fn about(info: &SnapshotInfo) -> io::Result<Value> {
    Ok(serde_json::to_value(info.clone().without_access())?)
}

/// Reads and judges what a registry says of a snapshot that is to fill `part`.
///
/// # Errors
/// `InvalidData` with the reason when it is not what it should be.
pub fn read(remote: &RemoteSnapshot, part: &Part) -> io::Result<SnapshotInfo> {
    inspect(remote, part.name().clone())
}

/// The same of one that is only looked at, under `name`.
///
/// # Errors
/// As [`read`].
pub fn inspect(remote: &RemoteSnapshot, name: SnapshotName) -> io::Result<SnapshotInfo> {
    let refused = |e| archive::refused(format!("what it says of itself is none: {e}"));
    let info: SnapshotInfo = serde_json::from_value(remote.about().clone()).map_err(refused)?;
    let length = |name: &str| {
        let missing = || archive::refused(format!("it has no {name}"));
        remote.bytes_of(name).ok_or_else(missing)
    };
    archive::check_sizes(&info, length(DISK_FILE)?)?;
    if length(MEMORY_FILE)? != info.memory_bytes {
        return Err(archive::refused("its memory has another length than it says".to_owned()));
    }
    // Whoever pushed it does not say who may use it here.
    Ok(SnapshotInfo { name, ..info.without_access() })
}

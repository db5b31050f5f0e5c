//! Snapshot in a registry: its two files in chunks, preceded by its manifest.
//!
//! The registry is not trusted: its description of the snapshot is checked before any transfer, and every chunk is checked by
//! its digest. No part of the description is used as a path.

use std::io;

use coracle_disk::{RemoteSnapshot, SnapshotFile};
use coracle_record::SnapshotName;
use serde_json::Value;

use crate::{DISK_FILE, MEMORY_FILE, Part, SnapshotInfo, SnapshotStore, archive};

/// Files of a snapshot in a registry.
pub const FILES: [&str; 2] = [MEMORY_FILE, DISK_FILE];

/// Returns the files of the snapshot `info`, as they are pushed to a registry.
pub fn files(store: &SnapshotStore, info: &SnapshotInfo) -> Vec<SnapshotFile> {
    let file = |name: &str, path| SnapshotFile { name: name.to_owned(), path };
    vec![file(MEMORY_FILE, store.memory_of(&info.name)), file(DISK_FILE, store.disk_of(&info.name))]
}

/// Returns the description of a snapshot that is pushed to a registry.
///
/// # Errors
/// Never for a manifest that was read.
pub fn about(info: &SnapshotInfo) -> io::Result<Value> {
    Ok(serde_json::to_value(info.clone().without_access())?)
}

/// Reads and checks a registry's description of a snapshot that is to fill `part`.
///
/// # Errors
/// `InvalidData` with the reason when the description is invalid.
pub fn read(remote: &RemoteSnapshot, part: &Part) -> io::Result<SnapshotInfo> {
    inspect(remote, part.name().clone())
}

/// Like [`read`], for a snapshot that is only inspected, under `name`.
///
/// # Errors
/// Same as [`read`].
pub fn inspect(remote: &RemoteSnapshot, name: SnapshotName) -> io::Result<SnapshotInfo> {
    let refused = |e| archive::invalid_archive(format!("what it says of itself is none: {e}"));
    let info: SnapshotInfo = serde_json::from_value(remote.about().clone()).map_err(refused)?;
    let length = |name: &str| {
        let missing = || archive::invalid_archive(format!("it has no {name}"));
        remote.bytes_of(name).ok_or_else(missing)
    };
    archive::check_sizes(&info, length(DISK_FILE)?)?;
    if length(MEMORY_FILE)? != info.memory_bytes {
        return Err(archive::invalid_archive("its memory has another length than it says".to_owned()));
    }
    // The author of the snapshot does not decide on access on this node.
    Ok(SnapshotInfo { name, ..info.without_access() })
}

//! Entry point of the fuzz target. Not a public API.

use std::path::Path;

use coracle_types::UnixMillis;

use crate::{SnapshotStore, archive};

/// Reads an archive of a snapshot into the directory `state`, and removes the result. Blocking.
pub fn snapshot(state: &Path, bytes: &[u8]) {
    let (Ok(store), Ok(name)) = (SnapshotStore::open(state, UnixMillis(0)), "fuzzed".parse()) else { return };
    let Some(part) = store.begin(name) else { return };
    if let Ok(info) = archive::read(bytes, &part) {
        assert_eq!(info.name, *part.name(), "it is called as it was asked for");
    }
}

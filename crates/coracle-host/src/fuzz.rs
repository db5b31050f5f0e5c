//! What bytes from elsewhere meet first, for the fuzz targets: no promise, and nothing for anybody else.

use std::path::Path;

use coracle_types::UnixMillis;
use tokio::net::UnixStream;

use crate::guest;
use crate::snapshots::{SnapshotStore, archive};

/// Reads an archive of a snapshot into the folder `state`; what comes of it goes again. Blocking.
pub fn snapshot(state: &Path, bytes: &[u8]) {
    let (Ok(store), Ok(name)) = (SnapshotStore::open(state, UnixMillis(0)), "fuzzed".parse()) else { return };
    let Some(part) = store.begin(name) else { return };
    if let Ok(info) = archive::read(bytes, &part) {
        assert_eq!(info.name, *part.name(), "it is called as it was asked for");
    }
}

/// Waits for a guest's hello; returns the number of its session. Not cancel-safe.
pub async fn hello(mut stream: UnixStream) -> Option<u64> {
    guest::read_hello(&mut stream).await.ok()
}

//! The VMM instances of a node, as its files and processes tell of them.

use std::path::Path;

use coracle_hypervisor::{ProcessId, launch};
use coracle_types::InstanceId;

/// Living VMMs of the instances whose owner is of this kind: `vm`, `pool`, `template` or `reader`.
///
/// # Panics
/// When the process table cannot be read.
#[must_use]
#[expect(clippy::expect_used, reason = "for tests")]
pub fn vmms_of(state: &Path, run: &Path, kind: &str) -> Vec<ProcessId> {
    let dirs = std::fs::read_dir(state.join("instances")).into_iter().flatten().flatten();
    let vmm = |dir: std::fs::DirEntry| {
        let id: InstanceId = dir.file_name().to_str()?.parse().ok()?;
        // It may end while we look.
        let record = std::fs::read(dir.path().join("instance.json")).ok()?;
        let record: serde_json::Value = serde_json::from_slice(&record).ok()?;
        record["owner"].get(kind)?;
        launch::find_in(&run.join(id.short())).expect("the process table")
    };
    dirs.filter_map(vmm).collect()
}

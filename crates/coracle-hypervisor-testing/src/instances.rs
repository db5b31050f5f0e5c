//! VMM instances of a node, as shown by its files and processes.

use std::path::Path;

use coracle_hypervisor::{ProcessId, find_by_argument, launch};
use coracle_types::InstanceId;

/// Returns the living VMMs of instances whose owner is of this kind: `vm`, `pool`, `template` or `reader`.
///
/// # Panics
/// When the process table cannot be read.
#[must_use]
#[expect(clippy::expect_used, reason = "for tests")]
pub fn vmms_of(state: &Path, run: &Path, kind: &str) -> Vec<ProcessId> {
    let dirs = std::fs::read_dir(state.join("instances")).into_iter().flatten().flatten();
    let vmm = |dir: std::fs::DirEntry| {
        let id: InstanceId = dir.file_name().to_str()?.parse().ok()?;
        // The instance may end during the search.
        let record = std::fs::read(dir.path().join("instance.json")).ok()?;
        let record: serde_json::Value = serde_json::from_slice(&record).ok()?;
        record["owner"].get(kind)?;
        launch::find_in(&run.join(id.short())).expect("the process table")
    };
    dirs.filter_map(vmm).collect()
}

/// Returns every living process but this one that has `dir` in its arguments, or a file below it open: a jailed VMM names no
/// path of the host. VMMs without a process file are found, too.
///
/// # Panics
/// When the process table cannot be read.
#[must_use]
#[expect(clippy::expect_used, reason = "for tests")]
pub fn processes_of(dir: &Path) -> Vec<ProcessId> {
    let mut found = find_by_argument(dir).expect("the process table");
    let own = std::fs::read_link("/proc/self/exe").expect("the process table");
    for entry in std::fs::read_dir("/proc").expect("the process table").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // A child that has executed no program yet has the files of its parent, this process. When it ends, it loses its
        // program before the files.
        if std::fs::read_link(entry.path().join("exe")).map_or(true, |program| program == own) {
            continue;
        }
        // The process may end during the search.
        let files = std::fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        if targets.any(|target| target.starts_with(dir)) {
            found.extend(ProcessId::of_pid(pid).expect("the process table"));
        }
    }
    found.sort_by_key(|process| process.pid);
    found.dedup();
    found
}

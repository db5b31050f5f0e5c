//! Processes that count as left over.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use coracle_hypervisor_testing::instances::processes_of;

const LOOKS: u32 = 300;

/// Other tests of this process fork at any time, and a child has the files of this test. When the child ends, it loses its
/// program before its files.
#[test]
fn forked_child_without_exec_is_not_counted() {
    let dir = tempfile::tempdir().unwrap();
    let files: Vec<File> = (0..64).map(|n| File::create(dir.path().join(n.to_string())).unwrap()).collect();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let failed = Command::new("/no/program").gid(0).spawn(); // with a group, it forks first
                    assert!(failed.is_err());
                }
            });
        }
        let found: Vec<_> = (0..LOOKS).flat_map(|_| processes_of(dir.path())).collect();
        ends.store(true, Ordering::Relaxed);
        assert!(found.is_empty(), "{found:?}");
    });
    drop(files);
}

#[test]
fn child_with_a_file_of_the_directory_counts() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::create(dir.path().join("file")).unwrap();
    let mut child = Command::new("sleep").arg("60").stdout(file).spawn().unwrap();
    let found = processes_of(dir.path());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(found.iter().map(|process| process.pid).collect::<Vec<_>>(), [child.id()]);
}

//! A guest's FUSE messages to a directory of the host.

use std::fs;

use coracle_share::{SharedDirServer, SharedDirSpec, Submounts};
use coracle_types::IdMapping;

/// Most bytes that files of the host may come to have by one input: beyond, nothing new is found, only time lost.
const MESSAGES_MAX: usize = 64;

/// Messages one behind the other, each with its length in front (two bytes); the first byte says whether the directory may be
/// changed, and whether its owners are those of a user namespace. Nothing outside of the directory changes or comes into it.
pub(crate) fn run(bytes: &[u8]) {
    let [how, messages @ ..] = bytes else { return };
    let mut rest = messages;
    let Ok(dir) = tempfile::tempdir() else { return };
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    if prepare(&root, &outside).is_err() {
        return;
    }
    let submounts = Submounts { writable: how % 4 == 3, ..Submounts::default() };
    let ids = if how % 8 > 3 { IdMapping::new(65_536, 1000).ok() } else { None };
    let table = dir.path().join("table/ids");
    let spec = SharedDirSpec { root, read_only: how % 2 == 1, submounts, ids, table };
    let Ok(server) = SharedDirServer::open(spec) else { return };
    for _ in 0..MESSAGES_MAX {
        let [low, high, behind @ ..] = rest else { break };
        let (message, behind) =
            behind.split_at(usize::from(u16::from_le_bytes([*low, *high])).min(behind.len()));
        if let Some(reply) = server.answer(message) {
            let said = reply.get(..4).and_then(|n| n.try_into().ok()).map(u32::from_le_bytes);
            assert_eq!(said.map(|n| n as usize), Some(reply.len()), "a reply is as long as it says");
            let told = reply.windows(6).any(|w| w == b"SECRET");
            assert!(!told, "what lies outside was read");
        }
        rest = behind;
    }
    drop(server);
    let secret = fs::read_dir(&outside).map(|all| all.flatten().count());
    assert!(matches!(secret, Ok(1)), "something came to be outside");
    assert!(fs::read(outside.join("secret")).is_ok_and(|b| b == b"SECRET"), "what lies outside was changed");
}

fn prepare(root: &std::path::Path, outside: &std::path::Path) -> std::io::Result<()> {
    for folder in [root, &root.join("sub"), outside, &root.with_file_name("table")] {
        fs::create_dir(folder)?;
    }
    fs::write(outside.join("secret"), "SECRET")?;
    fs::write(root.join("file"), "content")?;
    std::os::unix::fs::symlink("../outside", root.join("way"))
}

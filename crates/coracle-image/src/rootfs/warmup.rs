//! Root file system for templates and for the warm-up of pooled VMM instances.

use std::{fs::File, io, path::Path};

use coracle_types::RootfsLayout;

use crate::erofs::{self, Body, CopyError, DataWriter, Meta, Object, mode};

static FOLDER: Meta = Meta { mode: mode::DIR | 0o755, uid: 0, gid: 0, mtime: (0, 0), xattrs: Vec::new() };
static PROGRAM: Meta = Meta { mode: mode::FILE | 0o755, uid: 0, gid: 0, mtime: (0, 0), xattrs: Vec::new() };

/// Names of the empty directories of the root. The object of each is at its index plus 1.
const DIRECTORIES: [&[u8]; 5] = [b"bin", b"dev", b"etc", b"proc", b"sys"];
const DIRECTORIES_LEN: u32 = 5;

/// Writes an EROFS image with the directories that every container has, and `program` as `/bin/program`.
/// Blocking; atomic.
///
/// # Errors
/// When the program cannot be read, or the file system is full.
pub fn warmup_rootfs(program: &Path, to: &Path) -> io::Result<()> {
    let part = to.with_extension("part");
    let made = write(program, &part).and_then(|()| std::fs::rename(&part, to));
    if made.is_err() {
        let _leave_nothing = std::fs::remove_file(&part);
    }
    made
}

fn write(program: &Path, to: &Path) -> io::Result<()> {
    let mut program = File::open(program)?;
    let size = program.metadata()?.len();
    let file = File::options().read(true).write(true).create(true).truncate(true).open(to)?;
    let mut data = DataWriter::new(file);
    let block = data.copy(&mut program, size).map_err(|(CopyError::Read(e) | CopyError::Write(e))| e)?;
    let directory =
        |parent, links, children| Object { meta: &FOLDER, links, body: Body::Dir { parent, children } };
    let mut objects =
        vec![directory(0, 2 + DIRECTORIES_LEN, DIRECTORIES.into_iter().zip(1..=DIRECTORIES_LEN).collect())];
    for name in DIRECTORIES {
        let children = if name == b"bin" { vec![(&b"program"[..], DIRECTORIES_LEN + 1)] } else { vec![] };
        objects.push(directory(0, 2, children));
    }
    objects.push(Object { meta: &PROGRAM, links: 1, body: Body::Blocks { block, size } });
    erofs::write(data, &objects, *b"coracle-stand-in", RootfsLayout::RootFirst).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warmup_rootfs_is_complete_or_absent() {
        let dir = tempfile::tempdir().unwrap();
        let (program, image) = (dir.path().join("program"), dir.path().join("image.erofs"));
        assert!(warmup_rootfs(&program, &image).is_err(), "the program does not exist");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        std::fs::write(&program, vec![7; 10_000]).unwrap();
        warmup_rootfs(&program, &image).unwrap();
        let file = File::open(&image).unwrap();
        assert!(erofs::identity(&file, b"coracle-stand-in", RootfsLayout::RootFirst).unwrap());
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2);
    }
}

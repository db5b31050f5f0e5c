//! Parts of the disks of this host by the digest of their raw bytes: a pull copies what is here instead of fetching it. An image
//! that was made from another one shares most parts with it.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use coracle_oci::Digest;
use serde::{Deserialize, Serialize};

use crate::frame::SparseTarget;

/// Bytes that are copied at a time.
const PIECE_BYTES: usize = 1 << 20;

/// A part of a disk that is not zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskPart {
    /// Offset of its first byte.
    pub start: u64,
    /// Its length.
    pub bytes: u64,
    /// Digest of its raw bytes.
    pub raw: Digest,
}

/// Parts of disks that are files of this host, and do not change.
#[derive(Debug, Default)]
pub struct LocalParts(HashMap<Digest, (PathBuf, Range<u64>)>);

impl LocalParts {
    /// Adds the parts of a raw disk.
    pub fn add(&mut self, disk: &Path, parts: Vec<DiskPart>) {
        for DiskPart { start, bytes, raw } in parts {
            self.0.entry(raw).or_insert_with(|| (disk.to_owned(), start..start.saturating_add(bytes)));
        }
    }

    /// Copies the part with this digest to its place. False when no disk has it, or what it has is something else; the place then
    /// has to be written anew. Blocking.
    ///
    /// # Errors
    /// When the place cannot be written.
    pub(crate) fn copy(&self, raw: &Digest, to: &File, part: &Range<u64>) -> io::Result<bool> {
        let Some((disk, from)) = self.0.get(raw) else { return Ok(false) };
        if from.end - from.start != part.end - part.start {
            return Ok(false);
        }
        // One that was removed meanwhile, or cannot be read, is fetched.
        let Ok(disk) = File::open(disk) else { return Ok(false) };
        let target = SparseTarget::of(to, part)?;
        let (mut hasher, mut done, all) = (raw.hasher(), 0, part.end - part.start);
        let mut buffer = vec![0; PIECE_BYTES];
        while done < all {
            let want = usize::try_from(all - done).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            let piece = buffer.get_mut(..want).unwrap_or_default();
            if disk.read_exact_at(piece, from.start + done).is_err() {
                return Ok(false);
            }
            hasher.update(piece);
            target.write(piece, part.start + done)?;
            done += want as u64;
        }
        Ok(hasher.finish() == *raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_is_copied_unless_it_became_another() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, target) = (dir.path().join("disk"), dir.path().join("target"));
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        std::fs::write(&disk, &bytes).unwrap();
        let raw = Digest::of(&bytes[1000..2_900_000]);
        let mut local = LocalParts::default();
        local.add(&disk, vec![DiskPart { start: 1000, bytes: 2_899_000, raw }]);
        let to = File::options().create(true).truncate(true).read(true).write(true).open(&target).unwrap();
        assert!(local.copy(&raw, &to, &(5..2_899_005)).unwrap());
        assert!(std::fs::read(&target).unwrap()[5..] == bytes[1000..2_900_000]);
        assert!(!local.copy(&raw, &to, &(0..10)).unwrap(), "another length");
        assert!(!local.copy(&Digest::of(b"x"), &to, &(0..10)).unwrap(), "no disk has it");
        File::options().write(true).open(&disk).unwrap().write_all_at(b"!", 2000).unwrap();
        assert!(!local.copy(&raw, &to, &(5..2_899_005)).unwrap(), "damaged");
        std::fs::remove_file(&disk).unwrap();
        assert!(!local.copy(&raw, &to, &(5..2_899_005)).unwrap(), "removed");
    }
}

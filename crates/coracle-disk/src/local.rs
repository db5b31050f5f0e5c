//! Parts of the disks on this node, by digest of the raw bytes: a pull copies them instead of fetching them. An image derived
//! from another image shares most parts with it.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use coracle_oci::Digest;
use serde::{Deserialize, Serialize};

use crate::frame::SparseTarget;

/// Bytes copied at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Part of a disk that is not zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskPart {
    /// Offset of the part, bytes.
    pub start: u64,
    /// Length of the part, bytes.
    pub bytes: u64,
    /// Digest of the raw bytes of the part.
    pub raw: Digest,
}

/// Parts of disks in files of this node. The files must not change.
#[derive(Debug, Default)]
pub struct LocalParts(HashMap<Digest, (PathBuf, Range<u64>)>);

impl LocalParts {
    /// Adds the parts of a raw disk.
    pub fn add(&mut self, disk: &Path, parts: Vec<DiskPart>) {
        for DiskPart { start, bytes, raw } in parts {
            self.0.entry(raw).or_insert_with(|| (disk.to_owned(), start..start.saturating_add(bytes)));
        }
    }

    /// Copies the part with this digest to the range `part` of `to`. Returns false when no disk has the part, or when its bytes
    /// do not match the digest; the range must then be written again. Blocking.
    ///
    /// # Errors
    /// When `to` cannot be written.
    pub(crate) fn copy(&self, raw: &Digest, to: &File, part: &Range<u64>) -> io::Result<bool> {
        let Some((disk, from)) = self.0.get(raw) else { return Ok(false) };
        if from.end - from.start != part.end - part.start {
            return Ok(false);
        }
        // A part of a disk that was removed meanwhile or cannot be read is fetched instead.
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
    fn part_is_copied_only_if_its_digest_matches() {
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

//! A file of fixed size that keeps the last bytes written to it.
//!
//! Layout: 8 bytes magic, 8 bytes number of bytes ever written (little endian),
//! then the data, byte `n` at `n % capacity`. Not synced: a console is no
//! promise, and after a crash of the host the tail may be old.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const MAGIC: &[u8; 8] = b"CORRING1";
const HEADER_LEN: usize = 16;
const HEADER: u64 = HEADER_LEN as u64;

/// An open ring.
#[derive(Debug)]
pub(crate) struct Ring {
    file: File,
    capacity: u64,
    written: u64,
}

impl Ring {
    /// Opens or makes a ring that keeps `capacity` bytes. A file of another format is emptied.
    pub(crate) fn open(path: &Path, capacity: u64) -> io::Result<Self> {
        let file =
            File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut header = [0; HEADER_LEN];
        let mut written = 0;
        if file.read_exact_at(&mut header, 0).is_ok() && header.starts_with(MAGIC) {
            let (_, count) = header.split_at(8);
            written = u64::from_le_bytes(count.try_into().unwrap_or_default());
        } else {
            file.set_len(0)?;
            file.write_all_at(MAGIC, 0)?;
            file.write_all_at(&0_u64.to_le_bytes(), 8)?;
        }
        Ok(Self { file, capacity, written })
    }

    /// Adds bytes; the oldest give way.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let keep = usize::try_from(self.capacity).unwrap_or(usize::MAX);
        let skipped = bytes.len().saturating_sub(keep);
        self.written += skipped as u64;
        let mut rest = bytes.get(skipped..).unwrap_or_default();
        while !rest.is_empty() {
            let at = self.written % self.capacity;
            let room = usize::try_from(self.capacity - at).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at(room);
            self.file.write_all_at(now, HEADER + at)?;
            self.written += room as u64;
            rest = later;
        }
        self.file.write_all_at(&self.written.to_le_bytes(), 8)
    }

    /// Everything that is kept, oldest first.
    pub(crate) fn contents(&self) -> io::Result<Vec<u8>> {
        let length = self.written.min(self.capacity);
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        let start = (self.written - length) % self.capacity;
        let first = usize::try_from((self.capacity - start).min(length)).map_err(io::Error::other)?;
        let (older, newer) = bytes.split_at_mut(first);
        self.file.read_exact_at(older, HEADER + start)?;
        self.file.read_exact_at(newer, HEADER)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_ring_keeps_the_last_bytes_and_stays_small(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            reopen in any::<bool>(),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("ring");
            let mut ring = Ring::open(&path, 32).unwrap();
            let mut all = Vec::new();
            for part in &parts {
                if reopen {
                    ring = Ring::open(&path, 32).unwrap();
                }
                ring.append(part).unwrap();
                all.extend_from_slice(part);
            }
            prop_assert_eq!(&ring.contents().unwrap()[..], &all[all.len().saturating_sub(32)..]);
            prop_assert!(std::fs::metadata(&path).unwrap().len() <= 48);
        }
    }

    #[test]
    fn what_is_no_ring_is_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ring");
        std::fs::write(&path, b"something else entirely").unwrap();
        assert_eq!(Ring::open(&path, 32).unwrap().contents().unwrap(), b"");
    }
}

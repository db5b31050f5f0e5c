//! File of fixed size that keeps the last bytes written to it.
//!
//! Layout: 8 bytes magic, 8 bytes number of bytes ever written (little endian), then the data, byte `n` at `n % capacity`. The
//! file is not synced: the console has no durability guarantee, and after a crash of the host its tail may be old.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"CORRING1";
const HEADER_LEN: usize = 16;
const HEADER: u64 = HEADER_LEN as u64;

/// Ring buffer in a file, which is opened at the first use: most guests of a large node write nothing to their consoles.
#[derive(Debug)]
pub(crate) struct Ring {
    path: PathBuf,
    capacity: u64,
    open: Option<OpenRing>,
}

#[derive(Debug)]
struct OpenRing {
    file: File,
    written: u64,
}

impl Ring {
    /// Makes a ring that keeps `capacity` bytes in the file at `path`. A file of another format is emptied.
    pub(crate) fn new(path: &Path, capacity: u64) -> Self {
        Self { path: path.to_owned(), capacity, open: None }
    }

    /// Appends bytes and overwrites the oldest ones.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let capacity = self.capacity;
        let OpenRing { file, written } = self.open()?;
        let keep = usize::try_from(capacity).unwrap_or(usize::MAX);
        let skipped = bytes.len().saturating_sub(keep);
        *written += skipped as u64;
        let mut rest = bytes.get(skipped..).unwrap_or_default();
        while !rest.is_empty() {
            let at = *written % capacity;
            let room = usize::try_from(capacity - at).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at(room);
            file.write_all_at(now, HEADER + at)?;
            *written += room as u64;
            rest = later;
        }
        file.write_all_at(&written.to_le_bytes(), 8)
    }

    /// Returns all bytes that are kept, oldest first.
    pub(crate) fn contents(&mut self) -> io::Result<Vec<u8>> {
        let capacity = self.capacity;
        let OpenRing { file, written } = self.open()?;
        let length = (*written).min(capacity);
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        let start = (*written - length) % capacity;
        let first = usize::try_from((capacity - start).min(length)).map_err(io::Error::other)?;
        let (older, newer) = bytes.split_at_mut(first);
        file.read_exact_at(older, HEADER + start)?;
        file.read_exact_at(newer, HEADER)?;
        Ok(bytes)
    }

    fn open(&mut self) -> io::Result<&mut OpenRing> {
        let open = match self.open.take() {
            Some(open) => open,
            None => OpenRing::open(&self.path)?,
        };
        Ok(self.open.insert(open))
    }
}

impl OpenRing {
    fn open(path: &Path) -> io::Result<Self> {
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
        Ok(Self { file, written })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ring_keeps_the_last_bytes_and_stays_small(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            reopen in any::<bool>(),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("ring");
            let mut ring = Ring::new(&path, 32);
            let mut all = Vec::new();
            for part in &parts {
                if reopen {
                    ring = Ring::new(&path, 32);
                }
                ring.append(part).unwrap();
                all.extend_from_slice(part);
            }
            prop_assert_eq!(&ring.contents().unwrap()[..], &all[all.len().saturating_sub(32)..]);
            prop_assert!(std::fs::metadata(&path).unwrap().len() <= 48);
        }
    }

    #[test]
    fn invalid_ring_file_is_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ring");
        std::fs::write(&path, b"something else entirely").unwrap();
        assert_eq!(Ring::new(&path, 32).contents().unwrap(), b"");
    }
}

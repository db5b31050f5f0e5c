//! File data in block-aligned ranges. Blocks of zeros become holes.

use std::{
    fs::File,
    io::{self, Read},
};

use super::BLOCK;
use crate::{space::Guard, sparse};

const CHUNK: usize = 256 << 10;

/// Appends file data to the image.
pub(crate) struct DataWriter {
    file: File,
    next: u64,
    buffer: Vec<u8>,
    /// Keeps free space on the file system. `None`: no reserve.
    guard: Option<Guard>,
}

/// Side of a copy that failed.
pub(crate) enum CopyError {
    Read(io::Error),
    Write(io::Error),
}

impl DataWriter {
    /// Starts behind the block of the superblock. `file` must be empty.
    pub(crate) fn new(file: File) -> Self {
        Self { file, next: BLOCK, buffer: vec![0; CHUNK], guard: None }
    }

    /// Like [`DataWriter::new`], with a reserve of free space.
    pub(crate) fn guarded(file: File, guard: Guard) -> Self {
        Self { guard: Some(guard), ..Self::new(file) }
    }

    /// Reserves space before it is used.
    pub(super) fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        self.guard.as_mut().map_or(Ok(()), |guard| guard.take(bytes))
    }

    /// Offset of the next file, in bytes.
    pub(crate) fn position(&self) -> u64 {
        self.next
    }

    /// Discards everything written from `position` on.
    pub(crate) fn rewind(&mut self, position: u64) -> io::Result<()> {
        // Truncates instead of overwriting: later holes must read as zeros.
        self.file.set_len(position)?;
        self.next = position;
        Ok(())
    }

    /// Copies exactly `size` bytes and returns the number of the first block.
    pub(crate) fn copy(&mut self, from: &mut impl Read, size: u64) -> Result<u32, CopyError> {
        let start = self.next;
        let block =
            u32::try_from(start / BLOCK).map_err(|_| CopyError::Write(io::ErrorKind::FileTooLarge.into()))?;
        let mut done = 0;
        while done < size {
            let want = usize::try_from(size - done).unwrap_or(CHUNK).min(CHUNK);
            self.reserve(want as u64).map_err(CopyError::Write)?;
            from.read_exact(&mut self.buffer[..want]).map_err(CopyError::Read)?;
            sparse::write_data(&self.file, &self.buffer[..want], start + done).map_err(CopyError::Write)?;
            done += want as u64;
        }
        self.next = (start + size).next_multiple_of(BLOCK);
        Ok(block)
    }

    /// Returns the file, to which the metadata is then written.
    pub(crate) fn into_file(self) -> File {
        self.file
    }
}

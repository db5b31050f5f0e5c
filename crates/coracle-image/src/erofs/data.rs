//! File data, streamed to block-aligned places; blocks of zeros become holes.

use std::{
    fs::File,
    io::{self, Read},
};

use super::BLOCK;
use crate::sparse;

const CHUNK: usize = 256 << 10;

/// Appends file data to the image.
pub(crate) struct DataWriter {
    file: File,
    next: u64,
    buffer: Vec<u8>,
}

/// Which side of a copy failed.
pub(crate) enum CopyError {
    Read(io::Error),
    Write(io::Error),
}

impl DataWriter {
    /// Starts behind the superblock's block. `file` is empty.
    pub(crate) fn new(file: File) -> Self {
        Self { file, next: BLOCK, buffer: vec![0; CHUNK] }
    }

    /// Where the next file will begin, in bytes.
    pub(crate) fn position(&self) -> u64 {
        self.next
    }

    /// Forgets everything written from `position` on.
    pub(crate) fn rewind(&mut self, position: u64) -> io::Result<()> {
        // Shortened, not overwritten: what is skipped as a hole later must read as zeros.
        self.file.set_len(position)?;
        self.next = position;
        Ok(())
    }

    /// Copies exactly `size` bytes and returns the first block's number.
    pub(crate) fn copy(&mut self, from: &mut impl Read, size: u64) -> Result<u32, CopyError> {
        let start = self.next;
        let block =
            u32::try_from(start / BLOCK).map_err(|_| CopyError::Write(io::ErrorKind::FileTooLarge.into()))?;
        let mut done = 0;
        while done < size {
            let want = usize::try_from(size - done).unwrap_or(CHUNK).min(CHUNK);
            from.read_exact(&mut self.buffer[..want]).map_err(CopyError::Read)?;
            sparse::write_data(&self.file, &self.buffer[..want], start + done).map_err(CopyError::Write)?;
            done += want as u64;
        }
        self.next = (start + size).next_multiple_of(BLOCK);
        Ok(block)
    }

    /// Hands the file over for the metadata, with the place where that begins.
    pub(crate) fn into_parts(self) -> (File, u64) {
        (self.file, self.next)
    }
}

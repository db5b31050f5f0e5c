//! File data, streamed to block-aligned places; blocks of zeros become holes.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
};

use super::{BLOCK, BLOCK_LEN};

const CHUNK: usize = 256 << 10;
const ZEROS: [u8; BLOCK_LEN] = [0; BLOCK_LEN];

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
            write_sparse(&self.file, &self.buffer[..want], start + done).map_err(CopyError::Write)?;
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

/// Writes the runs of blocks that hold anything.
fn write_sparse(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let (mut start, mut at) = (None, 0);
    for block in bytes.chunks(BLOCK_LEN) {
        let empty = block == &ZEROS[..block.len()];
        match (empty, start) {
            (true, Some(from)) => {
                file.write_all_at(&bytes[from..at], offset + from as u64)?;
                start = None;
            }
            (false, None) => start = Some(at),
            _ => {}
        }
        at += block.len();
    }
    match start {
        Some(from) => file.write_all_at(&bytes[from..], offset + from as u64),
        None => Ok(()),
    }
}

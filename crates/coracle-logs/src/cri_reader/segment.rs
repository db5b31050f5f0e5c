//! Files of a log, in the order of their output, and their lines.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use super::rotated_path;
use super::tail::{self, Tail};

/// Size of a read, bytes.
const BLOCK: usize = 64 << 10;
/// Maximum length of a line, bytes; the rest is dropped. The records of [`crate::CriLog`] have at most 16 KiB of content.
pub(super) const LINE_MAX: usize = 64 << 10;

/// Line of a file without its newline, cut to [`LINE_MAX`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line(Vec<u8>);

impl Line {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Files of one log that are still to be read. The writer renames a file when it is full, and continues in a new one.
#[derive(Debug)]
pub(super) struct Segments {
    path: PathBuf,
    /// Files, of which the first is being read. Never empty.
    files: VecDeque<Segment>,
}

#[derive(Debug)]
struct Segment {
    file: File,
    inode: u64,
    /// Offset of the next block.
    offset: u64,
    block: Vec<u8>,
    /// Number of bytes of the block that were consumed.
    used: usize,
    /// Beginning of a line whose end was not read yet.
    line: Vec<u8>,
}

impl Segments {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        // Opened in this order, a file that is renamed meanwhile is found twice, and none is missed.
        let current = Segment::open(path)?;
        let old = found_or_none(Segment::open(&rotated_path(path)))?.filter(|old| old.inode != current.inode);
        let files = old.into_iter().chain([current]).collect();
        Ok(Self { path: path.to_owned(), files })
    }

    /// Seeks to the beginning of the last `lines` lines.
    pub(super) fn seek_to_tail(&mut self, lines: u64) -> io::Result<()> {
        let (mut left, mut is_last) = (lines, true);
        for index in (0..self.files.len()).rev() {
            let Some(segment) = self.files.get_mut(index) else { break };
            match tail::find(&segment.file, left, is_last)? {
                Tail::At(offset) => {
                    segment.offset = offset;
                    self.files.drain(..index);
                    break;
                }
                Tail::Before { lines } => (left, is_last) = (left.saturating_sub(lines), false),
                Tail::Empty => {}
            }
        }
        Ok(())
    }

    /// Returns the next complete line; `None` if there is none yet.
    pub(super) fn next_line(&mut self) -> io::Result<Option<Line>> {
        loop {
            let Some(current) = self.files.front_mut() else { return Ok(None) };
            if let Some(line) = current.next_line()? {
                return Ok(Some(line));
            }
            if self.files.len() > 1 {
                // The file was read to its end after its successor existed: nothing more will be written to it.
                self.files.pop_front();
            } else if !self.find_successors()? {
                return Ok(None);
            }
        }
    }

    /// Looks for files that have replaced the current one, which remains the first.
    fn find_successors(&mut self) -> io::Result<bool> {
        let Some(known) = self.files.front().map(|segment| segment.inode) else { return Ok(false) };
        let is_new = |inode: u64| inode != known;
        if !found_or_none(fs::metadata(&self.path))?.is_some_and(|metadata| is_new(metadata.ino())) {
            return Ok(false);
        }
        let Some(current) = found_or_none(Segment::open(&self.path))?.filter(|found| is_new(found.inode))
        else {
            return Ok(false);
        };
        // A third file, if the log was replaced twice since.
        let between = found_or_none(Segment::open(&rotated_path(&self.path)))?;
        let between = between.filter(|found| is_new(found.inode) && found.inode != current.inode);
        self.files.extend(between.into_iter().chain([current]));
        Ok(true)
    }
}

impl Segment {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let inode = file.metadata()?.ino();
        Ok(Self { file, inode, offset: 0, block: Vec::new(), used: 0, line: Vec::new() })
    }

    fn next_line(&mut self) -> io::Result<Option<Line>> {
        loop {
            let rest = self.block.get(self.used..).unwrap_or_default();
            let end = rest.iter().position(|byte| *byte == b'\n');
            let part = rest.get(..end.unwrap_or(rest.len())).unwrap_or_default();
            let room = LINE_MAX.saturating_sub(self.line.len());
            self.line.extend_from_slice(part.get(..room).unwrap_or(part));
            self.used = self.used.saturating_add(part.len());
            if end.is_some() {
                self.used = self.used.saturating_add(1);
                return Ok(Some(Line(std::mem::take(&mut self.line))));
            }
            if !self.read_block()? {
                return Ok(None);
            }
        }
    }

    /// Reads the next block. Returns false at the end of the file.
    fn read_block(&mut self) -> io::Result<bool> {
        self.block.resize(BLOCK, 0);
        let read = self.file.read_at(&mut self.block, self.offset);
        self.block.truncate(*read.as_ref().unwrap_or(&0));
        self.used = 0;
        let read = read?;
        self.offset = self.offset.saturating_add(read as u64);
        if read == 0 {
            let length = self.file.metadata()?.len();
            if length < self.offset {
                // The writer has truncated a record that a crash or a full disk left incomplete.
                self.offset = length;
                self.line.clear();
            }
        }
        Ok(read > 0)
    }
}

/// `None` if the file does not exist.
fn found_or_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

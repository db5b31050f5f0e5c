//! Finds the last lines of a file. The file is read backwards, so that the time depends on the length of these lines only.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::record::{HEADER_MAX, Record};

/// Size of a read, bytes.
const BLOCK: u64 = 64 << 10;

/// Position of the last lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// The lines begin at this offset.
    At(u64),
    /// The lines begin in an earlier file; `lines` of them end in this one.
    Before { lines: u64 },
    /// The lines are in an earlier file; this one is empty.
    Empty,
}

/// Finds the last `wanted` lines. A line ends with a full record; in the newest file (`is_newest`) an unfinished last line
/// counts, too.
pub(super) fn find(file: &File, wanted: u64, is_newest: bool) -> io::Result<Tail> {
    let mut newlines = Newlines { file, before: file.metadata()?.len(), block: Vec::new(), start: 0 };
    let mut end = match newlines.next_back()? {
        end if is_newest && wanted == 0 => return Ok(Tail::At(end.map_or(0, |end| end + 1))),
        Some(end) => end,
        None => return Ok(Tail::Empty),
    };
    let (mut lines, mut may_be_open) = (0, is_newest);
    loop {
        let before = newlines.next_back()?;
        let begin = before.map_or(0, |newline| newline + 1);
        match ends_line(file, begin, end)? {
            Some(true) if lines == wanted => return Ok(Tail::At(end + 1)),
            Some(true) => lines += 1,
            Some(false) if may_be_open => lines += 1,
            Some(false) | None => {}
        }
        may_be_open = false;
        match before {
            Some(newline) => end = newline,
            None => return Ok(Tail::Before { lines }),
        }
    }
}

/// Whether the record is the last one of its line; `None` if there is no record.
fn ends_line(file: &File, begin: u64, end: u64) -> io::Result<Option<bool>> {
    let length = usize::try_from(end.saturating_sub(begin)).unwrap_or(HEADER_MAX).min(HEADER_MAX);
    let mut header = vec![0; length];
    let read = file.read_at(&mut header, begin)?;
    Ok(Record::parse(header.get(..read).unwrap_or_default()).map(|record| record.ends_line))
}

/// Positions of newlines, in reverse order.
struct Newlines<'a> {
    file: &'a File,
    /// Position before which newlines are still to be found.
    before: u64,
    block: Vec<u8>,
    /// Offset of the block.
    start: u64,
}

impl Newlines<'_> {
    fn next_back(&mut self) -> io::Result<Option<u64>> {
        loop {
            let known = usize::try_from(self.before.saturating_sub(self.start)).unwrap_or(usize::MAX);
            let known = self.block.get(..known).unwrap_or_default();
            if let Some(index) = known.iter().rposition(|byte| *byte == b'\n') {
                self.before = self.start + index as u64;
                return Ok(Some(self.before));
            }
            // The block has no more newlines.
            self.before = if self.block.is_empty() { self.before } else { self.start };
            if self.before == 0 {
                return Ok(None);
            }
            self.start = self.before.saturating_sub(BLOCK);
            let length = usize::try_from(self.before - self.start).unwrap_or(0);
            self.block.resize(length, 0);
            self.file.read_exact_at(&mut self.block, self.start)?;
        }
    }
}

//! Reads logs in the CRI format, with the queries of `kubectl logs`: the last lines, records since a time, a number of bytes,
//! and following a running container.
//!
//! ```text
//! <log>.1, <log> ─▶ segments ─▶ records (lines of the file, bounded) ─▶ query ─▶ output
//!                      ▲ tail: where to begin          renamed or replaced log: the next segment
//! ```
//! Log files are hostile: malformed lines are skipped, and of a long line only the beginning is read.

mod follow;
mod record;
mod segment;
mod tail;

use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

pub use follow::CriLogFollower;

use record::Record;
use segment::{Line, Segments};

/// Maximum size of the output of one call of [`CriLogReader::read`], bytes; exceeded by at most one record.
const READ_MAX: usize = 64 << 10;

/// Selection of log records; `Default` selects all, without times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogQuery {
    /// Number of last lines to begin with; lines written later are not counted.
    pub tail_lines: Option<u64>,
    /// Time of the first record.
    pub since: Option<Timestamp>,
    /// Maximum size of the output, bytes.
    pub limit_bytes: Option<u64>,
    /// Whether each line begins with its time and a space.
    pub timestamps: bool,
}

/// Reader of one log. All calls block for as long as the file system takes.
#[derive(Debug)]
pub struct CriLogReader {
    segments: Segments,
    query: LogQuery,
    /// Size of the output that the query still permits, bytes.
    remaining: u64,
    /// Whether the output is at the beginning of a line.
    at_line_start: bool,
}

impl CriLogReader {
    /// Opens the log at `path` and, if it exists, the rotated part before it, `<path>.1`.
    ///
    /// # Errors
    /// Errors of the file system; [`io::ErrorKind::NotFound`] if the log does not exist.
    pub fn open(path: &Path, query: LogQuery) -> io::Result<Self> {
        let mut segments = Segments::open(path)?;
        if let Some(lines) = query.tail_lines {
            segments.seek_to_tail(lines)?;
        }
        let remaining = query.limit_bytes.unwrap_or(u64::MAX);
        Ok(Self { segments, query, remaining, at_line_start: true })
    }

    /// Returns the next output, some 64 KiB of it; `None` when everything written so far was read, or the query permits no
    /// more. A later call returns what was written since, also to files that replaced the log.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut output = Vec::new();
        while !self.is_complete() && output.len() < READ_MAX {
            match self.segments.next_line()? {
                Some(line) => self.append(&line, &mut output),
                None => break,
            }
        }
        Ok(Some(output).filter(|output| !output.is_empty()))
    }

    /// Whether the query permits no more output.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.remaining == 0
    }

    fn append(&mut self, line: &Line, output: &mut Vec<u8>) {
        let Some(record) = Record::parse(line.bytes()) else { return };
        if self.query.since.is_some_and(|since| record.time < since) {
            return;
        }
        if self.query.timestamps && self.at_line_start {
            self.put(record.time_text, output);
            self.put(b" ", output);
        }
        self.put(record.content, output);
        if record.ends_line {
            self.put(b"\n", output);
        }
        self.at_line_start = record.ends_line;
    }

    fn put(&mut self, bytes: &[u8], output: &mut Vec<u8>) {
        let room = usize::try_from(self.remaining).unwrap_or(usize::MAX);
        let allowed = bytes.get(..room).unwrap_or(bytes);
        output.extend_from_slice(allowed);
        self.remaining = self.remaining.saturating_sub(allowed.len() as u64);
    }
}

/// Path of the rotated part of a log.
fn rotated_path(path: &Path) -> PathBuf {
    let mut old = path.to_owned().into_os_string();
    old.push(".1");
    old.into()
}

#[cfg(test)]
mod tests;

//! Reading logs in the format of CRI, as `kubectl logs` asks for them: the end of a log, from a time on, so many bytes, and
//! what is added to it while the container runs.
//!
//! ```text
//! <log>.1, <log> ─▶ segments ─▶ records (lines of the file, bounded) ─▶ query ─▶ output
//!                      ▲ tail: where to begin          renamed or replaced log: the next segment
//! ```
//! Files are hostile: a malformed line is skipped, of a long one the beginning is read.

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

/// Bytes of output that one call of [`CriLogReader::read`] gives, plus at most one record.
const READ_MAX: usize = 64 << 10;

/// What of a log is wanted; `Default` is all of it, without times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogQuery {
    /// So many of the last lines; those that are written later are not counted.
    pub tail_lines: Option<u64>,
    /// Records of this time and later.
    pub since: Option<Timestamp>,
    /// So many bytes of output.
    pub limit_bytes: Option<u64>,
    /// Each line begins with its time and a space.
    pub timestamps: bool,
}

/// Reads one log. All calls block, for the time that the file system takes.
#[derive(Debug)]
pub struct CriLogReader {
    segments: Segments,
    query: LogQuery,
    /// Bytes of output that may still be given.
    remaining: u64,
    /// The output is at the beginning of a line.
    at_line_start: bool,
}

impl CriLogReader {
    /// Opens the log at `path` and the part before it that was rotated away, `<path>.1`, where there is one.
    ///
    /// # Errors
    /// As of the file system; [`io::ErrorKind::NotFound`] when there is no log.
    pub fn open(path: &Path, query: LogQuery) -> io::Result<Self> {
        let mut segments = Segments::open(path)?;
        if let Some(lines) = query.tail_lines {
            segments.seek_to_tail(lines)?;
        }
        let remaining = query.limit_bytes.unwrap_or(u64::MAX);
        Ok(Self { segments, query, remaining, at_line_start: true })
    }

    /// The next output, some 64 KiB of it; `None` when all that is written was read, or as much as the query allows.
    /// Called again, it gives what was written since, also to files that replaced the log.
    ///
    /// # Errors
    /// As of the file system.
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

    /// Whether the query allows no more output.
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

/// Where the part of a log is that was rotated away.
fn rotated(path: &Path) -> PathBuf {
    let mut old = path.to_owned().into_os_string();
    old.push(".1");
    old.into()
}

#[cfg(test)]
mod tests;

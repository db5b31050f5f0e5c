//! What a workload printed, kept on disk within a bound.
//!
//! Two files, `log` and `log.old`; when `log` is full it takes the other's
//! place. An entry is a header of 29 bytes and the bytes themselves. The
//! guest's offset is in each header, so after a crash the end of the file says
//! where to go on, and a torn entry at the end is cut off.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tokio::sync::watch;

/// Bytes in one of the two files before it is turned over.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Longest piece of output in one entry; the guest sends less.
const DATA_MAX: u32 = 1 << 20;

const MAGIC: u8 = 0xc0;
const HEADER: usize = 1 + 8 + 8 + 8 + 1 + 4;

/// Which of the workload's two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A piece of a workload's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Which start of the VM it belongs to.
    pub boot: u32,
    /// Offset of the first byte in the output of this boot.
    pub offset: u64,
    /// Guest time, nanoseconds since 1970.
    pub time_ns: i64,
    /// Which stream.
    pub stream: LogStream,
    /// The bytes.
    pub data: Vec<u8>,
}

/// The log of one VM. One writer; readers open the files themselves.
#[derive(Debug)]
pub(crate) struct LogWriter {
    dir: PathBuf,
    file: File,
    length: u64,
    /// Where the output of the present boot continues.
    next: (u32, u64),
    changed: watch::Sender<u64>,
}

impl LogWriter {
    /// Opens the log below `dir`, cutting off what a crash left unfinished. Blocking.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let mut file =
            File::options().read(true).write(true).create(true).truncate(false).open(dir.join("log"))?;
        let mut next = (0, 0);
        let mut length = 0;
        for entry in Entries::new(BufReader::new(file.try_clone()?)) {
            length += (HEADER + entry.data.len()) as u64;
            next = (entry.boot, entry.offset + entry.data.len() as u64);
        }
        file.set_len(length)?;
        file.seek(SeekFrom::Start(length))?;
        Ok(Self { dir: dir.to_owned(), file, length, next, changed: watch::Sender::new(0) })
    }

    /// The offset to ask the guest for in this boot.
    pub(crate) fn resume_offset(&self, boot: u32) -> u64 {
        if self.next.0 == boot { self.next.1 } else { 0 }
    }

    /// Adds an entry. What the log already has is passed over. Blocking, short.
    pub(crate) fn append(&mut self, entry: &LogEntry) -> io::Result<()> {
        let skip = self.resume_offset(entry.boot).saturating_sub(entry.offset);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX).min(entry.data.len());
        let data = entry.data.get(skip..).unwrap_or_default();
        if data.is_empty() {
            return Ok(());
        }
        if self.length >= FILE_BYTES_MAX {
            fs::rename(self.dir.join("log"), self.dir.join("log.old"))?;
            self.file = File::options().write(true).create(true).truncate(true).open(self.dir.join("log"))?;
            self.length = 0;
        }
        let offset = entry.offset + skip as u64;
        let mut bytes = Vec::with_capacity(HEADER + data.len());
        bytes.push(MAGIC);
        bytes.extend_from_slice(&u64::from(entry.boot).to_le_bytes());
        bytes.extend_from_slice(&offset.to_le_bytes());
        bytes.extend_from_slice(&entry.time_ns.to_le_bytes());
        bytes.push(match entry.stream {
            LogStream::Stdout => 1,
            LogStream::Stderr => 2,
        });
        let length = u32::try_from(data.len()).map_err(io::Error::other)?;
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(data);
        self.file.write_all(&bytes)?;
        self.length += bytes.len() as u64;
        self.next = (entry.boot, offset + data.len() as u64);
        self.changed.send_modify(|n| *n += 1);
        Ok(())
    }

    /// Changes with every entry, for readers that follow.
    pub(crate) fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}

/// Everything that is kept, oldest first. Blocking; at most 8 MiB and a bit.
pub(crate) fn read_all(dir: &Path) -> io::Result<Vec<LogEntry>> {
    let mut entries = Vec::new();
    for name in ["log.old", "log"] {
        match File::open(dir.join(name)) {
            Ok(file) => entries.extend(Entries::new(BufReader::new(file))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(entries)
}

/// Entries of a file up to its end, or to the first that is not whole.
struct Entries<R>(R);

impl<R: Read> Entries<R> {
    fn new(reader: R) -> Self {
        Self(reader)
    }

    fn read(&mut self) -> Option<LogEntry> {
        let [magic] = self.array()?;
        let boot = u64::from_le_bytes(self.array()?);
        let offset = u64::from_le_bytes(self.array()?);
        let time_ns = i64::from_le_bytes(self.array()?);
        let [stream] = self.array()?;
        let length = u32::from_le_bytes(self.array()?);
        let stream = match stream {
            1 => LogStream::Stdout,
            2 => LogStream::Stderr,
            _ => return None,
        };
        if magic != MAGIC || length > DATA_MAX {
            return None;
        }
        let mut data = vec![0; usize::try_from(length).ok()?];
        self.0.read_exact(&mut data).ok()?;
        Some(LogEntry { boot: u32::try_from(boot).ok()?, offset, time_ns, stream, data })
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).ok()?;
        Some(bytes)
    }
}

impl<R: Read> Iterator for Entries<R> {
    type Item = LogEntry;

    fn next(&mut self) -> Option<LogEntry> {
        self.read()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(boot: u32, offset: u64, text: &str) -> LogEntry {
        LogEntry { boot, offset, time_ns: 7, stream: LogStream::Stdout, data: text.into() }
    }

    fn text(dir: &Path) -> String {
        read_all(dir).unwrap().into_iter().map(|e| String::from_utf8(e.data).unwrap()).collect()
    }

    #[test]
    fn what_is_repeated_is_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogWriter::open(dir.path()).unwrap();
        log.append(&entry(1, 0, "hello ")).unwrap();
        log.append(&entry(1, 3, "lo world")).unwrap();
        log.append(&entry(1, 0, "hello ")).unwrap();
        assert_eq!(text(dir.path()), "hello world");
        assert_eq!((log.resume_offset(1), log.resume_offset(2)), (11, 0));
    }

    #[test]
    fn a_torn_entry_is_cut_off_and_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogWriter::open(dir.path()).unwrap();
        log.append(&entry(1, 0, "first")).unwrap();
        log.append(&entry(1, 5, "second")).unwrap();
        drop(log);
        let path = dir.path().join("log");
        let length = fs::metadata(&path).unwrap().len();
        File::options().write(true).open(&path).unwrap().set_len(length - 3).unwrap();
        let mut log = LogWriter::open(dir.path()).unwrap();
        assert_eq!(log.resume_offset(1), 5);
        log.append(&entry(1, 5, "second")).unwrap();
        assert_eq!(text(dir.path()), "firstsecond");
    }

    #[test]
    fn a_flood_stays_within_the_bound() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogWriter::open(dir.path()).unwrap();
        let chunk = "x".repeat(64 * 1024);
        for n in 0..400_u64 {
            log.append(&entry(1, n * chunk.len() as u64, &chunk)).unwrap();
        }
        let total: u64 =
            fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum();
        assert!(total < 2 * FILE_BYTES_MAX + 2 * chunk.len() as u64, "{total} bytes kept");
        let entries = read_all(dir.path()).unwrap();
        assert_eq!(entries.last().unwrap().offset, 399 * chunk.len() as u64);
    }
}

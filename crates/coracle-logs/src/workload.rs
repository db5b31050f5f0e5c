//! Output of a workload, kept on disk with a bounded size.
//!
//! There are two files, `log` and `log.old`; a full `log` replaces `log.old`. An entry is a header of 29 bytes and the data.
//! Each header has the offset in the guest's output, so after a crash the end of the file says where to continue. A torn entry
//! at the end is truncated.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tokio::sync::watch;

/// Maximum size of one of the two files, bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Maximum size of the data of one entry, bytes; the guest sends less.
const DATA_MAX: u32 = 1 << 20;

/// Names of the file that is being written, and of the one before it.
const CURRENT: &str = "log";
const OLD: &str = "log.old";

const MAGIC: u8 = 0xc0;
const HEADER: usize = 1 + 8 + 8 + 8 + 1 + 4;

/// Output stream of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Piece of a workload's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Number of the VM's boot that the output belongs to.
    pub boot: u32,
    /// Offset of the first byte in the output of this boot.
    pub offset: u64,
    /// Guest time, nanoseconds since 1970.
    pub time_ns: i64,
    /// Stream that the workload wrote to.
    pub stream: LogStream,
    /// Output bytes.
    pub data: Vec<u8>,
}

impl LogEntry {
    /// Offset behind the last byte; `None` if it overflows, because the guest chooses the offset.
    fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.data.len() as u64)
    }

    /// Boot and end offset, which order the entries.
    fn position(&self) -> (u32, u64) {
        (self.boot, self.end().unwrap_or(u64::MAX))
    }
}

/// Writer of one VM's log. There is one writer; readers open the files themselves.
#[derive(Debug)]
pub struct LogWriter {
    dir: PathBuf,
    file: File,
    length: u64,
    /// Boot and offset at which the output continues.
    next: (u32, u64),
    changed: watch::Sender<u64>,
}

impl LogWriter {
    /// Opens the log below `dir` and truncates an entry that a crash left incomplete. Blocking.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let mut file =
            File::options().read(true).write(true).create(true).truncate(false).open(dir.join(CURRENT))?;
        let mut next = (0, 0);
        let mut length = 0;
        for entry in Entries::new(BufReader::new(file.try_clone()?)) {
            length += (HEADER + entry.data.len()) as u64;
            next = entry.position();
        }
        file.set_len(length)?;
        file.seek(SeekFrom::Start(length))?;
        Ok(Self { dir: dir.to_owned(), file, length, next, changed: watch::Sender::new(0) })
    }

    /// Offset of this boot's output to request from the guest.
    pub fn resume_offset(&self, boot: u32) -> u64 {
        if self.next.0 == boot { self.next.1 } else { 0 }
    }

    /// Appends an entry. Skips an entry that the log has already, and one whose end overflows: the guest chooses the offset.
    /// Blocking, short.
    pub fn append(&mut self, entry: &LogEntry) -> io::Result<()> {
        let Some(end) = entry.end() else {
            tracing::debug!(offset = entry.offset, "log offset of a guest refused");
            return Ok(());
        };
        let skip = self.resume_offset(entry.boot).saturating_sub(entry.offset);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX).min(entry.data.len());
        let data = entry.data.get(skip..).unwrap_or_default();
        if data.is_empty() {
            return Ok(());
        }
        if self.length >= FILE_BYTES_MAX {
            fs::rename(self.dir.join(CURRENT), self.dir.join(OLD))?;
            self.file =
                File::options().write(true).create(true).truncate(true).open(self.dir.join(CURRENT))?;
            self.length = 0;
        }
        let offset = end - data.len() as u64;
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
        self.next = (entry.boot, end);
        self.changed.send_modify(|n| *n += 1);
        Ok(())
    }

    /// Receiver of a value that changes with every entry, for readers that follow the log.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}

/// Reader that keeps its position: no entry is returned twice.
#[derive(Debug)]
pub struct LogReader {
    dir: PathBuf,
    /// Current file, and the offset of its next entry. `None`: no file existed yet.
    at: Option<(File, u64)>,
}

impl LogReader {
    /// Makes a reader that begins at the oldest entry.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), at: None }
    }

    /// Returns the entries that were added since the last call, oldest first: at most what is kept on disk, a little over 8
    /// MiB. Blocking.
    pub fn read(&mut self) -> io::Result<Vec<LogEntry>> {
        let mut entries = Vec::new();
        if self.at.is_none() {
            self.at = self.open(OLD)?.or(self.open(CURRENT)?);
        }
        while let Some((file, at)) = &mut self.at {
            // Looked up before the file is read to its end: output written after that is in the next file.
            let next = successor(&self.dir, file)?;
            file.seek(SeekFrom::Start(*at))?;
            for entry in Entries::new(BufReader::new(&*file)) {
                *at += (HEADER + entry.data.len()) as u64;
                entries.push(entry);
            }
            match next {
                Some(next) => self.at = Some((next, 0)),
                None => break,
            }
        }
        Ok(entries)
    }

    fn open(&self, name: &str) -> io::Result<Option<(File, u64)>> {
        Ok(open(&self.dir, name)?.map(|file| (file, 0)))
    }
}

/// File that follows `file`; `None` if `file` is being written, or all are gone.
fn successor(dir: &Path, file: &File) -> io::Result<Option<File>> {
    let (old, current) = (open(dir, OLD)?, open(dir, CURRENT)?);
    let Some(current) = current.filter(|current| !is_same(current, file)) else { return Ok(None) };
    // After more than one rotation the older of the two files is unread as well.
    match old {
        Some(old) if !is_same(&old, file) => Ok(Some(old)),
        _ => Ok(Some(current)),
    }
}

fn is_same(a: &File, b: &File) -> bool {
    let id = |file: &File| file.metadata().map(|of| (of.dev(), of.ino())).ok();
    id(a).is_some() && id(a) == id(b)
}

fn open(dir: &Path, name: &str) -> io::Result<Option<File>> {
    match File::open(dir.join(name)) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// All entries that are kept, oldest first.
#[cfg(test)]
fn read_all(dir: &Path) -> io::Result<Vec<LogEntry>> {
    LogReader::new(dir).read()
}

/// Entries of a file up to its end, or to the first incomplete one.
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
        let entry = LogEntry { boot: u32::try_from(boot).ok()?, offset, time_ns, stream, data };
        entry.end().is_some().then_some(entry)
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
    fn repeated_output_is_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogWriter::open(dir.path()).unwrap();
        log.append(&entry(1, 0, "hello ")).unwrap();
        log.append(&entry(1, 3, "lo world")).unwrap();
        log.append(&entry(1, 0, "hello ")).unwrap();
        assert_eq!(text(dir.path()), "hello world");
        assert_eq!((log.resume_offset(1), log.resume_offset(2)), (11, 0));
    }

    #[test]
    fn torn_log_entry_is_truncated_and_requested_again() {
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
    fn follower_reads_every_entry_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut follower = LogReader::new(dir.path());
        assert!(follower.read().unwrap().is_empty(), "nothing is there yet");
        let mut log = LogWriter::open(dir.path()).unwrap();
        let chunk = "x".repeat(64 * 1024);
        let mut seen = Vec::new();
        for n in 0..200_u64 {
            log.append(&entry(1, n * chunk.len() as u64, &chunk)).unwrap();
            let fresh = follower.read().unwrap();
            assert_eq!(fresh.len(), 1, "entry {n}");
            seen.extend(fresh.iter().map(|entry| entry.offset / chunk.len() as u64));
        }
        assert_eq!(seen, (0..200).collect::<Vec<_>>());
        assert!(follower.read().unwrap().is_empty());
    }

    #[test]
    fn lagging_follower_continues_with_the_oldest_entry() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogWriter::open(dir.path()).unwrap();
        let chunk = "x".repeat(64 * 1024);
        log.append(&entry(1, 0, &chunk)).unwrap();
        let mut follower = LogReader::new(dir.path());
        assert_eq!(follower.read().unwrap().len(), 1);
        for n in 1..200_u64 {
            log.append(&entry(1, n * chunk.len() as u64, &chunk)).unwrap();
        }
        let offsets: Vec<_> = follower.read().unwrap().iter().map(|entry| entry.offset).collect();
        assert!(offsets.is_sorted() && offsets.last() == Some(&(199 * chunk.len() as u64)), "{offsets:?}");
        assert!(follower.read().unwrap().is_empty());
    }

    #[test]
    fn log_offset_beyond_the_last_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogWriter::open(dir.path()).unwrap();
        log.append(&entry(1, 0, "kept")).unwrap();
        log.append(&entry(1, u64::MAX - 3, "refused")).unwrap();
        assert_eq!((text(dir.path()), log.resume_offset(1)), ("kept".to_owned(), 4));
    }

    #[test]
    fn stored_log_offset_beyond_the_last_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogWriter::open(dir.path()).unwrap();
        log.append(&entry(1, 0, "kept")).unwrap();
        let length = fs::metadata(dir.path().join("log")).unwrap().len();
        log.append(&entry(1, 4, "offset")).unwrap();
        drop(log);
        let file = File::options().write(true).open(dir.path().join("log")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &u64::MAX.to_le_bytes(), length + 9).unwrap();
        let log = LogWriter::open(dir.path()).unwrap();
        assert_eq!((text(dir.path()), log.resume_offset(1)), ("kept".to_owned(), 4));
    }

    #[test]
    fn log_flood_stays_within_the_size_bound() {
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

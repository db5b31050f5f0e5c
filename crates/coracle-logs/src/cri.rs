//! Logs of containers in the CRI format (kubernetes, pkg/kubelet/kuberuntime/logs).
//!
//! Each record is a line `<time> <stream> <F|P> <content>`; P: the line of output continues in the next record of the stream.
//! The file always contains a prefix of the output. The beginning of a line is held back until its end, output of the other
//! stream, or the length of a record, so that a line becomes one record. The position of the log is stored in a file next to
//! it. After a crash the log is truncated to that position and the guest sends the rest, so that nothing is lost or written
//! twice.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use crate::LogStream;

/// Maximum length of a record's content, bytes.
const CONTENT_MAX: usize = 16 * 1024;
/// Size of the stored position, bytes: inode, length, offset, open lines.
const POSITION: usize = 8 + 8 + 8 + 1;

/// Log of one container. There is one writer; readers open the file themselves. All calls block.
#[derive(Debug)]
pub struct CriLog {
    path: PathBuf,
    file: File,
    position_file: File,
    position: Position,
    /// Output behind the position: the beginning of a line.
    pending: Pending,
    /// File size at which the file is renamed to `<name>.1`, bytes.
    rotate_bytes: Option<u64>,
    /// Output that could not be written, bytes.
    dropped: u64,
}

/// Beginning of a line whose end was not received yet.
#[derive(Debug, Default)]
struct Pending {
    stream: Option<LogStream>,
    data: Vec<u8>,
}

/// Position of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Position {
    inode: u64,
    length: u64,
    /// Offset behind the last byte of the container's output that is in the file.
    offset: u64,
    /// Whether the last record of stdout, and of stderr, was partial.
    open: [bool; 2],
}

impl CriLog {
    /// Opens the log at `path`, with its position in `position_path`. Truncates what a crash left behind the position.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open(path: &Path, position_path: &Path, rotate_bytes: Option<u64>) -> io::Result<Self> {
        for path in [path, position_path] {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
        }
        let position_file =
            File::options().read(true).write(true).create(true).truncate(false).open(position_path)?;
        let mut position = read_position(&position_file);
        let file = append(path)?;
        let metadata = file.metadata()?;
        if metadata.ino() == position.inode && metadata.len() > position.length {
            file.set_len(position.length)?;
        }
        (position.inode, position.length) = (metadata.ino(), file.metadata()?.len());
        let pending = Pending::default();
        Ok(Self { path: path.to_owned(), file, position_file, position, pending, rotate_bytes, dropped: 0 })
    }

    /// Offset of the container's output from which a newly opened log continues.
    #[must_use]
    pub fn next_offset(&self) -> u64 {
        self.position.offset
    }

    /// Number of bytes of output that could not be written since the log was opened.
    #[must_use]
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped
    }

    /// Appends output that begins at `offset`, without the part that the log has already. Output that cannot be written is
    /// dropped and counted: a container never waits for the disk of its node.
    ///
    /// # Errors
    /// When the output was dropped.
    pub fn append(&mut self, stream: LogStream, offset: u64, time_ns: i64, data: &[u8]) -> io::Result<()> {
        let seen = self.position.offset.saturating_add(self.pending.data.len() as u64);
        let known = seen.saturating_sub(offset);
        let fresh = data.get(usize::try_from(known).unwrap_or(usize::MAX)..).unwrap_or_default();
        // The guest chooses the offset: output whose end overflows is ignored.
        let Some(end) = offset.checked_add(data.len() as u64).filter(|_| !fresh.is_empty()) else {
            return Ok(());
        };
        if self.pending.stream.is_some_and(|other| other != stream) {
            self.write_pending(time_ns)?;
        }
        let mut output = std::mem::take(&mut self.pending.data);
        output.extend_from_slice(fresh);
        let tail = output.split_off(complete_len(&output));
        self.pending = Pending { stream: Some(stream).filter(|_| !tail.is_empty()), data: tail };
        let mut next =
            Position { offset: end.saturating_sub(self.pending.data.len() as u64), ..self.position };
        let records = records(stream, time_ns, &output, &mut next.open[index(stream)]);
        if records.is_empty() { Ok(()) } else { self.write(&records, next, output.len()) }
    }

    /// Writes the beginning of a line as a partial record.
    fn write_pending(&mut self, time_ns: i64) -> io::Result<()> {
        let Pending { stream: Some(stream), data } = std::mem::take(&mut self.pending) else { return Ok(()) };
        let mut next = self.position;
        next.offset = next.offset.saturating_add(data.len() as u64);
        let records = records(stream, time_ns, &data, &mut next.open[index(stream)]);
        self.write(&records, next, data.len())
    }

    /// Ends a line that has no newline. Idempotent.
    ///
    /// # Errors
    /// When the disk is full.
    pub fn finish(&mut self, time_ns: i64) -> io::Result<()> {
        if let Pending { stream: Some(stream), data } = std::mem::take(&mut self.pending) {
            let mut next = self.position;
            next.offset = next.offset.saturating_add(data.len() as u64);
            next.open[index(stream)] = false;
            let mut end = Vec::new();
            record(&mut end, stream, time_ns, 'F', &data);
            self.write(&end, next, data.len())?;
        }
        for stream in [LogStream::Stdout, LogStream::Stderr] {
            if self.position.open[index(stream)] {
                let mut next = self.position;
                next.open[index(stream)] = false;
                let mut end = Vec::new();
                record(&mut end, stream, time_ns, 'F', b"");
                self.write(&end, next, 0)?;
            }
        }
        Ok(())
    }

    /// Continues in a new file at the path, after the caller has renamed the old one. A failure leaves no new file.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn reopen(&mut self) -> io::Result<()> {
        let file = append(&self.path)?;
        let metadata = file.metadata()?;
        let next = Position { inode: metadata.ino(), length: metadata.len(), ..self.position };
        if let Err(error) = self.save_position(next) {
            let _ = fs::remove_file(&self.path);
            return Err(error);
        }
        self.file = file;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8], mut next: Position, output: usize) -> io::Result<()> {
        next.length = next.length.saturating_add(bytes.len() as u64);
        if let Err(error) = self.file.write_all(bytes) {
            let _cut_back = self.file.set_len(self.position.length);
            self.dropped = self.dropped.saturating_add(output as u64);
            self.position.offset = next.offset;
            return Err(error);
        }
        self.save_position(next)?;
        if self.rotate_bytes.is_some_and(|limit| self.position.length >= limit) {
            let mut old = self.path.clone().into_os_string();
            old.push(".1");
            fs::rename(&self.path, old)?;
            self.reopen()?;
        }
        Ok(())
    }

    fn save_position(&mut self, next: Position) -> io::Result<()> {
        self.position_file.write_all_at(&next.encode(), 0)?;
        self.position = next;
        Ok(())
    }
}

/// Length of the output that can be written: whole lines, and whole records of a long line.
fn complete_len(output: &[u8]) -> usize {
    let lines = output.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let rest = output.len() - lines;
    // A full record is held back while it may be the last one of its line.
    lines + rest.saturating_sub(1) / CONTENT_MAX * CONTENT_MAX
}

fn append(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).open(path)
}

fn index(stream: LogStream) -> usize {
    match stream {
        LogStream::Stdout => 0,
        LogStream::Stderr => 1,
    }
}

impl Position {
    fn encode(self) -> [u8; POSITION] {
        let mut bytes = [0; POSITION];
        let open = u8::from(self.open[0]) | u8::from(self.open[1]) << 1;
        let fields = [self.inode.to_le_bytes(), self.length.to_le_bytes(), self.offset.to_le_bytes()];
        for (to, from) in bytes.iter_mut().zip(fields.concat().into_iter().chain([open])) {
            *to = from;
        }
        bytes
    }
}

/// Reads the position. A missing or truncated one is that of an empty log.
fn read_position(file: &File) -> Position {
    let mut bytes = [0; POSITION];
    if file.read_exact_at(&mut bytes, 0).is_err() {
        return Position::default();
    }
    let number = |at: usize| {
        let field = bytes.get(at..at + 8).and_then(|field| field.try_into().ok());
        field.map_or(0, u64::from_le_bytes)
    };
    let flags = bytes.last().copied().unwrap_or(0);
    Position {
        inode: number(0),
        length: number(8),
        offset: number(16),
        open: [flags & 1 != 0, flags & 2 != 0],
    }
}

/// Formats output as records. `open`: before the call, whether the first line continues an earlier record; after it, whether
/// the last line will be continued.
fn records(stream: LogStream, time_ns: i64, data: &[u8], open: &mut bool) -> Vec<u8> {
    let mut text = Vec::with_capacity(data.len() + 64);
    for line in data.split_inclusive(|byte| *byte == b'\n') {
        let (content, ends) = match line.split_last() {
            Some((b'\n', content)) => (content, true),
            _ => (line, false),
        };
        let mut parts = content.chunks(CONTENT_MAX).peekable();
        while let Some(part) = parts.next() {
            let is_last = ends && parts.peek().is_none();
            record(&mut text, stream, time_ns, if is_last { 'F' } else { 'P' }, part);
        }
        if ends && content.is_empty() {
            record(&mut text, stream, time_ns, 'F', b"");
        }
        *open = !ends;
    }
    text
}

fn record(text: &mut Vec<u8>, stream: LogStream, time_ns: i64, tag: char, content: &[u8]) {
    let time = Timestamp::from_nanosecond(i128::from(time_ns)).unwrap_or(Timestamp::UNIX_EPOCH);
    let name = match stream {
        LogStream::Stdout => "stdout",
        LogStream::Stderr => "stderr",
    };
    text.extend(format!("{time:.9} {name} {tag} ").into_bytes());
    text.extend(content);
    text.push(b'\n');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIME: i64 = 1_800_000_000_123_456_789;

    fn text(pieces: &[(LogStream, &str)]) -> String {
        let mut open = [false; 2];
        let records = pieces
            .iter()
            .flat_map(|(stream, data)| records(*stream, TIME, data.as_bytes(), &mut open[index(*stream)]));
        String::from_utf8(records.collect()).unwrap().replace("2027-01-15T08:00:00.123456789Z ", "")
    }

    #[test]
    fn lines_become_records() {
        use LogStream::{Stderr, Stdout};
        for (why, pieces, want) in [
            ("two lines", vec![(Stdout, "a\nb\n")], "stdout F a\nstdout F b\n"),
            ("an empty line", vec![(Stdout, "\n")], "stdout F \n"),
            ("a line in pieces", vec![(Stdout, "a"), (Stdout, "b\n")], "stdout P a\nstdout F b\n"),
            ("its end alone", vec![(Stdout, "a"), (Stdout, "\n")], "stdout P a\nstdout F \n"),
            (
                "two streams",
                vec![(Stdout, "a"), (Stderr, "x\n"), (Stdout, "b\n")],
                "stdout P a\nstderr F x\nstdout F b\n",
            ),
        ] {
            assert_eq!(text(&pieces), want, "{why}");
        }
    }

    #[test]
    fn long_lines_are_split() {
        let line = format!("{}\n", "x".repeat(2 * CONTENT_MAX));
        let records = text(&[(LogStream::Stdout, &line)]);
        let tags: Vec<_> = records.lines().map(|l| l.split(' ').nth(1).unwrap()).collect();
        assert_eq!(tags, ["P", "F"]);
    }

    #[test]
    fn time_has_nine_digits_and_a_zone() {
        let mut text = Vec::new();
        record(&mut text, LogStream::Stdout, 1_800_000_000_000_000_000, 'F', b"x");
        assert_eq!(text, b"2027-01-15T08:00:00.000000000Z stdout F x\n");
        text.clear();
        record(&mut text, LogStream::Stderr, i64::MIN, 'F', b"");
        assert!(text.ends_with(b"Z stderr F \n"), "a guest's clock is its own");
    }

    fn open(dir: &Path, rotate: Option<u64>) -> CriLog {
        CriLog::open(&dir.join("pod/web/0.log"), &dir.join("web.position"), rotate).unwrap()
    }

    fn read(dir: &Path) -> String {
        fs::read_to_string(dir.join("pod/web/0.log")).unwrap()
    }

    #[test]
    fn record_beyond_the_position_is_undone_after_a_crash() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = open(dir.path(), None);
        log.append(LogStream::Stdout, 0, TIME, b"one\ntw").unwrap();
        let before = read(dir.path());
        // The record was written, but not the position.
        File::options()
            .append(true)
            .open(dir.path().join("pod/web/0.log"))
            .unwrap()
            .write_all(b"torn")
            .unwrap();
        drop(log);
        let mut log = open(dir.path(), None);
        assert_eq!(
            (log.next_offset(), read(dir.path())),
            (4, before),
            "the beginning of a line is asked for again"
        );
        // The guest repeats output that may have been lost.
        log.append(LogStream::Stdout, 4, TIME, b"two\n").unwrap();
        log.append(LogStream::Stdout, 0, TIME, b"one\n").unwrap();
        assert!(read(dir.path()).ends_with(" stdout F one\n2027-01-15T08:00:00.123456789Z stdout F two\n"));
        assert_eq!(log.next_offset(), 8);
    }

    #[test]
    fn renamed_log_is_left_to_its_reader() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = open(dir.path(), None);
        log.append(LogStream::Stdout, 0, TIME, b"one\n").unwrap();
        let (path, old) = (dir.path().join("pod/web/0.log"), dir.path().join("pod/web/0.log.20270115"));
        fs::rename(&path, &old).unwrap();
        log.append(LogStream::Stdout, 4, TIME, b"two\n").unwrap();
        log.reopen().unwrap();
        log.append(LogStream::Stdout, 8, TIME, b"three\n").unwrap();
        assert_eq!(fs::read_to_string(&old).unwrap().lines().count(), 2);
        assert!(read(dir.path()).ends_with("stdout F three\n"));
        drop(log);
        assert_eq!(open(dir.path(), None).next_offset(), 14);
        // The log of a removed directory cannot be reopened, and no file is left.
        let mut log = open(dir.path(), None);
        fs::remove_dir_all(dir.path().join("pod")).unwrap();
        assert!(log.reopen().is_err() && !path.exists());
    }

    #[test]
    fn log_rotates_by_size_and_ends_open_lines() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = open(dir.path(), Some(100));
        log.append(LogStream::Stdout, 0, TIME, "x".repeat(100).as_bytes()).unwrap();
        assert_eq!(read(dir.path()), "");
        log.append(LogStream::Stdout, 100, TIME, b"y").unwrap();
        log.finish(TIME).unwrap();
        log.finish(TIME).unwrap();
        assert_eq!(read(dir.path()), "", "it has turned over");
    }

    /// Streams, tags and contents of the records.
    fn written_records(dir: &Path) -> Vec<String> {
        let record = |line: &str| line.split_once(' ').map_or(String::new(), |(_, rest)| rest.to_owned());
        read(dir).lines().map(record).collect()
    }

    #[test]
    fn last_line_without_an_end_is_one_record() {
        use LogStream::{Stderr, Stdout};
        for (why, pieces, want) in [
            ("in pieces", vec![(Stdout, "a\nb"), (Stdout, "c")], vec!["stdout F a", "stdout F bc"]),
            ("alone", vec![(Stderr, "no end")], vec!["stderr F no end"]),
            (
                "cut by the other stream",
                vec![(Stdout, "a"), (Stderr, "x\n"), (Stdout, "b")],
                vec!["stdout P a", "stderr F x", "stdout F b"],
            ),
            ("with an end", vec![(Stdout, "a\n")], vec!["stdout F a"]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut log = open(dir.path(), None);
            let mut offset = 0;
            for (stream, text) in pieces {
                log.append(stream, offset, TIME, text.as_bytes()).unwrap();
                offset += text.len() as u64;
            }
            log.finish(TIME).unwrap();
            log.finish(TIME).unwrap();
            assert_eq!(written_records(dir.path()), want, "{why}");
            assert_eq!(log.next_offset(), offset, "{why}");
        }
    }

    #[test]
    fn long_line_is_written_in_whole_records() {
        for (bytes, want) in
            [(CONTENT_MAX, 0), (CONTENT_MAX + 1, CONTENT_MAX), (2 * CONTENT_MAX, CONTENT_MAX)]
        {
            assert_eq!(complete_len(&vec![b'x'; bytes]), want, "{bytes}");
        }
        assert_eq!(complete_len(b"a\nbc"), 2);
    }

    #[test]
    fn full_disk_drops_output_and_counts_it() {
        let dir = tempfile::tempdir().unwrap();
        let full = Path::new("/dev/full");
        let mut log = CriLog::open(full, &dir.path().join("position"), None).unwrap();
        assert!(log.append(LogStream::Stdout, 0, TIME, b"lost\n").is_err());
        assert_eq!((log.dropped_bytes(), log.next_offset()), (5, 5));
    }

    proptest! {
        #[test]
        fn cri_format_round_trip_preserves_output(pieces in prop::collection::vec("[ab\n]{0,40}", 0..20)) {
            let all: String = pieces.concat();
            let mut open = false;
            let records: Vec<u8> =
                pieces.iter().flat_map(|p| records(LogStream::Stdout, TIME, p.as_bytes(), &mut open)).collect();
            let mut got = String::new();
            for line in String::from_utf8(records).unwrap().lines() {
                let mut fields = line.splitn(4, ' ').skip(2);
                let (tag, content) = (fields.next().unwrap(), fields.next().unwrap());
                got.push_str(content);
                if tag == "F" {
                    got.push('\n');
                }
            }
            prop_assert_eq!(got, all);
        }
    }
}

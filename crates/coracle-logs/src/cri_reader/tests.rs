use std::fs;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;
use tokio::sync::oneshot;

use super::*;
use crate::{CriLog, LogStream};

const DEADLINE: Duration = Duration::from_secs(20);

/// Records with the times 10:00:00, 10:00:01 and so on, from lines of the form `tag content`; `!text` is written verbatim.
fn records(lines: &[&str]) -> Vec<u8> {
    let line = |(second, line): (usize, &&str)| match line.strip_prefix('!') {
        Some(raw) => format!("{raw}\n"),
        None => format!("2026-08-01T10:00:{second:02}.000000000Z stdout {line}\n"),
    };
    lines.iter().enumerate().map(line).collect::<String>().into_bytes()
}

fn read(path: &Path, query: LogQuery) -> String {
    let mut reader = CriLogReader::open(path, query).unwrap();
    let mut all = Vec::new();
    while let Some(output) = reader.read().unwrap() {
        all.extend(output);
    }
    String::from_utf8_lossy(&all).into_owned()
}

#[test]
fn query_table() {
    let query = LogQuery::default;
    let lines = |n| LogQuery { tail_lines: Some(n), ..query() };
    let since = |text: &str| LogQuery { since: Some(text.parse().unwrap()), ..query() };
    let limit = |n| LogQuery { limit_bytes: Some(n), ..query() };
    let times = LogQuery { timestamps: true, ..query() };
    let ab = ["F a", "F b", "F c"];
    let parts = ["F a", "P b", "P b", "F b", "F c"];
    let t = "2026-08-01T10:00:00.000000000Z";
    for (why, log, query, want) in [
        ("all", &ab[..], query(), "a\nb\nc\n".to_owned()),
        ("nothing of the past", &ab, lines(0), String::new()),
        ("the last line", &ab, lines(1), "c\n".into()),
        ("more lines than there are", &ab, lines(9), "a\nb\nc\n".into()),
        ("a line in parts is one", &parts, lines(2), "bbb\nc\n".into()),
        ("an open line is one", &["F a", "F b", "P c"], lines(1), "c".into()),
        ("an open line and one before", &["F a", "F b", "P c"], lines(2), "b\nc".into()),
        ("from a time on", &ab, since("2026-08-01T10:00:01Z"), "b\nc\n".into()),
        ("from a later time on", &ab, since("2026-08-01T11:00:00Z"), String::new()),
        ("so many bytes", &ab, limit(3), "a\nb".into()),
        ("with times", &["F a"], times.clone(), format!("{t} a\n")),
        ("one time a line", &["P a", "F b"], times.clone(), format!("{t} ab\n")),
        ("times count as bytes", &["F a"], LogQuery { limit_bytes: Some(4), ..times.clone() }, "2026".into()),
        (
            "garbage is skipped",
            &["!garbage", "F a", "!", "!\u{1} stdout F x", "F b"],
            query(),
            "a\nb\n".into(),
        ),
        ("garbage is not counted", &["F a", "F b", "!garbage", "F c", "!garbage"], lines(2), "b\nc\n".into()),
        ("nothing", &[], lines(2), String::new()),
        (
            "the last lines, from a time on",
            &ab,
            LogQuery { tail_lines: Some(2), ..since("2026-08-01T10:00:02Z") },
            "c\n".into(),
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(&path, records(log)).unwrap();
        assert_eq!(read(&path, query), want, "{why}");
    }
}

#[test]
fn rotated_log_is_read_first() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    fs::write(dir.path().join("0.log.1"), records(&["F a", "F b", "P c"])).unwrap();
    fs::write(&path, records(&["F c", "F d"])).unwrap();
    assert_eq!(read(&path, LogQuery::default()), "a\nb\ncc\nd\n");
    for (lines, want) in
        [(0, ""), (1, "d\n"), (2, "cc\nd\n"), (3, "b\ncc\nd\n"), (4, "a\nb\ncc\nd\n"), (9, "a\nb\ncc\nd\n")]
    {
        assert_eq!(read(&path, LogQuery { tail_lines: Some(lines), ..LogQuery::default() }), want, "{lines}");
    }
}

#[test]
fn huge_lines_and_torn_ends_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    let huge = format!("F {}", "x".repeat(5 << 20));
    let mut bytes = records(&["F a", &huge, "F b"]);
    bytes.extend(b"2026-08-01T10:00:00.000000000Z stdout F torn");
    fs::write(&path, &bytes).unwrap();
    let output = read(&path, LogQuery::default());
    assert!(output.starts_with("a\nxxx") && output.ends_with("x\nb\n"), "{}", output.len());
    assert!(output.len() < segment::LINE_MAX + 10, "{}", output.len());
    assert_eq!(read(&path, LogQuery { tail_lines: Some(1), ..LogQuery::default() }), "b\n");
    fs::write(&path, vec![b'x'; 3 << 20]).unwrap();
    assert_eq!(read(&path, LogQuery { tail_lines: Some(1), ..LogQuery::default() }), "");
}

/// Log that is followed, and the output read so far.
struct Followed {
    log: CriLog,
    offset: u64,
    follower: CriLogFollower,
    end: Option<oneshot::Sender<()>>,
    got: String,
}

impl Followed {
    fn new(dir: &Path, rotate: Option<u64>, query: LogQuery) -> Self {
        let path = dir.join("0.log");
        let log = CriLog::open(&path, &dir.join("position"), rotate).unwrap();
        let (end, ended) = oneshot::channel();
        let reader = CriLogReader::open(&path, query).unwrap();
        let follower = CriLogFollower::new(reader, async { drop(ended.await) });
        Self { log, offset: 0, follower, end: Some(end), got: String::new() }
    }

    fn write(&mut self, text: &str) {
        self.log.append(LogStream::Stdout, self.offset, 1_800_000_000_000_000_000, text.as_bytes()).unwrap();
        self.offset += text.len() as u64;
    }

    /// Reads once. Returns false at the end.
    async fn read(&mut self) -> bool {
        let output = tokio::time::timeout(DEADLINE, self.follower.next()).await.unwrap().unwrap();
        self.got.extend(output.iter().map(|output| String::from_utf8_lossy(output)));
        output.is_some()
    }

    async fn read_until(&mut self, want: &str) {
        while self.got != want {
            assert!(self.read().await, "it ended at {:?}", self.got);
        }
    }

    async fn read_to_end(&mut self) {
        drop(self.end.take());
        while self.read().await {}
    }
}

#[tokio::test]
async fn follower_ends_when_the_container_ended_and_all_was_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut followed = Followed::new(dir.path(), None, LogQuery::default());
    followed.write("one\n");
    followed.read_until("one\n").await;
    followed.write("tw");
    followed.write("o\nthree\n");
    followed.read_to_end().await;
    assert_eq!(followed.got, "one\ntwo\nthree\n");
    assert!(!followed.read().await, "it stays at its end");
}

#[tokio::test]
async fn follower_survives_rename_and_rotation() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    let mut followed = Followed::new(dir.path(), None, LogQuery::default());
    followed.write("one\n");
    followed.read_until("one\n").await;
    fs::rename(&path, dir.path().join("0.log.20260801-100000")).unwrap();
    followed.write("two\n");
    followed.read_until("one\ntwo\n").await;
    followed.write("three\n");
    followed.log.reopen().unwrap();
    followed.write("four\n");
    followed.read_until("one\ntwo\nthree\nfour\n").await;
    // The log is removed with its container.
    fs::remove_file(&path).unwrap();
    followed.write("five\n");
    followed.read_to_end().await;
    assert_eq!(followed.got, "one\ntwo\nthree\nfour\nfive\n");
}

#[tokio::test]
async fn follower_reads_a_log_that_was_replaced_twice() {
    let dir = tempfile::tempdir().unwrap();
    let mut followed = Followed::new(dir.path(), Some(60), LogQuery::default());
    followed.write("one\n");
    followed.read_until("one\n").await;
    for text in ["two\n", "three\n", "four\n", "five\n"] {
        followed.write(text);
    }
    followed.read_to_end().await;
    assert_eq!(followed.got, "one\ntwo\nthree\nfour\nfive\n");
}

#[tokio::test]
async fn follower_stops_at_its_limit() {
    let dir = tempfile::tempdir().unwrap();
    let query = LogQuery { limit_bytes: Some(6), tail_lines: Some(0), ..LogQuery::default() };
    let mut followed = Followed::new(dir.path(), None, query);
    followed.write("one\ntwo\n");
    followed.read_until("one\ntw").await;
    assert!(!followed.read().await, "the container still runs");
}

#[tokio::test]
async fn truncated_record_is_not_read() {
    use std::io::Write as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    let mut followed = Followed::new(dir.path(), None, LogQuery::default());
    followed.write("one\n");
    let mut raw = fs::File::options().append(true).open(&path).unwrap();
    let length = raw.metadata().unwrap().len();
    raw.write_all(b"2026-08-01T10:00:00.000000000Z stdout F torn by a crash").unwrap();
    followed.read_until("one\n").await;
    raw.set_len(length).unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(250), followed.follower.next()).await.is_err());
    let mut again = CriLogReader::open(&path, LogQuery::default()).unwrap();
    while again.read().unwrap().is_some() {}
    raw.write_all(b"torn").unwrap();
    assert_eq!(again.read().unwrap(), None);
    raw.set_len(length).unwrap();
    assert_eq!(again.read().unwrap(), None);
    raw.write_all(&records(&["F two"])).unwrap();
    assert_eq!(again.read().unwrap().unwrap(), b"two\n");
}

proptest! {
    #[test]
    fn tail_lines_returns_the_last_lines(
        pieces in prop::collection::vec("[ab\n]{0,30}", 0..30),
        lines in 0_u64..12,
        rotate in prop::option::of(100_u64..2000),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let mut log = CriLog::open(&path, &dir.path().join("position"), rotate).unwrap();
        let mut offset = 0;
        for piece in &pieces {
            log.append(LogStream::Stdout, offset, 0, piece.as_bytes()).unwrap();
            offset += piece.len() as u64;
        }
        let all = read(&path, LogQuery::default());
        let mut written = pieces.concat();
        // An unfinished line is held back.
        written.truncate(written.rfind('\n').map_or(0, |at| at + 1));
        prop_assert!(written.ends_with(&all), "what rotation has not removed");
        let total = all.split_inclusive('\n').count();
        let skip = total.saturating_sub(usize::try_from(lines).unwrap());
        let want: String = all.split_inclusive('\n').skip(skip).collect();
        prop_assert_eq!(read(&path, LogQuery { tail_lines: Some(lines), ..LogQuery::default() }), want);
    }

    #[test]
    fn arbitrary_bytes_are_read_to_their_end(bytes in prop::collection::vec(any::<u8>(), 0..2000), lines in 0_u64..5) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(&path, &bytes).unwrap();
        let output = read(&path, LogQuery { tail_lines: Some(lines), ..LogQuery::default() });
        prop_assert!(output.len() <= bytes.len());
    }
}

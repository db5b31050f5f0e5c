//! Record of a log: `<time> <stream> <tags> <content>`. Pure.

use jiff::Timestamp;

/// Parsed record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record<'a> {
    pub(super) time: Timestamp,
    /// Time as written in the file.
    pub(super) time_text: &'a [u8],
    /// Whether the record is the last one of its line of output.
    pub(super) ends_line: bool,
    pub(super) content: &'a [u8],
}

/// Maximum length of a record's header (time, stream and tags), bytes.
pub(super) const HEADER_MAX: usize = 128;

impl<'a> Record<'a> {
    /// Parses a line without its newline; `None` if it is malformed.
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.splitn(4, |byte| *byte == b' ');
        let (time_text, stream, tags) = (fields.next()?, fields.next()?, fields.next()?);
        let time = std::str::from_utf8(time_text).ok()?.parse().ok()?;
        if !matches!(stream, b"stdout" | b"stderr") {
            return None;
        }
        let ends_line = match tags.split(|byte| *byte == b':').next()? {
            b"F" => true,
            b"P" => false,
            _ => return None,
        };
        // Docker's tools omit the space before an empty content.
        Some(Self { time, time_text, ends_line, content: fields.next().unwrap_or_default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_table() {
        let time = "2026-08-01T10:00:00.000000000Z";
        for (why, line, want) in [
            ("a full record", format!("{time} stdout F hello world"), Some((true, "hello world"))),
            ("a partial one", format!("{time} stderr P he"), Some((false, "he"))),
            ("further tags", format!("{time} stdout P:x:y he"), Some((false, "he"))),
            ("no content", format!("{time} stdout F "), Some((true, ""))),
            ("no content and no space", format!("{time} stdout F"), Some((true, ""))),
            ("another zone", "2026-08-01T12:00:00.000000000+02:00 stdout F x".into(), Some((true, "x"))),
            ("unknown stream", format!("{time} stdin F x"), None),
            ("unknown tag", format!("{time} stdout X x"), None),
            ("no tag", format!("{time} stdout"), None),
            ("no time", "stdout F x".into(), None),
            ("nothing", String::new(), None),
        ] {
            let record = Record::parse(line.as_bytes());
            let got = record.map(|r| (r.ends_line, std::str::from_utf8(r.content).unwrap()));
            assert_eq!(got, want, "{why}");
        }
        let [zulu, zone] = ["2026-08-01T10:00:00.5Z", "2026-08-01T12:00:00.5+02:00"];
        let time = |text: &str| Record::parse(format!("{text} stdout F x").as_bytes()).unwrap().time;
        assert_eq!(time(zulu), time(zone));
        assert_eq!(Record::parse(b"\xff\xfe stdout F x"), None);
    }
}

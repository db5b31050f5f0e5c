//! Ignored reports about unknown allocations, and the limit of their lines in the audit.

use std::collections::BTreeMap;

/// Lines of one tenant per minute; further reports are counted and added to its next line.
const A_MINUTE: u32 = 60;
const MINUTE_MS: u64 = 60_000;
/// Longest stored name.
const SUBJECT_MAX: usize = 64;

/// Assigns numbers to lines, and limits them.
#[derive(Debug, Default)]
pub(crate) struct Ignored {
    last: i64,
    turns: BTreeMap<u32, Turn>,
}

#[derive(Debug, Default)]
struct Turn {
    since_ms: u64,
    written: u32,
    unwritten: i64,
}

/// A line to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// Its number.
    pub(crate) no: i64,
    /// Reports since the line before that got none.
    pub(crate) unwritten: i64,
}

impl Ignored {
    /// Continues after the last stored line.
    pub(crate) fn after(last: i64) -> Self {
        Self { last, turns: BTreeMap::new() }
    }

    /// The line for a report of a tenant; `None`: it had all of this minute.
    pub(crate) fn line(&mut self, who: u32, now_ms: u64) -> Option<Line> {
        let turn = self.turns.entry(who).or_default();
        if now_ms.saturating_sub(turn.since_ms) >= MINUTE_MS {
            (turn.since_ms, turn.written) = (now_ms, 0);
        }
        if turn.written == A_MINUTE {
            turn.unwritten += 1;
            return None;
        }
        turn.written += 1;
        self.last += 1;
        Some(Line { no: self.last, unwritten: std::mem::take(&mut turn.unwritten) })
    }
}

/// Name that a caller gave for an allocation, shortened, in printable letters.
pub(crate) fn shown(subject: &str) -> String {
    let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c.to_ascii_uppercase() };
    subject.chars().take(SUBJECT_MAX).map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audit_lines_per_supplier_are_limited() {
        let mut ignored = Ignored::after(7);
        let mut at = |who, ms: u64| ignored.line(who, 1_000_000 + ms);
        for no in 8..68 {
            assert_eq!(at(1, 0), Some(Line { no, unwritten: 0 }));
        }
        assert_eq!([at(1, 1), at(1, 59_999)], [None, None], "the minute is full");
        assert_eq!(at(2, 2), Some(Line { no: 68, unwritten: 0 }), "another tenant has lines of its own");
        assert_eq!(at(1, 60_000), Some(Line { no: 69, unwritten: 2 }), "told with the next line");
        assert_eq!(at(1, 60_001), Some(Line { no: 70, unwritten: 0 }), "once");
    }

    #[test]
    fn a_name_is_short_and_without_control_letters() {
        assert_eq!(shown("a\0b\nc"), "A\u{fffd}B\u{fffd}C");
        assert_eq!(shown(&"ä".repeat(1000)).chars().count(), SUBJECT_MAX);
    }
}

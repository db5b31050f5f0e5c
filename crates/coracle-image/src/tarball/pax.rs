//! PAX records: `<length> <key>=<value>\n`, where the length counts the whole record.

use std::collections::BTreeMap;

use super::damaged::damaged;
use crate::ImageError;

const XATTR: &[u8] = b"SCHILY.xattr.";

/// Parses all records of one extended header. The last record of a key wins, and an empty value removes the key (POSIX).
pub(super) fn parse(mut bytes: &[u8]) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, ImageError> {
    let mut records = BTreeMap::new();
    while !bytes.is_empty() {
        let (key, value, rest) = record(bytes).ok_or_else(|| damaged("a PAX record is malformed"))?;
        // An extended attribute may be empty; a path or a number may not.
        if value.is_empty() && !key.starts_with(XATTR) {
            records.remove(key);
        } else {
            records.insert(key.to_vec(), value.to_vec());
        }
        bytes = rest;
    }
    Ok(records)
}

fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|b| *b == b' ')?;
    let length: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
    let (line, rest) = bytes.split_at_checked(length)?;
    let body = line.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = body.iter().position(|b| *b == b'=')?;
    (equals > 0).then(|| (&body[..equals], &body[equals + 1..], rest))
}

pub(super) fn xattrs(records: &BTreeMap<Vec<u8>, Vec<u8>>) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let named = |(key, value): (&Vec<u8>, &Vec<u8>)| {
        key.strip_prefix(XATTR).map(|name| (name.to_vec(), value.clone()))
    };
    records.iter().filter_map(named).collect()
}

pub(super) fn number(value: &[u8], what: &str) -> Result<u64, ImageError> {
    let digits = std::str::from_utf8(value).ok().filter(|t| t.bytes().all(|b| b.is_ascii_digit()));
    digits
        .and_then(|t| t.parse().ok())
        .ok_or_else(|| ImageError::hostile(format!("PAX record {what} is not a number in range")))
}

/// Parses `[-]seconds[.fraction]`. Seconds are rounded down, so that the nanoseconds are not negative.
pub(super) fn time(value: &[u8]) -> Result<(i64, u32), ImageError> {
    let bad = || ImageError::hostile("PAX record mtime is not a time".to_owned());
    let text = std::str::from_utf8(value).map_err(|_| bad())?;
    let (negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|b| b.is_ascii_digit()) || whole.starts_with(['+', '-']) {
        return Err(bad());
    }
    let seconds: i64 = whole.parse().map_err(|_| bad())?;
    let nanos: u32 = format!("{fraction:0<9.9}").parse().map_err(|_| bad())?;
    Ok(match (negative, nanos) {
        (false, _) => (seconds, nanos),
        (true, 0) => (-seconds, 0),
        (true, _) => (-seconds - 1, 1_000_000_000 - nanos),
    })
}

//! Conditional and range requests (RFC 9110). Pure.

use std::ops::Range;

use axum::http::{HeaderMap, header};

/// Requested part of a representation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Whole,
    Part(Range<u64>),
    /// Unsatisfiable range: none of its bytes exists.
    Impossible,
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// True when the client already has the representation with `etag`.
pub(crate) fn is_known(headers: &HeaderMap, etag: &str) -> bool {
    let Some(list) = text(headers, header::IF_NONE_MATCH) else { return false };
    list.split(',').map(|t| t.trim().trim_start_matches("W/")).any(|t| t == "*" || t == etag)
}

/// Range of a request for a representation of `size` bytes. A request for several ranges gets the whole, as the RFC allows.
pub(crate) fn requested_range(headers: &HeaderMap, size: u64, etag: &str) -> Wanted {
    if text(headers, header::IF_RANGE).is_some_and(|said| said.trim() != etag) {
        return Wanted::Whole;
    }
    let Some(spec) = text(headers, header::RANGE).and_then(|r| r.trim().strip_prefix("bytes=")) else {
        return Wanted::Whole;
    };
    let Some((first, last)) = spec.split_once('-').filter(|_| !spec.contains(',')) else {
        return Wanted::Whole;
    };
    let (first, last) = (first.trim(), last.trim());
    match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), _) if first >= size => Wanted::Impossible,
        (Ok(first), Ok(last)) if first <= last => Wanted::Part(first..last.saturating_add(1).min(size)),
        (Ok(first), Err(_)) if last.is_empty() => Wanted::Part(first..size),
        (Err(_), Ok(0)) if first.is_empty() => Wanted::Impossible,
        // An empty representation has neither a first nor a last byte.
        (Err(_), Ok(_)) if first.is_empty() && size == 0 => Wanted::Whole,
        (Err(_), Ok(tail)) if first.is_empty() => Wanted::Part(size.saturating_sub(tail)..size),
        // The RFC allows to refuse or to ignore an invalid range. Refusing it reveals bugs of clients.
        (Ok(_), Ok(_)) => Wanted::Impossible,
        _ => Wanted::Whole,
    }
}

/// Parses `start-end`, with or without the prefix `bytes`.
pub(crate) fn content_range(headers: &HeaderMap) -> Result<Option<(u64, u64)>, ()> {
    let Some(said) = headers.get(header::CONTENT_RANGE) else { return Ok(None) };
    let said = said.to_str().map_err(drop)?.trim();
    let said = said.strip_prefix("bytes").map_or(said, |rest| rest.trim_start_matches(['=', ' ']));
    let (first, last) = said.split('/').next().and_then(|s| s.split_once('-')).ok_or(())?;
    let number = |text: &str| text.trim().parse::<u64>().map_err(drop);
    Ok(Some((number(first)?, number(last)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_table() {
        for (why, range, size, want) in [
            ("first bytes", "bytes=0-9", 100, Wanted::Part(0..10)),
            ("open end", "bytes=90-", 100, Wanted::Part(90..100)),
            ("past the end", "bytes=90-1000", 100, Wanted::Part(90..100)),
            ("the last ones", "bytes=-10", 100, Wanted::Part(90..100)),
            ("more than all", "bytes=-1000", 100, Wanted::Part(0..100)),
            ("behind the end", "bytes=100-", 100, Wanted::Impossible),
            ("nothing of an empty one", "bytes=0-0", 0, Wanted::Impossible),
            ("the last ones of an empty one", "bytes=-10", 0, Wanted::Whole),
            ("no last bytes", "bytes=-0", 100, Wanted::Impossible),
            ("backwards", "bytes=9-0", 100, Wanted::Impossible),
            ("several", "bytes=0-1,5-6", 100, Wanted::Whole),
            ("another unit", "lines=0-1", 100, Wanted::Whole),
            ("huge", "bytes=0-18446744073709551615", 100, Wanted::Part(0..100)),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::RANGE, range.parse().unwrap());
            assert_eq!(requested_range(&headers, size, "\"e\""), want, "{why}");
            headers.insert(header::IF_RANGE, "\"other\"".parse().unwrap());
            assert_eq!(requested_range(&headers, size, "\"e\""), Wanted::Whole, "{why}, of another thing");
        }
    }

    #[test]
    fn content_range_table() {
        for (said, want) in [
            ("0-9", Ok(Some((0, 9)))),
            ("bytes 0-9/100", Ok(Some((0, 9)))),
            ("bytes=0-9", Ok(Some((0, 9)))),
            ("0-", Err(())),
            ("x", Err(())),
            ("-1-5", Err(())),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_RANGE, said.parse().unwrap());
            assert_eq!(content_range(&headers), want, "{said}");
        }
    }
}

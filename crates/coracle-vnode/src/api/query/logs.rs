//! The query of `/containerLogs` (`PodLogOptions`).

use coracle_logs::LogQuery;
use jiff::Timestamp;

use super::{Pairs, first};
use crate::api::http_failure::HttpFailure;

/// Options of a log request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::api) struct LogOptions {
    pub(in crate::api) query: LogQuery,
    pub(in crate::api) follow: bool,
    /// Log of the previous instance.
    pub(in crate::api) previous: bool,
}

impl LogOptions {
    /// Parses a query at the time `now`.
    ///
    /// # Errors
    /// 400: a value is invalid, or the streams cannot be separated. 422: a value or combination is not allowed.
    pub(in crate::api) fn parse(pairs: &Pairs, now: Timestamp) -> Result<Self, HttpFailure> {
        let tail_lines = match first(pairs, "tail").filter(|tail| !tail.is_empty()) {
            Some("all") => None,
            Some(tail) => Some(number("tail", tail)?),
            None => optional(pairs, "tailLines")?,
        };
        let since_seconds = optional(pairs, "sinceSeconds")?;
        let since_time = time(pairs, "sinceTime")?;
        let limit_bytes = optional(pairs, "limitBytes")?;
        if first(pairs, "stream").is_some_and(|stream| stream != "All") {
            return Err(HttpFailure::bad_request("invalid stream: only All can be asked for"));
        }
        if since_seconds.is_some() && since_time.is_some() {
            return Err(HttpFailure::invalid("at most one of sinceTime and sinceSeconds may be given"));
        }
        let since = match since_seconds {
            Some(seconds) => Some(before(now, at_least("sinceSeconds", seconds, 1)?)),
            None => since_time,
        };
        Ok(Self {
            query: LogQuery {
                tail_lines: tail_lines.map(|lines| at_least("tailLines", lines, 0)).transpose()?,
                since,
                limit_bytes: limit_bytes.map(|bytes| at_least("limitBytes", bytes, 1)).transpose()?,
                timestamps: flag(pairs, "timestamps"),
            },
            follow: flag(pairs, "follow"),
            previous: flag(pairs, "previous"),
        })
    }
}

/// Parses a flag like the API machinery: every value except `false` and `0` is true, including the empty one.
fn flag(pairs: &Pairs, name: &str) -> bool {
    first(pairs, name).is_some_and(|value| !value.eq_ignore_ascii_case("false") && value != "0")
}

fn number(name: &str, value: &str) -> Result<i64, HttpFailure> {
    value.parse().map_err(|_| HttpFailure::bad_request(format!("invalid {name} {value:?}: not a number")))
}

fn optional(pairs: &Pairs, name: &str) -> Result<Option<i64>, HttpFailure> {
    first(pairs, name).map(|value| number(name, value)).transpose()
}

fn time(pairs: &Pairs, name: &str) -> Result<Option<Timestamp>, HttpFailure> {
    let value = first(pairs, name).filter(|value| !matches!(*value, "" | "null"));
    let wrong =
        |value: &str| HttpFailure::bad_request(format!("invalid {name} {value:?}: not a time of RFC 3339"));
    value.map(|value| value.parse().map_err(|_| wrong(value))).transpose()
}

fn at_least(name: &str, value: i64, least: u64) -> Result<u64, HttpFailure> {
    let value = u64::try_from(value).ok().filter(|value| *value >= least);
    value.ok_or_else(|| HttpFailure::invalid(format!("invalid {name}: must be at least {least}")))
}

fn before(now: Timestamp, seconds: u64) -> Timestamp {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    now.checked_sub(jiff::SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MIN)
}

#[cfg(test)]
mod tests {
    use super::super::pairs;
    use super::*;

    #[test]
    fn query_table() {
        let now: Timestamp = "2026-08-01T10:00:10Z".parse().unwrap();
        let since = |text: &str| LogQuery { since: Some(text.parse().unwrap()), ..LogQuery::default() };
        let tail = |lines| LogQuery { tail_lines: Some(lines), ..LogQuery::default() };
        for (query, want) in [
            ("", Ok(LogQuery::default())),
            ("tailLines=0", Ok(tail(0))),
            ("tailLines=5&tailLines=6", Ok(tail(5))),
            ("tail=5&tailLines=6", Ok(tail(5))),
            ("tail=all&tailLines=6", Ok(LogQuery::default())),
            ("tailLines=-1", Err(422)),
            ("tail=-1", Err(422)),
            ("tailLines=x", Err(400)),
            ("tailLines=", Err(400)),
            ("tail=some", Err(400)),
            ("limitBytes=1", Ok(LogQuery { limit_bytes: Some(1), ..LogQuery::default() })),
            ("limitBytes=0", Err(422)),
            ("limitBytes=1k", Err(400)),
            ("sinceSeconds=10", Ok(since("2026-08-01T10:00:00Z"))),
            ("sinceSeconds=0", Err(422)),
            ("sinceSeconds=-1", Err(422)),
            (
                "sinceSeconds=9223372036854775807",
                Ok(LogQuery { since: Some(Timestamp::MIN), ..LogQuery::default() }),
            ),
            ("sinceSeconds=9223372036854775808", Err(400)),
            ("sinceTime=2026-08-01T12:00:00%2B02:00", Ok(since("2026-08-01T10:00:00Z"))),
            ("sinceTime=", Ok(LogQuery::default())),
            ("sinceTime=yesterday", Err(400)),
            ("sinceTime=2026-08-01T12:00:00Z&sinceSeconds=1", Err(422)),
            ("timestamps=true", Ok(LogQuery { timestamps: true, ..LogQuery::default() })),
            ("timestamps", Ok(LogQuery { timestamps: true, ..LogQuery::default() })),
            ("timestamps=False", Ok(LogQuery::default())),
            ("stream=All", Ok(LogQuery::default())),
            ("stream=Stdout", Err(400)),
            ("insecureSkipTLSVerifyBackend=true&unknown=1", Ok(LogQuery::default())),
        ] {
            let got = LogOptions::parse(&pairs(Some(query)), now);
            assert_eq!(got.map(|o| o.query).map_err(|failure| failure.status.as_u16()), want, "{query}");
        }
        let options = LogOptions::parse(&pairs(Some("follow=true&previous=1")), now).unwrap();
        assert_eq!((options.follow, options.previous), (true, true));
    }
}

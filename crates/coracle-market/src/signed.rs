//! Unsigned numbers of the engine as signed numbers of the database and the API.

use coracle_auction::Time;

/// A count; the largest signed number where it is larger.
pub(crate) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Milliseconds since the epoch; 0 for [`Time::NEVER`].
pub(crate) fn ms(time: Time) -> i64 {
    if time == Time::NEVER { 0 } else { signed(time.0) }
}

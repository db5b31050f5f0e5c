//! Conversion of the engine's unsigned numbers to the signed numbers of database and API.

use coracle_auction::Time;

/// Converts a count, saturating at the largest signed number.
pub(crate) fn saturating_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Milliseconds since the epoch; 0 for [`Time::NEVER`].
pub(crate) fn ms(time: Time) -> i64 {
    if time == Time::NEVER { 0 } else { saturating_i64(time.0) }
}

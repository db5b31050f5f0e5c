//! Money: whole micro-dollars, exact sums, rounded once.

use std::fmt;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// Micro-dollars per node-hour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Price(i64);

/// Error of a text that is not a price.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid price \"{0}\": write dollars with at most 6 decimals, up to 1000000")]
pub struct InvalidPrice(String);

const MICROS: i64 = 1_000_000;

impl Price {
    /// Zero.
    pub const ZERO: Self = Self(0);
    /// One million dollars per node-hour, the highest accepted limit.
    pub const MAX: Self = Self(1_000_000 * MICROS);

    /// Creates a price from micro-dollars.
    #[must_use]
    pub const fn micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Returns the price in micro-dollars.
    #[must_use]
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// Highest multiple of `tick` not above this price.
    #[must_use]
    pub fn floor_to(self, tick: Self) -> Self {
        Self(self.0 - self.0.rem_euclid(tick.0.max(1)))
    }

    /// Lowest multiple of `tick` not below this price.
    #[must_use]
    pub fn ceil_to(self, tick: Self) -> Self {
        let over = self.0.rem_euclid(tick.0.max(1));
        if over == 0 { self } else { Self(self.0 - over + tick.0.max(1)) }
    }

    /// Whether the price is a multiple of `tick`.
    #[must_use]
    pub fn on_tick(self, tick: Self) -> bool {
        self.0 % tick.0.max(1) == 0
    }

    /// `percent` hundredths of the price, rounded down to a micro-dollar.
    #[must_use]
    pub fn percent(self, percent: i64) -> Self {
        let scaled = i128::from(self.0) * i128::from(percent) / 100;
        Self(i64::try_from(scaled).unwrap_or(i64::MAX))
    }

    /// Parses decimal text such as `2.08` without floating point.
    ///
    /// # Errors
    /// A sign, an exponent, more than 6 decimals, or more than [`Price::MAX`].
    pub fn parse(text: &str) -> Result<Self, InvalidPrice> {
        parse(text).ok_or_else(|| InvalidPrice(text.chars().take(40).collect()))
    }
}

fn parse(text: &str) -> Option<Price> {
    const DIGITS: RangeInclusive<u8> = b'0'..=b'9';
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| DIGITS.contains(&b));
    if !digits(whole) || !digits(fraction) || fraction.len() > 6 || whole.len() > 7 {
        return None;
    }
    let whole: i64 = whole.parse().ok()?;
    let fraction: i64 = format!("{fraction:0<6}").parse().ok()?;
    let price = Price(whole.checked_mul(MICROS)?.checked_add(fraction)?);
    (price <= Price::MAX).then_some(price)
}

impl fmt::Display for Price {
    /// Formats dollars with four decimals, or up to six if needed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let (whole, micros) = (self.0.unsigned_abs() / 1_000_000, self.0.unsigned_abs() % 1_000_000);
        let text = format!("{sign}{whole}.{micros:06}");
        let cut = if text.ends_with("00") { 2 } else { usize::from(text.ends_with('0')) };
        f.pad(text.get(..text.len() - cut).unwrap_or(&text))
    }
}

/// Exact sum of `price × time`, in micro-dollar milliseconds per hour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Charge(pub i128);

impl Charge {
    const MS_PER_HOUR: i128 = 3_600_000;

    /// Charge of `price` for `ms` milliseconds.
    #[must_use]
    pub fn of(price: Price, ms: u64) -> Self {
        Self(i128::from(price.0) * i128::from(ms))
    }

    /// The sum; `None` on overflow.
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// Converts to whole micro-dollars, half to even. Rounded once per allocation and invoice, never in between.
    #[must_use]
    pub fn to_micros(self) -> i128 {
        let (quotient, rest) = (self.0.div_euclid(Self::MS_PER_HOUR), self.0.rem_euclid(Self::MS_PER_HOUR));
        match (rest * 2).cmp(&Self::MS_PER_HOUR) {
            std::cmp::Ordering::Less => quotient,
            std::cmp::Ordering::Greater => quotient + 1,
            std::cmp::Ordering::Equal => quotient + quotient.rem_euclid(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn price_text_round_trips_or_is_refused() {
        for (text, micros, shown) in [
            ("2.08", 2_080_000, "2.0800"),
            ("0.0001", 100, "0.0001"),
            ("4.5", 4_500_000, "4.5000"),
            ("3", 3_000_000, "3.0000"),
            ("0.123456", 123_456, "0.123456"),
            ("0.12345", 123_450, "0.12345"),
            ("1000000", 1_000_000_000_000, "1000000.0000"),
        ] {
            let price = Price::parse(text).unwrap();
            assert_eq!((price.as_micros(), price.to_string().as_str()), (micros, shown), "{text}");
            assert_eq!(Price::parse(shown), Ok(price), "{shown}");
        }
        for bad in
            ["", "-1", "+1", "1e3", "1.1234567", "1000000.000001", "1.", ".5", "1_0", "NaN", "99999999"]
        {
            assert!(Price::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ticks_round_limits_down_and_quotes_up() {
        let tick = Price::micros(100);
        assert_eq!(Price::micros(199).floor_to(tick), Price::micros(100));
        assert_eq!(Price::micros(101).ceil_to(tick), Price::micros(200));
        assert_eq!(Price::micros(200).ceil_to(tick), Price::micros(200));
    }

    #[test]
    fn charge_rounds_half_to_even_micro_dollar() {
        for (sum, micros) in [
            (1_800_000, 0),
            (5_400_000, 2),
            (1_800_001, 1),
            (3_599_999, 1),
            (-1_800_000, 0),
            (-5_400_000, -2),
        ] {
            assert_eq!(Charge(sum).to_micros(), micros, "{sum}");
        }
    }
}

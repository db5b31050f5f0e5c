//! Exact Kubernetes quantities: `500m`, `1.5Gi`, `1e3` (apimachinery, `resource.Quantity`).

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Resolution of amounts: parts of a unit. The smallest suffix of the API is `n`.
const NANO: i128 = 1_000_000_000;
/// Longest text of a quantity, in bytes. The API server's own values are far shorter.
const TEXT_MAX: usize = 64;

/// Amount of a resource, in billionths of its unit. Never negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount(i128);

/// Text that is not a quantity, or a quantity that is negative or too large.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid quantity {0:?}: not a number with a suffix such as m, k, Mi or e3")]
pub struct InvalidQuantity(String);

impl Amount {
    /// Zero.
    pub const ZERO: Self = Self(0);

    /// Returns the amount of `units` whole units.
    #[must_use]
    pub fn of_units(units: u64) -> Self {
        Self(i128::from(units) * NANO)
    }

    /// Parses a quantity.
    ///
    /// # Errors
    /// [`InvalidQuantity`] when the text is not a quantity, or the quantity is negative or too large.
    pub fn parse(text: &str) -> Result<Self, InvalidQuantity> {
        parse(text).map(Self).ok_or_else(|| InvalidQuantity(text.chars().take(TEXT_MAX).collect()))
    }

    /// Converts a quantity that the API server has validated; an invalid one counts as zero.
    #[must_use]
    pub fn of(quantity: &Quantity) -> Self {
        Self::parse(&quantity.0).unwrap_or_default()
    }

    /// Returns whole units, rounded up.
    #[must_use]
    pub fn units(self) -> u64 {
        self.in_parts_of(Self(NANO))
    }

    /// Returns thousandths of the unit, rounded up.
    #[must_use]
    pub fn millis(self) -> u64 {
        self.in_parts_of(Self(NANO / 1000))
    }

    /// Returns how often `divisor` fits into the amount, rounded up, as `resourceFieldRef` counts. A divisor of zero counts as
    /// one unit.
    #[must_use]
    pub fn in_parts_of(self, divisor: Self) -> u64 {
        let divisor = if divisor.0 == 0 { NANO } else { divisor.0 };
        let parts = self.0 / divisor + i128::from(self.0 % divisor != 0);
        u64::try_from(parts).unwrap_or(u64::MAX)
    }

    /// Returns the sum of two amounts.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// True when the amount is zero.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }
}

fn parse(text: &str) -> Option<i128> {
    if text.len() > TEXT_MAX {
        return None;
    }
    let text = text.strip_prefix('+').unwrap_or(text);
    let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(number_end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let (multiplier, exponent) = scale(suffix)?;
    let digits: i128 = [whole, fraction].concat().parse().ok()?;
    // Amount = digits × multiplier × 10^(exponent − length of the fraction), counted in billionths.
    let shift = exponent.checked_sub(i32::try_from(fraction.len()).ok()?)?.checked_add(9)?;
    let scaled = digits.checked_mul(multiplier)?;
    let power = 10_i128.checked_pow(shift.unsigned_abs());
    match (shift >= 0, power) {
        (true, Some(power)) => scaled.checked_mul(power),
        (true, None) => (scaled == 0).then_some(0),
        // An amount below a billionth counts as a billionth.
        (false, Some(power)) => Some(scaled / power + i128::from(scaled % power != 0)),
        (false, None) => Some(i128::from(scaled != 0)),
    }
}

/// Returns multiplier and power of ten of a suffix.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    Some(match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?;
            (1, exponent.parse().ok().filter(|e: &i32| e.abs() <= 30)?)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantity_suffixes_give_exact_amounts() {
        for (text, nano) in [
            ("0", 0),
            ("1", NANO),
            ("+1", NANO),
            ("100m", NANO / 10),
            ("1.5", NANO * 3 / 2),
            (".5", NANO / 2),
            ("5.", NANO * 5),
            ("1k", NANO * 1000),
            ("1Ki", NANO * 1024),
            ("1.5Gi", NANO * (3 << 29)),
            ("1e3", NANO * 1000),
            ("1E3", NANO * 1000),
            ("1E", NANO * 1_000_000_000_000_000_000),
            ("12e-3", NANO * 12 / 1000),
            ("1n", 1),
            ("0.1n", 1),
            ("9007199254740993", NANO * 9_007_199_254_740_993),
        ] {
            assert_eq!(Amount::parse(text), Ok(Amount(nano)), "{text}");
        }
    }

    #[test]
    fn invalid_quantity_is_refused() {
        for text in ["", "-1", "Mi", "1 Mi", "1.2.3", "1mm", "1e", "1e99", "0x10", ".", "1KI"] {
            assert!(Amount::parse(text).is_err(), "{text}");
        }
        let long = "9".repeat(65);
        assert!(Amount::parse(&long).is_err());
        assert!(Amount::parse("999999999999999999999999999999E").is_err());
    }

    #[test]
    fn division_rounds_up_as_the_downward_api_does() {
        for (text, divisor, want) in [
            ("500m", "1", 1),
            ("500m", "1m", 500),
            ("1500m", "1", 2),
            ("128Mi", "1Mi", 128),
            ("129M", "1Mi", 124),
            ("1", "0", 1),
        ] {
            let parts = Amount::parse(text).unwrap().in_parts_of(Amount::parse(divisor).unwrap());
            assert_eq!(parts, want, "{text} in {divisor}");
        }
        assert_eq!(Amount::parse("0.5m").unwrap().millis(), 1);
    }
}

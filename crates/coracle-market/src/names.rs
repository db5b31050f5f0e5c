//! Public ids of bids and allocations: 26 letters, unique, ordered by time.

use coracle_auction::{AllocationId, BidId, Time};

const LETTERS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
const KIND: u16 = 0x8000;

/// Object that an id names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// Bid of a market.
    Bid(u32, BidId),
    /// Allocation of a market.
    Allocation(u32, AllocationId),
}

fn encode(ms: u64, market: u16, local: u64) -> String {
    let mut bits = u128::from(ms) << 80 | u128::from(market) << 64 | u128::from(local);
    let mut letters = [b'0'; 26];
    for letter in letters.iter_mut().rev() {
        *letter = LETTERS[usize::try_from(bits & 31).unwrap_or(0)];
        bits >>= 5;
    }
    letters.iter().copied().map(char::from).collect()
}

/// Id of a bid that was placed at a time.
pub(crate) fn bid(market: u32, at: Time, id: BidId) -> String {
    encode(at.0, market_bits(market), id.0)
}

/// Id of an allocation that was matched at a time.
pub(crate) fn allocation(market: u32, at: Time, id: AllocationId) -> String {
    encode(at.0, market_bits(market) | KIND, id.0)
}

fn market_bits(market: u32) -> u16 {
    u16::try_from(market).unwrap_or(u16::MAX) & !KIND
}

/// Parses an id to object and time; `None` if it is invalid.
pub(crate) fn parse(text: &str) -> Option<(Named, Time)> {
    if text.len() != 26 {
        return None;
    }
    let mut bits = 0u128;
    for letter in text.bytes() {
        let digit = LETTERS.iter().position(|l| *l == letter.to_ascii_uppercase())?;
        bits = bits.checked_mul(32)? | digit as u128;
    }
    let local = u64::try_from(bits & u128::from(u64::MAX)).ok()?;
    let market = u16::try_from(bits >> 64 & 0xffff).ok()?;
    let at = Time(u64::try_from(bits >> 80).ok()?);
    let no = u32::from(market & !KIND);
    let named = if market & KIND == 0 {
        Named::Bid(no, BidId(local))
    } else {
        Named::Allocation(no, AllocationId(local))
    };
    Some((named, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_and_sort_by_time() {
        let (a, b) = (
            bid(3, Time(1_700_000_000_000), BidId(7 << 32 | 9)),
            allocation(3, Time(1_700_000_000_001), AllocationId(1)),
        );
        assert_eq!(parse(&a), Some((Named::Bid(3, BidId(7 << 32 | 9)), Time(1_700_000_000_000))));
        assert_eq!(
            parse(&b.to_lowercase()),
            Some((Named::Allocation(3, AllocationId(1)), Time(1_700_000_000_001)))
        );
        assert!(a < b && a.starts_with("01"));
        for bad in ["", "01", "U1HQ3Y0000000000000000000U", "ZZZZZZZZZZZZZZZZZZZZZZZZZZ"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}

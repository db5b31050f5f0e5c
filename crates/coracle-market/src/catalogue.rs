//! The node types that a market knows from the start: list price and reserve, US$ per node-hour.

use coracle_auction::{Params, Price};

const DOLLAR: i64 = 1_000_000;

/// Name, list price (= cap) and reserve in micro-dollars.
pub(crate) const DEFAULT: [(&str, i64, i64); 5] = [
    ("h100-8x", 64 * DOLLAR, 16 * DOLLAR),
    ("h100-4x", 32 * DOLLAR, 8 * DOLLAR),
    ("a100-8x", 16 * DOLLAR, 4 * DOLLAR),
    ("a100-4x", 8 * DOLLAR, 2 * DOLLAR),
    ("l40s-4x", 5 * DOLLAR, DOLLAR + DOLLAR / 4),
];

/// Parameters of a type of the catalogue.
pub(crate) fn params(cap: i64, reserve: i64) -> Params {
    Params::new(Price::micros(reserve), Price::micros(cap))
}

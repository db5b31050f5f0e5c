//! Bid advice from past prices: the limit that would not have been preempted.

use std::collections::VecDeque;

use crate::{Price, Time};

/// Advised limit, and the number of windows that it is based on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advice {
    /// Lowest limit that would have survived the requested share of windows.
    pub limit: Price,
    /// Number of windows examined.
    pub samples: usize,
}

/// Computes the limit that would have survived `survive_permille` of all windows of `window_ms` in `history`. `history` is
/// `(from when, clearing price)`, oldest first; a window starts at each entry and must end by `until`. Returns `None` if the
/// history is shorter than one window.
///
/// A limit survives a window if it is not below the highest clearing price in the window.
#[must_use]
pub fn advise(
    history: &[(Time, Price)],
    until: Time,
    window_ms: u64,
    survive_permille: u32,
) -> Option<Advice> {
    let mut highest = window_maxima(history, until, window_ms);
    highest.sort_unstable();
    let samples = highest.len();
    let wanted = usize::try_from(survive_permille.min(1000)).ok()? * samples;
    let limit = *highest.get(wanted.div_ceil(1000).max(1) - 1)?;
    Some(Advice { limit, samples })
}

/// Highest price of each window, in one pass: the queue holds decreasing prices.
fn window_maxima(history: &[(Time, Price)], until: Time, window_ms: u64) -> Vec<Price> {
    let mut maxima = Vec::new();
    let mut falling: VecDeque<usize> = VecDeque::new();
    let mut next = 0;
    for (start, (from, _)) in history.iter().enumerate() {
        let end = from.plus_ms(window_ms);
        if end > until {
            break;
        }
        while next < history.len() && history[next].0 < end.max(from.plus_ms(1)) {
            while falling.back().is_some_and(|last| history[*last].1 <= history[next].1) {
                falling.pop_back();
            }
            falling.push_back(next);
            next += 1;
        }
        while falling.front().is_some_and(|first| *first < start) {
            falling.pop_front();
        }
        if let Some(first) = falling.front() {
            maxima.push(history[*first].1);
        }
    }
    maxima
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advised_limit_covers_the_requested_share_of_windows() {
        let price = |cents: i64| Price::micros(cents * 10_000);
        let history: Vec<_> =
            [200, 200, 241, 200, 300, 200, 200, 200, 200, 200].map(price).into_iter().enumerate().collect();
        let history: Vec<_> = history.into_iter().map(|(i, p)| (Time(i as u64 * 60_000), p)).collect();
        let until = Time(600_000);
        for (minutes, permille, cents, samples) in
            [(1, 1000, 300, 10), (1, 900, 241, 10), (1, 800, 200, 10), (2, 1000, 300, 9), (2, 500, 200, 9)]
        {
            let advice = advise(&history, until, minutes * 60_000, permille).unwrap();
            assert_eq!(advice, Advice { limit: price(cents), samples }, "{minutes} min, {permille}‰");
        }
        assert_eq!(advise(&history, until, 601_000, 900), None, "shorter than a window");
    }
}

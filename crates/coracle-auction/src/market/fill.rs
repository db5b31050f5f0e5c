//! Matching between calls: free slots are given to open bids at once, without preemption or price changes.

use super::Market;
use crate::book::Open;

/// Most blocks that do not fit and are skipped in one step. The next call examines all.
const PASSED_OVER_MAX: usize = 64;

impl Market {
    /// Matches open bids with free slots at the price of the last call.
    pub(super) fn fill(&mut self) {
        if !self.relieved.is_empty() {
            self.release_held();
        }
        while !self.halted && !self.free_slots.free.is_empty() {
            let Some((open, units)) = self.best_fit() else { return };
            self.take(open, units);
        }
    }

    /// Best open entry that pays the present price and whose block fits into the free slots.
    fn best_fit(&self) -> Option<(Open, u32)> {
        let free = u32::try_from(self.free_slots.free.len()).unwrap_or(u32::MAX);
        let fits = |open: &Open| {
            let price = self.history.current().for_tenant(open.tenant).max(self.params.reserve);
            let units = u32::from(open.entry.units);
            (open.rank.price >= price && self.block_of(open) <= free).then(|| units.min(free))
        };
        let first = self.book.first()?;
        if first.rank.price < self.params.reserve {
            return None;
        }
        if let Some(units) = fits(&first) {
            return Some((first, units));
        }
        self.book
            .walk()
            .skip(1)
            .take(PASSED_OVER_MAX)
            .take_while(|open| open.rank.price >= self.params.reserve)
            .find_map(|open| fits(&open).map(|units| (open, units)))
    }
}

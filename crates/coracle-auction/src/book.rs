//! Order book of open bids, best first. It is kept by tenant, because the price of a tenant excludes its own bids.

use std::cmp::{Ordering, Reverse};
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, btree_map, btree_set};
use std::iter::{Peekable, Rev};

use crate::Price;

/// Bands in which the depth of the book is published: tenths of the cap.
pub const BANDS: usize = 10;

/// Order of demand: a higher price first, then a lower sequence number. The greater rank is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) price: Price,
    pub(crate) seq: Reverse<u64>,
}

/// Open units of one bid with one time priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) bid: u32,
    pub(crate) units: u16,
    /// Whether some units must be matched together. Only then the bid is read for their number.
    pub(crate) is_block: bool,
}

/// Entry of the book, as a walk returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Open {
    pub(crate) rank: Rank,
    pub(crate) tenant: u32,
    pub(crate) entry: Entry,
}

/// Open bids of one tenant.
#[derive(Clone, Debug, Default)]
struct Own {
    open: BTreeMap<Rank, Entry>,
    /// Best entry, which every new bid asks for.
    best: Option<Rank>,
}

/// Order book. Prices in ranks are effective ones: limits reduced to the cap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Book {
    tenants: Vec<Own>,
    best: BTreeSet<(Rank, u32)>,
    bands: [u64; BANDS],
    units: u64,
}

impl Book {
    fn band(price: Price, cap: Price) -> usize {
        // Prices are at most a million dollars, so ten times that does not overflow.
        let tenth = price.as_micros().saturating_mul(10) / cap.as_micros().max(1);
        usize::try_from(tenth).unwrap_or(0).min(BANDS - 1)
    }

    pub(crate) fn insert(&mut self, tenant: u32, rank: Rank, entry: Entry, cap: Price) {
        if self.tenants.len() <= tenant as usize {
            self.tenants.resize_with(tenant as usize + 1, Own::default);
        }
        let own = &mut self.tenants[tenant as usize];
        own.open.insert(rank, entry);
        if own.best.is_none_or(|best| rank > best) {
            if let Some(before) = own.best.replace(rank) {
                self.best.remove(&(before, tenant));
            }
            self.best.insert((rank, tenant));
        }
        self.bands[Self::band(rank.price, cap)] += u64::from(entry.units);
        self.units += u64::from(entry.units);
    }

    pub(crate) fn remove(&mut self, tenant: u32, rank: Rank, cap: Price) -> Option<Entry> {
        let own = self.tenants.get_mut(tenant as usize)?;
        let is_best = own.best == Some(rank);
        // The winner of a call is usually the best entry, which needs no search.
        let entry = if is_best { own.open.pop_last()?.1 } else { own.open.remove(&rank)? };
        if is_best {
            if self.best.last() == Some(&(rank, tenant)) {
                self.best.pop_last();
            } else {
                self.best.remove(&(rank, tenant));
            }
            own.best = own.open.last_key_value().map(|(next, _)| *next);
            self.best.extend(own.best.map(|next| (next, tenant)));
        }
        self.bands[Self::band(rank.price, cap)] -= u64::from(entry.units);
        self.units -= u64::from(entry.units);
        Some(entry)
    }

    /// Best entry of all tenants.
    pub(crate) fn first(&self) -> Option<Open> {
        let (rank, tenant) = self.best.last()?;
        let entry = self.tenants.get(*tenant as usize)?.open.get(rank)?;
        Some(Open { rank: *rank, tenant: *tenant, entry: *entry })
    }

    /// Units in each tenth of the cap, lowest first.
    pub(crate) fn bands(&self) -> &[u64; BANDS] {
        &self.bands
    }

    /// Number of all open units.
    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    /// Number of units in entries better than a rank. Reads all of them, so it is for queries and not for calls.
    pub(crate) fn better_than(&self, rank: Rank) -> u64 {
        let above = (std::ops::Bound::Excluded(rank), std::ops::Bound::Unbounded);
        let units = |own: &Own| own.open.range(above).map(|(_, e)| u64::from(e.units)).sum::<u64>();
        self.tenants.iter().map(units).sum()
    }

    /// Walk over the entries, best first: O(log n) per step.
    pub(crate) fn walk(&self) -> Walk<'_> {
        let fresh = self.best.iter().rev().peekable();
        Walk { book: self, fresh, opened: BinaryHeap::new(), rests: Vec::new() }
    }
}

/// Merges the books of the tenants. A tenant's book is opened only when its best entry is next, and read on from there.
pub(crate) struct Walk<'a> {
    book: &'a Book,
    fresh: Peekable<Rev<btree_set::Iter<'a, (Rank, u32)>>>,
    /// Next entry of each opened tenant, with the index of its iterator in `rests`.
    opened: BinaryHeap<Opened>,
    rests: Vec<Rev<btree_map::Iter<'a, Rank, Entry>>>,
}

#[derive(Clone, Copy)]
struct Opened {
    open: Open,
    rest: u32,
}

impl Opened {
    fn order(&self) -> (Rank, u32) {
        (self.open.rank, self.open.tenant)
    }
}

impl PartialEq for Opened {
    fn eq(&self, other: &Self) -> bool {
        self.order() == other.order()
    }
}

impl Eq for Opened {}

impl PartialOrd for Opened {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Opened {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order().cmp(&other.order())
    }
}

impl Walk<'_> {
    /// Entry that `next` will return.
    pub(crate) fn peek(&mut self) -> Option<Open> {
        let opened = self.opened.peek();
        match self.fresh.peek().map(|next| **next) {
            Some(next) if opened.is_none_or(|opened| opened.order() < next) => {
                self.fresh.next();
                self.look_into(next.1);
                self.opened.peek().map(|opened| opened.open)
            }
            _ => opened.map(|opened| opened.open),
        }
    }

    fn look_into(&mut self, tenant: u32) {
        let Some(own) = self.book.tenants.get(tenant as usize) else { return };
        let mut rest = own.open.iter().rev();
        let Some((rank, entry)) = rest.next() else { return };
        let open = Open { rank: *rank, tenant, entry: *entry };
        self.opened.push(Opened { open, rest: u32::try_from(self.rests.len()).unwrap_or(u32::MAX) });
        self.rests.push(rest);
    }

    /// Best remaining price of any other tenant.
    pub(crate) fn best_without(&self, tenant: u32) -> Option<(Price, u32)> {
        let opened = self.opened.iter().map(Opened::order).filter(|(_, t)| *t != tenant).max();
        // Each tenant is in `fresh` once, so at most one entry is skipped.
        let fresh = self.fresh.clone().find(|(_, t)| *t != tenant).copied();
        opened.max(fresh).map(|(rank, t)| (rank.price, t))
    }
}

impl Iterator for Walk<'_> {
    type Item = Open;

    fn next(&mut self) -> Option<Open> {
        self.peek()?;
        let mut first = self.opened.peek_mut()?;
        let (taken, rest) = (first.open, first.rest);
        match self.rests.get_mut(rest as usize).and_then(Iterator::next) {
            Some((rank, entry)) => first.open = Open { rank: *rank, entry: *entry, ..taken },
            None => drop(PeekMut::pop(first)),
        }
        Some(taken)
    }
}

//! Open bids, best first. Kept by tenant, because what a tenant pays leaves its own bids out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::iter::{Peekable, Rev};

use crate::Price;

/// Bands in which the depth of the book is published: tenths of the cap.
pub const BANDS: usize = 10;

/// The order of demand: a higher price, then an earlier sequence number. Greater is better.
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
}

/// One step of the walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Open {
    pub(crate) rank: Rank,
    pub(crate) tenant: u32,
    pub(crate) entry: Entry,
}

/// The book. Prices in ranks are effective ones: limits cut at the cap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Book {
    tenants: Vec<BTreeMap<Rank, Entry>>,
    best: BTreeSet<(Rank, u32)>,
    bands: [u64; BANDS],
    units: u64,
}

impl Book {
    fn band(price: Price, cap: Price) -> usize {
        let tenth = i128::from(price.as_micros()) * 10 / i128::from(cap.as_micros().max(1));
        usize::try_from(tenth).unwrap_or(0).min(BANDS - 1)
    }

    pub(crate) fn insert(&mut self, tenant: u32, rank: Rank, entry: Entry, cap: Price) {
        if self.tenants.len() <= tenant as usize {
            self.tenants.resize_with(tenant as usize + 1, BTreeMap::new);
        }
        let own = &mut self.tenants[tenant as usize];
        let before = own.last_key_value().map(|(rank, _)| *rank);
        own.insert(rank, entry);
        if before.is_none_or(|before| rank > before) {
            if let Some(before) = before {
                self.best.remove(&(before, tenant));
            }
            self.best.insert((rank, tenant));
        }
        self.bands[Self::band(rank.price, cap)] += u64::from(entry.units);
        self.units += u64::from(entry.units);
    }

    pub(crate) fn remove(&mut self, tenant: u32, rank: Rank, cap: Price) -> Option<Entry> {
        let own = self.tenants.get_mut(tenant as usize)?;
        let entry = own.remove(&rank)?;
        if self.best.remove(&(rank, tenant))
            && let Some((next, _)) = own.last_key_value()
        {
            self.best.insert((*next, tenant));
        }
        self.bands[Self::band(rank.price, cap)] -= u64::from(entry.units);
        self.units -= u64::from(entry.units);
        Some(entry)
    }

    /// The best of all.
    pub(crate) fn first(&self) -> Option<Open> {
        let (rank, tenant) = self.best.last()?;
        let entry = self.tenants.get(*tenant as usize)?.get(rank)?;
        Some(Open { rank: *rank, tenant: *tenant, entry: *entry })
    }

    /// Units by tenth of the cap, lowest first.
    pub(crate) fn bands(&self) -> &[u64; BANDS] {
        &self.bands
    }

    /// All open units.
    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    /// Units of entries better than a rank. Reads all of them: for people, not for calls.
    pub(crate) fn better_than(&self, rank: Rank) -> u64 {
        let above = (std::ops::Bound::Excluded(rank), std::ops::Bound::Unbounded);
        let units =
            |own: &BTreeMap<Rank, Entry>| own.range(above).map(|(_, e)| u64::from(e.units)).sum::<u64>();
        self.tenants.iter().map(units).sum()
    }

    /// A walk from the best downwards: O(log n) a step.
    pub(crate) fn walk(&self) -> Walk<'_> {
        Walk { book: self, fresh: self.best.iter().rev().peekable(), opened: BinaryHeap::new() }
    }
}

/// Merges the tenants' books. A tenant is looked into only when its turn comes.
pub(crate) struct Walk<'a> {
    book: &'a Book,
    fresh: Peekable<Rev<std::collections::btree_set::Iter<'a, (Rank, u32)>>>,
    opened: BinaryHeap<(Rank, u32)>,
}

impl Walk<'_> {
    /// What comes next, and whether its tenant was looked into before.
    fn ahead(&mut self) -> Option<((Rank, u32), bool)> {
        match (self.opened.peek().copied(), self.fresh.peek().map(|next| **next)) {
            (Some(opened), Some(fresh)) => Some((opened.max(fresh), opened > fresh)),
            (Some(opened), None) => Some((opened, true)),
            (None, fresh) => Some((fresh?, false)),
        }
    }

    fn open(&self, (rank, tenant): (Rank, u32)) -> Option<Open> {
        let entry = self.book.tenants.get(tenant as usize)?.get(&rank)?;
        Some(Open { rank, tenant, entry: *entry })
    }

    /// What `next` will give.
    pub(crate) fn peek(&mut self) -> Option<Open> {
        let (next, _) = self.ahead()?;
        self.open(next)
    }

    /// The best price still ahead that is of another tenant.
    pub(crate) fn best_without(&self, tenant: u32) -> Option<(Price, u32)> {
        let opened = self.opened.iter().filter(|(_, t)| *t != tenant).max().copied();
        // A tenant stands in `fresh` once, so at most one is passed over.
        let fresh = self.fresh.clone().find(|(_, t)| *t != tenant).copied();
        opened.max(fresh).map(|(rank, t)| (rank.price, t))
    }
}

impl Iterator for Walk<'_> {
    type Item = Open;

    fn next(&mut self) -> Option<Open> {
        let ((rank, tenant), opened) = self.ahead()?;
        if opened {
            self.opened.pop();
        } else {
            self.fresh.next();
        }
        if let Some((next, _)) = self.book.tenants.get(tenant as usize)?.range(..rank).next_back() {
            self.opened.push((*next, tenant));
        }
        self.open((rank, tenant))
    }
}

//! Index of idempotency keys. Four bytes per entry: the key itself is in the bid.

use crate::bid::Bid;
use crate::slab::Slab;

/// An open-addressed table of places in the table of bids, each with a part of its key, so that
/// a search touches the bid it looks for and no other. Never iterated, so it needs no order.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyTable {
    slots: Vec<Bucket>,
    used: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bucket {
    place: u32,
    /// First bytes of the key. They choose the bucket, and compare keys without reading their bids.
    hash: u32,
}

const VACANT: Bucket = Bucket { place: u32::MAX, hash: 0 };

/// Keys are digests: any four bytes of them are as good as a hash.
fn hash(key: &[u8; 16]) -> u32 {
    let [a, b, c, d, ..] = *key;
    u32::from_le_bytes([a, b, c, d])
}

impl KeyTable {
    fn mask(&self) -> usize {
        self.slots.len() - 1
    }

    fn home(&self, hash: u32) -> usize {
        hash as usize & self.mask()
    }

    /// The slot of a key.
    fn search(&self, key: &[u8; 16], bids: &Slab<Bid>) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let hash = hash(key);
        let mut at = self.home(hash);
        while self.slots[at] != VACANT {
            let slot = self.slots[at];
            if slot.hash == hash && bids.at(slot.place).is_some_and(|bid| bid.key == *key) {
                return Some(at);
            }
            at = (at + 1) & self.mask();
        }
        None
    }

    /// The bid placed under this key.
    pub(crate) fn find(&self, key: &[u8; 16], bids: &Slab<Bid>) -> Option<u32> {
        self.search(key, bids).map(|at| self.slots[at].place)
    }

    /// Remembers a bid under its key.
    pub(crate) fn insert(&mut self, place: u32, key: &[u8; 16]) {
        if self.used * 4 >= self.slots.len() * 3 {
            let old = std::mem::take(&mut self.slots);
            self.slots = vec![VACANT; (old.len() * 2).max(64)];
            old.into_iter().filter(|slot| *slot != VACANT).for_each(|slot| self.put(slot));
        }
        self.put(Bucket { place, hash: hash(key) });
        self.used += 1;
    }

    fn put(&mut self, slot: Bucket) {
        let mut at = self.home(slot.hash);
        while self.slots[at] != VACANT {
            at = (at + 1) & self.mask();
        }
        self.slots[at] = slot;
    }

    /// Forgets a bid's key, while the bid is still in the table. Later entries of the same run
    /// move up, so that no search ends early.
    pub(crate) fn remove(&mut self, key: &[u8; 16], bids: &Slab<Bid>) {
        let Some(mut hole) = self.search(key, bids) else { return };
        self.used -= 1;
        let (mask, mut at) = (self.mask(), hole);
        loop {
            at = (at + 1) & mask;
            let slot = self.slots[at];
            if slot == VACANT {
                break;
            }
            let home = self.home(slot.hash);
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = VACANT;
    }
}

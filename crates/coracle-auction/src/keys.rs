//! Index of idempotency keys. Nine bytes per entry: the key itself is in the bid.

use hashbrown::HashTable;

use crate::bid::Bid;
use crate::slab::Slab;

/// Rows of bids by idempotency key. Never iterated, so the order does not matter.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyTable(HashTable<Indexed>);

/// Row of a bid and the head of its key. Growth and most misses need not read the bid, which is far away in memory.
#[derive(Clone, Copy, Debug)]
struct Indexed {
    place: u32,
    head: u32,
}

/// First bytes of a key. Keys are digests, so any of their bytes serve as a hash.
fn head(key: &[u8; 16]) -> u32 {
    let [a, b, c, d, ..] = *key;
    u32::from_le_bytes([a, b, c, d])
}

/// Hash of a head. The table takes the bucket from the lower half and the tag from the upper half.
fn hash(head: u32) -> u64 {
    u64::from(head) << 32 | u64::from(head)
}

fn is_of<'a>(key: &'a [u8; 16], bids: &'a Slab<Bid>) -> impl Fn(&Indexed) -> bool + 'a {
    let wanted = head(key);
    move |indexed| indexed.head == wanted && bids.at(indexed.place).is_some_and(|bid| bid.key == *key)
}

impl KeyTable {
    /// Finds the bid that was placed with this key.
    pub(crate) fn find(&self, key: &[u8; 16], bids: &Slab<Bid>) -> Option<u32> {
        self.0.find(hash(head(key)), is_of(key, bids)).map(|indexed| indexed.place)
    }

    /// Adds a bid that is already in the table, with its key.
    pub(crate) fn insert(&mut self, place: u32, key: &[u8; 16]) {
        let indexed = Indexed { place, head: head(key) };
        self.0.insert_unique(hash(indexed.head), indexed, |known| hash(known.head));
    }

    /// Removes the key of a bid that is still in the table. Idempotent.
    pub(crate) fn remove(&mut self, key: &[u8; 16], bids: &Slab<Bid>) {
        if let Ok(entry) = self.0.find_entry(hash(head(key)), is_of(key, bids)) {
            entry.remove();
        }
    }
}

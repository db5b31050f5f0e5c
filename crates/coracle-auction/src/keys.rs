//! Index of idempotency keys. Nine bytes per entry: the key itself is in the bid.

use hashbrown::HashTable;

use crate::bid::Bid;
use crate::slab::Slab;

/// Places in the table of bids by their keys. Never iterated, so its order does not matter.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyTable(HashTable<Indexed>);

/// A bid and the head of its key: growth and most misses need not read the bid, which is far away in memory.
#[derive(Clone, Copy, Debug)]
struct Indexed {
    place: u32,
    head: u32,
}

/// Keys are digests: any bytes of them are as good as a hash.
fn head(key: &[u8; 16]) -> u32 {
    let [a, b, c, d, ..] = *key;
    u32::from_le_bytes([a, b, c, d])
}

/// The table takes its bucket from the lower half and its tag from the upper.
fn hash(head: u32) -> u64 {
    u64::from(head) << 32 | u64::from(head)
}

fn is_of<'a>(key: &'a [u8; 16], bids: &'a Slab<Bid>) -> impl Fn(&Indexed) -> bool + 'a {
    let wanted = head(key);
    move |indexed| indexed.head == wanted && bids.at(indexed.place).is_some_and(|bid| bid.key == *key)
}

impl KeyTable {
    /// The bid placed under this key.
    pub(crate) fn find(&self, key: &[u8; 16], bids: &Slab<Bid>) -> Option<u32> {
        self.0.find(hash(head(key)), is_of(key, bids)).map(|indexed| indexed.place)
    }

    /// Remembers a bid, which is in the table already, under its key.
    pub(crate) fn insert(&mut self, place: u32, key: &[u8; 16]) {
        let indexed = Indexed { place, head: head(key) };
        self.0.insert_unique(hash(indexed.head), indexed, |known| hash(known.head));
    }

    /// Forgets a bid's key, while the bid is still in the table. Idempotent.
    pub(crate) fn remove(&mut self, key: &[u8; 16], bids: &Slab<Bid>) {
        if let Ok(entry) = self.0.find_entry(hash(head(key)), is_of(key, bids)) {
            entry.remove();
        }
    }
}

//! Index of idempotency keys. Five bytes per entry: the key itself is in the bid.

use hashbrown::HashTable;

use crate::bid::Bid;
use crate::slab::Slab;

/// Places in the table of bids by their keys. Never iterated, so its order does not matter.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyTable(HashTable<u32>);

/// Keys are digests: any eight bytes of them are as good as a hash.
fn hash(key: &[u8; 16]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *key;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

fn is_of<'a>(key: &'a [u8; 16], bids: &'a Slab<Bid>) -> impl Fn(&u32) -> bool + 'a {
    move |place| bids.at(*place).is_some_and(|bid| bid.key == *key)
}

impl KeyTable {
    /// The bid placed under this key.
    pub(crate) fn find(&self, key: &[u8; 16], bids: &Slab<Bid>) -> Option<u32> {
        self.0.find(hash(key), is_of(key, bids)).copied()
    }

    /// Remembers a bid, which is in the table already, under its key.
    pub(crate) fn insert(&mut self, place: u32, key: &[u8; 16], bids: &Slab<Bid>) {
        let known = |place: &u32| bids.at(*place).map_or(0, |bid| hash(&bid.key));
        self.0.insert_unique(hash(key), place, known);
    }

    /// Forgets a bid's key, while the bid is still in the table. Idempotent.
    pub(crate) fn remove(&mut self, key: &[u8; 16], bids: &Slab<Bid>) {
        if let Ok(entry) = self.0.find_entry(hash(key), is_of(key, bids)) {
            entry.remove();
        }
    }
}

//! Names and their numbers. The engine uses numbers; the store keeps both.

use std::collections::BTreeMap;

use crate::error::StoreError;
use crate::store::{NameRow, Store};
use parking_lot::{Mutex, RwLock};

/// Kind of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Market = 0,
    Tenant = 1,
    Supplier = 2,
    Lot = 3,
    /// Owner whose name is not a UUID. The number is unused, and the body is the key.
    Owner = 4,
    /// Instance type. The body describes its nodes.
    Type = 5,
}

#[derive(Debug, Default)]
struct Known {
    by_name: BTreeMap<i64, BTreeMap<String, u32>>,
    by_no: BTreeMap<(i64, u32), (String, Vec<u8>)>,
}

/// All registered names. Numbers start at 1 and are not reused.
#[derive(Debug)]
pub(crate) struct Registry {
    store: Store,
    known: RwLock<Known>,
    /// Serialises the addition of names.
    adding: tokio::sync::Mutex<()>,
    owners: Mutex<BTreeMap<[u8; 16], String>>,
}

impl Registry {
    pub(crate) async fn load(store: Store) -> Result<Self, StoreError> {
        let mut known = Known::default();
        let mut owners = BTreeMap::new();
        for row in store.names().await? {
            if row.kind == Kind::Owner as i64
                && let Ok(key) = <[u8; 16]>::try_from(&row.body[..])
            {
                owners.insert(key, row.name.clone());
            }
            known.by_name.entry(row.kind).or_default().insert(row.name.clone(), row.no);
            known.by_no.insert((row.kind, row.no), (row.name, row.body));
        }
        Ok(Self {
            store,
            known: RwLock::new(known),
            adding: tokio::sync::Mutex::new(()),
            owners: Mutex::new(owners),
        })
    }

    pub(crate) fn number(&self, kind: Kind, name: &str) -> Option<u32> {
        let known = self.known.read();
        known.by_name.get(&(kind as i64))?.get(name).copied()
    }

    pub(crate) fn name(&self, kind: Kind, no: u32) -> String {
        let known = self.known.read();
        known.by_no.get(&(kind as i64, no)).map_or_else(String::new, |(name, _)| name.clone())
    }

    pub(crate) fn body(&self, kind: Kind, no: u32) -> Vec<u8> {
        let known = self.known.read();
        known.by_no.get(&(kind as i64, no)).map_or_else(Vec::new, |(_, body)| body.clone())
    }

    /// Replaces the body of a name. The caller has stored it already.
    pub(crate) fn set_body(&self, kind: Kind, no: u32, body: Vec<u8>) {
        let mut known = self.known.write();
        if let Some(entry) = known.by_no.get_mut(&(kind as i64, no)) {
            entry.1 = body;
        }
    }

    /// All names of a kind, with numbers.
    pub(crate) fn all(&self, kind: Kind) -> Vec<(u32, String)> {
        let known = self.known.read();
        let range = (kind as i64, 0)..=(kind as i64, u32::MAX);
        known.by_no.range(range).map(|((_, no), (name, _))| (*no, name.clone())).collect()
    }

    /// Returns the number of a name, and adds the name if it is new. A new name is stored before its number is used.
    pub(crate) async fn ensure(&self, kind: Kind, name: &str, body: &[u8]) -> Result<u32, StoreError> {
        match self.number(kind, name) {
            Some(no) => Ok(no),
            // Boxed: otherwise the future of every bid would include that of a database statement.
            None => Box::pin(self.add(kind, name, body)).await,
        }
    }

    async fn add(&self, kind: Kind, name: &str, body: &[u8]) -> Result<u32, StoreError> {
        let _one = self.adding.lock().await;
        if let Some(no) = self.number(kind, name) {
            return Ok(no);
        }
        let no = self.all(kind).last().map_or(1, |(no, _)| no + 1);
        let row = NameRow { kind: kind as i64, no, name: name.to_owned(), body: body.to_vec() };
        self.store.put_name(&row).await?;
        let mut known = self.known.write();
        known.by_name.entry(row.kind).or_default().insert(row.name.clone(), no);
        known.by_no.insert((row.kind, no), (row.name, row.body));
        Ok(no)
    }

    /// Stores the name of an owner whose key does not contain it.
    pub(crate) async fn ensure_owner(&self, key: [u8; 16], name: &str) -> Result<(), StoreError> {
        if self.owners.lock().contains_key(&key) {
            return Ok(());
        }
        self.ensure(Kind::Owner, name, &key).await?;
        self.owners.lock().insert(key, name.to_owned());
        Ok(())
    }

    pub(crate) fn owner(&self, key: &[u8; 16]) -> Option<String> {
        self.owners.lock().get(key).cloned()
    }
}

//! Triggers of reconciles.

use std::{collections::HashMap, sync::Arc};

use coracle_api::bidnode::BidNode;
use coracle_reconcile::WorkQueue;
use kube::runtime::reflector::ObjectRef;
use parking_lot::Mutex;

/// A BidNode that may be unreadable: one of them must not hide the others.
pub(crate) type Guarded = coracle_reconcile::Guarded<BidNode>;
/// Names an object in the queue.
pub(crate) type Ref = ObjectRef<Guarded>;

/// What triggers reconciles, and packings of pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct Triggers {
    /// Objects to reconcile.
    pub(crate) queue: WorkQueue<Guarded>,
    /// Requests a packing of pods.
    pub(crate) pack: Arc<tokio::sync::Notify>,
    /// Objects by UID.
    uids: Arc<Mutex<HashMap<String, Ref>>>,
}

impl Triggers {
    /// Reconciles `object`: at once, or together with other triggers that come soon.
    pub(crate) fn wake(&self, object: Ref, urgent: bool) {
        if urgent {
            self.queue.add_urgent(object);
        } else {
            self.queue.add(object);
        }
    }

    pub(crate) fn wake_uid(&self, uid: &str, urgent: bool) {
        let found = self.uids.lock().get(uid).cloned();
        if let Some(object) = found {
            self.wake(object, urgent);
        }
    }

    /// Remembers the object of a UID, or forgets it.
    pub(crate) fn know(&self, uid: String, object: Option<Ref>) {
        let mut uids = self.uids.lock();
        match object {
            Some(object) => uids.insert(uid, object),
            None => uids.remove(&uid),
        };
    }
}

//! Triggers of reconciles.

use std::{collections::HashMap, sync::Arc};

use coracle_api::bidnode::BidNode;
use coracle_reconcile::WorkQueue;
use kube::runtime::reflector::ObjectRef;
use parking_lot::Mutex;

/// BidNode that may be undecodable: one such object must not hide the others.
pub(crate) type Guarded = coracle_reconcile::Guarded<BidNode>;
/// Reference to an object in the queue.
pub(crate) type Ref = ObjectRef<Guarded>;

/// Triggers of reconciles and of pod packing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Triggers {
    /// Objects to reconcile.
    pub(crate) queue: WorkQueue<Guarded>,
    /// Requests a packing of the waiting pods.
    pub(crate) pack: Arc<tokio::sync::Notify>,
    /// References to objects, by UID.
    uids: Arc<Mutex<HashMap<String, Ref>>>,
}

impl Triggers {
    /// Triggers a reconcile of `object`: at once, or merged with other triggers that follow soon.
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

    /// Stores the object of a UID, or removes it.
    pub(crate) fn set_object(&self, uid: String, object: Option<Ref>) {
        let mut uids = self.uids.lock();
        match object {
            Some(object) => uids.insert(uid, object),
            None => uids.remove(&uid),
        };
    }
}

//! Events about BidNodes, sent beside the work and not in its way: a pass that must be quick does not wait for them.

use coracle_api::bidnode::BidNode;
use coracle_reconcile::{Event, EventRecorder, Kind};
use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource as _;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::mirror::Note;

/// Events that may wait to be sent; more are dropped.
const WAITING_MAX: usize = 4096;
/// Events that are sent at once.
const AT_ONCE: usize = 4;

type Told = (Event, ObjectReference);

/// Takes events. Clones feed the same queue.
#[derive(Clone, Debug)]
pub(crate) struct Teller(Sender<Told>);

/// The queue, and the end that [`keep`] empties.
pub(crate) fn queue() -> (Teller, Receiver<Told>) {
    let (sender, receiver) = channel(WAITING_MAX);
    (Teller(sender), receiver)
}

impl Teller {
    /// Best effort: what finds the queue full is a log line.
    pub(crate) fn tell(&self, object: &BidNode, note: Note) {
        let kind = if note.warning { Kind::Warning } else { Kind::Normal };
        let event = Event { kind, reason: note.reason, action: note.reason, note: note.text };
        let reason = event.reason;
        if self.0.try_send((event, object.object_ref(&()))).is_err() {
            tracing::warn!(reason, "event dropped: too many wait to be sent");
        }
    }
}

/// Sends events until the last [`Teller`] is gone.
pub(crate) async fn keep(recorder: &EventRecorder, told: Receiver<Told>) {
    let told = stream::unfold(told, |mut told| async move { Some((told.recv().await?, told)) });
    told.for_each_concurrent(AT_ONCE, async |(event, object)| recorder.publish(&event, &object).await).await;
}

//! Events about BidNodes and pods. A separate task sends them, so that a reconcile does not wait for them.

use coracle_api::bidnode::BidNode;
use coracle_reconcile::{Event, EventRecorder, Kind};
use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource as _;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Most events that wait to be sent; further ones are dropped.
const QUEUE_MAX: usize = 4096;
/// Number of events that are sent concurrently.
const CONCURRENCY: usize = 4;

/// Event about one object.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectEvent {
    /// Reason, a PascalCase constant.
    pub reason: &'static str,
    /// Message.
    pub text: String,
    /// Whether the type of the event is Warning.
    pub warning: bool,
}

/// Queued event with the object that it is about.
pub(crate) type Queued = (Event, ObjectReference);

/// Sending end of the queue. Clones feed the same queue.
#[derive(Clone, Debug)]
pub(crate) struct EventSender(Sender<Queued>);

/// Creates the queue; [`publish`] reads its receiving end.
pub(crate) fn queue() -> (EventSender, Receiver<Queued>) {
    let (sender, receiver) = channel(QUEUE_MAX);
    (EventSender(sender), receiver)
}

impl EventSender {
    /// Queues an event about a BidNode. Best effort: if the queue is full, the event is dropped and logged.
    pub(crate) fn emit(&self, object: &BidNode, event: ObjectEvent) {
        self.emit_about(object.object_ref(&()), event);
    }

    /// Like [`emit`](Self::emit), for any object.
    pub(crate) fn emit_about(&self, object: ObjectReference, event: ObjectEvent) {
        let kind = if event.warning { Kind::Warning } else { Kind::Normal };
        let reason = event.reason;
        let event = Event { kind, reason, action: reason, note: event.text };
        if self.0.try_send((event, object)).is_err() {
            tracing::warn!(reason, "event dropped: queue is full");
        }
    }
}

/// Sends events until the last [`EventSender`] is dropped.
pub(crate) async fn publish(recorder: &EventRecorder, queue: Receiver<Queued>) {
    let queue = stream::unfold(queue, |mut queue| async move { Some((queue.recv().await?, queue)) });
    queue
        .for_each_concurrent(CONCURRENCY, async |(event, object)| recorder.publish(&event, &object).await)
        .await;
}

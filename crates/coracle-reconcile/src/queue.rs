//! Work queue of one controller.

use std::{
    collections::{HashSet, VecDeque},
    fmt,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kube::{Resource, runtime::reflector::ObjectRef};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

/// Objects to reconcile: urgent ones first, otherwise first in first out. Each object is queued at most once, so the length is
/// bounded by the number of objects. Clones share one queue.
pub struct WorkQueue<K: Resource> {
    waiting: Arc<Mutex<Waiting<K>>>,
    added: Arc<Notify>,
}

struct Waiting<K: Resource> {
    urgent: VecDeque<ObjectRef<K>>,
    /// Triggered objects with the time of their first trigger, in ascending order.
    order: VecDeque<(Instant, ObjectRef<K>)>,
    /// Objects whose requeue time has come, with that time.
    due: VecDeque<(Instant, ObjectRef<K>)>,
    members: HashSet<ObjectRef<K>>,
}

/// Result of a look at the front of the queue.
enum Next<K: Resource> {
    Object(ObjectRef<K>),
    /// The first object can be taken at this time.
    DueAt(Instant),
    Empty,
}

impl<K: Resource> Default for WorkQueue<K> {
    fn default() -> Self {
        let (order, due) = (VecDeque::new(), VecDeque::new());
        let waiting = Waiting { urgent: VecDeque::new(), order, due, members: HashSet::new() };
        Self { waiting: Arc::new(Mutex::new(waiting)), added: Arc::default() }
    }
}

impl<K: Resource> Clone for WorkQueue<K> {
    fn clone(&self) -> Self {
        Self { waiting: self.waiting.clone(), added: self.added.clone() }
    }
}

impl<K: Resource> fmt::Debug for WorkQueue<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkQueue").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<K: Resource> WorkQueue<K> {
    fn lock(&self) -> MutexGuard<'_, Waiting<K>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of waiting objects.
    #[must_use]
    pub fn len(&self) -> usize {
        let waiting = self.lock();
        waiting.members.len()
    }

    /// True when no object waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<K> WorkQueue<K>
where
    K: Resource,
    K::DynamicType: Clone + Eq + Hash,
{
    /// Adds `object` unless it is already waiting.
    pub fn add(&self, object: ObjectRef<K>) {
        let mut waiting = self.lock();
        if waiting.members.insert(object.clone()) {
            waiting.order.push_back((Instant::now(), object));
        }
        drop(waiting);
        self.added.notify_one();
    }

    /// Adds `object`, whose requeue time has come, unless it is already waiting. It is taken in its turn, without a debounce.
    pub fn add_due(&self, object: ObjectRef<K>) {
        let mut waiting = self.lock();
        if waiting.members.insert(object.clone()) {
            waiting.due.push_back((Instant::now(), object));
        }
        drop(waiting);
        self.added.notify_one();
    }

    /// Adds `object` before all objects that are not urgent. It is taken without a debounce.
    pub fn add_urgent(&self, object: ObjectRef<K>) {
        let mut waiting = self.lock();
        if !waiting.members.insert(object.clone()) {
            let before = waiting.order.len() + waiting.due.len();
            waiting.order.retain(|(_, waits)| *waits != object);
            waiting.due.retain(|(_, waits)| *waits != object);
            if waiting.order.len() + waiting.due.len() == before {
                return; // already urgent
            }
        }
        waiting.urgent.push_back(object);
        drop(waiting);
        self.added.notify_one();
    }

    fn take(&self, debounce: Duration) -> Next<K> {
        let mut waiting = self.lock();
        let found = waiting.urgent.pop_front().map_or_else(|| waiting.first(debounce), Next::Object);
        if let Next::Object(object) = &found {
            waiting.members.remove(object);
        }
        found
    }

    /// Waits for the next object and takes it. Triggers of an object within `debounce` of the first one are merged.
    /// Cancel-safe; supports one consumer.
    pub async fn next(&self, debounce: Duration) -> ObjectRef<K> {
        loop {
            match self.take(debounce) {
                Next::Object(object) => return object,
                Next::Empty => self.added.notified().await,
                Next::DueAt(time) => tokio::select! {
                    () = self.added.notified() => {}
                    () = sleep_until(time) => {}
                },
            }
        }
    }
}

impl<K: Resource> Waiting<K> {
    /// Takes the object that became ready first.
    fn first(&mut self, debounce: Duration) -> Next<K> {
        let triggered = self.order.front().map(|(added, _)| *added + debounce);
        let due = self.due.front().map(|(time, _)| *time);
        let (time, from) = match (triggered, due) {
            (None, None) => return Next::Empty,
            (Some(time), due) if due.is_none_or(|due| time < due) => (time, &mut self.order),
            (_, due) => (due.unwrap_or_else(Instant::now), &mut self.due),
        };
        if time > Instant::now() {
            return Next::DueAt(time);
        }
        from.pop_front().map_or(Next::Empty, |(_, object)| Next::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn queue_holds_each_object_once_in_order() {
        let queue = WorkQueue::<ConfigMap>::default();
        for name in ["a", "b", "a", "c", "b"] {
            queue.add(ObjectRef::new(name));
        }
        assert_eq!(queue.len(), 3);
        for want in ["a", "b", "c"] {
            assert_eq!(queue.next(Duration::ZERO).await.name, want);
        }
        queue.add(ObjectRef::new("a"));
        assert_eq!(
            (queue.next(Duration::ZERO).await.name.as_str(), queue.is_empty()),
            ("a", true),
            "taken, so it may wait again"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn debounce_counts_from_first_trigger_and_spares_urgent() {
        let (queue, debounce) = (WorkQueue::<ConfigMap>::default(), Duration::from_millis(200));
        let began = Instant::now();
        queue.add(ObjectRef::new("a"));
        queue.add(ObjectRef::new("b"));
        tokio::time::advance(debounce / 2).await;
        queue.add(ObjectRef::new("a"));
        queue.add_urgent(ObjectRef::new("b"));
        queue.add_urgent(ObjectRef::new("b"));
        assert_eq!(queue.len(), 2);
        assert_eq!((queue.next(debounce).await.name.as_str(), began.elapsed()), ("b", debounce / 2));
        assert_eq!((queue.next(debounce).await.name.as_str(), began.elapsed()), ("a", debounce));
        assert!(queue.is_empty());
    }
}

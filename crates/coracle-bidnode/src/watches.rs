//! What is watched, and what a change of it sets off. Caches trigger; what buys or destroys is decided on a fresh read.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use coracle_api::bidnode::{BidNode, names};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Resource as _, ResourceExt as _,
    core::DeserializeGuard,
    runtime::{
        WatchStreamExt as _,
        reflector::{ObjectRef, store::Writer},
        watcher,
    },
};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender},
    time::{Instant, sleep_until},
};

use crate::{Context, mirror::Change};

/// A BidNode that may be unreadable: one of them must not hide the others.
pub(crate) type Guarded = DeserializeGuard<BidNode>;
/// Names an object in the queue.
pub(crate) type Ref = ObjectRef<Guarded>;

/// Ends of the queues.
#[derive(Clone, Debug)]
pub(crate) struct Triggers {
    /// At once.
    pub(crate) urgent: UnboundedSender<Ref>,
    /// When a few have come together.
    pub(crate) soon: UnboundedSender<Ref>,
    /// Pods must be packed.
    pub(crate) pack: Arc<tokio::sync::Notify>,
    /// Objects by UID.
    uids: Arc<Mutex<HashMap<String, Ref>>>,
}

impl Triggers {
    pub(crate) fn new(urgent: UnboundedSender<Ref>, soon: UnboundedSender<Ref>) -> Self {
        Self { urgent, soon, pack: Arc::default(), uids: Arc::default() }
    }

    /// A queue whose reader is gone belongs to a controller that stops.
    pub(crate) fn wake(&self, object: Ref, urgent: bool) {
        let queue = if urgent { &self.urgent } else { &self.soon };
        drop(queue.send(object));
    }

    pub(crate) fn wake_uid(&self, uid: &str, urgent: bool) {
        let found = self.uids.lock().unwrap_or_else(PoisonError::into_inner).get(uid).cloned();
        if let Some(object) = found {
            self.wake(object, urgent);
        }
    }

    fn know(&self, uid: String, object: Option<Ref>) {
        let mut uids = self.uids.lock().unwrap_or_else(PoisonError::into_inner);
        match object {
            Some(object) => uids.insert(uid, object),
            None => uids.remove(&uid),
        };
    }
}

/// `namespace/name` as the queue names it.
fn reference(key: &str) -> Ref {
    let (namespace, name) = key.split_once('/').unwrap_or(("", key));
    ObjectRef::new(name).within(namespace)
}

/// What the market's change sets off.
pub(crate) fn market_changed(cx: &Context, change: Change) {
    match change {
        Change::Owner { uid, urgent } => cx.triggers.wake_uid(&uid, urgent),
        Change::Market(market) => {
            let kind = market.split_once('/').map_or(market.as_str(), |(kind, _)| kind);
            wake_all(cx, |object| object.spec.instance_type == kind);
            // Prices decide whose pod it is.
            cx.triggers.pack.notify_one();
        }
        Change::Everyone => {
            wake_all(cx, |_| true);
            cx.triggers.pack.notify_one();
        }
    }
}

fn wake_all(cx: &Context, which: impl Fn(&BidNode) -> bool) {
    for guard in cx.objects.state() {
        if guard.0.as_ref().is_ok_and(&which) {
            cx.triggers.wake(ObjectRef::from_obj(guard.as_ref()), false);
        }
    }
}

/// Collects triggers for a moment, so that several of one object are one.
pub(crate) async fn coalesce(mut soon: UnboundedReceiver<Ref>, out: UnboundedSender<Ref>, pause: Duration) {
    while let Some(first) = soon.recv().await {
        let mut all: HashSet<Ref> = [first].into();
        let until = Instant::now() + pause;
        loop {
            tokio::select! {
                next = soon.recv() => match next {
                    Some(next) => drop(all.insert(next)),
                    None => break,
                },
                () = sleep_until(until) => break,
            }
        }
        for object in all {
            if out.send(object).is_err() {
                return;
            }
        }
    }
}

/// What of a BidNode wakes its controller: everything but the status, which is our own.
fn print_of(object: &Guarded) -> u64 {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let meta = object.meta();
    let mut hasher = DefaultHasher::new();
    meta.generation.hash(&mut hasher);
    meta.annotations.hash(&mut hasher);
    meta.finalizers.hash(&mut hasher);
    meta.deletion_timestamp.is_some().hash(&mut hasher);
    meta.uid.hash(&mut hasher);
    hasher.finish()
}

/// Follows BidNodes. Never ends by itself.
pub(crate) async fn objects(cx: &Context, mut writer: Writer<Guarded>) {
    let api: Api<Guarded> = match &cx.config.namespace {
        Some(namespace) => Api::namespaced(cx.client.clone(), namespace),
        None => Api::all(cx.client.clone()),
    };
    let events = watcher(api, watcher::Config::default()).default_backoff();
    let mut events = std::pin::pin!(events);
    let mut prints: HashMap<String, u64> = HashMap::new();
    let mut coming: Option<Vec<Guarded>> = None;
    let mut bad: HashSet<String> = HashSet::new();
    while let Some(event) = events.next().await {
        let Ok(mut event) = event else { continue };
        if let watcher::Event::Apply(object) | watcher::Event::InitApply(object) = &mut event {
            object.meta_mut().managed_fields = None;
        }
        writer.apply_watcher_event(&event);
        match event {
            watcher::Event::Apply(object) => seen(cx, &object, &mut prints, &mut bad),
            watcher::Event::Delete(object) => gone(cx, &object, &mut prints, &mut bad),
            watcher::Event::Init => coming = Some(Vec::new()),
            watcher::Event::InitApply(object) => coming.get_or_insert_default().push(object),
            // The cache holds them only now.
            watcher::Event::InitDone => {
                for object in coming.take().unwrap_or_default() {
                    seen(cx, &object, &mut prints, &mut bad);
                }
            }
        }
        cx.config.bid_metrics.undecodable(bad.len());
    }
}

fn seen(cx: &Context, object: &Guarded, prints: &mut HashMap<String, u64>, bad: &mut HashSet<String>) {
    let uid = object.uid().unwrap_or_default();
    if let Err(why) = &object.0 {
        if bad.insert(uid) {
            let (ns, name) = (object.namespace(), object.name_any());
            tracing::warn!(
                ns,
                name,
                error = why as &dyn std::error::Error,
                "BidNode cannot be read and is left alone"
            );
        }
        return;
    }
    bad.remove(&uid);
    cx.triggers.know(uid.clone(), Some(ObjectRef::from_obj(object)));
    let print = print_of(object);
    if prints.insert(uid, print) != Some(print) {
        cx.triggers.wake(ObjectRef::from_obj(object), false);
        cx.triggers.pack.notify_one();
    }
}

fn gone(cx: &Context, object: &Guarded, prints: &mut HashMap<String, u64>, bad: &mut HashSet<String>) {
    let uid = object.uid().unwrap_or_default();
    prints.remove(&uid);
    bad.remove(&uid);
    if let Ok(object) = &object.0 {
        cx.forget(object);
    }
    cx.triggers.know(uid, None);
}

/// Follows Nodes of ours. Never ends by itself.
pub(crate) async fn nodes(cx: &Context, ready: &tokio::sync::watch::Sender<u8>) {
    let api: Api<Node> = Api::all(cx.client.clone());
    let config = watcher::Config::default().labels(names::BIDNODE);
    let events = watcher(api, config).default_backoff();
    let mut events = std::pin::pin!(events);
    while let Some(event) = events.next().await {
        let Ok(event) = event else { continue };
        touched(cx, cx.world.node_event(&event, cx.now_ms()));
        if matches!(event, watcher::Event::InitDone) {
            ready.send_modify(|bits| *bits |= 1);
        }
    }
}

/// Follows Pods. Never ends by itself.
pub(crate) async fn pods(cx: &Context, ready: &tokio::sync::watch::Sender<u8>) {
    let api: Api<Pod> = Api::all(cx.client.clone());
    let events = watcher(api, watcher::Config::default()).default_backoff();
    let mut events = std::pin::pin!(events);
    while let Some(event) = events.next().await {
        let Ok(event) = event else { continue };
        touched(cx, cx.world.pod_event(&event, cx.now_ms()));
        if matches!(event, watcher::Event::InitDone) {
            ready.send_modify(|bits| *bits |= 2);
        }
    }
}

fn touched(cx: &Context, touched: crate::world::Touched) {
    for owner in touched.owners {
        cx.triggers.wake(reference(&owner), false);
    }
    if touched.demand {
        cx.triggers.pack.notify_one();
    }
}

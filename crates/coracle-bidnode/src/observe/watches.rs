//! Watches and the reconciles that they trigger. Caches only trigger reconciles; steps are planned on a fresh read.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    pin::pin,
};

use coracle_api::bidnode::{BidNode, names};
use coracle_reconcile::{Seen, follow, watch, watch_config};
use futures_util::StreamExt as _;
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Node, Pod},
};
use kube::{
    Api, Resource as _, ResourceExt as _,
    runtime::{
        reflector::{ObjectRef, store::Writer},
        watcher,
    },
};

use super::{
    facts::{PodFacts, PodKind},
    mirror::Change,
};
use crate::{
    Context,
    triggers::{Guarded, Ref},
};

/// Queue reference of `namespace/name`.
fn reference(key: &str) -> Ref {
    let (namespace, name) = key.split_once('/').unwrap_or(("", key));
    ObjectRef::new(name).within(namespace)
}

/// Triggers reconciles for a change of the market.
pub(crate) fn market_changed(cx: &Context, change: Change) {
    match change {
        Change::Owner { uid, urgent } => cx.triggers.wake_uid(&uid, urgent),
        Change::Market(market) => {
            wake_all(cx, |object| object.spec.instance_type == market.instance_type());
            // Prices decide which BidNode a pod is assigned to.
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

/// Hash of the fields whose change triggers a reconcile: all but the status, which the controller writes.
fn fingerprint(object: &Guarded) -> u64 {
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

/// Watches BidNodes. Never returns.
pub(crate) async fn objects(cx: &Context, writer: Writer<Guarded>) {
    let api: Api<Guarded> = match &cx.config.namespace {
        Some(namespace) => Api::namespaced(cx.client.clone(), namespace),
        None => Api::all(cx.client.clone()),
    };
    let mut prints: HashMap<String, u64> = HashMap::new();
    let mut bad: HashSet<String> = HashSet::new();
    let changed = |event: Seen<'_, Guarded>| {
        match event {
            Seen::Applied(object) => on_applied(cx, object, &mut prints, &mut bad),
            Seen::Gone(object) => on_deleted(cx, object, &mut prints, &mut bad),
        }
        cx.config.bid_metrics.set_undecodable(bad.len());
    };
    follow(api, watch_config(), writer, changed).await;
}

fn on_applied(cx: &Context, object: &Guarded, prints: &mut HashMap<String, u64>, bad: &mut HashSet<String>) {
    let uid = object.uid().unwrap_or_default();
    if let Err(why) = &object.0 {
        if bad.insert(uid) {
            let (ns, name) = (object.namespace(), object.name_any());
            tracing::warn!(
                ns,
                name,
                error = why as &dyn std::error::Error,
                "BidNode cannot be decoded, ignored"
            );
        }
        return;
    }
    bad.remove(&uid);
    cx.triggers.set_object(uid.clone(), Some(ObjectRef::from_obj(object)));
    let print = fingerprint(object);
    if prints.insert(uid, print) != Some(print) {
        cx.triggers.wake(ObjectRef::from_obj(object), false);
        cx.triggers.pack.notify_one();
    }
}

fn on_deleted(cx: &Context, object: &Guarded, prints: &mut HashMap<String, u64>, bad: &mut HashSet<String>) {
    let uid = object.uid().unwrap_or_default();
    prints.remove(&uid);
    bad.remove(&uid);
    if let Ok(object) = &object.0 {
        cx.forget(object);
    }
    cx.triggers.set_object(uid, None);
}

/// Watches the Nodes of this controller. Never returns.
pub(crate) async fn nodes(cx: &Context, ready: &tokio::sync::watch::Sender<u8>) {
    let api: Api<Node> = Api::all(cx.client.clone());
    let mut events = pin!(watch(api, watch_config().labels(names::BIDNODE)));
    while let Some(event) = events.next().await {
        wake_touched(cx, cx.cluster.node_event(&event, cx.now_ms()));
        if matches!(event, watcher::Event::InitDone) {
            ready.send_modify(|bits| *bits |= 1);
        }
    }
}

/// Watches Pods. Never returns.
pub(crate) async fn pods(cx: &Context, ready: &tokio::sync::watch::Sender<u8>) {
    let api: Api<Pod> = Api::all(cx.client.clone());
    let mut events = pin!(watch(api, watch_config()));
    while let Some(event) = events.next().await {
        wake_touched(cx, cx.cluster.pod_event(&event, cx.now_ms()));
        if matches!(event, watcher::Event::InitDone) {
            ready.send_modify(|bits| *bits |= 2);
        }
    }
}

/// Watches DaemonSets, whose pods take a part of each node. Never returns.
pub(crate) async fn daemons(cx: &Context) {
    let api: Api<DaemonSet> = Api::all(cx.client.clone());
    let mut events = pin!(watch(api, watch_config()));
    let mut listed = BTreeSet::new();
    while let Some(event) = events.next().await {
        let uid = |set: &DaemonSet| set.uid().unwrap_or_default();
        let changed = match &event {
            watcher::Event::Init => {
                listed.clear();
                false
            }
            watcher::Event::InitApply(set) => {
                listed.insert(uid(set));
                cx.cluster.put_daemon(uid(set), Some(daemon(set)))
            }
            watcher::Event::Apply(set) => cx.cluster.put_daemon(uid(set), Some(daemon(set))),
            watcher::Event::Delete(set) => cx.cluster.put_daemon(uid(set), None),
            watcher::Event::InitDone => {
                cx.cluster.keep_daemons(&listed);
                true
            }
        };
        if changed {
            cx.triggers.pack.notify_one();
        }
    }
}

/// Pod that a DaemonSet creates.
fn daemon(set: &DaemonSet) -> PodFacts {
    let spec = set.spec.as_ref().and_then(|spec| spec.template.spec.clone());
    PodFacts { kind: PodKind::Daemon, ..PodFacts::of(&Pod { spec, ..Pod::default() }) }
}

fn wake_touched(cx: &Context, touched: super::cluster::Touched) {
    for owner in touched.owners {
        cx.triggers.wake(reference(&owner), false);
    }
    if touched.demand {
        cx.triggers.pack.notify_one();
    }
}

//! Shared context of both controllers: the client, caches of objects, and the queues that changes fill.

use std::{collections::HashMap, fmt, sync::Arc};

use coracle_api::cocoon::keys;
use coracle_api::{CocoonHibernation, CocoonSet};
use coracle_reconcile::{Backoff, Backoffs, EventRecorder, Guarded, Seen, WorkQueue, follow, watch_config};
use jiff::Timestamp;
use k8s_openapi::{NamespaceResourceScope, api::core::v1::Pod};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    runtime::reflector::{ObjectRef, Store, store::Writer},
};
use parking_lot::Mutex;
use std::time::Duration;

use crate::config::Config;

/// A set that may be undecodable: such a set must not hide the others.
pub(crate) type SetGuard = Guarded<CocoonSet>;
/// A hibernation that may be undecodable.
pub(crate) type HibernationGuard = Guarded<CocoonHibernation>;

/// Delays after failures.
const BACKOFF: Backoff = Backoff { base: Duration::from_millis(500), max: Duration::from_secs(60) };
/// Failures in a row after which the delay doubles.
const STEADY: u32 = 2;

/// State that all reconciles share.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) config: Config,
    pub(crate) recorder: EventRecorder,
    pub(crate) backoffs: Arc<Backoffs<String>>,
    pub(crate) sets: Store<SetGuard>,
    pub(crate) pods: Store<Pod>,
    pub(crate) hibernations: Store<HibernationGuard>,
    pub(crate) set_queue: WorkQueue<SetGuard>,
    pub(crate) hibernation_queue: WorkQueue<HibernationGuard>,
    /// First observation of the present generation of each hibernation, by UID.
    since: Mutex<HashMap<String, (Option<i64>, Timestamp)>>,
}

/// Write ends of the caches of a [`Context`].
pub(crate) struct Writers {
    sets: Writer<SetGuard>,
    pods: Writer<Pod>,
    hibernations: Writer<HibernationGuard>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Context {
    pub(crate) fn new(client: Client, config: Config) -> (Self, Writers) {
        let writers = Writers { sets: Writer::new(()), pods: Writer::new(()), hibernations: Writer::new(()) };
        let cx = Self {
            recorder: EventRecorder::new(client.clone(), "cocoon", &config.identity),
            backoffs: Arc::new(Backoffs::steady_for(STEADY, BACKOFF)),
            sets: writers.sets.as_reader(),
            pods: writers.pods.as_reader(),
            hibernations: writers.hibernations.as_reader(),
            set_queue: WorkQueue::default(),
            hibernation_queue: WorkQueue::default(),
            since: Mutex::default(),
            client,
            config,
        };
        (cx, writers)
    }

    /// Returns the API of the watched namespaces.
    fn scoped<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        match &self.config.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }

    pub(crate) fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Returns when this process first observed the present generation of a hibernation. A restart forgets it: the time limits
    /// start again, and nothing else depends on it.
    pub(crate) fn since(&self, uid: &str, generation: Option<i64>, now: Timestamp) -> Timestamp {
        let mut all = self.since.lock();
        let entry = all.entry(uid.to_owned()).or_insert((generation, now));
        if entry.0 != generation {
            *entry = (generation, now);
        }
        entry.1
    }

    pub(crate) fn forget(&self, uid: &str) {
        self.since.lock().remove(uid);
        self.backoffs.reset(&uid.to_owned());
    }

    /// Waits until every kind was listed once. Does not wait for a watch that has ended, because then the whole controller
    /// ends.
    pub(crate) async fn ready(&self) {
        let _ = self.sets.wait_until_ready().await;
        let _ = self.pods.wait_until_ready().await;
        let _ = self.hibernations.wait_until_ready().await;
    }

    /// Keeps the caches up to date. Never returns.
    pub(crate) async fn watch(&self, writers: Writers) {
        let sets =
            follow(self.scoped::<SetGuard>(), watch_config(), writers.sets, |seen| self.on_set_event(seen));
        // Only pods of sets are watched: pods of hibernations without a set are polled.
        let of_sets = watch_config().labels(keys::SET_NAME_LABEL);
        let pods =
            follow(self.scoped::<Pod>(), of_sets, writers.pods, |seen| self.on_pod_event(seen.object()));
        let hibernations =
            follow(self.scoped::<HibernationGuard>(), watch_config(), writers.hibernations, |seen| {
                self.on_hibernation_event(seen);
            });
        tokio::join!(sets, pods, hibernations);
    }

    fn on_set_event(&self, seen: Seen<'_, SetGuard>) {
        let (object, is_gone) = parts(seen);
        if let Err(error) = &object.0 {
            let (ns, name) = (object.namespace(), object.name_any());
            tracing::warn!(
                ns,
                name,
                error = error as &dyn std::error::Error,
                "decode CocoonSet failed, ignored"
            );
            return;
        }
        match is_gone {
            false => self.set_queue.add(ObjectRef::from_obj(object)),
            true => self.forget(&object.uid().unwrap_or_default()),
        }
    }

    fn on_hibernation_event(&self, seen: Seen<'_, HibernationGuard>) {
        let (object, is_gone) = parts(seen);
        let Ok(hibernation) = &object.0 else {
            let (ns, name) = (object.namespace(), object.name_any());
            tracing::warn!(ns, name, "decode CocoonHibernation failed, ignored");
            return;
        };
        match is_gone {
            false => self.hibernation_queue.add(ObjectRef::from_obj(object)),
            true => self.forget(&object.uid().unwrap_or_default()),
        }
        // The set of the pod must keep its annotation, or remove it.
        let namespace = object.namespace().unwrap_or_default();
        let pod = self.pods.get(&ObjectRef::new(&hibernation.spec.pod_ref.name).within(&namespace));
        if let Some(pod) = pod {
            self.wake_set_of(&pod);
        }
    }

    fn on_pod_event(&self, pod: &Pod) {
        self.wake_set_of(pod);
        let (namespace, name) = (pod.namespace(), pod.name_any());
        for object in self.hibernations.state() {
            let names_it = object.0.as_ref().is_ok_and(|hibernation| hibernation.spec.pod_ref.name == name);
            if names_it && object.namespace() == namespace {
                self.hibernation_queue.add(ObjectRef::from_obj(object.as_ref()));
            }
        }
    }

    fn wake_set_of(&self, pod: &Pod) {
        if let Some(owner) = owner_of(pod) {
            self.set_queue.add(ObjectRef::new(&owner.name).within(&pod.namespace().unwrap_or_default()));
        }
    }
}

/// Returns the object, and whether it was deleted.
fn parts<K>(seen: Seen<'_, K>) -> (&K, bool) {
    match seen {
        Seen::Applied(object) => (object, false),
        Seen::Gone(object) => (object, true),
    }
}

/// Set that controls a pod, by name and UID.
pub(crate) struct Owner {
    pub(crate) name: String,
    pub(crate) uid: String,
}

/// Returns the set that controls the pod.
pub(crate) fn owner_of(pod: &Pod) -> Option<Owner> {
    let owner = pod.owner_references().iter().find(|owner| {
        owner.controller == Some(true)
            && owner.kind == "CocoonSet"
            && owner.api_version.starts_with("cocoonset.cocoonstack.io/")
    })?;
    Some(Owner { name: owner.name.clone(), uid: owner.uid.clone() })
}

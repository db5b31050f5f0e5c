//! Watches of the objects that pods refer to. Each object has one watch for all pods, as long as a pod refers to it.
//!
//! A node may read only objects that its pods refer to (Kubernetes documentation, "Using Node Authorization"), so that each
//! object needs a watch of its own.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Weak};

use coracle_pod::objects::{Objects, References};
use futures_util::StreamExt as _;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Error as WatchError, watch_object};
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::claims::{self, Claim};
use super::known::{self, Known, Revision};
use super::services::Services;

/// Watched object. The watch ends when this value is dropped.
#[derive(Debug)]
struct Watched<T> {
    known: watch::Receiver<Known<T>>,
    _task: DropGuard,
}

/// Watched objects of one kind.
#[derive(Debug)]
struct Kind<T>(Mutex<WatchedByName<T>>);

/// Watched objects by namespace and name.
type WatchedByName<T> = BTreeMap<(String, String), Weak<Watched<T>>>;

/// All watches of the node. Clones share them.
#[derive(Clone)]
pub(super) struct ObjectWatches(Arc<Inner>);

struct Inner {
    client: Client,
    config_maps: Kind<ConfigMap>,
    secrets: Kind<Secret>,
    claims: Kind<Claim>,
    services: watch::Receiver<Option<Services>>,
    /// Counter of changes of all objects.
    revision: Revision,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Objects that one pod refers to.
#[derive(Debug, Default)]
pub(super) struct Subscription {
    of: References,
    config_maps: BTreeMap<String, Arc<Watched<ConfigMap>>>,
    secrets: BTreeMap<String, Arc<Watched<Secret>>>,
    claims: BTreeMap<String, Arc<Watched<Claim>>>,
}

impl<T: Debug + Send + Sync + 'static> Kind<T> {
    fn new() -> Self {
        Self(Mutex::default())
    }

    fn get<F>(
        &self,
        namespace: &str,
        name: &str,
        inner: &Inner,
        task: impl FnOnce(watch::Sender<Known<T>>) -> F,
    ) -> Arc<Watched<T>>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut all = self.0.lock();
        let key = (namespace.to_owned(), name.to_owned());
        if let Some(watched) = all.get(&key).and_then(Weak::upgrade) {
            return watched;
        }
        all.retain(|_, watched| watched.strong_count() > 0);
        let (known, receiver) = watch::channel(Known::Unknown);
        let stop = inner.stop.child_token();
        let task = task(known);
        let ended = stop.clone();
        inner.tasks.spawn(async move { ended.run_until_cancelled(task).await });
        let watched = Arc::new(Watched { known: receiver, _task: stop.drop_guard() });
        all.insert(key, Arc::downgrade(&watched));
        watched
    }
}

impl ObjectWatches {
    /// Returns watches without an object. `services` are all services of the cluster.
    pub(super) fn new(
        client: Client,
        services: watch::Receiver<Option<Services>>,
        revision: Revision,
        stop: CancellationToken,
    ) -> Self {
        Self(Arc::new(Inner {
            client,
            config_maps: Kind::new(),
            secrets: Kind::new(),
            claims: Kind::new(),
            services,
            revision,
            tasks: TaskTracker::new(),
            stop,
        }))
    }

    /// Returns a receiver that changes with each of the objects, and with the services.
    pub(super) fn revision(&self) -> watch::Receiver<u64> {
        self.0.revision.subscribe()
    }

    /// Waits for the tasks of all watches, which end with `stop`.
    pub(super) async fn join(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    /// Watches the objects that a pod refers to now, and drops its previous watches.
    pub(super) fn subscribe(&self, subscription: &mut Subscription, namespace: &str, of: References) {
        if subscription.of == of {
            return;
        }
        let own = &*self.0;
        let config_maps = of.config_maps.iter().cloned().map(|name| {
            let watched = own.config_maps.get(namespace, &name, own, |known| {
                follow(
                    Api::namespaced(own.client.clone(), namespace),
                    name.clone(),
                    known,
                    own.revision.clone(),
                )
            });
            (name, watched)
        });
        let secrets = of.secrets.iter().cloned().map(|name| {
            let watched = own.secrets.get(namespace, &name, own, |known| {
                follow(
                    Api::namespaced(own.client.clone(), namespace),
                    name.clone(),
                    known,
                    own.revision.clone(),
                )
            });
            (name, watched)
        });
        let claims = of.claims.iter().cloned().map(|name| {
            let watched = own.claims.get(namespace, &name, own, |known| {
                claims::follow(
                    own.client.clone(),
                    namespace.to_owned(),
                    name.clone(),
                    known,
                    own.revision.clone(),
                )
            });
            (name, watched)
        });
        let (config_maps, secrets, claims) = (config_maps.collect(), secrets.collect(), claims.collect());
        *subscription = Subscription { of, config_maps, secrets, claims };
    }

    /// Returns the objects that a pod refers to; `None` until each was read.
    pub(super) fn gather(&self, subscription: &Subscription, namespace: &str) -> Option<Objects> {
        let services = self.0.services.borrow().as_ref()?.of_namespace(namespace);
        let claims = existing_objects(&subscription.claims)?;
        Some(Objects {
            config_maps: existing_objects(&subscription.config_maps)?,
            secrets: existing_objects(&subscription.secrets)?,
            services,
            claims: claims.into_iter().map(|(name, claim)| (name, claim.source.clone())).collect(),
            trust_bundles: BTreeMap::new(),
        })
    }
}

/// Returns the existing objects; `None` while the state of one is unknown.
fn existing_objects<T>(watched: &BTreeMap<String, Arc<Watched<T>>>) -> Option<BTreeMap<String, Arc<T>>> {
    let mut found = BTreeMap::new();
    for (name, one) in watched {
        match &*one.known.borrow() {
            Known::Unknown => return None,
            Known::Absent => {}
            Known::Present(object) => drop(found.insert(name.clone(), object.clone())),
        }
    }
    Some(found)
}

/// Follows one object until its watch is dropped.
async fn follow<K>(api: Api<K>, name: String, known: watch::Sender<Known<K>>, revision: Revision)
where
    K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default,
{
    let mut seen = std::pin::pin!(watch_object(api, &name).default_backoff());
    while let Some(seen) = seen.next().await {
        match seen {
            Ok(Some(object)) => drop(known.send_replace(Known::Present(Arc::new(object)))),
            Ok(None) => drop(known.send_replace(Known::Absent)),
            Err(error) => {
                tracing::debug!(name, %error, "watch an object of a pod failed");
                let forbidden = is_forbidden(&error) && matches!(*known.borrow(), Known::Unknown);
                if !forbidden {
                    continue;
                }
                tracing::warn!(name, %error, "an object of a pod may not be read");
                known.send_replace(Known::Absent);
            }
        }
        known::count(&revision);
    }
}

fn is_forbidden(error: &WatchError) -> bool {
    match error {
        WatchError::InitialListFailed(kube::Error::Api(status))
        | WatchError::WatchStartFailed(kube::Error::Api(status)) => status.code == 403,
        WatchError::WatchError(status) => status.code == 403,
        _ => false,
    }
}

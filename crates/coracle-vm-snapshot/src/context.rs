//! Caches, and fresh reads.

use std::fmt::Debug;

use coracle_api::{MikromVM, VMRestore, VMSnapshot};
use coracle_reconcile::{ApplyError, Seen, WorkQueue, follow, watch_config};
use k8s_openapi::NamespaceResourceScope;
use kube::{
    Api, Client, Resource, ResourceExt as _,
    runtime::reflector::{self, ObjectRef, Store, store::Writer},
};
use serde::de::DeserializeOwned;

use crate::{Config, nodes::NodeError};

/// Why a pass failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call to the API server.
    #[error("{operation} {object}")]
    Api {
        /// What was tried.
        operation: &'static str,
        /// Kind and `namespace/name`.
        object: String,
        /// Its answer.
        source: Box<kube::Error>,
    },
    /// A write to the API server.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A call to a node, which the status reports.
    #[error("call node")]
    Node(#[from] NodeError),
}

impl Error {
    /// True for errors that pass by themselves, or that the status reports.
    pub(crate) fn is_expected(&self) -> bool {
        match self {
            Self::Api { source, .. } => {
                matches!(source.as_ref(), kube::Error::Api(status) if status.code == 409)
            }
            Self::Apply(error) => error.is_conflict(),
            Self::Node(_) => true,
        }
    }
}

/// Shared by both controllers.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) config: Config,
    pub(crate) snapshots: Store<VMSnapshot>,
    pub(crate) restores: Store<VMRestore>,
    pub(crate) snapshot_queue: WorkQueue<VMSnapshot>,
    pub(crate) restore_queue: WorkQueue<VMRestore>,
}

/// The write ends of the caches.
pub(crate) struct Writers {
    snapshots: Writer<VMSnapshot>,
    restores: Writer<VMRestore>,
}

impl Context {
    pub(crate) fn new(client: Client, config: Config) -> (Self, Writers) {
        let ((snapshots, of_snapshots), (restores, of_restores)) = (reflector::store(), reflector::store());
        let cx = Self {
            client,
            config,
            snapshots,
            restores,
            snapshot_queue: WorkQueue::default(),
            restore_queue: WorkQueue::default(),
        };
        (cx, Writers { snapshots: of_snapshots, restores: of_restores })
    }

    fn all<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        match &self.config.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }

    pub(crate) fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Waits until both kinds were listed once.
    pub(crate) async fn ready(&self) {
        // It fails only without a writer, which `watch` holds.
        let _ = self.snapshots.wait_until_ready().await;
        let _ = self.restores.wait_until_ready().await;
    }

    /// Keeps the caches. Never returns.
    pub(crate) async fn watch(&self, writers: Writers) {
        let snapshots = follow(self.all::<VMSnapshot>(), watch_config(), writers.snapshots, |seen| {
            if let Seen::Applied(snapshot) = seen {
                self.snapshot_queue.add(ObjectRef::from_obj(snapshot));
            }
            let snapshot = seen.object();
            let waits = |restore: &VMRestore| {
                restore.spec.snapshot_name == snapshot.name_any()
                    && restore.namespace() == snapshot.namespace()
            };
            for restore in self.restores.state().iter().filter(|restore| waits(restore)) {
                self.restore_queue.add(ObjectRef::from_obj(restore.as_ref()));
            }
        });
        let restores = follow(self.all::<VMRestore>(), watch_config(), writers.restores, |seen| {
            if let Seen::Applied(restore) = seen {
                self.restore_queue.add(ObjectRef::from_obj(restore));
            }
        });
        tokio::join!(snapshots, restores);
    }

    /// The object as it is now.
    pub(crate) async fn read<K>(&self, namespace: &str, name: &str) -> Result<Option<K>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        self.api::<K>(namespace).get_opt(name).await.map_err(api::<K>("read", namespace, name))
    }

    /// The MikromVM as it is now.
    pub(crate) async fn vm(&self, namespace: &str, name: &str) -> Result<Option<MikromVM>, Error> {
        self.read(namespace, name).await
    }
}

/// The error of a call to the API server about an object.
pub(crate) fn api<K: Resource<DynamicType = ()>>(
    operation: &'static str,
    namespace: &str,
    name: &str,
) -> impl FnOnce(kube::Error) -> Error + use<K> {
    let object = format!("{} {namespace}/{name}", K::kind(&()));
    move |source| Error::Api { operation, object, source: Box::new(source) }
}

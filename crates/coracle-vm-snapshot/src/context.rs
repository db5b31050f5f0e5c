//! Caches, and reads from the API server.

use std::fmt::Debug;

use coracle_api::{MikromVM, VMRestore, VMSnapshot};
use coracle_reconcile::{ApiError, ApplyError, Seen, WorkQueue, follow, object, watch_config};
use k8s_openapi::NamespaceResourceScope;
use kube::{
    Api, Client, Resource, ResourceExt as _,
    runtime::reflector::{self, ObjectRef, Store, store::Writer},
};
use serde::de::DeserializeOwned;

use crate::{Config, nodes::NodeError};

/// Reason why a reconcile failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call to the API server failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A write to the API server failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A call to a node failed. The status reports it.
    #[error("call node")]
    Node(#[from] NodeError),
}

impl Error {
    /// True for temporary errors, and for errors that the status reports.
    pub(crate) fn is_expected(&self) -> bool {
        match self {
            Self::Api(error) => error.is_conflict(),
            Self::Apply(error) => error.is_conflict(),
            Self::Node(_) => true,
        }
    }
}

/// State that both controllers share.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) config: Config,
    pub(crate) snapshots: Store<VMSnapshot>,
    pub(crate) restores: Store<VMRestore>,
    pub(crate) snapshot_queue: WorkQueue<VMSnapshot>,
    pub(crate) restore_queue: WorkQueue<VMRestore>,
}

/// Write ends of the caches.
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

    pub(crate) fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        object::scoped(&self.client, Some(namespace))
    }

    /// Waits until both kinds were listed once.
    pub(crate) async fn ready(&self) {
        // `wait_until_ready` fails only without a writer, and `watch` holds the writers.
        let _ = self.snapshots.wait_until_ready().await;
        let _ = self.restores.wait_until_ready().await;
    }

    /// Keeps the caches up to date. Never returns.
    pub(crate) async fn watch(&self, writers: Writers) {
        let namespace = self.config.common.namespace.as_deref();
        let snapshots = follow(
            object::scoped::<VMSnapshot>(&self.client, namespace),
            watch_config(),
            writers.snapshots,
            |seen| {
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
            },
        );
        let restores = follow(
            object::scoped::<VMRestore>(&self.client, namespace),
            watch_config(),
            writers.restores,
            |seen| {
                if let Seen::Applied(restore) = seen {
                    self.restore_queue.add(ObjectRef::from_obj(restore));
                }
            },
        );
        tokio::join!(snapshots, restores);
    }

    /// Reads the present object.
    pub(crate) async fn read<K>(&self, namespace: &str, name: &str) -> Result<Option<K>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        Ok(object::read(&self.client, namespace, name).await?)
    }

    /// Reads the present MikromVM.
    pub(crate) async fn vm(&self, namespace: &str, name: &str) -> Result<Option<MikromVM>, Error> {
        self.read(namespace, name).await
    }
}

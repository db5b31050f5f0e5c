//! Cache of pools, and reads of a pool and its VMs from the API server.

use std::pin::pin;

use coracle_api::{MikromVM, MikromVMPool, keys};
use coracle_reconcile::{ApiError, Clock, ControllerConfig, Seen, WorkQueue, follow, object, watch_config};
use futures_util::StreamExt as _;
use kube::{
    Client, ResourceExt as _,
    api::ListParams,
    runtime::{
        reflector::{self, ObjectRef, Store, store::Writer},
        watcher,
    },
};

/// State that all reconciles share.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) clock: Clock,
    pub(crate) pools: Store<MikromVMPool>,
    pub(crate) queue: WorkQueue<MikromVMPool>,
    namespace: Option<String>,
}

impl Context {
    pub(crate) fn new(client: Client, config: &ControllerConfig) -> (Self, Writer<MikromVMPool>) {
        let (pools, writer) = reflector::store();
        let (clock, namespace) = (config.clock.clone(), config.namespace.clone());
        (Self { client, clock, pools, queue: WorkQueue::default(), namespace }, writer)
    }

    /// Waits until the pools were listed once.
    pub(crate) async fn ready(&self) {
        // `wait_until_ready` fails only without a writer, and `watch` holds the writer.
        let _ = self.pools.wait_until_ready().await;
    }

    /// Keeps the cache up to date, and triggers pools whose VMs change. Never returns.
    pub(crate) async fn watch(&self, writer: Writer<MikromVMPool>) {
        let namespace = self.namespace.as_deref();
        let pools = follow(object::scoped(&self.client, namespace), watch_config(), writer, |seen| {
            if let Seen::Applied(pool) = seen {
                self.queue.add(ObjectRef::from_obj(pool));
            }
        });
        let members = watch_config().labels(keys::POOL_LABEL);
        let vms = coracle_reconcile::watch(object::scoped::<MikromVM>(&self.client, namespace), members);
        let vms = async {
            let mut vms = pin!(vms);
            while let Some(event) = vms.next().await {
                self.queue_pool(&event);
            }
        };
        tokio::join!(pools, vms);
    }

    /// Queues the pool of a changed VM.
    fn queue_pool(&self, event: &watcher::Event<MikromVM>) {
        let vm = match event {
            watcher::Event::Apply(vm) | watcher::Event::Delete(vm) | watcher::Event::InitApply(vm) => vm,
            watcher::Event::Init | watcher::Event::InitDone => return,
        };
        if let Some(pool) = vm.labels().get(keys::POOL_LABEL) {
            self.queue.add(ObjectRef::new(pool).within(&vm.namespace().unwrap_or_default()));
        }
    }

    /// Lists the VMs with the pool's label from the API server.
    pub(crate) async fn members(&self, namespace: &str, pool: &str) -> Result<Vec<MikromVM>, ApiError> {
        let members = ListParams::default().labels(&format!("{}={pool}", keys::POOL_LABEL));
        let vms = object::scoped::<MikromVM>(&self.client, Some(namespace));
        let listed = vms.list(&members).await;
        Ok(listed.map_err(ApiError::of::<MikromVMPool>("list members of", namespace, pool))?.items)
    }
}

//! One pass over one pool: observe, plan, execute, status.

use std::{sync::Arc, time::Duration};

use coracle_api::{MikromVM, MikromVMPool, keys};
use coracle_reconcile::{
    ApplyError, Clock, Reconciler, Seen, WallTime as _, WorkQueue, add_finalizer, apply_status, follow,
    remove_finalizer, watch_config,
};
use futures_util::StreamExt as _;
use k8s_openapi::NamespaceResourceScope;
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
    runtime::{
        controller::Action,
        reflector::{self, ObjectRef, Store, store::Writer},
        watcher,
    },
};
use serde_json::json;
use tracing::info;

use crate::{
    config::Config,
    plan::{Observed, Step, plan},
    status,
};

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
}

fn api<K: Resource<DynamicType = ()>>(
    operation: &'static str,
    namespace: &str,
    name: &str,
) -> impl FnOnce(kube::Error) -> Error + use<K> {
    let object = format!("{} {namespace}/{name}", K::kind(&()));
    move |source| Error::Api { operation, object, source: Box::new(source) }
}

/// Shared by all passes.
pub(crate) struct Context {
    client: Client,
    clock: Clock,
    namespace: Option<String>,
    pub(crate) pools: Store<MikromVMPool>,
    pub(crate) queue: WorkQueue<MikromVMPool>,
}

impl Context {
    pub(crate) fn new(client: Client, config: &Config) -> (Self, Writer<MikromVMPool>) {
        let (pools, writer) = reflector::store();
        let (clock, namespace) = (config.clock.clone(), config.namespace.clone());
        (Self { client, clock, namespace, pools, queue: WorkQueue::default() }, writer)
    }

    fn all<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        match &self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }

    /// Waits until the pools were listed once.
    pub(crate) async fn ready(&self) {
        // It fails only without a writer, which `watch` holds.
        let _ = self.pools.wait_until_ready().await;
    }

    /// Keeps the cache, and triggers pools whose VMs change. Never returns.
    pub(crate) async fn watch(&self, writer: Writer<MikromVMPool>) {
        let pools = follow(self.all::<MikromVMPool>(), watch_config(), writer, |seen| {
            if let Seen::Applied(pool) = seen {
                self.queue.add(ObjectRef::from_obj(pool));
            }
        });
        let members = watch_config().labels(keys::POOL_LABEL);
        let vms = coracle_reconcile::watch(self.all::<MikromVM>(), members);
        let vms = async {
            let mut vms = std::pin::pin!(vms);
            while let Some(event) = vms.next().await {
                match &event {
                    watcher::Event::Apply(vm)
                    | watcher::Event::Delete(vm)
                    | watcher::Event::InitApply(vm) => {
                        if let Some(pool) = vm.labels().get(keys::POOL_LABEL) {
                            let namespace = vm.namespace().unwrap_or_default();
                            self.queue.add(ObjectRef::new(pool).within(&namespace));
                        }
                    }
                    watcher::Event::Init | watcher::Event::InitDone => {}
                }
            }
        };
        tokio::join!(pools, vms);
    }
}

/// The controller.
pub(crate) struct Pools(pub(crate) Arc<Context>);

impl Reconciler for Pools {
    type Object = MikromVMPool;
    type Error = Error;

    async fn reconcile(&self, cached: Arc<MikromVMPool>) -> Result<Action, Error> {
        reconcile(&self.0, &cached).await
    }

    fn is_expected(&self, error: &Error) -> bool {
        match error {
            Error::Api { source, .. } => {
                matches!(source.as_ref(), kube::Error::Api(status) if status.code == 409)
            }
            Error::Apply(error) => error.is_conflict(),
        }
    }
}

async fn reconcile(cx: &Context, cached: &MikromVMPool) -> Result<Action, Error> {
    let (namespace, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let pools: Api<MikromVMPool> = Api::namespaced(cx.client.clone(), &namespace);
    let vms: Api<MikromVM> = Api::namespaced(cx.client.clone(), &namespace);
    let found = pools.get_opt(&name).await.map_err(api::<MikromVMPool>("read", &namespace, &name))?;
    let Some(pool) = found.filter(|found| found.uid() == cached.uid()) else {
        return Ok(Action::await_change());
    };
    let members = ListParams::default().labels(&format!("{}={name}", keys::POOL_LABEL));
    let members =
        vms.list(&members).await.map_err(api::<MikromVM>("list members of", &namespace, &name))?.items;
    let observed = Observed { pool: &pool, vms: &members };
    let steps = plan(&observed);
    for step in &steps {
        execute(&pools, &vms, &pool, step).await?;
    }
    if pool.metadata.deletion_timestamp.is_none() {
        let wanted = status::derive(&observed, cx.clock.timestamp());
        apply_status(&pools, &pool, pool.status.as_ref(), &wanted, keys::POOL_MANAGER).await?;
    }
    // A large step is done in batches; each change of a VM triggers the next pass, too.
    Ok(if steps.is_empty() { Action::await_change() } else { Action::requeue(Duration::from_millis(200)) })
}

async fn execute(
    pools: &Api<MikromVMPool>,
    vms: &Api<MikromVM>,
    pool: &MikromVMPool,
    step: &Step,
) -> Result<(), Error> {
    let namespace = pool.namespace().unwrap_or_default();
    let is =
        |error: &kube::Error, codes: &[u16]| matches!(error, kube::Error::Api(s) if codes.contains(&s.code));
    match step {
        Step::AddFinalizer => {
            add_finalizer(pools, pool, keys::POOL_FINALIZER, keys::POOL_MANAGER).await?;
        }
        Step::RemoveFinalizer => {
            remove_finalizer(pools, pool, keys::POOL_FINALIZER, keys::POOL_MANAGER).await?;
        }
        Step::Create(vm) => {
            let name = vm.name_any();
            info!(ns = namespace, name, "VM of a pool created");
            let params =
                PostParams { field_manager: Some(keys::POOL_MANAGER.into()), ..PostParams::default() };
            match vms.create(&params, vm).await {
                // Made by a pass that was cut off, or another's: the next list shows it.
                Err(error) if is(&error, &[409]) => {}
                created => drop(created.map_err(api::<MikromVM>("create", &namespace, &name))?),
            }
        }
        Step::Delete { name, uid } => {
            info!(ns = namespace, name, "VM of a pool deleted");
            let exactly = Preconditions { uid: Some(uid.clone()), resource_version: None };
            let params = DeleteParams { preconditions: Some(exactly), ..DeleteParams::background() };
            match vms.delete(name, &params).await {
                Err(error) if is(&error, &[404, 409]) => {}
                deleted => drop(deleted.map_err(api::<MikromVM>("delete", &namespace, name))?),
            }
        }
        Step::Annotate { name, uid, max_unavailable } => {
            let annotations = json!({keys::vm::MAX_UNAVAILABLE: max_unavailable});
            let patch = Patch::Merge(json!({"metadata": {"uid": uid, "annotations": annotations}}));
            let params = PatchParams { field_manager: Some(keys::POOL_MANAGER.into()), ..Default::default() };
            match vms.patch(name, &params, &patch).await {
                Err(error) if is(&error, &[404, 409]) => {}
                patched => drop(patched.map_err(api::<MikromVM>("annotate", &namespace, name))?),
            }
        }
    }
    Ok(())
}

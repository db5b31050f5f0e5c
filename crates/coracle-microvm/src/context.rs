//! Shared context of all reconciles.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use coracle_api::MikromVM;
use coracle_reconcile::{Backoffs, Clock, ControllerMetrics, Event, EventRecorder, Kind, OwnWrites};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client, Resource as _, ResourceExt as _};
use tokio::{
    sync::{OnceCell, OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tracing::warn;

use crate::{
    agent::{AgentError, Connections, Dialer},
    config::{CONTROLLER, Config},
    discovery::Fleet,
    observed::{Memo, Policy},
};

/// Longest time that a call waits for a permit of its agent.
const PERMIT_WAIT: Duration = Duration::from_secs(5);

/// State that all reconciles share. Clones share the state, too.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) fleet: Fleet,
    pub(crate) connections: Connections,
    pub(crate) events: Arc<EventRecorder>,
    pub(crate) own_writes: Arc<OwnWrites<MikromVM>>,
    pub(crate) metrics: ControllerMetrics,
    pub(crate) clock: Clock,
    pub(crate) policy: Arc<Policy>,
    pub(crate) backoffs: Arc<Backoffs<String>>,
    pub(crate) reconciles: u16,
    /// Namespace of the nodes' Leases.
    pub(crate) node_namespace: String,
    /// Namespace of the watched objects; `None`: all.
    pub(crate) namespace: Option<String>,
    cluster: Arc<OnceCell<String>>,
    memos: Arc<Mutex<HashMap<String, Memo>>>,
    /// Permits for reconciles at each agent.
    pub(crate) reconcile_permits: AgentLimits,
    /// Permits for creations at each agent.
    pub(crate) create_permits: AgentLimits,
    /// Permits for starts at each agent.
    pub(crate) boot_permits: AgentLimits,
}

/// Permits for calls, with a limit for each agent.
#[derive(Clone, Debug)]
pub(crate) struct AgentLimits {
    max: usize,
    by_agent: Arc<Mutex<HashMap<String, Arc<Semaphore>>>>,
}

impl AgentLimits {
    fn new(max: usize) -> Self {
        Self { max: max.max(1), by_agent: Arc::default() }
    }

    fn semaphore(&self, agent: &str) -> Arc<Semaphore> {
        let mut all = self.by_agent.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(agent.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(self.max))).clone()
    }

    /// Waits for a permit. Cancel-safe.
    ///
    /// # Errors
    /// [`AgentError::busy`] after five seconds: reconciles that wait for an unresponsive agent would occupy all workers.
    pub(crate) async fn acquire(&self, agent: &str) -> Result<OwnedSemaphorePermit, AgentError> {
        match timeout(PERMIT_WAIT, self.semaphore(agent).acquire_owned()).await {
            Ok(permit) => Ok(permit.expect("our semaphores are never closed")),
            Err(_) => Err(AgentError::busy(agent)),
        }
    }

    /// Returns a permit, if one is free now.
    pub(crate) fn try_acquire(&self, agent: &str) -> Option<OwnedSemaphorePermit> {
        self.semaphore(agent).try_acquire_owned().ok()
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("fleet", &self.fleet).finish_non_exhaustive()
    }
}

impl Context {
    pub(crate) fn new(client: &Client, config: &Config, fleet: Fleet) -> Self {
        let (connect, tls) = (config.connect.clone(), config.tls.clone());
        let dialer = Dialer::new(connect, tls, config.deadlines, config.metrics.clone());
        Self {
            client: client.clone(),
            fleet,
            connections: Connections::new(dialer),
            events: Arc::new(EventRecorder::new(client.clone(), CONTROLLER, &config.identity)),
            own_writes: Arc::default(),
            metrics: config.metrics.clone(),
            clock: config.clock.clone(),
            policy: Arc::new(config.policy),
            backoffs: Arc::new(Backoffs::new(config.backoff)),
            reconciles: config.reconciles,
            node_namespace: config.scope.node_namespace.clone(),
            namespace: config.scope.namespace.clone(),
            cluster: Arc::default(),
            memos: Arc::default(),
            reconcile_permits: AgentLimits::new(config.reconciles_per_agent),
            create_permits: AgentLimits::new(config.creates_per_agent),
            boot_permits: AgentLimits::new(config.boots_per_agent),
        }
    }

    /// Returns the API of the namespace that `vm` is in.
    pub(crate) fn api(&self, vm: &MikromVM) -> Api<MikromVM> {
        Api::namespaced(self.client.clone(), &vm.namespace().unwrap_or_default())
    }

    /// Returns the identity of this cluster, since other clusters may use the same nodes: the UID of its namespace
    /// `kube-system`. `None` when it cannot be read now.
    pub(crate) async fn cluster(&self) -> Option<String> {
        let read = async || {
            let namespaces: Api<Namespace> = Api::all(self.client.clone());
            namespaces.get("kube-system").await.map(|found| found.uid().unwrap_or_default())
        };
        match self.cluster.get_or_try_init(read).await {
            Ok(uid) => Some(uid.clone()),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                warn!(error, "read namespace kube-system failed: VMs of deleted objects stay on their nodes");
                None
            }
        }
    }

    /// Returns [`Self::cluster`], if it was read before.
    pub(crate) fn known_cluster(&self) -> Option<String> {
        self.cluster.get().cloned()
    }

    pub(crate) fn memo(&self, uid: &str) -> Memo {
        self.memos.lock().unwrap_or_else(PoisonError::into_inner).get(uid).cloned().unwrap_or_default()
    }

    /// Stores the memo of an object; a default memo takes no memory.
    pub(crate) fn remember(&self, uid: &str, memo: &Memo) {
        let mut memos = self.memos.lock().unwrap_or_else(PoisonError::into_inner);
        if *memo == Memo::default() {
            memos.remove(uid);
        } else {
            memos.insert(uid.to_owned(), memo.clone());
        }
    }

    pub(crate) fn forget(&self, uid: &str) {
        self.remember(uid, &Memo::default());
        self.backoffs.reset(&uid.to_owned());
    }

    pub(crate) async fn warn(&self, vm: &MikromVM, reason: &'static str, action: &'static str, note: String) {
        self.events.publish(&Event { kind: Kind::Warning, reason, action, note }, &vm.object_ref(&())).await;
    }
}

//! The MikromVM controller: one custom resource, one microVM, through the FirecrackerAgent of a node.
//!
//! It never keeps VM state of its own: what it remembers between reconciles may be lost at any time. It never speaks to
//! a hypervisor. Files: [`plan`] decides (pure), [`status`] words it (pure), `observe` reads, `execute` writes,
//! [`discovery`] knows nodes and declared VMs, [`placement`] chooses (pure), `streams` follows the agents' events.
//!
//! ```text
//!  watch ┐                 ┌─ look ── GetVM ──┐
//!  event ├─▶ queue ─▶ plan ┤                  ├─ again until nothing is left to do ─▶ status
//!  30 s  ┘                 └─ act ── steps ───┘
//! ```

pub mod agent;
mod controller;
pub mod discovery;
mod execute;
pub mod manifests;
mod observe;
pub mod placement;
pub mod plan;
pub mod status;
mod streams;

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use coracle_api::MikromVM;
use coracle_reconcile::{
    ApplyError, Backoff, Backoffs, Clock, ControllerMetrics, Election, ElectionError, Event, EventRecorder,
    Kind, SystemClock,
};
use kube::{Api, Client, Resource as _, ResourceExt as _};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

pub use agent::{AgentTls, Deadlines};
pub use discovery::{Fleet, Scope};
pub use manifests::manifests;
pub use placement::Overcommit;
pub use plan::Policy;

use agent::{AgentError, Dialer};
use plan::Memo;

/// Name of this controller in metrics, events and its Lease.
pub const CONTROLLER: &str = "mikromvm";

/// How long a reconcile waits for a place at its agent.
const PLACE_WAIT: Duration = Duration::from_secs(5);

/// What the controller is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// What is watched, and where.
    pub scope: Scope,
    /// TLS to the agents; `None`: plaintext.
    pub tls: Option<AgentTls>,
    /// Deadlines of calls to agents.
    pub deadlines: Deadlines,
    /// Times that decide something.
    pub policy: Policy,
    /// Delay after a reconcile that failed.
    pub backoff: Backoff,
    /// How much nodes may promise.
    pub overcommit: Overcommit,
    /// Creates and starts at once for one agent. Fewer than the connections, so that looks and deletions get through.
    pub boots_per_agent: usize,
    /// Connections at once to one agent, its event stream apart.
    pub connections_per_agent: usize,
    /// Reconciles at once.
    pub reconciles: u16,
    /// Leader election. `None`: this process is the only one.
    pub election: Option<Election>,
    /// Who we are, in events.
    pub identity: String,
    /// Where to count.
    pub metrics: ControllerMetrics,
    /// The wall clock.
    pub clock: Arc<dyn Clock>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            scope: Scope::default(),
            tls: None,
            deadlines: Deadlines::default(),
            policy: Policy::default(),
            backoff: Backoff { base: Duration::from_secs(1), max: Duration::from_secs(60) },
            overcommit: Overcommit::default(),
            boots_per_agent: 16,
            connections_per_agent: 32,
            reconciles: 256,
            election: None,
            identity: "coracle-operator".into(),
            metrics: ControllerMetrics::default(),
            clock: Arc::new(SystemClock),
        }
    }
}

/// Why a reconcile, or the controller, ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The agent.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// A write to the API server.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A read from it.
    #[error("read MikromVM {namespace}/{name}")]
    Read {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// The object kept changing under us.
    #[error("MikromVM {namespace}/{name} did not settle")]
    Unsettled {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// The election.
    #[error(transparent)]
    Election(#[from] ElectionError),
}

/// Runs the controller until `stop`: follows the fleet at once, reconciles while it leads.
///
/// # Errors
/// Only what cannot be put right by trying again.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), Error> {
    let (fleet, keep) = Fleet::watch(&client, &config.scope, config.overcommit, config.clock.clone());
    let work = run_with(client, config, fleet, stop.clone());
    tokio::select! {
        result = work => result,
        () = keep => Ok(()),
    }
}

/// As [`run`], over a fleet that the caller keeps up to date (and shares with the webhook).
///
/// # Errors
/// As [`run`].
pub async fn run_with(
    client: Client,
    config: Config,
    fleet: Fleet,
    stop: CancellationToken,
) -> Result<(), Error> {
    let cx = Context::new(&client, &config, fleet);
    let lead = |token: CancellationToken| {
        let cx = cx.clone();
        async move {
            cx.metrics.leads(CONTROLLER, true);
            controller::control(&cx, &token).await;
            cx.metrics.leads(CONTROLLER, false);
            Ok(())
        }
    };
    match &config.election {
        Some(election) => Box::pin(election.run(&client, &config.clock, &stop, lead)).await,
        None => Box::pin(lead(stop)).await,
    }
}

/// What every reconcile has at hand. Clones are the same.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) fleet: Fleet,
    pub(crate) dialer: Arc<Dialer>,
    pub(crate) events: Arc<EventRecorder>,
    pub(crate) metrics: ControllerMetrics,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) policy: Arc<Policy>,
    pub(crate) backoffs: Arc<Backoffs<String>>,
    pub(crate) reconciles: u16,
    memos: Arc<Mutex<HashMap<String, Memo>>>,
    /// Connections to each agent.
    pub(crate) lines: Places,
    /// Creates and starts at each agent.
    pub(crate) boots: Places,
}

/// So many places at each agent.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    max: usize,
    by_agent: Arc<Mutex<HashMap<String, Arc<Semaphore>>>>,
}

impl Places {
    fn new(max: usize) -> Self {
        Self { max: max.max(1), by_agent: Arc::default() }
    }

    fn at(&self, agent: &str) -> Arc<Semaphore> {
        let mut all = self.by_agent.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(agent.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(self.max))).clone()
    }

    /// A place, once there is one. Cancel-safe.
    ///
    /// # Errors
    /// [`AgentError::busy`] after a while: what waits behind an agent that hangs would keep others from running.
    pub(crate) async fn of(&self, agent: &str) -> Result<OwnedSemaphorePermit, AgentError> {
        match timeout(PLACE_WAIT, self.at(agent).acquire_owned()).await {
            Ok(place) => Ok(place.expect("our semaphores are never closed")),
            Err(_) => Err(AgentError::busy(agent)),
        }
    }

    /// A place, if there is one now.
    pub(crate) fn try_of(&self, agent: &str) -> Option<OwnedSemaphorePermit> {
        self.at(agent).try_acquire_owned().ok()
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("fleet", &self.fleet).finish_non_exhaustive()
    }
}

impl Context {
    fn new(client: &Client, config: &Config, fleet: Fleet) -> Self {
        Self {
            client: client.clone(),
            fleet,
            dialer: Arc::new(Dialer::new(config.tls.clone(), config.deadlines, config.metrics.clone())),
            events: Arc::new(EventRecorder::new(client.clone(), CONTROLLER, &config.identity)),
            metrics: config.metrics.clone(),
            clock: config.clock.clone(),
            policy: Arc::new(config.policy),
            backoffs: Arc::new(Backoffs::new(config.backoff)),
            reconciles: config.reconciles,
            memos: Arc::default(),
            lines: Places::new(config.connections_per_agent),
            boots: Places::new(config.boots_per_agent),
        }
    }

    /// The objects of the namespace that `vm` is in.
    pub(crate) fn api(&self, vm: &MikromVM) -> Api<MikromVM> {
        Api::namespaced(self.client.clone(), &vm.namespace().unwrap_or_default())
    }

    pub(crate) fn memo(&self, uid: &str) -> Memo {
        self.memos.lock().unwrap_or_else(PoisonError::into_inner).get(uid).cloned().unwrap_or_default()
    }

    /// Remembers; what says nothing takes no room.
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

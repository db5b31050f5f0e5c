//! The agent-forge controllers: a HyperShift NodePool requests nodes, and VMs on vSphere become the Agents that it takes.
//!
//! ```text
//!  AgentMachine waits ─▶ machine: one VsphereAgent each ─▶ request: one VM each, from the discovery ISO
//!                                                              │ boots, registers
//!  Machine is bound  ◀── provider ◀── pool: recognises, prepares the Agent ◀┘
//!  Machine is gone   ──▶ pool: deletes the VsphereAgent ─▶ request: fence, VM, Agent
//! ```
//! The controllers never scale a NodePool, never pick a victim, and never destroy a VM unless vSphere confirms that it is their
//! own. Each kind has a module with observation, plan (pure), execution and status: [`pool`], [`machine`], [`request`].

mod controller;
pub mod demand;
mod error;
pub mod identity;
pub mod iso;
pub mod machine;
pub mod manifests;
mod metrics;
mod missing;
pub mod pool;
pub mod request;
mod status;
mod vcenters;
pub mod vm;
mod watches;

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use coracle_api::agentpool::{VsphereAgent, VsphereAgentPool, names};
use coracle_reconcile::{
    Backoff, Backoffs, Clock, ControllerMetrics, Election, EventRecorder, Group, WallTime as _,
};
use coracle_vsphere::{Connect, TaskId};
use jiff::SignedDuration;
use kube::{Client, ResourceExt as _};
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc::UnboundedSender, watch},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub use error::Error;
pub use iso::{IsoOptions, IsoVerify};
pub use manifests::manifests;
pub use metrics::PoolMetrics;
pub use status::pool_conditions;
pub use vcenters::ProviderError;
pub use watches::Kinds;

use vcenters::Vcenters;
use watches::Caches;

/// Name of this group in metrics.
pub const CONTROLLER: &str = "agentpool";
/// Field manager of pools for server-side apply.
pub(crate) const POOL_MANAGER: &str = "coracle-vsphereagentpool";
/// Field manager of VsphereAgents for server-side apply.
pub(crate) const REQUEST_MANAGER: &str = "coracle-vsphereagent";
/// Field manager of the ISO in a pool's status for server-side apply.
pub(crate) const ISO_MANAGER: &str = "coracle-agentpool-iso";

/// Longest wait for logouts at shutdown.
const LOGOUT: Duration = Duration::from_secs(3);

/// Intervals and time limits of the controllers.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Poll interval of an AgentMachine.
    pub machine: Duration,
    /// Poll interval of a pool.
    pub pool: Duration,
    /// Poll interval of a pool or VsphereAgent that waits for another object.
    pub blocked: Duration,
    /// Poll interval of a VsphereAgent whose VM runs.
    pub steady: Duration,
    /// Retry interval after errors that only a user can resolve.
    pub refused: Duration,
    /// Longest time until an Agent registers.
    pub discovery: SignedDuration,
    /// Time that an orphaned VM is kept.
    pub orphan: SignedDuration,
    /// Time within which triggers of one object are merged into one reconcile.
    pub debounce: Duration,
    /// Interval of checks for missing kinds of other projects.
    pub unlisted: Duration,
    /// Longest wait of a reconcile for work that objects share: a login, an image.
    pub patience: Duration,
    /// Time that running reconciles have after a request to stop.
    pub stop: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            machine: Duration::from_secs(30),
            pool: Duration::from_secs(60),
            blocked: Duration::from_secs(30),
            steady: Duration::from_secs(600),
            refused: Duration::from_secs(300),
            discovery: SignedDuration::from_mins(30),
            orphan: SignedDuration::from_mins(30),
            debounce: Duration::from_millis(200),
            unlisted: Duration::from_secs(2),
            patience: Duration::from_secs(2),
            stop: Duration::from_secs(3),
        }
    }
}

/// Configuration of the controllers.
#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace that is watched; `None`: all namespaces.
    pub namespace: Option<String>,
    /// Opens connections to vCenters.
    pub connect: Arc<dyn Connect>,
    /// Intervals and time limits.
    pub times: Times,
    /// Backoff after a transient failure.
    pub backoff: Backoff,
    /// Backoff while there is no capacity.
    pub capacity: Backoff,
    /// Concurrent creations in one vCenter.
    pub creates: usize,
    /// Concurrent destructions in one vCenter.
    pub destroys: usize,
    /// Concurrent reconciles: pools, AgentMachines, VsphereAgents.
    pub workers: [u16; 3],
    /// Whether Secrets of other namespaces may be used without their consent.
    pub cross_namespace_secrets: bool,
    /// Options for the download of ISO images.
    pub iso: IsoOptions,
    /// Leader election. `None`: this process is the only instance.
    pub election: Option<Election>,
    /// Reporting instance of events.
    pub identity: String,
    /// Metrics of reconciles, shared by all controllers.
    pub metrics: ControllerMetrics,
    /// Metrics of these controllers.
    pub pool_metrics: PoolMetrics,
    /// The wall clock.
    pub clock: Clock,
    /// True while required kinds cannot be listed; nothing is reconciled then.
    pub blocked: Arc<watch::Sender<bool>>,
}

impl Config {
    /// Creates a configuration with defaults.
    #[must_use]
    pub fn new(connect: Arc<dyn Connect>) -> Self {
        Self {
            namespace: None,
            connect,
            times: Times::default(),
            backoff: Backoff { base: Duration::from_secs(1), max: Duration::from_secs(300) },
            capacity: Backoff { base: Duration::from_secs(60), max: Duration::from_secs(600) },
            creates: 8,
            destroys: 4,
            workers: [4, 4, 16],
            cross_namespace_secrets: false,
            iso: IsoOptions::default(),
            election: None,
            identity: "agent-forge-operator".into(),
            metrics: ControllerMetrics::default(),
            pool_metrics: PoolMetrics::default(),
            clock: Clock::system(),
            blocked: Arc::new(watch::Sender::new(false)),
        }
    }
}

/// Runs the controllers until `stop`.
///
/// # Errors
/// Only errors that a retry cannot resolve.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), Error> {
    let group = Group {
        name: CONTROLLER,
        election: config.election.clone(),
        client: client.clone(),
        clock: config.clock.clone(),
        metrics: config.metrics.clone(),
    };
    group
        .run_with(&config, stop, |client, config, token| async move { work(client, &config, &token).await })
        .await
}

/// Watches and reconciles until `stop`, then logs out. Tasks in vCenter continue.
async fn work(client: Client, config: &Config, stop: &CancellationToken) -> Result<(), Error> {
    let kinds =
        Kinds::discover(&client).await.map_err(|source| Error::Discover { source: Box::new(source) })?;
    let (caches, triggers, keep) = watches::watch(&client, kinds, config.namespace.as_deref());
    let (folders, followed) = tokio::sync::mpsc::unbounded_channel();
    let cx = Arc::new(Context::new(client, config, caches, folders));
    let all = async {
        let is_ready = tokio::select! {
            () = stop.cancelled() => false,
            () = cx.ready() => true,
            never = missing::report(&cx) => match never {},
        };
        // An operator that does not lead does not wait for kinds either.
        config.blocked.send_replace(false);
        if !is_ready {
            return;
        }
        tokio::join!(
            machine::run(&cx, triggers.agent_machines.clone(), stop),
            request::run(&cx, triggers.requests.clone(), stop),
            pool::run(&cx, triggers.pools.clone(), stop),
        );
    };
    tokio::select! {
        () = all => {}
        () = keep => {}
        () = request::follow(&cx, followed, &triggers) => {}
        () = wait_stop_grace(stop, config.times.stop) => {
            warn!("reconciles still run, stopping without them; their tasks in vCenter continue");
        }
    }
    cx.iso.close().await;
    if timeout(LOGOUT, cx.vcenters.close()).await.is_err() {
        warn!("vCenter did not answer the logout");
    }
    Ok(())
}

/// Returns `grace` after the request to stop.
async fn wait_stop_grace(stop: &CancellationToken, grace: Duration) {
    stop.cancelled().await;
    sleep(grace).await;
}

/// Shared state of all reconciles.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) caches: Caches,
    pub(crate) vcenters: Vcenters,
    pub(crate) iso: iso::Cache,
    pub(crate) pool_events: EventRecorder,
    pub(crate) request_events: EventRecorder,
    pub(crate) config: Config,
    pub(crate) backoffs: Backoffs<String>,
    pub(crate) capacity: Backoffs<String>,
    /// Start time of this process. Another process may have started work for older objects.
    pub(crate) started: jiff::Timestamp,
    /// Creations that this process started and that have not ended, by UID of the VsphereAgent: vCenter instance and task.
    pub(crate) creations: Mutex<HashMap<String, (String, TaskId)>>,
    /// Folders whose VMs are watched: number of the session, id of the folder.
    pub(crate) followed: Mutex<HashSet<(u64, String)>>,
    folders: UnboundedSender<request::Folder>,
    /// VMs of the watched folders, by namespace and name of the pool.
    folders_of: Mutex<HashMap<(Option<String>, String), request::Folder>>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Context {
    fn new(
        client: Client,
        config: &Config,
        caches: Caches,
        folders: UnboundedSender<request::Folder>,
    ) -> Self {
        let events = |name: &str| EventRecorder::reporting_as(client.clone(), name, &config.identity);
        Self {
            vcenters: Vcenters::new(
                config.connect.clone(),
                vcenters::Limits {
                    creates: config.creates,
                    destroys: config.destroys,
                    patience: config.times.patience,
                    refused: config.times.refused,
                    backoff: config.backoff,
                },
                config.cross_namespace_secrets,
            ),
            iso: iso::Cache::new(config.iso.clone()),
            pool_events: events("vsphereagentpool-controller"),
            request_events: events("vsphereagent-controller"),
            backoffs: Backoffs::new(config.backoff),
            capacity: Backoffs::new(config.capacity),
            started: config.clock.timestamp(),
            creations: Mutex::default(),
            followed: Mutex::default(),
            folders_of: Mutex::default(),
            folders,
            config: config.clone(),
            caches,
            client,
        }
    }

    /// Waits until every cache has been filled once.
    async fn ready(&self) {
        let c = &self.caches;
        // These waits fail only if a writer ended, and then the whole task ends.
        let _ = tokio::join!(
            c.pools.wait_until_ready(),
            c.requests.wait_until_ready(),
            c.agent_machines.wait_until_ready(),
            c.machines.wait_until_ready(),
            c.agents.wait_until_ready(),
            c.infra_envs.wait_until_ready(),
        );
    }

    /// Records that the VM of `request` reached a stage.
    pub(crate) fn record_stage(&self, request: &VsphereAgent, stage: &'static str) {
        let Some(made) = &request.metadata.creation_timestamp else { return };
        let after = self.config.clock.timestamp().duration_since(made.0);
        // Clocks differ slightly, so the difference may be negative.
        self.config.pool_metrics.stage(stage, after.try_into().unwrap_or_default());
    }

    /// VMs of the pool's folder, if it is watched.
    pub(crate) fn watched_folder(&self, pool: &VsphereAgentPool) -> Option<request::Folder> {
        self.folders_of.lock().get(&(pool.namespace(), pool.name_any())).cloned()
    }

    /// Watches the VMs of a folder, unless this session watches them already.
    pub(crate) fn follow(
        &self,
        pool: &VsphereAgentPool,
        provider: &vcenters::Provider,
        machines: request::Folder,
    ) {
        let mut followed = self.followed.lock();
        let key = (pool.namespace(), pool.name_any());
        self.folders_of.lock().insert(key, machines.clone());
        if followed.insert((provider.vcenter.serial, provider.site.folder.id.clone())) {
            // Without a reader, the controllers are stopping.
            let _ = self.folders.send(machines);
        }
    }
}

/// Leader election with the Lease of the original operator, so that only one of the two runs.
#[must_use]
pub fn election(namespace: &str, identity: &str) -> Election {
    Election::new(namespace, names::LEASE, identity)
}

//! Simulations: controllers and their peers in one thread, with one random seed and a paused clock.
//!
//! ```text
//!  controller ── kube::Client ──▶ ApiServer (in memory)
//!      │  └────── byte streams ──▶ Network ──▶ the kind's own fakes
//!      └── Clock, timers ── tokio's paused clock: when all tasks wait, it jumps to the next timer
//! ```
//! A test of minutes on the clock of the simulation takes milliseconds. [`crash_after_each_call`] kills a controller after each
//! of its calls. Tasks must neither use sockets nor block: the clock would jump while they wait.

mod api;
mod crash;
mod fuse;
mod network;

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use coracle_types::{Clock, UnixMillis};
use k8s_openapi::{
    api::core::v1::Namespace, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::Client;
use tokio::time::Instant;

pub use api::ApiServer;
pub use crash::{Scenario, crash_after_each_call};
pub use fuse::Fuse;
pub use network::{Listener, Network};

use crate::{TestResult, eventually};

/// Start time of every simulation: 2026-01-01T00:00:00Z.
const BEGIN: i64 = 1_767_225_600_000;

/// Simulation. Clones share it.
#[derive(Clone)]
pub struct Sim(Arc<Shared>);

struct Shared {
    seed: u64,
    api: ApiServer,
    network: Network,
    clock: Clock,
    fuse: Mutex<Fuse>,
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim").field("seed", &self.0.seed).finish_non_exhaustive()
    }
}

impl Sim {
    /// Runs a test body in a simulation.
    ///
    /// # Panics
    /// When the body fails.
    pub fn run<F, Fut>(seed: u64, body: F)
    where
        F: FnOnce(Self) -> Fut,
        Fut: Future<Output: TestResult>,
    {
        block_on(seed, body).settle();
    }

    fn new(seed: u64) -> Self {
        let began = Instant::now();
        let clock = Clock::derived(move || {
            let passed = i64::try_from(began.elapsed().as_millis()).unwrap_or(i64::MAX);
            UnixMillis(BEGIN.saturating_add(passed))
        });
        let api = ApiServer::new(seed, clock.clone());
        Self(Arc::new(Shared { seed, api, network: Network::default(), clock, fuse: Mutex::default() }))
    }

    /// Seed of the random numbers of peers.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.0.seed
    }

    /// API server of the simulation.
    #[must_use]
    pub fn api(&self) -> &ApiServer {
        &self.0.api
    }

    /// Creates a client of the API server for a user.
    #[must_use]
    pub fn client(&self) -> Client {
        self.0.api.client()
    }

    /// Network that connects the other peers.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.0.network
    }

    /// Wall clock, which advances with the timers.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.0.clock.clone()
    }

    /// Counts a call of a controller. Peers other than the API server call this when the work of the call is done, before they
    /// answer.
    pub async fn after_call(&self, call: &str) {
        let fuse = self.0.fuse.lock().unwrap_or_else(PoisonError::into_inner).clone();
        fuse.after_call(call).await;
    }

    /// Asserts that controllers are at rest: waits for `n` more passes, then for `n` again.
    ///
    /// # Errors
    /// When anything was written to the API server during the second half, or passes do not end.
    pub async fn stays_quiet(&self, n: u64, passes: impl Fn() -> u64) -> anyhow::Result<()> {
        let more = async || {
            let enough = passes() + n;
            eventually("more passes", async || (passes() >= enough).then_some(())).await
        };
        more().await?;
        let before = self.api().writes();
        more().await?;
        let written = self.api().writes() - before;
        anyhow::ensure!(written == 0, "{written} writes in {n} passes that had nothing to do");
        Ok(())
    }

    fn set_fuse(&self, fuse: Fuse) {
        *self.0.fuse.lock().unwrap_or_else(PoisonError::into_inner) = fuse;
    }

    /// Adds custom resource definitions and a namespace, without API calls.
    ///
    /// # Panics
    /// When one of them exists, or is incomplete.
    pub fn prepare(&self, crds: &[CustomResourceDefinition], namespace: &str) {
        crds.iter().for_each(|crd| self.api().seed("CustomResourceDefinition", crd));
        let mut object = Namespace::default();
        object.metadata.name = Some(namespace.to_owned());
        self.api().seed("Namespace", &object);
    }
}

/// Runs `body` on a runtime of its own with a paused clock.
fn block_on<F, Fut>(seed: u64, body: F) -> Fut::Output
where
    F: FnOnce(Sim) -> Fut,
    Fut: Future,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime of one thread needs nothing");
    runtime.block_on(async { body(Sim::new(seed)).await })
}

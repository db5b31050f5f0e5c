//! Configuration of the controller.

use std::{sync::Arc, time::Duration};

use coracle_reconcile::{Backoff, Clock, ControllerMetrics, Election};

use crate::{
    agent::{AgentTls, Connect, Deadlines, TcpConnect},
    discovery::Scope,
    observed::Policy,
    placement::Overcommit,
};

/// Name of this controller in metrics, events and its Lease.
pub const CONTROLLER: &str = "mikromvm";

/// Configuration of the controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// Watched namespaces and allowed agents.
    pub scope: Scope,
    /// TLS to the agents; `None`: plaintext.
    pub tls: Option<AgentTls>,
    /// How streams to agents are opened.
    pub connect: Arc<dyn Connect>,
    /// Deadlines of calls to agents.
    pub deadlines: Deadlines,
    /// Times and counts that decisions depend on.
    pub policy: Policy,
    /// Delays after failed reconciles.
    pub backoff: Backoff,
    /// How far the memory and CPUs of nodes are overcommitted.
    pub overcommit: Overcommit,
    /// Creations at once at one agent: some wait for a registry.
    pub creates_per_agent: usize,
    /// Starts at once at one agent. Starts and creations together stay below the reconciles, so that GetVM
    /// and deletions get through.
    pub boots_per_agent: usize,
    /// Reconciles at once of VMs at one agent.
    pub reconciles_per_agent: usize,
    /// Reconciles at once.
    pub reconciles: u16,
    /// Leader election. `None`: this process is the only one.
    pub election: Option<Election>,
    /// Identity of this process in Events.
    pub identity: String,
    /// Metrics of the process.
    pub metrics: ControllerMetrics,
    /// The wall clock.
    pub clock: Clock,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            scope: Scope::default(),
            tls: None,
            connect: Arc::new(TcpConnect),
            deadlines: Deadlines::default(),
            policy: Policy::default(),
            backoff: Backoff { base: Duration::from_secs(1), max: Duration::from_secs(60) },
            overcommit: Overcommit::default(),
            creates_per_agent: 16,
            boots_per_agent: 16,
            reconciles_per_agent: 48,
            reconciles: 256,
            election: None,
            identity: "coracle-operator".into(),
            metrics: ControllerMetrics::default(),
            clock: Clock::system(),
        }
    }
}

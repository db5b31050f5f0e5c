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
    /// TLS configuration for the agents; `None`: plaintext.
    pub tls: Option<AgentTls>,
    /// Opens streams to agents.
    pub connect: Arc<dyn Connect>,
    /// Deadlines of calls to agents.
    pub deadlines: Deadlines,
    /// Times and counts that decisions depend on.
    pub policy: Policy,
    /// Delays after failed reconciles.
    pub backoff: Backoff,
    /// Overcommit of the memory and CPUs of nodes.
    pub overcommit: Overcommit,
    /// Concurrent creations at one agent; some of them wait for a registry.
    pub creates_per_agent: usize,
    /// Concurrent starts at one agent. Starts and creations together stay below the number of reconciles, so that GetVM and
    /// deletions are not blocked.
    pub boots_per_agent: usize,
    /// Concurrent reconciles of VMs at one agent.
    pub reconciles_per_agent: usize,
    /// Concurrent reconciles in total.
    pub reconciles: u16,
    /// Leader election. `None`: this process is the only one.
    pub election: Option<Election>,
    /// Identity of this process in Events.
    pub identity: String,
    /// Metrics of the process.
    pub metrics: ControllerMetrics,
    /// Wall clock.
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

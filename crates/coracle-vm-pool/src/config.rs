//! Configuration of the controller.

use std::time::Duration;

use coracle_reconcile::{Backoff, Clock, ControllerMetrics, Election};

/// Name of this controller in metrics, events and its Lease.
pub const CONTROLLER: &str = "vm-pool";

/// Configuration of the controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// Only pools of this namespace; `None`: all.
    pub namespace: Option<String>,
    /// Leader election. `None`: this process is the only one.
    pub election: Option<Election>,
    /// Delays after failed reconciles.
    pub backoff: Backoff,
    /// Metrics of the process.
    pub metrics: ControllerMetrics,
    /// The wall clock.
    pub clock: Clock,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            namespace: None,
            election: None,
            backoff: Backoff { base: Duration::from_secs(1), max: Duration::from_secs(60) },
            metrics: ControllerMetrics::default(),
            clock: Clock::system(),
        }
    }
}

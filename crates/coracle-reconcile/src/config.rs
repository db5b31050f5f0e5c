//! Configuration that every controller has.

use std::{sync::Arc, time::Duration};

use coracle_types::Clock;
use kube::Client;

use crate::{Backoff, Backoffs, ControllerMetrics, Election, Group, Runner};

/// Configuration that every controller has. One with more holds it as a field.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// Only objects of this namespace; `None`: all.
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

impl Default for ControllerConfig {
    /// All namespaces, no election, delays of 1 s to a minute.
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

impl ControllerConfig {
    /// The group of controllers of that name.
    #[must_use]
    pub fn group(&self, name: &'static str, client: Client) -> Group {
        let (election, clock, metrics) = (self.election.clone(), self.clock.clone(), self.metrics.clone());
        Group { name, election, client, clock, metrics }
    }

    /// Runs one controller of that name, so many reconciles at once, with triggers within `debounce` as one.
    #[must_use]
    pub fn runner(&self, name: &'static str, workers: u16, debounce: Duration) -> Runner {
        let backoffs = Arc::new(Backoffs::new(self.backoff));
        let (clock, metrics) = (self.clock.clone(), self.metrics.clone());
        Runner { name, workers, debounce, backoffs, metrics, clock }
    }
}

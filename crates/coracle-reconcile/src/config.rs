//! Common configuration of all controllers.

use std::{sync::Arc, time::Duration};

use coracle_types::Clock;
use kube::Client;

use crate::{Backoff, Backoffs, ControllerMetrics, Election, Group, Runner};

/// Common configuration of all controllers. A configuration with more options contains it as a field.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// Namespace of the watched objects; `None`: all.
    pub namespace: Option<String>,
    /// Leader election. `None`: this process is the only one.
    pub election: Option<Election>,
    /// Delays after failed reconciles.
    pub backoff: Backoff,
    /// Metrics of the process.
    pub metrics: ControllerMetrics,
    /// Wall clock.
    pub clock: Clock,
}

impl Default for ControllerConfig {
    /// Returns a configuration for all namespaces, without election, with delays from 1 s to a minute.
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
    /// Returns the group of controllers with that name.
    #[must_use]
    pub fn group(&self, name: &'static str, client: Client) -> Group {
        let (election, clock, metrics) = (self.election.clone(), self.clock.clone(), self.metrics.clone());
        Group { name, election, client, clock, metrics }
    }

    /// Returns the runner of one controller with that name. `workers` limits concurrent reconciles; triggers within `debounce`
    /// are merged.
    #[must_use]
    pub fn runner(&self, name: &'static str, workers: u16, debounce: Duration) -> Runner {
        let backoffs = Arc::new(Backoffs::new(self.backoff));
        let (clock, metrics) = (self.clock.clone(), self.metrics.clone());
        Runner { name, workers, debounce, backoffs, metrics, clock }
    }
}

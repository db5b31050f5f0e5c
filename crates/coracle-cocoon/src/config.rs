//! Configuration of the controllers.

use std::{sync::Arc, time::Duration};

use coracle_reconcile::{Clock, ControllerMetrics, Election};

use crate::{metrics::CocoonMetrics, registry::SnapshotTags};

/// Name of the controller of CocoonSets in metrics.
pub const SETS: &str = "cocoonset";
/// Name of the controller of CocoonHibernations in metrics.
pub const HIBERNATIONS: &str = "cocoonhibernation";

/// Behaviour that differs between releases of the original. The defaults are those of coracle.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A set is `Suspended` as soon as its pods are annotated, before the saved states are in the registry.
    pub suspended_at_once: bool,
    /// The status also has the phase `Waking`.
    pub later_phases: bool,
    /// Pods that differ from the spec are deleted and created again.
    pub drift: bool,
    /// Sub-agents that ended are rebuilt, up to four times.
    pub rebuild: bool,
    /// `spec.nodeName` moves a main agent that runs elsewhere.
    pub migrate: bool,
    /// The state that was saved when pods were deleted stays in the registry when the set is deleted.
    pub keep_snapshots: bool,
    /// Largest number of sub-agents that one reconcile creates.
    pub creates_max: usize,
    /// Intervals and limits.
    pub times: Times,
}

/// Intervals and limits of time.
#[derive(Clone, Debug)]
pub struct Times {
    /// Time between reconciles while the controller waits for a change that no watch reports.
    pub poll: Duration,
    /// Time between reconciles of an object without pending work.
    pub resync: Duration,
    /// Time after which a hibernation counts as failed. The controller keeps waiting for it.
    pub hibernate_limit: Duration,
    /// Time after which a wake counts as failed. The controller keeps waiting for it.
    pub wake_limit: Duration,
}

impl Default for Times {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            poll: seconds(5),
            resync: seconds(300),
            hibernate_limit: seconds(180),
            wake_limit: seconds(300),
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            suspended_at_once: false,
            later_phases: true,
            drift: false,
            rebuild: false,
            migrate: false,
            keep_snapshots: false,
            creates_max: 8,
            times: Times::default(),
        }
    }
}

impl Settings {
    /// Returns the behaviour under the name of the original: that of its first release.
    #[must_use]
    pub fn original() -> Self {
        Self { suspended_at_once: true, later_phases: false, ..Self::default() }
    }
}

/// Configuration of the controllers.
#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace of the watched objects; `None`: all namespaces.
    pub namespace: Option<String>,
    /// Registry with the saved states of VMs.
    pub registry: Arc<dyn SnapshotTags>,
    /// Behaviour of the controllers.
    pub settings: Settings,
    /// Sets reconciled concurrently.
    pub set_workers: u16,
    /// Hibernations reconciled concurrently.
    pub hibernation_workers: u16,
    /// Leader election. `None`: this process is the only one.
    pub election: Option<Election>,
    /// Reporting instance in events.
    pub identity: String,
    /// Metrics of reconciles, shared by all controllers.
    pub metrics: ControllerMetrics,
    /// Metrics of these controllers.
    pub cocoon_metrics: CocoonMetrics,
    /// Wall clock.
    pub clock: Clock,
}

impl Config {
    /// Returns the default configuration for a registry.
    #[must_use]
    pub fn new(registry: Arc<dyn SnapshotTags>) -> Self {
        Self {
            namespace: None,
            registry,
            settings: Settings::default(),
            set_workers: 4,
            hibernation_workers: 4,
            election: None,
            identity: "coracle-operator".into(),
            metrics: ControllerMetrics::default(),
            cocoon_metrics: CocoonMetrics::default(),
            clock: Clock::system(),
        }
    }
}

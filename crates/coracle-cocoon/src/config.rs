//! Configuration of the controllers.

use std::{sync::Arc, time::Duration};

use coracle_reconcile::{Clock, ControllerMetrics, Election};

use crate::{metrics::CocoonMetrics, registry::SnapshotTags};

/// Name of the controller of CocoonSets in metrics.
pub const SETS: &str = "cocoonset";
/// Name of the controller of CocoonHibernations in metrics.
pub const HIBERNATIONS: &str = "cocoonhibernation";

/// Behaviour that differs between generations of the original. The defaults are those of this project's own name.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A set is `Suspended` as soon as its pods are annotated, and not when the saved states are in the registry.
    pub suspended_at_once: bool,
    /// Also the phase `Waking`.
    pub later_phases: bool,
    /// Pods that differ from the spec are deleted and created again.
    pub drift: bool,
    /// Sub-agents that ended are built again, four times.
    pub rebuild: bool,
    /// `spec.nodeName` moves a main agent that runs elsewhere.
    pub migrate: bool,
    /// What was saved when pods were deleted stays in the registry when the set is deleted.
    pub keep_snapshots: bool,
    /// Sub-agents that one pass creates at most.
    pub creates_max: usize,
    /// Intervals and limits.
    pub times: Times,
}

/// Intervals and limits of time.
#[derive(Clone, Debug)]
pub struct Times {
    /// Time between passes while something is awaited that no watch reports.
    pub poll: Duration,
    /// Time between passes over an object at rest.
    pub resync: Duration,
    /// After it a hibernation counts as failed. It is awaited all the same.
    pub hibernate_limit: Duration,
    /// After it a wake counts as failed. It is awaited all the same.
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
    /// Behaviour under the original's name: that of its first release.
    #[must_use]
    pub fn original() -> Self {
        Self { suspended_at_once: true, later_phases: false, ..Self::default() }
    }
}

/// Which controllers run, and how.
#[derive(Clone, Debug)]
pub struct Config {
    /// Only objects of this namespace; `None`: of all.
    pub namespace: Option<String>,
    /// Saved states of VMs.
    pub registry: Arc<dyn SnapshotTags>,
    /// Behaviour.
    pub settings: Settings,
    /// Sets reconciled at once.
    pub set_workers: u16,
    /// Hibernations reconciled at once.
    pub hibernation_workers: u16,
    /// Leader election. `None`: this process is the only one.
    pub election: Option<Election>,
    /// Reporting instance in events.
    pub identity: String,
    /// Metrics of reconciles, shared by all controllers.
    pub metrics: ControllerMetrics,
    /// Metrics of these controllers.
    pub cocoon_metrics: CocoonMetrics,
    /// The wall clock.
    pub clock: Clock,
}

impl Config {
    /// Defaults for a registry.
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

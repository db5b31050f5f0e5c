//! Shared runtime of all controllers: leader election, watches, work queue, backoff, spans, metrics, events, conditions, writes
//! of objects.
//!
//! A controller crate contains observe, plan, execute and status for one kind. This crate contains everything else that runs
//! it: [`Group`] elects a leader, [`Runner`] takes objects from a [`WorkQueue`] and calls the crate's [`Reconciler`]. This
//! crate knows no kind of object.

mod apply;
mod backoff;
mod clock;
mod conditions;
mod config;
mod election;
mod events;
mod guarded;
pub mod manifest;
mod metrics;
pub mod object;
mod own_writes;
mod queue;
mod run;
mod watch;

pub use apply::{
    ApplyError, add_finalizer, add_finalizer_if_unchanged, apply_status, remove_finalizer, replace_status,
};
pub use backoff::{Backoff, Backoffs, spread};
pub use clock::WallTime;
pub use conditions::{Desired, find, is_true, merge};
pub use config::ControllerConfig;
pub use coracle_types::Clock;
pub use election::{Election, ElectionError, Lost};
pub use events::{Event, EventRecorder, Kind};
pub use guarded::Guarded;
pub use metrics::{ControllerMetrics, ReconcileResult};
pub use object::ApiError;
pub use own_writes::OwnWrites;
pub use queue::WorkQueue;
pub use run::{Action, Group, Reconciler, Runner};
pub use watch::{Seen, follow, watch, watch_config};

//! What every controller shares: clock, backoff, conditions, server-side apply, events, leader election, metrics.
//!
//! A controller crate looks, decides, acts and reports; the parts that are alike in each of them are here once. Nothing
//! in here knows a kind.

mod apply;
mod backoff;
mod clock;
mod conditions;
mod election;
mod events;
pub mod manifest;
mod metrics;
mod review;

pub use apply::{ApplyError, add_finalizer, apply_status, remove_finalizer};
pub use backoff::{Backoff, Backoffs};
pub use clock::{Clock, FixedClock, SystemClock};
pub use conditions::{Desired, find, is_true, merge};
pub use election::{Election, ElectionError, Lost};
pub use events::{Event, EventRecorder, Kind};
pub use metrics::{ControllerMetrics, Outcome};
pub use review::review_token;

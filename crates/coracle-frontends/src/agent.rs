//! The agent service, for clients of the existing `FirecrackerAgent` API.
//!
//! `service.rs` has the nine calls, `convert.rs` the pure translation with both error styles, `legacy.rs` reads the
//! configuration file of the original agent, `metrics.rs` keeps its metric names.

mod convert;
mod legacy;
mod metrics;
mod service;

pub use self::convert::ErrorStyle;
pub use self::legacy::{InvalidLegacyConfig, LegacyConfig};
pub use self::metrics::AgentMetrics;
pub use self::service::{AgentOptions, AgentService, reflection};

//! The FirecrackerAgent door: what existing clients of that gRPC service send,
//! translated to the host core and back. No VM state lives here.
//!
//! `service.rs` is the nine calls, `convert.rs` the pure translation with both
//! error styles, `legacy.rs` the configuration file of the old agent,
//! `metrics.rs` the old metric names.

mod convert;
mod legacy;
mod metrics;
mod service;

pub use convert::ErrorStyle;
pub use legacy::{InvalidLegacyConfig, LegacyConfig};
pub use metrics::AgentMetrics;
pub use service::{AgentOptions, AgentService, reflection};

//! Frontends of a node: gRPC services that translate to the host core and back. They keep no VM state.
//!
//! [`HostService`] serves `coracle.host.v1` to the CLI and the operator; [`AgentService`] serves
//! `firecracker.v1.FirecrackerAgent` to existing clients. `status.rs` is the one mapping from host errors to gRPC; `objects.rs`
//! finds and creates the VMs of cluster objects for both.

mod agent;
mod host;
mod objects;
mod status;

pub use agent::{
    AgentMetrics, AgentOptions, AgentService, ErrorStyle, InvalidLegacyConfig, LegacyConfig, reflection,
};
pub use host::HostService;
pub use status::to_status;

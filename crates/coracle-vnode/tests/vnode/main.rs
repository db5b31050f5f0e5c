//! Tests of the virtual node with a real API server and VMs in memory.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

mod api;
mod fallback;
mod image_policy;
mod node;
mod pods;
mod provider_suite;
mod restarts;
mod streams;
mod vm_pods;
mod world;

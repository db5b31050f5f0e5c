//! Tests of pods: tables of decisions, and whole lifecycles over an in-memory runtime on a paused clock.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

mod container_spec;
mod env;
mod fake;
mod fields;
mod host_core;
mod network;
mod plan;
mod resources;
mod sim_change;
mod sim_crash;
mod sim_life;
mod support;
mod volumes;
mod world;

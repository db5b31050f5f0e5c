//! Tests of the MikromVM controller with a fake agent that can fail in every way: on a real API server, and in simulations.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

mod contract;
mod fake_agent;
mod fake_host;
mod fleet;
mod host_node;
mod moving_nodes;
mod pki;
mod plan;
mod schema;
mod sim_connections;
mod sim_crash;
mod sim_drain;
mod sim_healing;
mod subnets;
mod world;

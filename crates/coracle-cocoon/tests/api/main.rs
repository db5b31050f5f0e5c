//! Controllers with a small node in the test process: on a real API server, and in simulations.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

mod guide;
mod hibernations;
mod node;
mod registry;
mod sets;
mod sim_crash;
mod tags;
mod world;

//! The MikromVM controller against a real API server and a fake agent that can fail in every way.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

mod contract;
mod crash;
mod fake_agent;
mod fleet;
mod healing;
mod schema;
mod world;

//! Tests of the controller with a real API server, a real market in the same process, and a supplier that registers Nodes
//! without machines behind them. Intervals are a twentieth of the defaults, or less where a test counts many.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod accounts;
mod bad;
mod buy;
mod crash;
mod ending;
mod nodes;
mod price;
mod sim_crash;
mod sim_failures;
mod sim_host;
mod sim_market;
mod sim_system;
mod supplier;
mod world;

//! The command line of Coracle: its grammar, and the commands that speak to a node, a cluster, a registry or a market and
//! end. Long-lived processes are in the crate `coracle`, the binary.
#![allow(
    missing_docs,
    reason = "help texts are the documentation of flags, and the binary is the only user of the functions"
)]

mod api_failure;
pub mod cli;
pub mod client;
mod cluster;
pub use cluster::connect;
pub mod commands;
pub mod error;
pub mod output;
pub mod progress;
pub mod registries;
mod suggest;
pub mod tasks;
mod tunnel;
mod view;

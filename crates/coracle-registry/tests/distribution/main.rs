//! The distribution specification 1.1, a test for each thing that it says a registry MUST or SHOULD do, named after it;
//! and what is ours: tokens, garbage, the original's routes, bad input. `docs/reference/registry.md` has the table.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod bad_input;
mod common;
mod deleting;
mod discovery;
mod garbage;
mod original;
mod postgres;
mod pulling;
mod pushing;
mod renewal;
mod replicas;
mod slow_store;
mod storing;
mod tokens;

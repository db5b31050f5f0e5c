//! Tests of the distribution specification 1.1: one test, named after it, for each MUST and SHOULD of a registry. Also tests of
//! features beyond it: tokens, garbage collection, epoch's routes, bad input. `docs/reference/registry.md` has the table.
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

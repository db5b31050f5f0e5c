//! Tests of the market over its network API.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod bad_input;
mod history;
mod market;
mod postgres;
#[path = "../server/mod.rs"]
mod server;
mod streams;
mod support;
mod tls;

/// Entry point of the process of [`support::Served`], not a test.
#[test]
fn server_process() {
    server::serve_if_asked();
}

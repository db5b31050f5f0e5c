//! Tests of the streaming server over the network: with client-go's clients of exec, attach and port-forward, and with raw
//! clients.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod clients;
mod forwards;
mod raw;
mod sessions;
mod support;

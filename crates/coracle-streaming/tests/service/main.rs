//! The streaming server over its network API: against client-go's clients of exec, attach and port-forward, and against
//! raw ones.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod clients;
mod forwards;
mod raw;
mod sessions;
mod support;

//! The server as a kubelet sees it: raw calls over its socket. Tests that correspond to tests of critest have their names.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod basics;
mod disk;
mod idempotence;
mod images;
mod pulls;
mod restart;
mod signatures;
mod support;
mod unimplemented;

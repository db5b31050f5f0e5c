//! What every daemon shows of itself: logs, and one admin port with
//! `/livez`, `/readyz`, `/metrics`, `/health` and `/version`.

mod admin;
mod logs;

pub use admin::{Admin, Readiness};
pub use logs::{LogFormat, init_logs};

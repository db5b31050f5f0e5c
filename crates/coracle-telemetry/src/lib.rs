//! Telemetry of every daemon: logs, traces, and an admin port with `/livez`, `/readyz`, `/metrics`, `/health` and `/version`.

mod admin;
mod logs;
mod tls;
mod traces;

pub use admin::{Access, Admin, Guard, Readiness};
pub use logs::{LogFormat, init_logs};
pub use tls::{TlsListener, TlsSettings};
pub use traces::{TRACEPARENT, call_span, flush_traces, traceparent};

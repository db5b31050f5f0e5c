//! Health of the node daemon.

use axum::extract::{Path, State};

use super::context::Context;
use super::http_failure::HttpFailure;

pub(super) async fn ok() -> &'static str {
    "ok"
}

/// Handles health checks. `ping` and `log` succeed while the daemon responds, `syncloop` while the task of the pods makes
/// progress.
pub(super) async fn check(
    State(context): State<Context>,
    Path(check): Path<String>,
) -> Result<&'static str, HttpFailure> {
    match check.as_str() {
        "ping" | "log" => Ok("ok"),
        "syncloop" if *context.sync_loop.borrow() => Ok("ok"),
        "syncloop" => Err(HttpFailure::internal("the task of the pods makes no progress")),
        other => Err(HttpFailure::not_found(format!("health check {other:?} not found"))),
    }
}

//! Admin port: health, readiness, metrics and version.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use parking_lot::Mutex;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

/// Named parts of a daemon that must be ready before the daemon is ready. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, bool>>>);

impl Readiness {
    /// Sets whether a part is ready. The first call makes the part a condition.
    pub fn set(&self, part: &'static str, ready: bool) {
        self.0.lock().insert(part, ready);
    }

    /// Returns whether all parts are ready, with a line for each.
    #[must_use]
    pub fn report(&self) -> (bool, String) {
        let parts = self.0.lock();
        let lines =
            parts.iter().map(|(part, ready)| format!("[{}] {part}\n", if *ready { '+' } else { '-' }));
        (parts.values().all(|ready| *ready), lines.collect())
    }
}

/// Result of checking access to the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Access is granted.
    Granted,
    /// The user is not authenticated.
    Unknown,
    /// The user may not read the metrics.
    Denied,
    /// The check is not possible now.
    Unavailable,
}

/// Decides who may read metrics.
#[async_trait]
pub trait Guard: std::fmt::Debug + Send + Sync {
    /// Checks the bearer token of a request.
    async fn check(&self, token: &str) -> Access;
}

/// Content of the admin port.
#[derive(Clone, Debug)]
pub struct Admin {
    registry: Arc<Registry>,
    readiness: Readiness,
    guard: Option<Arc<dyn Guard>>,
}

impl Admin {
    /// Returns the content with these metrics and this readiness.
    #[must_use]
    pub fn new(registry: Registry, readiness: Readiness) -> Self {
        Self { registry: Arc::new(registry), readiness, guard: None }
    }

    /// Restricts the metrics to users whom `guard` admits.
    #[must_use]
    pub fn guarded(mut self, guard: Arc<dyn Guard>) -> Self {
        self.guard = Some(guard);
        self
    }

    /// Serves until `stop`. `/health` responds with `OK`, as clients of old agents expect.
    ///
    /// # Errors
    /// When the listener fails.
    pub async fn serve<L: Listener>(self, listener: L, stop: CancellationToken) -> io::Result<()>
    where
        L::Addr: std::fmt::Debug,
    {
        let routes = health().route("/metrics", get(metrics)).with_state(self);
        axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned()).await
    }

    /// Like [`Self::serve`], without metrics.
    ///
    /// # Errors
    /// When the listener fails.
    pub async fn serve_health<L: Listener>(self, listener: L, stop: CancellationToken) -> io::Result<()>
    where
        L::Addr: std::fmt::Debug,
    {
        axum::serve(listener, health().with_state(self)).with_graceful_shutdown(stop.cancelled_owned()).await
    }
}

fn health() -> Router<Admin> {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/health", get(|| async { "OK" }))
        .route("/version", get(|| async { concat!(env!("CARGO_PKG_VERSION"), "\n") }))
        .route("/readyz", get(ready))
}

async fn ready(State(admin): State<Admin>) -> impl IntoResponse {
    let (ready, report) = admin.readiness.report();
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, report)
}

async fn metrics(State(admin): State<Admin>, headers: HeaderMap) -> Response {
    if let Some(guard) = &admin.guard {
        let said = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
        let token = said.and_then(|v| v.strip_prefix("Bearer ")).unwrap_or_default();
        let access = if token.is_empty() { Access::Unknown } else { guard.check(token).await };
        match access {
            Access::Granted => {}
            Access::Unknown => return (StatusCode::UNAUTHORIZED, "Unauthorized\n").into_response(),
            Access::Denied => return (StatusCode::FORBIDDEN, "Forbidden\n").into_response(),
            Access::Unavailable => return StatusCode::SERVICE_UNAVAILABLE.into_response(),
        }
    }
    let mut text = String::new();
    match encode(&mut text, &admin.registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            (StatusCode::OK, [(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unready_component_makes_the_report_unready() {
        let readiness = Readiness::default();
        assert!(readiness.report().0);
        readiness.set("host", true);
        readiness.set("agent", false);
        assert_eq!(readiness.report(), (false, "[-] agent\n[+] host\n".to_owned()));
    }
}

//! The admin port.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Named parts of a daemon that must be up before it is ready. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, bool>>>);

impl Readiness {
    /// Says whether a part is ready; the first word makes it a condition.
    pub fn set(&self, part: &'static str, ready: bool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(part, ready);
    }

    /// Are all parts ready? With a line for each.
    #[must_use]
    pub fn report(&self) -> (bool, String) {
        let parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lines =
            parts.iter().map(|(part, ready)| format!("[{}] {part}\n", if *ready { '+' } else { '-' }));
        (parts.values().all(|ready| *ready), lines.collect())
    }
}

/// What the admin port serves.
#[derive(Clone, Debug)]
pub struct Admin {
    registry: Arc<Registry>,
    readiness: Readiness,
}

impl Admin {
    /// Serves these metrics and this readiness.
    #[must_use]
    pub fn new(registry: Registry, readiness: Readiness) -> Self {
        Self { registry: Arc::new(registry), readiness }
    }

    /// Serves until `stop`. `/health` answers `OK`, as clients of old agents expect.
    ///
    /// # Errors
    /// When the listener fails.
    pub async fn serve(self, listener: TcpListener, stop: CancellationToken) -> io::Result<()> {
        let routes = Router::new()
            .route("/livez", get(|| async { "ok\n" }))
            .route("/health", get(|| async { "OK" }))
            .route("/version", get(|| async { concat!(env!("CARGO_PKG_VERSION"), "\n") }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self);
        axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned()).await
    }
}

async fn ready(State(admin): State<Admin>) -> impl IntoResponse {
    let (ready, report) = admin.readiness.report();
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, report)
}

async fn metrics(State(admin): State<Admin>) -> impl IntoResponse {
    let mut text = String::new();
    match encode(&mut text, &admin.registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            (StatusCode::OK, [(header::CONTENT_TYPE, kind)], text)
        }
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_part_that_is_not_ready_keeps_the_whole_from_it() {
        let readiness = Readiness::default();
        assert!(readiness.report().0);
        readiness.set("host", true);
        readiness.set("agent", false);
        assert_eq!(readiness.report(), (false, "[-] agent\n[+] host\n".to_owned()));
    }
}

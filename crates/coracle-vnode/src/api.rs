//! HTTPS API of a kubelet, for the pods of this node (Kubernetes, `pkg/kubelet/server`).
//!
//! ```text
//! connection ─▶ listener: TLS, user of the certificate ─▶ guard: 401 · 403 · 500 ─▶ handlers
//!                                        attributes (pure) ─┘ └─ reviews of the API server, with caches
//! handlers: pods · logs · streams (exec, attach, portForward) · run · statistics · health
//! ```
//! Pods come from the table of the node, never from the API server. Their containers come from the host core.

mod attributes;
mod context;
mod error;
mod guard;
mod guests;
mod health;
mod http_failure;
mod listener;
mod logs;
mod pods;
mod query;
mod run;
mod statistics;
mod streams;
mod target;
mod tls;

use std::sync::Arc;

use axum::routing::{any, get, post};
use axum::{Router, middleware};
use coracle_access::{ClientCa, KubeReviews};
use coracle_host::Host;
use coracle_streaming::{Limits, Tasks};
use coracle_vm_pod::ssh::Password;
use kube::Client;
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::stats::Rates;
use crate::table::PodTable;
use context::{Context, Shared};
pub(crate) use error::ApiError;
use guard::Guard;
use listener::Tls;

/// Kubelet API of one node.
pub(crate) struct Api {
    pub(crate) host: Host,
    pub(crate) pods: PodTable,
    /// Client for token reviews and access reviews.
    pub(crate) client: Client,
    /// Name of the node.
    pub(crate) node: String,
    /// Requests without credentials get the user `system:anonymous`; else they are refused.
    pub(crate) anonymous: bool,
    /// Whether the task of the pods makes progress, for `/healthz/syncloop`.
    pub(crate) sync_loop: watch::Receiver<bool>,
    /// Password of guests without an agent.
    pub(crate) ssh: Option<Password>,
}

impl Api {
    /// Serves until `stop`, which ends all sessions. `tls` contains the certificate of the server: its resolver is used for new
    /// connections. `client_ca`: authorities of client certificates, PEM; `None`: clients need tokens.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) async fn serve(
        self,
        listener: TcpListener,
        tls: watch::Receiver<Arc<ServerConfig>>,
        client_ca: Option<Vec<u8>>,
        stop: CancellationToken,
    ) -> Result<(), ApiError> {
        let clock = self.host.clock().clone();
        let client_ca = client_ca.map(|pem| ClientCa::new(&pem, clock)).transpose()?;
        let reviews = KubeReviews { client: self.client.clone() };
        let guard = Arc::new(Guard::new(Box::new(reviews), self.node.clone(), self.anonymous));
        let sessions = Tasks::new(stop.child_token());
        let context = Context::new(Shared {
            host: self.host,
            pods: self.pods,
            node: self.node,
            sync_loop: self.sync_loop,
            sessions: sessions.clone(),
            forwards: TaskTracker::new(),
            limits: Limits::default(),
            rates: Rates::default(),
            ssh: self.ssh,
            stop: stop.clone(),
        });
        let router = router(context.clone(), guard);
        let tls = Tls { serving: tls, client_ca };
        let served = listener::serve(listener, tls, router, stop).await;
        sessions.stop().await;
        context.stop().await;
        served
    }
}

fn router(context: Context, reviewed: Arc<Guard>) -> Router {
    Router::new()
        .route("/healthz", get(health::ok))
        .route("/healthz/{check}", get(health::check))
        .route("/pods", get(pods::assigned))
        .route("/pods/", get(pods::assigned))
        .route("/runningpods", get(pods::running))
        .route("/runningpods/", get(pods::running))
        .route("/containerLogs/{namespace}/{pod}/{container}", get(logs::read))
        .route("/exec/{namespace}/{pod}/{container}", get(streams::exec).post(streams::exec))
        .route("/exec/{namespace}/{pod}/{uid}/{container}", get(streams::exec).post(streams::exec))
        .route("/attach/{namespace}/{pod}/{container}", get(streams::attach).post(streams::attach))
        .route("/attach/{namespace}/{pod}/{uid}/{container}", get(streams::attach).post(streams::attach))
        .route("/portForward/{namespace}/{pod}", get(streams::port_forward).post(streams::port_forward))
        .route("/portForward/{namespace}/{pod}/{uid}", get(streams::port_forward).post(streams::port_forward))
        .route("/run/{namespace}/{pod}/{container}", post(run::run))
        .route("/run/{namespace}/{pod}/{uid}/{container}", post(run::run))
        .route("/stats/summary", get(statistics::summary).post(statistics::summary))
        .route("/metrics", get(statistics::node_metrics))
        .route("/metrics/cadvisor", get(statistics::container_metrics))
        .route("/metrics/resource", get(statistics::resource_metrics))
        .route("/metrics/probes", get(statistics::probe_metrics))
        .route("/metrics/slis", any(statistics::no_metrics))
        .with_state(context)
        .layer(middleware::from_fn_with_state(reviewed, guard::guard))
}

#[cfg(test)]
mod tests;

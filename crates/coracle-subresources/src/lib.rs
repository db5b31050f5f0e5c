//! Extension API `subresources.coracle.dev`: operations of users on the guests of MikromVMs, as far as the API server allows
//! them (Kubernetes documentation, "Kubernetes API Aggregation Layer").
//!
//! ```text
//! user ─▶ API server ─▶ guard: 401 · 403 ─▶ router: discovery · log · sessions
//!                        │ front proxy, SubjectAccessReview     │
//!                        │                             target: object ─▶ node ─▶ VM of the object's UID
//!                        └──────────── session: WebSocket ─ HTTP/2 ─▶ filter ─▶ host service of the node
//!                                                                    call (pure): may it pass, and of which VM is it
//! ```
//!
//! A name that a client sends in a call is never trusted. The VM is that of the object in the path.

mod call;
mod discovery;
mod failure;
mod guard;
mod log;
mod objects;
mod session;
mod target;

use std::sync::Arc;

use axum::routing::get;
use axum::{Router, middleware};
use coracle_access::KubeReviews;
use coracle_api::subresources::{GROUP, RESOURCE, VERSION};
use coracle_microvm::agent::HostChannels;
use coracle_streaming::{Limits, Tasks};
use coracle_types::Clock;
use kube::Client;

use guard::Guard;
pub use objects::objects;

/// Extension API of one cluster.
#[derive(Clone)]
pub struct SubresourceApi {
    client: Client,
    nodes: HostChannels,
    guard: Arc<Guard>,
    clock: Clock,
    tasks: Tasks,
    limits: Limits,
}

impl std::fmt::Debug for SubresourceApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SubresourceApi").finish_non_exhaustive()
    }
}

impl SubresourceApi {
    /// Creates the API. Access reviews use the API server of `client`, and connections to nodes use `nodes`. Sessions are tasks
    /// of `tasks`.
    #[must_use]
    pub fn new(client: Client, nodes: HostChannels, tasks: Tasks, clock: Clock) -> Self {
        let reviews = Arc::new(KubeReviews { client: client.clone() });
        let guard = Arc::new(Guard::new(client.clone(), reviews, clock.clone()));
        Self { client, nodes, guard, clock, tasks, limits: Limits::default() }
    }

    /// Returns the paths of the API. The server must give each request the extension
    /// [`PeerCertificates`](coracle_access::PeerCertificates).
    pub fn router(self) -> Router {
        let version = format!("/apis/{GROUP}/{VERSION}");
        let object = format!("{version}/namespaces/{{namespace}}/{RESOURCE}/{{name}}/{{subresource}}");
        let guard = self.guard.clone();
        // Every user may read the discovery documents; each subresource makes its own authorization.
        Router::new()
            .route(&format!("/apis/{GROUP}"), get(discovery::group))
            .route(&version, get(discovery::resources))
            .route(&object, get(session::open))
            .with_state(self)
            .layer(middleware::from_fn_with_state(guard, guard::authenticate))
    }
}

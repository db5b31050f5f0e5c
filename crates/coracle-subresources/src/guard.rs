//! Authentication and authorization of requests, before any other part of a request is read.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use coracle_access::{Access, FrontProxy, PeerCertificates, Reviews, User};
use coracle_api::subresources::{GROUP, RESOURCE, Subresource, VERSION};
use coracle_types::Clock;
use http::HeaderMap;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::failure::Failure;

/// Time for which the settings of the front proxy are cached.
const FRESH: Duration = Duration::from_secs(60);
/// Shortest cache time: a request that does not match the settings causes another read.
const READ_AGAIN: Duration = Duration::from_secs(5);

/// Authenticates and authorizes requests.
pub(crate) struct Guard {
    client: Client,
    reviews: Arc<dyn Reviews>,
    clock: Clock,
    front_proxy: Mutex<Option<(Instant, FrontProxy)>>,
}

impl Guard {
    pub(crate) fn new(client: Client, reviews: Arc<dyn Reviews>, clock: Clock) -> Self {
        Self { client, reviews, clock, front_proxy: Mutex::default() }
    }

    /// Returns the user for whom the API server proxies the request.
    async fn authenticate(&self, peer: &PeerCertificates, headers: &HeaderMap) -> Result<User, Failure> {
        for age in [FRESH, READ_AGAIN] {
            if let Some(user) = self.front_proxy(age).await?.user(&peer.0, headers) {
                return Ok(user);
            }
        }
        Err(Failure::unauthorized())
    }

    /// Returns the settings, not older than `age` unless the API server does not respond.
    async fn front_proxy(&self, age: Duration) -> Result<FrontProxy, Failure> {
        let mut kept = self.front_proxy.lock().await;
        if let Some((at, known)) = &*kept
            && at.elapsed() < age
        {
            return Ok(known.clone());
        }
        match (self.read().await, &mut *kept) {
            (Ok(read), kept) => {
                *kept = Some((Instant::now(), read.clone()));
                Ok(read)
            }
            (Err(error), Some((at, known))) => {
                tracing::warn!(error, "read settings of the API server's front proxy failed");
                *at = Instant::now();
                Ok(known.clone())
            }
            (Err(error), None) => Err(Failure::unavailable(error)),
        }
    }

    async fn read(&self) -> Result<FrontProxy, String> {
        let (namespace, name) = FrontProxy::CONFIG_MAP;
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
        let of = |error: &dyn std::fmt::Display| format!("read ConfigMap {namespace}/{name}: {error}");
        let found = api.get(name).await.map_err(|error| of(&error))?;
        FrontProxy::new(&found.data.unwrap_or_default(), self.clock.clone()).map_err(|error| of(&error))
    }

    /// Checks whether the user may make the request.
    ///
    /// # Errors
    /// 403, or 503 without a response of the API server.
    pub(crate) async fn authorize(&self, user: User, object: &Object) -> Result<(), Failure> {
        let Object { namespace, name, subresource } = object;
        let (verb, user_name) = (subresource.verb(), user.name.clone());
        let access = Access {
            user,
            verb,
            group: GROUP,
            version: VERSION,
            resource: RESOURCE,
            subresource: subresource.name(),
            namespace: namespace.clone(),
            name: name.clone(),
        };
        match self.reviews.access(&access).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(Failure::forbidden(format!(
                "{RESOURCE}.{GROUP} \"{name}\" is forbidden: User \"{user_name}\" cannot {verb} resource \
                 \"{RESOURCE}/{}\" in API group \"{GROUP}\" in the namespace \"{namespace}\"",
                subresource.name()
            ))),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "review access failed");
                Err(Failure::unavailable("the API server does not review access"))
            }
        }
    }
}

/// Object in a path, as the router decoded it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) subresource: Subresource,
}

/// Admits requests of the API server, with the [`User`] as an extension, and answers 401 or 503 to others.
pub(crate) async fn authenticate(
    State(guard): State<Arc<Guard>>,
    Extension(peer): Extension<PeerCertificates>,
    mut request: Request,
    next: Next,
) -> Result<Response, Failure> {
    let user = guard.authenticate(&peer, request.headers()).await?;
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

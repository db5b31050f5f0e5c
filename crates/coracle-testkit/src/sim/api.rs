//! API server in memory, as a service for a [`kube::Client`].
//!
//! The server implements what our controllers use of kube-apiserver: get, list in pages, watch with bookmarks and expired
//! revisions, create with `generateName`, update with optimistic concurrency, merge patch, server-side apply with field owners,
//! the subresources `status` and `eviction`, finalizers, preconditions, label and field selectors, discovery, and kinds from
//! CustomResourceDefinitions with their defaults. `tests/apiserver` checks that it behaves like the real one.
//!
//! The server does not validate (no schema errors, no CEL), authorise, call webhooks, or run controllers. As in the test
//! clusters of [`crate::cluster`], dependents are not garbage-collected, and objects of a deleted namespace stay.

mod failure;
mod kinds;
mod ownership;
mod request;
mod respond;
mod select;
mod store;
mod watch;

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use coracle_types::Clock;
use futures_util::future::BoxFuture;
use http::{Method, Request, Response};
use http_body_util::BodyExt as _;
use jiff::Timestamp;
use kube::{Client, client::Body};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tokio::sync::watch as latest;

use self::{failure::Failure, ownership::Manager, request::Url, store::Store};
use super::fuse::Fuse;

/// Longest duration of a request. The duration is drawn from the seed, so that each seed orders concurrent calls differently.
const LATENCY_MAX: Duration = Duration::from_millis(4);

/// API server. Clones share it.
#[derive(Clone)]
pub struct ApiServer(Arc<Shared>);

struct Shared {
    store: Mutex<Store>,
    /// Latest revision, which watches wait for.
    revision: latest::Sender<u64>,
    clock: Clock,
    random: Mutex<StdRng>,
    writes: AtomicU64,
}

impl std::fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiServer").finish_non_exhaustive()
    }
}

impl ApiServer {
    /// Creates an empty cluster with the namespaces `default`, `kube-system` and `kube-public`.
    #[must_use]
    pub fn new(seed: u64, clock: Clock) -> Self {
        let store = Store::new(seed, timestamp(&clock));
        let revision = latest::Sender::new(store.revision);
        let random = Mutex::new(StdRng::seed_from_u64(seed.wrapping_add(1)));
        Self(Arc::new(Shared {
            store: Mutex::new(store),
            revision,
            clock,
            random,
            writes: AtomicU64::new(0),
        }))
    }

    /// Creates a client for a user.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client_with(Fuse::default())
    }

    /// Creates a client whose calls count for `fuse`. Watches and Events do not count: the work of a watch never ends, and no
    /// controller reads Events.
    #[must_use]
    pub fn client_with(&self, fuse: Fuse) -> Client {
        Client::new(Service { server: self.clone(), fuse }, "default")
    }

    /// Stores an object of a built-in kind.
    pub(super) fn seed(&self, kind: &str, object: &impl serde::Serialize) {
        let mut store = self.store();
        let kind = store.kinds.iter().find(|k| k.kind == kind).cloned().expect("a kind that is built in");
        let mut object = serde_json::to_value(object).expect("objects are JSON");
        object["apiVersion"] = kind.api_version("v1").into();
        object["kind"] = kind.kind.clone().into();
        let by = Manager { name: "sim".into(), applies: false, subresource: String::new() };
        store.create(&kind, "", object, &by, self.now()).expect("an object that is complete and new");
    }

    /// Expires watches from older revisions, as compaction of etcd does.
    pub fn compact(&self) {
        let mut store = self.store();
        store.compacted = store.revision;
    }

    /// Number of write requests so far, including those that changed nothing.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.0.writes.load(Ordering::Relaxed)
    }

    /// Stored objects except Events and Leases, as `resource namespace/name`. Generated names end in `*`.
    #[must_use]
    pub fn inventory(&self) -> Vec<String> {
        let store = self.store();
        let named =
            store.objects.iter().filter(|((_, plural, ..), _)| plural != "events" && plural != "leases");
        let mut all: Vec<_> = named
            .map(|((_, plural, namespace, name), stored)| {
                match stored.object["metadata"]["generateName"].as_str() {
                    Some(prefix) => format!("{plural} {namespace}/{prefix}*"),
                    None => format!("{plural} {namespace}/{name}"),
                }
            })
            .collect();
        all.sort();
        all
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.0.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        timestamp(&self.0.clock)
    }

    fn latency(&self) -> Duration {
        let mut random = self.0.random.lock().unwrap_or_else(PoisonError::into_inner);
        LATENCY_MAX.mul_f64(random.random())
    }

    async fn answer(&self, request: Request<Body>) -> Response<respond::Reply> {
        let (parts, body) = request.into_parts();
        let Some(url) = Url::parse(&parts.uri) else { return respond::failure(&Failure::unknown_path()) };
        let Ok(body) = body.collect().await else {
            return respond::failure(&Failure::bad_request("the request body ended early"));
        };
        tokio::time::sleep(self.latency()).await;
        if parts.method != Method::GET {
            self.0.writes.fetch_add(1, Ordering::Relaxed);
        }
        let reply = self.respond(&parts, &url, &body.to_bytes());
        let revision = self.store().revision;
        self.0.revision.send_if_modified(|latest| std::mem::replace(latest, revision) != revision);
        reply
    }
}

fn timestamp(clock: &Clock) -> Timestamp {
    Timestamp::from_millisecond(clock.now().0).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// Connection of one client to the server.
#[derive(Clone, Debug)]
struct Service {
    server: ApiServer,
    fuse: Fuse,
}

impl tower::Service<Request<Body>> for Service {
    type Response = Response<respond::Reply>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let Self { server, fuse } = self.clone();
        let call = request::label(request.method(), request.uri());
        let counts =
            !call.contains("/events") && !request.uri().query().unwrap_or_default().contains("watch=true");
        Box::pin(async move {
            let reply = server.answer(request).await;
            if counts {
                fuse.after_call(&call).await;
            }
            Ok(reply)
        })
    }
}

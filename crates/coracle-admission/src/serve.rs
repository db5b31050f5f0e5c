//! The listener: TLS, one path, bounded in connections, bytes and time.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{Json, Router, extract::DefaultBodyLimit, extract::State, http::StatusCode, routing::post};
use coracle_api::MikromVM;
use coracle_microvm::{Fleet, discovery::request};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use jiff::Timestamp;
use kube::core::{
    DynamicObject,
    admission::{AdmissionRequest, AdmissionResponse, AdmissionReview, Operation},
};
use rustls::ServerConfig;
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet, time::timeout};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info, warn};

use crate::{
    Error, install,
    judge::{Question, Target, judge},
    pki::Leaf,
};

/// Connections at once.
const CONNECTIONS_MAX: usize = 256;
/// Largest question, in bytes: two objects of the API server's own limit would be 3 MiB; a MikromVM is tiny.
const BODY_BYTES_MAX: usize = 1 << 20;
/// A connection that says nothing for so long during its handshake is dropped.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// A connection lives at most this long; the API server opens another.
const CONNECTION: Duration = Duration::from_secs(600);
/// How long a question waits for the fleet to be known.
const READY: Duration = Duration::from_secs(2);

/// The certificate that is shown; replaced while serving.
#[derive(Clone, Default)]
pub(crate) struct Tls(Arc<Mutex<Option<Shown>>>);

#[derive(Clone)]
struct Shown {
    config: Arc<ServerConfig>,
    renew_after: Timestamp,
}

impl Tls {
    pub(crate) fn set(&self, leaf: Leaf) -> Result<(), Error> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![leaf.certificate], leaf.key)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Shown { config: Arc::new(config), renew_after: leaf.renew_after });
        Ok(())
    }

    pub(crate) fn renew_after(&self) -> Option<Timestamp> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|shown| shown.renew_after)
    }

    fn config(&self) -> Option<Arc<ServerConfig>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|shown| shown.config.clone())
    }
}

#[derive(Clone)]
struct Answer {
    fleet: Fleet,
    fail_open: bool,
}

/// Serves for ever. Dropping it ends all connections.
pub(crate) async fn serve(listener: &TcpListener, tls: Tls, fleet: Fleet, fail_open: bool) {
    let router = Router::new()
        .route(install::PATH, post(answer))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(Answer { fleet, fail_open });
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors: without a pause this would spin.
                warn!(%error, "connection not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (Some(config), Ok(slot)) = (tls.config(), slots.clone().try_acquire_owned()) else { continue };
        let service = TowerToHyperService::new(router.clone());
        connections.spawn(async move {
            let _slot = slot;
            let stream = match timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return debug!(%peer, %error, "handshake failed"),
                Err(_) => return debug!(%peer, "handshake timed out"),
            };
            let server = auto::Builder::new(TokioExecutor::new());
            if let Ok(Err(error)) =
                timeout(CONNECTION, server.serve_connection(TokioIo::new(stream), service)).await
            {
                debug!(%peer, error, "connection ended");
            }
        });
    }
}

async fn answer(
    State(state): State<Answer>,
    Json(review): Json<AdmissionReview<MikromVM>>,
) -> Result<Json<AdmissionReview<DynamicObject>>, StatusCode> {
    // An error here is "no answer": the failure policy decides.
    if timeout(READY, state.fleet.ready()).await.is_err() {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    let request: AdmissionRequest<MikromVM> = review.try_into().map_err(|_| StatusCode::BAD_REQUEST)?;
    let response = AdmissionResponse::from(&request);
    let response = match verdict(&state, &request) {
        Ok(()) => response,
        Err(why) => {
            info!(ns = request.namespace, name = request.name, why, "refused");
            response.deny(why)
        }
    };
    Ok(Json(response.into_review()))
}

fn verdict(state: &Answer, asked: &AdmissionRequest<MikromVM>) -> Result<(), String> {
    let Some(new) = &asked.object else { return Ok(()) };
    let old = match asked.operation {
        Operation::Update => asked.old_object.as_ref(),
        _ => None,
    };
    let mut wanted = request(new);
    wanted.namespace = asked.namespace.clone().unwrap_or_default();
    let nodes = state.fleet.candidates(&wanted.namespace, old);
    judge(&Question {
        new,
        old,
        target: target(&state.fleet, new),
        request: wanted,
        nodes: &nodes,
        overcommit: state.fleet.overcommit(),
        fail_open: state.fail_open,
    })
}

fn target(fleet: &Fleet, vm: &MikromVM) -> Target {
    let spec = &vm.spec;
    match (spec.agent_address.as_str(), spec.node_name.as_str()) {
        ("", "") => Target::Anywhere,
        ("", node) => Target::Node(node.to_owned()),
        (address, _) => fleet.node_at(address).map_or(Target::Outside, Target::Node),
    }
}

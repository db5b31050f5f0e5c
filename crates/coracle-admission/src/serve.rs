//! TLS listener with limits on connections, bytes and time.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json, Router,
    extract::{DefaultBodyLimit, Request, State},
    http::StatusCode,
    middleware::{self, Next},
    response::Response,
    routing::post,
};
use coracle_access::{AnyCertificate, ClientCa, PeerCertificates};
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
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet, time::timeout};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info, warn};

use coracle_authority::Leaf;

use crate::{
    Error, install,
    judge::{Review, Target, judge},
};

/// Largest number of concurrent connections.
const CONNECTIONS_MAX: usize = 256;
/// ALPN protocols that clients may choose; upgrades need HTTP/1.1.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// Largest review, in bytes. Two objects of the API server's own limit would be 3 MiB, but a MikromVM is small.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Time limit of the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Longest life of a connection; the API server opens another. An upgraded connection belongs to its session and is not
/// limited.
const CONNECTION: Duration = Duration::from_secs(600);
/// Longest wait of a review for the list of nodes.
const READY: Duration = Duration::from_secs(2);

/// Certificate of the server, replaceable while serving. Clients may present any certificate; it is verified after the
/// handshake.
#[derive(Clone, Default)]
pub(crate) struct Tls(Arc<Mutex<Option<Shown>>>);

#[derive(Clone)]
struct Shown {
    config: Arc<ServerConfig>,
    renew_after: Timestamp,
}

impl Tls {
    pub(crate) fn set(&self, leaf: Leaf) -> Result<(), Error> {
        self.set_config(vec![leaf.certificate], leaf.key, leaf.renew_after)
    }

    /// Uses a certificate of the user, which the caller replaces.
    pub(crate) fn set_chain(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<(), Error> {
        self.set_config(chain, key, Timestamp::MAX)
    }

    fn set_config(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        renew_after: Timestamp,
    ) -> Result<(), Error> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let clients = Arc::new(AnyCertificate::new(None, &provider));
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain, key)?;
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        *self.0.lock() = Some(Shown { config: Arc::new(config), renew_after });
        Ok(())
    }

    pub(crate) fn renew_after(&self) -> Option<Timestamp> {
        self.0.lock().as_ref().map(|shown| shown.renew_after)
    }

    fn config(&self) -> Option<Arc<ServerConfig>> {
        self.0.lock().as_ref().map(|shown| shown.config.clone())
    }
}

/// Wraps a router so that only clients of an authority are answered, and others receive 401.
pub(crate) fn require_client_of(router: Router, authority: ClientCa) -> Router {
    router.layer(middleware::from_fn_with_state(authority, check_client))
}

async fn check_client(
    State(authority): State<ClientCa>,
    Extension(PeerCertificates(chain)): Extension<PeerCertificates>,
    request: Request,
    next: Next,
) -> Result<Response, StatusCode> {
    match authority.has_signed(&chain) {
        true => Ok(next.run(request).await),
        false => Err(StatusCode::UNAUTHORIZED),
    }
}

#[derive(Clone)]
struct Answer {
    fleet: Fleet,
    fail_open: bool,
}

/// Returns the router for the review of MikromVMs.
pub(crate) fn router(fleet: Fleet, fail_open: bool) -> Router {
    Router::new()
        .route(install::PATH, post(answer))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(Answer { fleet, fail_open })
}

/// Serves forever. Dropping the future ends all connections.
pub(crate) async fn serve(listener: &TcpListener, tls: Tls, router: Router) {
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
                // The process may be out of file descriptors: without a pause this loop would spin.
                warn!(%error, "accept connection failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (Some(config), Ok(slot)) = (tls.config(), slots.clone().try_acquire_owned()) else { continue };
        let router = router.clone();
        connections.spawn(async move {
            let _slot = slot;
            let stream = match timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return debug!(%peer, %error, "handshake failed"),
                Err(_) => return debug!(%peer, "handshake timed out"),
            };
            let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let shown = PeerCertificates(chain.iter().map(|one| one.clone().into_owned()).collect());
            let service = TowerToHyperService::new(router.layer(Extension(shown)));
            let server = auto::Builder::new(TokioExecutor::new());
            let served = server.serve_connection_with_upgrades(TokioIo::new(stream), service);
            if let Ok(Err(error)) = timeout(CONNECTION, served).await {
                debug!(%peer, error, "connection ended");
            }
        });
    }
}

async fn answer(
    State(state): State<Answer>,
    Json(review): Json<AdmissionReview<DynamicObject>>,
) -> Result<Json<AdmissionReview<DynamicObject>>, StatusCode> {
    // An HTTP error counts as no answer: the failure policy of the webhook decides.
    if timeout(READY, state.fleet.ready()).await.is_err() {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    let request: AdmissionRequest<DynamicObject> = review.try_into().map_err(|_| StatusCode::BAD_REQUEST)?;
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

/// Returns the object before and after the change. A stored object that cannot be parsed may be replaced; otherwise it could
/// not be repaired.
fn objects(asked: &AdmissionRequest<DynamicObject>) -> Result<(Option<MikromVM>, Option<MikromVM>), String> {
    let read = |object: &DynamicObject| object.clone().try_parse::<MikromVM>();
    let new = asked.object.as_ref().map(read).transpose();
    let new = new.map_err(|error| format!("cannot read the object: {error}"))?;
    Ok((asked.old_object.as_ref().and_then(|old| read(old).ok()), new))
}

fn verdict(state: &Answer, asked: &AdmissionRequest<DynamicObject>) -> Result<(), String> {
    let (old, new) = objects(asked)?;
    let Some(new) = &new else { return Ok(()) };
    let old = match asked.operation {
        Operation::Update => old.as_ref(),
        _ => None,
    };
    let mut wanted = request(new);
    wanted.namespace = asked.namespace.clone().unwrap_or_default();
    let mut nodes = state.fleet.candidates(&wanted.namespace, old);
    // A cordoned node may return later, so the object may wait for it.
    nodes.iter_mut().for_each(|node| node.barred = None);
    judge(&Review {
        new,
        old,
        target: target(&state.fleet, new),
        request: wanted,
        nodes: &nodes,
        overcommit: state.fleet.overcommit(),
        exceeded_quota: state.fleet.exceeded_quota(asked.namespace.as_deref().unwrap_or_default(), new),
        fail_open: state.fail_open,
    })
}

fn target(fleet: &Fleet, vm: &MikromVM) -> Target {
    let spec = &vm.spec;
    match (spec.agent_address.as_str(), spec.node_name.as_str()) {
        ("", "") => Target::Anywhere,
        ("", node) => Target::Node(node.to_owned()),
        (address, _) => fleet.node_of(address).map_or(Target::Outside, Target::Node),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn admission_request(old_phase: &str, phase: &str) -> AdmissionRequest<DynamicObject> {
        let object = |phase: &str| {
            json!({
                "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": "web"},
                "spec": {"image": "i", "vcpuCount": 1, "memoryMB": 128}, "status": {"phase": phase},
            })
        };
        let kind = json!({"group": "vm.mikrom.es", "version": "v1alpha1", "kind": "MikromVM"});
        let resource = json!({"group": "vm.mikrom.es", "version": "v1alpha1", "resource": "mikromvms"});
        serde_json::from_value(json!({
            "uid": "1", "kind": kind, "resource": resource, "name": "web", "namespace": "team", "operation": "UPDATE",
            "userInfo": {}, "object": object(phase), "oldObject": object(old_phase), "dryRun": false,
        }))
        .unwrap()
    }

    #[test]
    fn unreadable_object_can_be_repaired() {
        let (old, new) = objects(&admission_request("Levitating", "Running")).unwrap();
        assert!(old.is_none() && new.is_some());
        assert!(
            objects(&admission_request("Running", "Levitating"))
                .unwrap_err()
                .contains("cannot read the object")
        );
        let (old, new) = objects(&admission_request("Running", "Running")).unwrap();
        assert!(old.is_some() && new.is_some());
    }
}

//! Listener: TLS, HTTP/1.1 with upgrades and HTTP/2, with limits on connections, bytes and time.

use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use coracle_access::ClientCa;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use super::error::ApiError;
use super::guard::Peer;
use super::tls;

/// Most concurrent connections. Further ones wait in the kernel's backlog.
const CONNECTIONS_MAX: usize = 1024;
/// Time limit of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Idle time after which a connection is closed, as in the kubelet.
const IDLE: Duration = Duration::from_secs(90);
/// Most bytes and most number of headers of a request.
const HEADER_BYTES_MAX: u32 = 1 << 20;
const HEADERS_MAX: usize = 1024;
/// Most concurrent requests on one HTTP/2 connection.
const STREAMS_MAX: u32 = 250;
/// Delay after a failed accept, e.g. because of too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time for requests to complete when the server stops.
const GRACE: Duration = Duration::from_secs(5);

/// Server certificate, which is renewed while serving, and client authorities.
pub(super) struct Tls {
    pub(super) serving: watch::Receiver<Arc<ServerConfig>>,
    pub(super) client_ca: Option<ClientCa>,
}

/// Accepts connections until `stop`, then waits a limited time for open ones.
pub(super) async fn serve(
    listener: TcpListener,
    mut tls: Tls,
    router: Router,
    stop: CancellationToken,
) -> Result<(), ApiError> {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    let client_ca = tls.client_ca.map(Arc::new);
    let mut config = tls::server_config(&tls.serving.borrow_and_update().clone(), client_ca.as_deref())?;
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = accept(&listener, &slots) => accepted,
        };
        let (stream, slot) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Without a pause, this loop would spin while file descriptors are exhausted.
                tracing::warn!(%error, "accept connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if tls.serving.has_changed().unwrap_or(false) {
            match tls::server_config(&tls.serving.borrow_and_update().clone(), client_ca.as_deref()) {
                Ok(renewed) => config = renewed,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "renew certificate failed");
                }
            }
        }
        let (acceptor, router) = (TlsAcceptor::from(config.clone()), router.clone());
        let (stop, client_ca) = (stop.clone(), client_ca.clone());
        connections.spawn(async move {
            let _slot = slot;
            serve_connection(stream, acceptor, client_ca, router, stop).await;
        });
    }
    // Each connection ends with its current request. Those that do not end in time are aborted with the set.
    let ended = async { while connections.join_next().await.is_some() {} };
    let _late = timeout(GRACE, ended).await;
    Ok(())
}

/// Accepts a connection within the limit. Cancel-safe: a slot without a connection is released.
async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let slot = slots.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, slot))
}

async fn serve_connection(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    client_ca: Option<Arc<ClientCa>>,
    router: Router,
    stop: CancellationToken,
) {
    let _small_messages_matter = stream.set_nodelay(true);
    let stream = match timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => return tracing::debug!("TLS handshake timed out"),
    };
    let connection = stream.get_ref().1;
    let chain = connection.peer_certificates().unwrap_or_default();
    let user = client_ca.and_then(|ca| ca.user(chain)).map(Arc::new);
    let is_http2 = connection.alpn_protocol() == Some(b"h2");
    let service = TowerToHyperService::new(router.layer(Extension(Peer(user))));
    let ended = match is_http2 {
        true => serve_http2(stream, service, stop).await,
        false => serve_http1(stream, service, stop).await,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection failed");
    }
}

async fn serve_http1(
    stream: TlsStream<TcpStream>,
    service: TowerToHyperService<Router>,
    stop: CancellationToken,
) -> hyper::Result<()> {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(IDLE);
    builder.max_buf_size(HEADER_BYTES_MAX as usize).max_headers(HEADERS_MAX);
    let connection = builder.serve_connection(TokioIo::new(stream), service).with_upgrades();
    tokio::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return ended,
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

async fn serve_http2(
    stream: TlsStream<TcpStream>,
    service: TowerToHyperService<Router>,
    stop: CancellationToken,
) -> hyper::Result<()> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.timer(TokioTimer::new()).keep_alive_interval(IDLE);
    builder.max_header_list_size(HEADER_BYTES_MAX).max_concurrent_streams(STREAMS_MAX);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return ended,
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

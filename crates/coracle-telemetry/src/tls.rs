//! TLS listener, for ports with non-public content.

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use axum::serve::Listener;
use rustls::ServerConfig;
use tokio::{
    io,
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tracing::debug;

/// Most concurrent handshakes; further connections wait in the kernel's backlog.
const HANDSHAKES_MAX: usize = 64;
/// Time limit of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// TLS configuration that may change while a listener runs, for renewed certificates.
pub trait TlsSettings: fmt::Debug + Send + Sync {
    /// Returns the configuration of the next connection.
    fn current(&self) -> Arc<ServerConfig>;
}

impl TlsSettings for ServerConfig {
    fn current(&self) -> Arc<ServerConfig> {
        Arc::new(self.clone())
    }
}

/// Listener that accepts connections and performs handshakes concurrently, so that a slow client does not block others.
#[derive(Debug)]
pub struct TlsListener {
    listener: TcpListener,
    settings: Arc<dyn TlsSettings>,
    handshakes: JoinSet<Option<(TlsStream<TcpStream>, SocketAddr)>>,
}

impl TlsListener {
    /// Returns a listener that speaks TLS with `config`.
    #[must_use]
    pub fn new(listener: TcpListener, config: Arc<ServerConfig>) -> Self {
        Self::with_settings(listener, config)
    }

    /// Like [`new`](Self::new), with a configuration that may change.
    #[must_use]
    pub fn with_settings(listener: TcpListener, settings: Arc<dyn TlsSettings>) -> Self {
        Self { listener, settings, handshakes: JoinSet::new() }
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let is_full = self.handshakes.len() >= HANDSHAKES_MAX;
            tokio::select! {
                Some(done) = self.handshakes.join_next() => {
                    if let Ok(Some(connection)) = done {
                        return connection;
                    }
                }
                accepted = self.listener.accept(), if !is_full => match accepted {
                    Ok((stream, peer)) => {
                        let acceptor = TlsAcceptor::from(self.settings.current());
                        self.handshakes.spawn(async move {
                            match timeout(HANDSHAKE, acceptor.accept(stream)).await {
                                Ok(Ok(stream)) => Some((stream, peer)),
                                ended => {
                                    debug!(%peer, timed_out = ended.is_err(), "handshake failed");
                                    None
                                }
                            }
                        });
                    }
                    // Without a pause, this loop would spin while file descriptors are exhausted.
                    Err(_) => sleep(Duration::from_millis(100)).await,
                },
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

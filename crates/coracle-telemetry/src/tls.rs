//! TLS listener, for ports whose content is not public.

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

/// Handshakes at once; more wait in the kernel.
const HANDSHAKES_MAX: usize = 64;
/// A connection that says nothing for so long during its handshake is dropped.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Settings of a listener that may change while it runs, for certificates that are renewed.
pub trait TlsSettings: fmt::Debug + Send + Sync {
    /// Settings of the next connection.
    fn current(&self) -> Arc<ServerConfig>;
}

impl TlsSettings for ServerConfig {
    fn current(&self) -> Arc<ServerConfig> {
        Arc::new(self.clone())
    }
}

/// Accepts connections and shakes hands, one slow client not keeping the next from it.
#[derive(Debug)]
pub struct TlsListener {
    listener: TcpListener,
    settings: Arc<dyn TlsSettings>,
    handshakes: JoinSet<Option<(TlsStream<TcpStream>, SocketAddr)>>,
}

impl TlsListener {
    /// Speaks TLS as `config` says on `listener`.
    #[must_use]
    pub fn new(listener: TcpListener, config: Arc<ServerConfig>) -> Self {
        Self::with_settings(listener, config)
    }

    /// As [`new`](Self::new), with settings that may change.
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
                    // Out of descriptors: without a pause this would spin.
                    Err(_) => sleep(Duration::from_millis(100)).await,
                },
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

//! In-memory connections: simulated peers that speak a byte stream listen here instead of on sockets.

use std::{
    collections::HashMap,
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use futures_util::Stream;
use tokio::{
    io::{DuplexStream, duplex},
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
};

/// Buffer of one direction of a connection, bytes.
const BUFFER: usize = 64 * 1024;
/// First port assigned to a listener without an address.
const FIRST_PORT: u16 = 40_000;

/// Listeners of one simulation. Clones share the network.
#[derive(Clone, Debug, Default)]
pub struct Network(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    listeners: HashMap<String, UnboundedSender<DuplexStream>>,
    ports: u16,
}

impl Network {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens at `address`. An earlier listener at the address stops.
    #[must_use]
    pub fn listen_at(&self, address: &str) -> Listener {
        let (sender, incoming) = unbounded_channel();
        self.state().listeners.insert(address.to_owned(), sender);
        Listener { address: address.to_owned(), incoming }
    }

    /// Listens at a new address.
    #[must_use]
    pub fn listen(&self) -> Listener {
        let port = {
            let mut state = self.state();
            state.ports += 1;
            FIRST_PORT + state.ports
        };
        self.listen_at(&format!("127.0.0.1:{port}"))
    }

    /// Connects to the listener at `address`.
    ///
    /// # Errors
    /// Connection refused when there is no listener.
    pub fn connect(&self, address: &str) -> io::Result<DuplexStream> {
        let (ours, theirs) = duplex(BUFFER);
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let state = self.state();
        let listener = state.listeners.get(address).ok_or_else(refused)?;
        listener.send(theirs).map_err(|_| refused())?;
        Ok(ours)
    }
}

/// Stream of incoming connections. Connections are refused after it is dropped.
#[derive(Debug)]
pub struct Listener {
    address: String,
    incoming: UnboundedReceiver<DuplexStream>,
}

impl Listener {
    /// Address of the listener: `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Stream for Listener {
    type Item = io::Result<DuplexStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.incoming.poll_recv(cx).map(|stream| stream.map(Ok))
    }
}

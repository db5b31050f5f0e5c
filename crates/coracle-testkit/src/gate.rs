//! Proxy in front of a server on loopback that counts the bytes of the server and cuts connections at a limit.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

/// Forwards connections until the server has sent `limit` bytes; then cuts all of them and refuses new ones.
#[derive(Debug)]
pub struct Gate {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    to: SocketAddr,
    sent: AtomicU64,
    limit: AtomicU64,
    ended: AtomicBool,
}

impl Gate {
    /// Starts a proxy to `to` that cuts connections after `limit` bytes.
    ///
    /// # Errors
    /// When no port is free.
    pub fn start(to: SocketAddr, limit: u64) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let state = State { to, sent: 0.into(), limit: limit.into(), ended: false.into() };
        let state = Arc::new(state);
        let own = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming() {
                if own.ended.load(SeqCst) {
                    return;
                }
                if let Ok(client) = client {
                    // An absent server counts as a cut.
                    let _cut = own.pass(client);
                }
            }
        });
        Ok(Self { address, state })
    }

    /// Listening address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes that the server has sent through the proxy so far.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.state.sent.load(SeqCst)
    }

    /// Removes the limit.
    pub fn open(&self) {
        self.state.limit.store(u64::MAX, SeqCst);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.state.ended.store(true, SeqCst);
        // Unblocks the thread that accepts connections.
        let _gone = TcpStream::connect(self.address);
    }
}

impl State {
    fn is_shut(&self) -> bool {
        self.sent.load(SeqCst) >= self.limit.load(SeqCst)
    }

    fn pass(self: &Arc<Self>, mut client: TcpStream) -> io::Result<()> {
        if self.is_shut() {
            return Ok(());
        }
        let mut server = TcpStream::connect(self.to)?;
        let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
        thread::spawn(move || {
            let _ended = io::copy(&mut from_client, &mut to_server);
            let _gone = to_server.shutdown(Shutdown::Write);
        });
        let state = Arc::clone(self);
        thread::spawn(move || {
            let mut buffer = vec![0; 16 << 10];
            while let Ok(read @ 1..) = server.read(&mut buffer) {
                if state.is_shut() || client.write_all(&buffer[..read]).is_err() {
                    break;
                }
                state.sent.fetch_add(read as u64, SeqCst);
            }
            let _gone = client.shutdown(Shutdown::Both);
            let _gone = server.shutdown(Shutdown::Both);
        });
        Ok(())
    }
}

//! Replica that waits for the lease of a shared store and forwards connections to the process that holds it.
//!
//! ```text
//!   client ─▶ replica ── bytes ──▶ holder of the lease (its addresses are in the store)
//! ```
//! Bytes are copied unchanged, so that TLS, tokens and streams are between the client and the holder. When the replica takes
//! over, it closes these connections, and clients reach it when they reconnect.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Longest time to connect to the holder.
const DIAL: Duration = Duration::from_secs(5);
/// Most concurrent connections; more wait in the kernel.
const CONNECTIONS_MAX: usize = 4_096;

/// Addresses at which other processes reach the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Advertised {
    pub(crate) grpc: SocketAddr,
    pub(crate) http: SocketAddr,
}

impl Advertised {
    /// Addresses of the listeners, with `host` instead of their own IP address. `None`: they listen on every address, and no
    /// `host` is given.
    pub(crate) fn of(grpc: SocketAddr, http: SocketAddr, host: Option<IpAddr>) -> Option<Self> {
        let at = |own: SocketAddr| {
            let ip = host.unwrap_or(own.ip());
            (!ip.is_unspecified()).then(|| SocketAddr::new(ip, own.port()))
        };
        Some(Self { grpc: at(grpc)?, http: at(http)? })
    }
}

/// Forwards connections of both listeners to the holder of the lease, if it is known. Never returns; dropping it closes all
/// connections.
pub(crate) async fn forward(
    (grpc, http): (&TcpListener, &TcpListener),
    holder: watch::Receiver<Option<Advertised>>,
) {
    let mut connections = JoinSet::new();
    loop {
        let is_full = connections.len() >= CONNECTIONS_MAX;
        let (accepted, is_grpc) = tokio::select! {
            Some(_) = connections.join_next() => continue,
            accepted = grpc.accept(), if !is_full => (accepted, true),
            accepted = http.accept(), if !is_full => (accepted, false),
        };
        let known = *holder.borrow();
        match (accepted, known) {
            (Ok((client, _)), Some(at)) => {
                connections.spawn(pass(client, if is_grpc { at.grpc } else { at.http }));
            }
            // If there is no known holder, the connection is closed and the client tries again.
            (Ok(_), None) => {}
            // The process may be out of file descriptors; without a pause this would spin.
            (Err(_), _) => sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn pass(mut client: TcpStream, to: SocketAddr) {
    let mut holder = match timeout(DIAL, TcpStream::connect(to)).await {
        Ok(Ok(holder)) => holder,
        Ok(Err(error)) => return tracing::debug!(%to, %error, "connect to holder of lease failed"),
        Err(_) => return tracing::debug!(%to, "connect to holder of lease timed out"),
    };
    let quick = client.set_nodelay(true).and(holder.set_nodelay(true));
    if let Err(error) = quick {
        tracing::debug!(%error, "set TCP_NODELAY failed");
    }
    if let Err(error) = copy_bidirectional(&mut client, &mut holder).await {
        tracing::debug!(%to, %error, "forwarded connection broke");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advertised_address_table() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let of = |grpc: &str, http: &str, host: Option<&str>| {
            let host = host.map(|host| host.parse().unwrap());
            Advertised::of(at(grpc), at(http), host).map(|a| (a.grpc.to_string(), a.http.to_string()))
        };
        let some = |grpc: &str, http: &str| Some((grpc.to_owned(), http.to_owned()));
        for (why, got, want) in [
            ("its own", of("10.0.0.1:1", "10.0.0.2:2", None), some("10.0.0.1:1", "10.0.0.2:2")),
            (
                "the given one",
                of("0.0.0.0:1", "0.0.0.0:2", Some("10.0.0.3")),
                some("10.0.0.3:1", "10.0.0.3:2"),
            ),
            ("none", of("0.0.0.0:1", "10.0.0.2:2", None), None),
            ("IPv6", of("[::]:1", "[::]:2", Some("fd00::1")), some("[fd00::1]:1", "[fd00::1]:2")),
        ] {
            assert_eq!(got, want, "{why}");
        }
    }
}

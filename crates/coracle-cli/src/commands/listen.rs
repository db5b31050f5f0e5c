//! Local TCP ports that a command serves until ^C.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::error::Failure;

/// Listens at a port; 0 selects a free one. The returned address has the port.
pub(super) async fn listen(address: IpAddr, port: u16) -> Result<(TcpListener, SocketAddr), Failure> {
    let at = SocketAddr::new(address, port);
    let failed = |e: io::Error| {
        Failure::new("COR-CLI-007", format!("listen on {at}: {e}")).help("choose another local port")
    };
    let listener = TcpListener::bind(at).await.map_err(failed)?;
    let at = listener.local_addr().map_err(failed)?;
    Ok((listener, at))
}

/// Serves each connection with `carry`, and prints why one failed. Dropping the future ends all connections.
pub(super) async fn serve<F>(listener: TcpListener, carry: impl Fn(TcpStream) -> F)
where
    F: Future<Output = Result<(), Failure>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    while let Ok((stream, peer)) = listener.accept().await {
        let carried = carry(stream);
        connections.spawn(async move {
            if let Err(failure) = carried.await {
                eprintln!("connection of {peer}: {failure}");
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

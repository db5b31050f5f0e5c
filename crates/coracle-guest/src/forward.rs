//! Forwards one TCP connection inside the guest over a stream.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use coracle_proto::guest::port_forward_request::Message as In;
use coracle_proto::guest::{PortForwardChunk, PortForwardHeader, PortForwardRequest};
use futures_util::{Stream, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tonic::Status;

use crate::error::Error;
use crate::pipe::CHUNK;
use crate::task_stream::{Outbox, TaskStream};

/// Time limit to connect inside the guest.
const CONNECT: Duration = Duration::from_secs(10);

/// Connects and copies in both directions. The end of the client's messages, or `close_write`, is a half-close. When the guest
/// closes the connection, the call ends after the last byte.
///
/// # Errors
/// UNAVAILABLE with the port, if nothing listens on it.
pub(crate) async fn forward<S>(
    header: &PortForwardHeader,
    input: S,
) -> Result<TaskStream<PortForwardChunk>, Error>
where
    S: Stream<Item = Result<PortForwardRequest, Status>> + Send + Unpin + 'static,
{
    let (read, write) = connect(&targets(header)?).await?.into_split();
    Ok(TaskStream::new(|outbox, tasks| {
        tasks.spawn(async move {
            let up = async {
                upstream(input, write).await;
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = downstream(read, outbox) => {}
                () = up => {}
            }
        });
    }))
}

fn targets(header: &PortForwardHeader) -> Result<Vec<SocketAddr>, Error> {
    let port = u16::try_from(header.port).ok().filter(|p| *p != 0);
    let port = port.ok_or_else(|| Error::invalid(format!("invalid TCP port {}", header.port)))?;
    let hosts = match header.host.as_str() {
        "" | "localhost" => vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)],
        other => vec![
            other
                .parse()
                .map_err(|_| Error::invalid(format!("invalid host {other:?}: not an IP address")))?,
        ],
    };
    Ok(hosts.into_iter().map(|host| SocketAddr::new(host, port)).collect())
}

async fn connect(targets: &[SocketAddr]) -> Result<TcpStream, Error> {
    let mut first: Option<Error> = None;
    for target in targets {
        let failure = match tokio::time::timeout(CONNECT, TcpStream::connect(target)).await {
            Ok(Ok(socket)) => {
                let _ = socket.set_nodelay(true);
                return Ok(socket);
            }
            Ok(Err(e)) if e.kind() == io::ErrorKind::ConnectionRefused => {
                format!("nothing listens on port {} of the guest ({target})", target.port())
            }
            Ok(Err(e)) => format!("port {} of the guest ({target}): {e}", target.port()),
            Err(_) => format!("port {} of the guest ({target}) does not answer", target.port()),
        };
        first.get_or_insert(Error::Unavailable(failure));
    }
    Err(first.unwrap_or(Error::TimedOut("connect")))
}

async fn upstream<S>(mut input: S, mut socket: OwnedWriteHalf)
where
    S: Stream<Item = Result<PortForwardRequest, Status>> + Unpin,
{
    while let Some(Ok(request)) = input.next().await {
        match request.message {
            Some(In::Data(data)) => {
                if socket.write_all(&data).await.is_err() {
                    return;
                }
            }
            Some(In::CloseWrite(true)) => break,
            Some(In::CloseWrite(false) | In::Header(_)) | None => {}
        }
    }
    let _ = socket.shutdown().await;
}

async fn downstream(mut socket: OwnedReadHalf, outbox: Outbox<PortForwardChunk>) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let message = match socket.read(&mut buffer).await {
            Ok(0) => return,
            Ok(n) => Ok(PortForwardChunk { data: buffer.get(..n).unwrap_or_default().to_vec() }),
            Err(e) => Err(Status::aborted(format!("connection inside the guest: {e}"))),
        };
        let last = message.is_err();
        if outbox.send(message).await.is_err() || last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_forward_targets_table() {
        let of = |port, host: &str| targets(&PortForwardHeader { port, host: host.into() });
        assert_eq!(of(80, "").unwrap(), ["127.0.0.1:80".parse().unwrap(), "[::1]:80".parse().unwrap()]);
        assert_eq!(of(80, "10.0.0.9").unwrap(), ["10.0.0.9:80".parse().unwrap()]);
        assert!(of(0, "").is_err() && of(65_536, "").is_err() && of(80, "example.org").is_err());
    }
}

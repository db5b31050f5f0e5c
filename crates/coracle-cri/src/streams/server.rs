//! HTTP server on 127.0.0.1. A token in the path identifies the session; the rest of the request does not.

use std::convert::Infallible;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coracle_pod::streams::PortDialer;
use coracle_streaming::{Body, Dial, Limits, Tasks, serve_port_forward, serve_session};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Waiting;
use crate::disk_pods::DiskPorts;
use crate::server::CriServer;

/// Time limit for a client to send its request.
const HEADER_LIMIT: Duration = Duration::from_secs(30);
/// Delay after a failed accept, e.g. because of too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl CriServer {
    /// Listens, and returns a future that serves until `stop`.
    ///
    /// # Errors
    /// Errors of bind(2).
    pub(crate) async fn streaming_server(
        &self,
        stop: CancellationToken,
    ) -> io::Result<impl Future<Output = ()> + use<>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let _once = self.0.streaming.address.set(listener.local_addr()?);
        let server = self.clone();
        Ok(async move { server.serve_streams(listener, stop).await })
    }

    async fn serve_streams(&self, listener: TcpListener, stop: CancellationToken) {
        let sessions = Tasks::new(stop.clone());
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stop.cancelled() => break,
            };
            match accepted {
                Ok((stream, _)) => {
                    let (server, sessions) = (self.clone(), sessions.clone());
                    connections.spawn(async move { server.serve_connection(stream, sessions).await });
                }
                Err(error) => {
                    tracing::warn!(%error, "accept streaming connection failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
            while connections.try_join_next().is_some() {}
        }
        sessions.stop().await;
    }

    async fn serve_connection(&self, stream: TcpStream, sessions: Tasks) {
        let _small_messages_matter = stream.set_nodelay(true);
        let service = service_fn(move |request| {
            let response = self.answer(request, &sessions);
            async move { Ok::<_, Infallible>(response) }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_LIMIT)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades()
            .await;
        if let Err(error) = served {
            tracing::debug!(%error, "streaming connection failed");
        }
    }

    fn answer(&self, request: Request<Incoming>, sessions: &Tasks) -> Response<Body> {
        let mut parts = request.uri().path().trim_start_matches('/').splitn(2, '/');
        let (verb, token) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let waiting = self.0.streaming.waiting.take(token);
        let (limits, host) = (Limits::default(), self.0.host.clone());
        match (verb, waiting) {
            ("exec", Some(Waiting::Exec { session, streams })) => {
                serve_session(request, streams, session, &limits, sessions)
            }
            ("attach", Some(Waiting::Attach { session, streams })) => {
                serve_session(request, streams, session, &limits, sessions)
            }
            ("portforward", Some(Waiting::PortForward { vm, disk })) => {
                let guest = PortDialer::new(host.clone(), &vm, self.0.tasks.clone());
                let ports = ports(request.uri().query().unwrap_or_default());
                let dial: Arc<dyn Dial> = match disk {
                    true => Arc::new(DiskPorts { host, vm, guest }),
                    false => Arc::new(guest),
                };
                serve_port_forward(request, &ports, dial, &limits, sessions)
            }
            _ => not_found(),
        }
    }
}

/// Parses the ports of old WebSocket clients, `port=80&port=81,82`.
fn ports(query: &str) -> Vec<u16> {
    let values = query.split('&').filter_map(|pair| pair.strip_prefix("port="));
    values.flat_map(|value| value.split(',')).filter_map(|port| port.parse().ok()).collect()
}

fn not_found() -> Response<Body> {
    let mut response = Response::new(Body::new(Bytes::from_static(b"unknown or used token\n")));
    *response.status_mut() = StatusCode::NOT_FOUND;
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_a_query_are_read() {
        for (query, want) in [
            ("", vec![]),
            ("port=80", vec![80]),
            ("a=b&port=80,81&port=82", vec![80, 81, 82]),
            ("port=x", vec![]),
        ] {
            assert_eq!(ports(query), want, "{query}");
        }
    }
}

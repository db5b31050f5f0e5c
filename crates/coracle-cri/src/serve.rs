//! Serving: the socket of the kubelet, the port for streams of its clients, and the shutdown of both.

use std::io;
use std::time::Duration;

use coracle_proto::cri::image_service_server::ImageServiceServer;
use coracle_proto::cri::runtime_service_server::RuntimeServiceServer;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::CriServer;
use crate::facts::SandboxFacts;
use crate::service::Service;
use crate::status::is_acknowledged;
use crate::trace;

/// Most bytes of a reply that a kubelet accepts.
const REPLY_MAX: usize = 16 << 20;
/// Time for background work to complete when the server stops.
const DRAIN: Duration = Duration::from_secs(20);

/// Error that ends the server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CriError {
    /// The port for exec, attach and port-forward cannot be opened.
    #[error("cannot listen on 127.0.0.1")]
    Listen {
        /// Operating system error.
        source: io::Error,
    },
    /// The socket of the kubelet fails.
    #[error("cannot serve the kubelet")]
    Serve {
        /// Error of the transport.
        source: tonic::transport::Error,
    },
}

impl CriServer {
    /// Serves a kubelet until `stop`. First removes sandboxes whose creation was interrupted by a restart. VMs outlive the
    /// server.
    ///
    /// # Errors
    /// [`CriError`].
    pub async fn serve(&self, listener: UnixListener, stop: CancellationToken) -> Result<(), CriError> {
        self.remove_unacknowledged().await;
        self.attend_all();
        let streaming =
            self.streaming_server(stop.clone()).await.map_err(|source| CriError::Listen { source })?;
        let service = Service(self.clone());
        let (ending, stopping) = (stop.clone(), self.0.stopping.clone());
        let ended = async move {
            ending.cancelled().await;
            stopping.cancel();
        };
        let server = Server::builder()
            .trace_fn(|request| {
                let parent = request.headers().get("traceparent").and_then(|value| value.to_str().ok());
                trace::span(request.uri().path(), parent)
            })
            .add_service(RuntimeServiceServer::new(service.clone()).max_encoding_message_size(REPLY_MAX))
            .add_service(ImageServiceServer::new(service).max_encoding_message_size(REPLY_MAX))
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), ended);
        let (served, ()) = tokio::join!(
            async {
                let served = server.await;
                stop.cancel();
                served
            },
            streaming
        );
        self.0.tasks.close();
        let _late = tokio::time::timeout(DRAIN, self.0.tasks.wait()).await;
        served.map_err(|source| CriError::Serve { source })
    }

    async fn remove_unacknowledged(&self) {
        for view in self.0.host.list() {
            let record = &view.record;
            if SandboxFacts::of(record).is_none_or(|facts| is_acknowledged(record, &facts)) {
                continue;
            }
            tracing::info!(vm = %record.id, "removing sandbox whose creation was cut off");
            if let Err(error) = self.0.host.delete(record.name.as_str(), true, None).await {
                tracing::warn!(vm = %record.id, error = error.chain(), "remove sandbox failed");
            }
        }
    }
}

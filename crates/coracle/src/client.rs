//! The connection to a node's socket.

use std::io;
use std::path::{Path, PathBuf};

use coracle_proto::host::host_client::HostClient;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::cli::Global;
use crate::error::Failure;

/// Connects to the node that the command line names.
pub(crate) async fn connect(global: &Global) -> Result<HostClient<Channel>, Failure> {
    let socket = global.socket();
    match open(&socket).await {
        Ok(client) => Ok(client),
        Err(why) => {
            Err(Failure::new("COR-CLI-002", format!("no node answers at {}: {why}", socket.display()))
                .help("start one with `coracle up --detach`, or name its state folder with --state DIR"))
        }
    }
}

/// As [`connect`], for callers that wait for a node.
pub(crate) async fn open(socket: &Path) -> Result<HostClient<Channel>, String> {
    // Tried once before: a channel's own error does not say why.
    UnixStream::connect(socket).await.map_err(|e: io::Error| e.to_string())?;
    let path: PathBuf = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://node")
        .connect_with_connector(connector)
        .await
        .map_err(|e| e.to_string())?;
    Ok(HostClient::new(channel).max_decoding_message_size(16 << 20))
}

//! TLS of a node's services, with a certificate from files or one that the operator of the cluster signs.

use std::io;
use std::path::Path;
use std::sync::Arc;

use coracle_certificate::{ClientCertificates, FileTls, NodeCertificate, TlsFiles};
use coracle_cli::cli::NodeArgs;
use coracle_cli::error::Failure;
use coracle_cli::tasks::Tasks;
use coracle_telemetry::TlsSettings as _;
use coracle_types::Clock;
use futures_util::{Stream, StreamExt as _};
use kube::Client;
use miette::{IntoDiagnostic as _, miette};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::limits::{Connection, HANDSHAKE};

/// Directory of the certificate files below the state directory.
const DIR: &str = "certificates";
/// ALPN protocols: gRPC.
const PROTOCOLS: [&str; 1] = ["h2"];
/// Maximum number of handshakes at a time; further connections wait in the kernel.
const HANDSHAKES: usize = 64;

/// TLS of a listener that requires client certificates.
#[derive(Clone, Debug)]
pub(super) struct ServiceTls {
    files: TlsFiles,
    /// True once the files exist.
    ready: watch::Receiver<bool>,
    /// Server name in the certificate, if the cluster signs it.
    pub(super) server_name: Option<String>,
}

impl ServiceTls {
    /// Uses the files that the flags name, else a certificate of the cluster's operator. `None` without either.
    pub(super) async fn of(
        tasks: &mut Tasks,
        args: &NodeArgs,
        state: &Path,
        clock: &Clock,
        cluster: Option<Client>,
    ) -> miette::Result<Option<Self>> {
        let named = (args.tls_cert.clone(), args.tls_key.clone(), args.tls_client_ca.clone());
        match named {
            (Some(certificate), Some(key), client_ca @ Some(_)) => {
                let files = TlsFiles { certificate, key, client_ca };
                FileTls::load(files.clone(), ClientCertificates::Required, &PROTOCOLS).into_diagnostic()?;
                return Ok(Some(Self { files, ready: watch::channel(true).1, server_name: None }));
            }
            (None, None, None) => {}
            _ => {
                let message =
                    "--host-listen and --agent-listen need all of --tls-cert, --tls-key and --tls-client-ca";
                return Err(Failure::usage(message)
                    .help("or none, for a certificate of the cluster's operator")
                    .into());
            }
        }
        let Some(client) = cluster else { return Ok(None) };
        let node = super::node_name(args);
        let namespace = super::own_namespace(coracle_api::keys::SYSTEM_NAMESPACE.to_owned());
        let (name, dir) = (node.clone(), state.join(DIR));
        let kept = NodeCertificate::open(client, namespace, name, dir, clock.clone()).await;
        let kept = kept.into_diagnostic()?;
        let (pair, ca) = (kept.pair().to_owned(), kept.ca().to_owned());
        let (is_ready, ready) = watch::channel(false);
        tasks.spawn("certificate", |stop| async move {
            kept.run(is_ready, stop).await;
            Ok(())
        });
        let files = TlsFiles { certificate: pair.clone(), key: pair, client_ca: Some(ca) };
        Ok(Some(Self { files, ready, server_name: Some(node) }))
    }

    /// Yields the connections of `accepted` after their handshakes. First waits for the certificate.
    pub(super) async fn accept(
        mut self,
        accepted: impl Stream<Item = io::Result<Connection>> + Send,
    ) -> miette::Result<impl Stream<Item = io::Result<TlsStream<Connection>>> + Send> {
        let ended =
            |_| miette!("the certificate of the node was not signed: the task that asks for it has ended");
        self.ready.wait_for(|ready| *ready).await.map(drop).map_err(ended)?;
        let files = self.files;
        let load = move || FileTls::load(files, ClientCertificates::Required, &PROTOCOLS);
        let tls = Arc::new(tokio::task::spawn_blocking(load).await.into_diagnostic()?.into_diagnostic()?);
        let shaken = accepted
            .map(move |connection| handshake(connection, tls.clone()))
            .buffer_unordered(HANDSHAKES)
            .filter_map(std::future::ready);
        Ok(shaken)
    }
}

/// Performs a handshake. `None`: the client has no valid certificate, or is too slow.
async fn handshake(
    connection: io::Result<Connection>,
    tls: Arc<FileTls>,
) -> Option<io::Result<TlsStream<Connection>>> {
    let connection = match connection {
        Ok(connection) => connection,
        Err(error) => return Some(Err(error)),
    };
    match timeout(HANDSHAKE, TlsAcceptor::from(tls.current()).accept(connection)).await {
        Ok(Ok(stream)) => Some(Ok(stream)),
        Ok(Err(error)) => {
            tracing::debug!(%error, "TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!("TLS handshake timed out");
            None
        }
    }
}

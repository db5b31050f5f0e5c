//! The server: what its parts share, and its life.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use coracle_host::Host;
use coracle_proto::cri::image_service_server::ImageServiceServer;
use coracle_proto::cri::runtime_service_server::RuntimeServiceServer;
use coracle_proto::cri::{
    RuntimeCondition, RuntimeFeatures, RuntimeHandler, RuntimeHandlerFeatures, RuntimeStatus, StatusResponse,
};
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;
use tonic::transport::Server;

use crate::CriOptions;
use crate::facts::SandboxFacts;
use crate::service::Service;
use crate::status::is_acknowledged;
use crate::streams::Streaming;
use crate::table::Table;

/// Largest reply that a kubelet takes, bytes.
const REPLY_MAX: usize = 16 << 20;
/// How long work that nobody waits for any more may take when the server ends.
const DRAIN: Duration = Duration::from_secs(20);

/// Why the server ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CriError {
    /// The port for exec, attach and port-forward.
    #[error("cannot listen on 127.0.0.1")]
    Listen {
        /// The kernel's answer.
        source: io::Error,
    },
    /// The socket of the kubelet.
    #[error("cannot serve the kubelet")]
    Serve {
        /// What the transport says.
        source: tonic::transport::Error,
    },
}

/// CRI v1 over one host core. Clones are the same server.
#[derive(Clone, Debug)]
pub struct CriServer(pub(crate) Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) host: Host,
    pub(crate) options: CriOptions,
    pub(crate) table: Table,
    /// Work that goes to its end even when its caller has gone.
    pub(crate) tasks: TaskTracker,
    /// Names of sandboxes and containers that are being created.
    creating: Mutex<HashSet<String>>,
    /// One creation or removal of containers at a time in a sandbox: they share directories.
    changing: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
    /// What the kubelet said last.
    pub(crate) pod_cidr: Mutex<String>,
    pub(crate) streaming: Streaming,
    /// Ends streams that would go on for ever.
    pub(crate) stopping: CancellationToken,
}

impl CriServer {
    /// A server over a host core.
    #[must_use]
    pub fn new(host: Host, options: CriOptions) -> Self {
        Self(Arc::new(Inner {
            host,
            options,
            table: Table::default(),
            tasks: TaskTracker::new(),
            creating: Mutex::default(),
            changing: Mutex::default(),
            pod_cidr: Mutex::default(),
            streaming: Streaming::default(),
            stopping: CancellationToken::new(),
        }))
    }

    /// Serves a kubelet until `stop`. Sandboxes whose creation was cut off by a restart are removed first. VMs outlive it.
    ///
    /// # Errors
    /// [`CriError`].
    pub async fn serve(&self, listener: UnixListener, stop: CancellationToken) -> Result<(), CriError> {
        self.remove_unacknowledged().await;
        let streaming =
            self.streaming_server(stop.clone()).await.map_err(|source| CriError::Listen { source })?;
        let service = Service(self.clone());
        let (ending, stopping) = (stop.clone(), self.0.stopping.clone());
        let ended = async move {
            ending.cancelled().await;
            stopping.cancel();
        };
        let server = Server::builder()
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
            if SandboxFacts::of(record).is_none() || is_acknowledged(record) {
                continue;
            }
            tracing::info!(vm = %record.id, "removing sandbox whose creation was cut off");
            if let Err(error) = self.0.host.delete(record.name.as_str(), true, None).await {
                tracing::warn!(vm = %record.id, error = error.chain(), "remove sandbox failed");
            }
        }
    }

    /// What the node can do, for a kubelet.
    pub(crate) fn runtime_status(&self, verbose: bool) -> StatusResponse {
        let host = &self.0.host;
        let condition = |r#type: &str, missing: Option<(&str, &str)>| RuntimeCondition {
            r#type: r#type.to_owned(),
            status: missing.is_none(),
            reason: missing.map(|(reason, _)| reason.to_owned()).unwrap_or_default(),
            message: missing.map(|(_, message)| message.to_owned()).unwrap_or_default(),
        };
        let stopping = host.stopping().is_cancelled().then_some(("Stopping", "the node is stopping"));
        let why = "guests have no address that the node can reach: start it as root";
        let no_network = host.network().subnet().is_none().then_some(("NoPodNetwork", why));
        let handlers = [String::new()].into_iter().chain(self.0.options.handlers.clone());
        let handler = |name| RuntimeHandler { name, features: Some(RuntimeHandlerFeatures::default()) };
        let info = || {
            let cidr = self.0.pod_cidr.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let facts = serde_json::json!({ "podCIDR": cidr, "network": host.network().mode() });
            [("node".to_owned(), facts.to_string())].into()
        };
        StatusResponse {
            status: Some(RuntimeStatus {
                conditions: vec![condition("RuntimeReady", stopping), condition("NetworkReady", no_network)],
            }),
            info: if verbose { info() } else { Default::default() },
            runtime_handlers: handlers.map(handler).collect(),
            features: Some(RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() }),
        }
    }

    /// Reserves a name until the claim is dropped; `None`: it is being created already.
    pub(crate) fn claim(&self, name: String) -> Option<Claim> {
        let new = self.0.creating().insert(name.clone());
        new.then(|| Claim { server: self.clone(), name })
    }

    /// Excludes other changes of one sandbox while the guard lives.
    pub(crate) async fn change(&self, sandbox: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut all = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|_, lock| lock.strong_count() > 0);
            let known = all.get(sandbox).and_then(Weak::upgrade);
            let lock = known.unwrap_or_default();
            all.insert(sandbox.to_owned(), Arc::downgrade(&lock));
            lock
        };
        lock.lock_owned().await
    }

    /// Runs work to its end, even when the caller goes away: then, and when it fails, it is undone.
    pub(crate) async fn run_or_undo<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Status>> + Send + 'static,
        undo: impl Future<Output = ()> + Send + 'static,
    ) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        self.0.tasks.spawn(async move {
            let outcome = work.await;
            if outcome.is_err() || reply.is_closed() {
                undo.await;
            }
            let _caller_gone = reply.send(outcome);
        });
        answer.await.unwrap_or_else(|_| Err(Status::unavailable("the server is stopping")))
    }
}

impl Inner {
    fn creating(&self) -> MutexGuard<'_, HashSet<String>> {
        self.creating.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reserved name.
#[derive(Debug)]
pub(crate) struct Claim {
    server: CriServer,
    name: String,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.server.0.creating().remove(&self.name);
    }
}

/// A fresh id, 32 hexadecimal digits.
pub(crate) fn new_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

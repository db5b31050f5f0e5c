//! Virtual node: all of its tasks, and their owner.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use coracle_certificate::{CertificateError, Certificates, Signer, Subject, client_ca};
use coracle_host::Host;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::interval;
use tokio_util::sync::CancellationToken;

use crate::api::{Api, ApiError};
use crate::node::{Identity, Reader, Registered, Renewer, Reporter};
use crate::options::{StartPolicy, VirtualNodeOptions};
use crate::pods::{self, PodsConfig};
use crate::table::PodTable;

/// Version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Directory of certificates, in the state directory of the host core.
const CERTIFICATES: &str = "virtual-node";
/// Time without a turn after which the loop of the pods counts as stuck. Each sweep makes a turn.
const STUCK_AFTER: Duration = Duration::from_secs(180);
/// Interval between checks of the loop.
const LOOK: Duration = Duration::from_secs(10);

/// Node of a cluster whose pods are VMs of a host core.
#[derive(Clone)]
pub struct VirtualNode {
    host: Host,
    client: Client,
    lease_client: Client,
    options: VirtualNodeOptions,
}

/// Error that ends a virtual node.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VirtualNodeError {
    /// The API cannot listen.
    #[error("cannot listen on {at}")]
    Listen {
        /// Listening address.
        at: SocketAddr,
        /// Operating system error.
        source: std::io::Error,
    },
    /// The pods cannot be read at the start.
    #[error("cannot read the pods of virtual node {node:?}")]
    Reconcile {
        /// Name of the node.
        node: String,
        /// Error of the read.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The serving certificate cannot be used.
    #[error("cannot use the certificate of virtual node {node:?}")]
    Certificate {
        /// Name of the node.
        node: String,
        /// Error of the certificate.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The API ended with an error.
    #[error("cannot serve the API of virtual node {node:?}")]
    Api {
        /// Name of the node.
        node: String,
        /// Error of the API.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A task ended before the node.
    #[error("task {task} of virtual node {node:?} ended early")]
    Task {
        /// Name of the node.
        node: String,
        /// Name of the task.
        task: &'static str,
    },
}

type Tasks = JoinSet<(&'static str, Result<(), VirtualNodeError>)>;

impl VirtualNode {
    /// Returns a node of the cluster of `client`, whose pods are VMs of `host`. Nothing is started before [`VirtualNode::run`].
    #[must_use]
    pub fn new(host: Host, client: Client, options: VirtualNodeOptions) -> Self {
        Self { lease_client: client.clone(), host, client, options }
    }

    /// Sets a client with its own connection for renewals of the Lease, so that no other work delays them.
    #[must_use]
    pub fn with_lease_client(self, client: Client) -> Self {
        Self { lease_client: client, ..self }
    }

    /// Registers the node and runs its pods until `stop`. Pods keep running afterwards, and the next run adopts them.
    ///
    /// # Errors
    /// [`VirtualNodeError`].
    pub async fn run(self, stop: CancellationToken) -> Result<(), VirtualNodeError> {
        if self.options.start == StartPolicy::ExitUnlessReconciled {
            match stop.run_until_cancelled(pods::check_list(&self.client, &self.options.name)).await {
                None => return Ok(()),
                Some(Ok(())) => {}
                Some(Err(source)) => {
                    return Err(VirtualNodeError::Reconcile { node: self.options.name, source });
                }
            }
        }
        let at = self.options.listen;
        let failed = |source| VirtualNodeError::Listen { at, source };
        let listener = TcpListener::bind(at).await.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let ended = stop.child_token();
        let mut tasks = Tasks::new();
        let begun = self.begin(&mut tasks, listener, bound, &ended).await;
        let first = match begun {
            Ok(()) => tokio::select! {
                // Tasks that end because of `stop` do not count as failed.
                biased;
                () = stop.cancelled() => Ok(()),
                Some(task) = tasks.join_next() => self.task_error(task),
            },
            Err(error) => Err(error),
        };
        ended.cancel();
        while tasks.join_next().await.is_some() {}
        first
    }

    fn task_error(
        &self,
        task: Result<(&'static str, Result<(), VirtualNodeError>), tokio::task::JoinError>,
    ) -> Result<(), VirtualNodeError> {
        let (task, result) = task.unwrap_or(("", Ok(())));
        result.and_then(|()| Err(VirtualNodeError::Task { node: self.options.name.clone(), task }))
    }

    /// Starts all tasks.
    async fn begin(
        &self,
        tasks: &mut Tasks,
        listener: TcpListener,
        bound: SocketAddr,
        stop: &CancellationToken,
    ) -> Result<(), VirtualNodeError> {
        let (host, client) = (self.host.clone(), self.client.clone());
        let options = Arc::new(self.options.clone());
        let (table, clock) = (PodTable::default(), host.clock().clone());
        let identity = Identity::read(&options, bound, VERSION);
        let reader = Reader { host: host.clone(), cpus: options.cpus, memory: options.memory };
        let (facts, facts_seen) = watch::channel(Arc::new(identity.pod_facts(&reader.read().await)));
        let (registered, registered_seen) = watch::channel(Registered::default());
        let (ready, ready_seen) = watch::channel(false);
        let (turns, turns_seen) = watch::channel(0);
        let (sync_loop, sync_loop_seen) = watch::channel(true);
        let certificates = self.certificates(&identity).await?;
        let shown = certificates.shown();
        let lease = Renewer {
            client: self.lease_client.clone(),
            node: options.name.clone(),
            clock: clock.clone(),
            intervals: options.intervals,
            registered: registered_seen.clone(),
        };
        let api = Api {
            host: host.clone(),
            pods: table.clone(),
            client: client.clone(),
            node: options.name.clone(),
            anonymous: options.anonymous,
            sync_loop: sync_loop_seen,
            ssh: options.vms.ssh.clone(),
        };
        let pods = PodsConfig {
            host,
            client: client.clone(),
            options: options.clone(),
            table,
            facts: facts_seen,
            registered: registered_seen,
            ready,
            turns,
        };
        let reporter =
            Reporter { client, options, identity, reader, clock, ready: ready_seen, registered, facts };
        let mut spawn = |name, task: futures_util::future::BoxFuture<'static, ()>| {
            tasks.spawn(async move {
                (name, {
                    task.await;
                    Ok(())
                })
            });
        };
        spawn("lease", Box::pin(lease.run(stop.clone())));
        spawn("status", Box::pin(reporter.run(stop.clone())));
        spawn("certificate", Box::pin(certificates.run(stop.clone())));
        spawn("pods", Box::pin(pods::run(pods, stop.clone())));
        spawn("watchdog", Box::pin(watch_loop(turns_seen, sync_loop, stop.clone())));
        tasks.spawn(self.clone().serve(api, listener, shown, stop.clone()));
        Ok(())
    }

    async fn certificates(&self, identity: &Identity) -> Result<Certificates, VirtualNodeError> {
        let options = &self.options;
        let subject = Subject {
            signer: Signer::KubeletServing,
            node: options.name.clone(),
            hostname: options.hostname.clone().unwrap_or_else(|| options.name.clone()),
            address: identity.address,
        };
        let dir = self.host.config().state_dir.join(CERTIFICATES);
        let clock = self.host.clock().clone();
        let opened =
            Certificates::open(self.client.clone(), options.certificate.clone(), subject, dir, clock);
        opened.await.map_err(|error| self.certificate_error(error))
    }

    fn certificate_error(&self, error: CertificateError) -> VirtualNodeError {
        VirtualNodeError::Certificate { node: self.options.name.clone(), source: Box::new(error) }
    }

    /// Serves the API until `stop`, after the client authorities are known.
    async fn serve(
        self,
        api: Api,
        listener: TcpListener,
        shown: watch::Receiver<Arc<rustls::ServerConfig>>,
        stop: CancellationToken,
    ) -> (&'static str, Result<(), VirtualNodeError>) {
        let found = client_ca(&self.client, self.options.client_ca.as_deref());
        let served = match stop.run_until_cancelled(found).await {
            None => Ok(()),
            Some(Err(error)) => Err(self.certificate_error(error)),
            Some(Ok(client_ca)) => {
                api.serve(listener, shown, client_ca, stop).await.map_err(|error: ApiError| {
                    VirtualNodeError::Api { node: self.options.name.clone(), source: Box::new(error) }
                })
            }
        };
        ("api", served)
    }
}

/// Checks whether the loop of the pods makes turns, for the health check of the API.
async fn watch_loop(mut turns: watch::Receiver<u64>, healthy: watch::Sender<bool>, stop: CancellationToken) {
    let mut ticks = interval(LOOK);
    let mut last = tokio::time::Instant::now();
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        if turns.has_changed().unwrap_or(false) {
            turns.mark_unchanged();
            last = tokio::time::Instant::now();
        }
        healthy.send_replace(last.elapsed() < STUCK_AFTER);
    }
}

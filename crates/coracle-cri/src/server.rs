//! Server: shared state and lifecycle.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use coracle_host::Host;
use coracle_net::{Assignment, Subnet};
use coracle_proto::cri::{
    RuntimeCondition, RuntimeFeatures, RuntimeHandler, RuntimeHandlerFeatures, RuntimeStatus, StatusResponse,
};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;
use tracing::Instrument as _;

use crate::CriOptions;
use crate::handlers::{self, Handler, Mode};
use crate::streams::Streaming;
use crate::table::Table;

/// CRI v1 server on a host core. Clones share the server.
#[derive(Clone, Debug)]
pub struct CriServer(pub(crate) Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) host: Host,
    pub(crate) options: CriOptions,
    pub(crate) handlers: Vec<Handler>,
    pub(crate) table: Table,
    /// Work that runs to completion even when its caller is gone.
    pub(crate) tasks: TaskTracker,
    /// Names of sandboxes and containers that are being created.
    creating: Mutex<HashSet<String>>,
    /// Locks of sandboxes: the containers of a sandbox are created and removed one at a time, because they share directories.
    changing: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
    /// Pod CIDR that the kubelet set last.
    pub(crate) pod_cidr: Mutex<String>,
    pub(crate) streaming: Streaming,
    /// Cancels streams that do not end themselves.
    pub(crate) stopping: CancellationToken,
}

impl CriServer {
    /// Returns a server on a host core.
    #[must_use]
    pub fn new(host: Host, options: CriOptions) -> Self {
        let usable = host.probes().iter().filter(|(_, probe)| probe.accelerator.is_some());
        let drivers: Vec<_> = usable.map(|(name, _)| *name).collect();
        Self(Arc::new(Inner {
            handlers: handlers::all(&options, &drivers),
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

    /// Returns the status and features of the node, for a kubelet.
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
        let no_network = (!host.network().gives_addresses()).then_some(("NoPodNetwork", why));
        let parts = host.jail_missing().join("; ");
        let not_jailed = (!parts.is_empty()).then_some(("JailPartsMissing", &*parts));
        let handler = |handler: &Handler| RuntimeHandler {
            name: handler.name.clone(),
            // A read-only shared directory includes all mounts below it on the node.
            features: Some(RuntimeHandlerFeatures {
                recursive_read_only_mounts: true,
                // The guest of a disk image has users of its own.
                user_namespaces: handler.mode == Mode::Containers,
            }),
        };
        let info = || {
            let cidr = self.0.pod_cidr.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let subnet = host.network().subnet().map(|subnet| subnet.to_string());
            let facts =
                serde_json::json!({ "podCIDR": cidr, "subnet": subnet, "network": host.network().mode() });
            [("node".to_owned(), facts.to_string())].into()
        };
        StatusResponse {
            status: Some(RuntimeStatus {
                conditions: vec![
                    condition("RuntimeReady", stopping),
                    condition("NetworkReady", no_network),
                    condition("VMMsJailed", not_jailed),
                ],
            }),
            info: if verbose { info() } else { Default::default() },
            runtime_handlers: self.0.handlers.iter().map(handler).collect(),
            features: Some(RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() }),
        }
    }

    /// Stores the pod CIDR of the kubelet, and moves the node's guests to that network: at once, or when the last VM with an
    /// address is removed.
    pub(crate) async fn set_pod_cidr(&self, cidr: String) {
        let network = self.0.host.network();
        let subnet = cidr.split(',').find_map(|one| one.trim().parse::<Subnet>().ok());
        if let Some(wanted) = subnet {
            let (own, help) =
                (network.subnet().map(|own| own.to_string()), format!("coracle node --subnet {wanted}"));
            match network.assign(wanted).await {
                Ok(Assignment::Current) => tracing::info!(cidr, "pod CIDR of the node"),
                Ok(Assignment::Pending) => {
                    tracing::warn!(cidr, own, "pod CIDR is taken when the last VM is removed")
                }
                Ok(Assignment::Fixed) if own.as_ref().is_none_or(|own| *own == wanted.to_string()) => {}
                Ok(Assignment::Fixed) => {
                    tracing::warn!(cidr, own, help, "pod CIDR of the kubelet is not the subnet of --subnet");
                }
                Err(error) => tracing::error!(cidr, %error, "take the pod CIDR failed"),
            }
        } else if !cidr.is_empty() {
            tracing::warn!(cidr, "pod CIDR has no IPv4 network of 8 to 30 bits, guests keep their subnet");
        }
        *self.0.pod_cidr.lock().unwrap_or_else(PoisonError::into_inner) = cidr;
    }

    /// Reserves a name until the claim is dropped; `None`: the object is being created already.
    pub(crate) fn claim(&self, name: String) -> Option<Claim> {
        let new = self.0.lock_creating().insert(name.clone());
        new.then(|| Claim { server: self.clone(), name })
    }

    /// Locks a sandbox against other changes of its containers while the guard lives.
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

    /// Runs work to its end, even when the caller is gone. Undoes the work if it fails or the caller is gone.
    pub(crate) async fn run_or_undo<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Status>> + Send + 'static,
        undo: impl Future<Output = ()> + Send + 'static,
    ) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        let run = async move {
            let outcome = work.await;
            if outcome.is_err() || reply.is_closed() {
                undo.await;
            }
            let _caller_gone = reply.send(outcome);
        };
        self.0.tasks.spawn(run.in_current_span());
        answer.await.unwrap_or_else(|_| Err(Status::unavailable("the server is stopping")))
    }
}

impl Inner {
    fn lock_creating(&self) -> MutexGuard<'_, HashSet<String>> {
        self.creating.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reserved name.
#[derive(Debug)]
pub(crate) struct Claim {
    server: CriServer,
    name: String,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.server.0.lock_creating().remove(&self.name);
    }
}

/// Returns a new random id of 32 hexadecimal digits.
pub(crate) fn new_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

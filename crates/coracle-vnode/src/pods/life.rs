//! Life of one pod on this node: its task of `coracle-pod`, and the input of that task from the cluster.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_api::cocoon::keys;
use coracle_host::Host;
use coracle_pod::events::PodEvent;
use coracle_pod::host::{HostRuntime, PodDirs, PodId};
use coracle_pod::node::NodeFacts;
use coracle_pod::objects::{Objects, references};
use coracle_pod::observed::PodFailure;
use coracle_pod::reason;
use coracle_pod::runtime::{PodObject as _, PodRuntime as _, RuntimeError};
use coracle_pod::task::{self, Ended, PodInput, PodPeers};
use coracle_pod::{ImageKeys, NamespaceKeys};
use coracle_vm_pod::pod::{annotations_of_disk, is_vm_pod};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Client};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::admission::{AdmissionFailure, Ledger, is_for};
use super::grpc::NodeNetwork;
use super::object::ApiPod;
use super::references::{ObjectWatches, Subscription};
use super::row::Row;
use super::runtime::ShownRuntime;
use crate::node::Registered;
use crate::options::VirtualNodeOptions;
use crate::pod_events::Recorder;
use crate::table::PodTable;

/// Time limit of a read, and delay before it is repeated.
const LIMIT: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(5);
/// Service account of pods that set none.
const DEFAULT_ACCOUNT: &str = "default";

/// State that all pods of the node share.
pub(super) struct Shared {
    pub(super) host: Host,
    pub(super) client: Client,
    pub(super) options: Arc<VirtualNodeOptions>,
    pub(super) table: PodTable,
    pub(super) ledger: Ledger,
    pub(super) recorder: Recorder,
    pub(super) watches: ObjectWatches,
    pub(super) image_keys: NamespaceKeys,
    pub(super) facts: watch::Receiver<Arc<NodeFacts>>,
    pub(super) registered: watch::Receiver<Registered>,
}

/// Last seen version of a pod.
#[derive(Clone, Debug)]
pub(super) struct PodVersion {
    pub(super) pod: Arc<Pod>,
    /// The object vanished: end everything at once.
    pub(super) forced: bool,
}

impl PodVersion {
    /// Returns whether the pod is being ended, so that the objects it refers to do not matter.
    fn is_ending(&self) -> bool {
        self.forced || self.pod.metadata.deletion_timestamp.is_some()
    }
}

/// Life of one pod.
pub(super) struct PodTask {
    pub(super) shared: Arc<Shared>,
    pub(super) pod: PodId,
    pub(super) seen: watch::Receiver<PodVersion>,
    pub(super) subscription: Subscription,
}

impl PodTask {
    /// Runs until nothing is left of the pod, or until `stop`. Cancel-safe: a later run continues from the existing VM.
    ///
    /// # Errors
    /// When the name of the pod cannot be part of a VM name.
    pub(super) async fn run(mut self, stop: CancellationToken) -> Result<Ended, RuntimeError> {
        loop {
            if is_vm_pod(&self.seen.borrow().pod) {
                // Boxed: the future of a running pod needs no memory for the other path.
                return Box::pin(self.run_vm(stop)).await;
            }
            if let Some(ended) = self.run_containers(&stop).await? {
                return Ok(ended);
            }
        }
    }

    /// Like [`PodTask::run`], for a pod whose containers are in one VM. `None`: the pod's container turned out to be a VM; the
    /// sandbox is removed, and the object names the VM.
    async fn run_containers(&mut self, stop: &CancellationToken) -> Result<Option<Ended>, RuntimeError> {
        let first = self.seen.borrow().pod.clone();
        let disk_image = Arc::new(Notify::new());
        let row = self.new_row(&first);
        let object = Arc::new(self.api_pod(&first, &row));
        let disk = annotations_of_disk(&first);
        drop(first); // each version takes some kilobytes, and the pod runs for long
        let runtime = Arc::new(ShownRuntime {
            inner: self.host_runtime()?,
            row: row.clone(),
            only_image: image_of(disk.as_deref()).cloned(),
            disk_image: disk_image.clone(),
        });
        row.update_from_sandbox(runtime.inner.vm().as_str());
        let Some(objects) = stop.run_until_cancelled(Box::pin(self.objects())).await else {
            return Ok(Some(Ended::Stopped));
        };
        let Some(failure) = stop.run_until_cancelled(Box::pin(self.admit())).await else {
            return Ok(Some(Ended::Stopped));
        };
        let now = self.seen.borrow_and_update().clone();
        row.set_pod(&now.pod);
        let input = PodInput {
            pod: now.pod,
            objects: Arc::new(objects),
            node: self.shared.facts.borrow().clone(),
            failure,
            forced: now.forced,
        };
        let (input, receiver) = watch::channel(input);
        let peers = PodPeers {
            runtime: runtime.clone(),
            object: object.clone(),
            network: Arc::new(NodeNetwork),
            clock: self.shared.host.clock().clone(),
        };
        let mut ended = Box::pin(task::run(peers, receiver, stop.clone()));
        tokio::select! {
            ended = &mut ended => return Ok(Some(ended)),
            () = self.feed(&input, &row) => return Ok(Some(Ended::Stopped)),
            () = disk_image.notified(), if disk.is_some() => drop(ended),
        }
        let becomes =
            Box::pin(self.convert_to_vm_pod(&runtime, &object, disk.into_iter().flatten().collect()));
        Ok(stop.run_until_cancelled(becomes).await.is_none().then_some(Ended::Stopped))
    }

    /// Returns a new entry of the pod in the table of the API.
    pub(super) fn new_row(&self, pod: &Arc<Pod>) -> Arc<Row> {
        let Shared { table, host, .. } = &*self.shared;
        Arc::new(Row::new(table.clone(), host.clone(), pod.clone()))
    }

    /// Returns the object of the pod at the API server.
    pub(super) fn api_pod(&self, pod: &Pod, row: &Arc<Row>) -> ApiPod {
        ApiPod {
            client: self.shared.client.clone(),
            pod: self.pod.clone(),
            account: service_account(pod),
            events: self.shared.recorder.clone(),
            ledger: self.shared.ledger.clone(),
            row: row.clone(),
        }
    }

    fn host_runtime(&self) -> Result<HostRuntime, RuntimeError> {
        let Shared { host, options, .. } = &*self.shared;
        let (disk, memory) = super::directories(options, host);
        let dirs = PodDirs::of(&disk, &memory, &self.pod.uid);
        Ok(HostRuntime::new(host.clone(), self.pod.clone(), dirs)?.with_image_keys(self.image_keys()))
    }

    /// Returns the keys that must have signed the images of the pod.
    pub(super) fn image_keys(&self) -> ImageKeys {
        self.shared.image_keys.of_namespace(&self.pod.namespace)
    }

    /// Turns the pod into a VM pod: removes its sandbox, and names the VM in the object. Returns when the object shows that, or
    /// the pod is being ended.
    async fn convert_to_vm_pod(
        &mut self,
        runtime: &ShownRuntime,
        object: &ApiPod,
        annotations: BTreeMap<&'static str, String>,
    ) {
        tracing::info!(ns = self.pod.namespace, name = self.pod.name, "the image is a disk: the pod is a VM");
        while !self.seen.borrow().is_ending() {
            let named = async {
                runtime.remove_sandbox().await?;
                object.annotate(&annotations).await
            };
            // The waits below fail when the pods of the node end, which ends this function as well.
            match named.await {
                Ok(()) => {
                    let shows = |seen: &PodVersion| is_vm_pod(&seen.pod) || seen.is_ending();
                    let _ = self.seen.wait_for(shows).await;
                    return;
                }
                Err(error) => {
                    let message = format!("cannot make it a VM: {}", error.message);
                    object.event(PodEvent::warning(reason::FAILED, None, message));
                    let _ = timeout(RETRY, self.seen.wait_for(PodVersion::is_ending)).await;
                }
            }
        }
    }

    /// Returns the objects that the pod refers to, once all of them were read; none if the pod is ended before.
    async fn objects(&mut self) -> Objects {
        let mut revision = self.shared.watches.revision();
        loop {
            let seen = self.seen.borrow_and_update().clone();
            revision.borrow_and_update();
            if let Some(objects) = self.gather(&seen.pod) {
                return objects;
            }
            if seen.is_ending() {
                return Objects::default();
            }
            tokio::select! {
                changed = self.seen.changed() => if changed.is_err() { return Objects::default() },
                _ = revision.changed() => {}
            }
        }
    }

    fn gather(&mut self, pod: &Pod) -> Option<Objects> {
        let (watches, namespace) = (&self.shared.watches, &self.pod.namespace);
        watches.subscribe(&mut self.subscription, namespace, references(pod));
        watches.gather(&self.subscription, namespace)
    }

    /// Updates the input of the task after changes in the cluster. Returns when the pods of the node end.
    async fn feed(&mut self, input: &watch::Sender<PodInput>, row: &Row) {
        let mut revision = self.shared.watches.revision();
        let mut facts = self.shared.facts.clone();
        loop {
            let seen = self.seen.borrow_and_update().clone();
            revision.borrow_and_update();
            row.set_pod(&seen.pod);
            // The old objects apply until all new ones were read.
            let objects = self.gather(&seen.pod);
            let node = facts.borrow_and_update().clone();
            input.send_if_modified(|input| {
                let objects = objects.filter(|objects| *objects != *input.objects).map(Arc::new);
                let changed = !Arc::ptr_eq(&seen.pod, &input.pod)
                    || seen.forced != input.forced
                    || node != input.node
                    || objects.is_some();
                input.objects = objects.unwrap_or_else(|| input.objects.clone());
                (input.pod, input.forced, input.node) = (seen.pod.clone(), seen.forced, node);
                changed
            });
            tokio::select! {
                changed = self.seen.changed() => if changed.is_err() { return },
                _ = revision.changed() => {}
                _ = facts.changed() => {}
            }
        }
    }

    /// Decides whether the node admits the pod. A pod that runs, is being ended or has ended is admitted.
    pub(super) async fn admit(&mut self) -> Option<PodFailure> {
        let seen = self.seen.borrow().clone();
        let Shared { ledger, facts, options, .. } = &*self.shared;
        if seen.is_ending() || has_ended(&seen.pod) {
            return None;
        }
        if has_begun(&seen.pod) {
            ledger.reserve_running(&self.pod.uid, &seen.pod);
            return None;
        }
        let node = facts.borrow().clone();
        let failure = match self.refused_labels(&seen.pod).await {
            None => ledger.admit(&self.pod.uid, &seen.pod, &node, options.pods_max).err(),
            refused => refused,
        }?;
        tracing::info!(ns = self.pod.namespace, name = self.pod.name, reason = failure.reason, "pod refused");
        self.shared
            .recorder
            .take(&self.pod, PodEvent::warning(failure.reason, None, failure.message.clone()));
        Some(PodFailure {
            reason: failure.reason.to_owned(),
            message: failure.message,
            deadline: Timestamp::from_millisecond(self.shared.host.clock().now().0).unwrap_or_default(),
            disruption: None,
        })
    }

    /// Checks whether the pod may run on a node with these labels. The scheduler may have seen newer labels; therefore a
    /// refusal is confirmed by a fresh read.
    async fn refused_labels(&self, pod: &Pod) -> Option<AdmissionFailure> {
        let name = &self.shared.options.name;
        let known = self.shared.registered.borrow().labels.clone();
        is_for(pod, name, &known).err()?;
        is_for(pod, name, &self.fresh_labels().await).err()
    }

    async fn fresh_labels(&self) -> BTreeMap<String, String> {
        let nodes: Api<Node> = Api::all(self.shared.client.clone());
        loop {
            match timeout(LIMIT, nodes.get_metadata(&self.shared.options.name)).await {
                Ok(Ok(node)) => return node.metadata.labels.unwrap_or_default(),
                Ok(Err(error)) => tracing::warn!(%error, "read the labels of the node failed"),
                Err(_) => tracing::warn!("read the labels of the node timed out"),
            }
            sleep(RETRY).await;
        }
    }
}

/// Returns the image that the annotations name.
fn image_of<'a>(annotations: Option<&'a [(&'static str, String)]>) -> Option<&'a String> {
    annotations?.iter().find(|(key, _)| *key == keys::IMAGE).map(|(_, image)| image)
}

/// Returns the service account whose tokens the pod gets.
fn service_account(pod: &Pod) -> String {
    let named = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
    named.filter(|name| !name.is_empty()).unwrap_or_else(|| DEFAULT_ACCOUNT.to_owned())
}

/// Returns whether the pod has ended.
pub(super) fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns whether this node has begun to run the pod.
pub(super) fn has_begun(pod: &Pod) -> bool {
    pod.status.as_ref().is_some_and(|status| status.start_time.is_some()) && !has_ended(pod)
}

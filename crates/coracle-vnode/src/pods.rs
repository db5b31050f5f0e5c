//! Pods of this node, and the task that runs each of them.
//!
//! ```text
//! watch of spec.nodeName ─▶ Pods: uid ─▶ Life ─▶ task of coracle-pod ─▶ host core
//! sweep: VMs without a pod ─▶ a fresh read ─▶ ended         └─▶ status, events, DELETE
//! ```
//! Pods are identified by their uid. The watch triggers; a pod that is missing is ended only after a fresh read confirms it.

mod admission;
mod claims;

mod grpc;
mod known;
mod life;
mod object;
mod references;
mod requests;
mod row;
mod runtime;
mod selector;
mod services;
mod vm;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::Host;
use coracle_pod::NamespaceKeys;
use coracle_pod::host::PodId;
use coracle_pod::node::NodeFacts;
use coracle_pod::runtime::RuntimeError;
use coracle_pod::task::Ended;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use crate::image_policy;
use crate::node::Registered;
use crate::options::VirtualNodeOptions;
use crate::pod_events::Recorder;
use crate::table::PodTable;
use life::{PodTask, PodVersion, Shared, has_begun};
use references::{ObjectWatches, Subscription};

/// Time limit of a read that confirms that a pod is gone.
const READ_LIMIT: Duration = Duration::from_secs(20);

/// Configuration for the pods of a node.
pub(crate) struct PodsConfig {
    pub(crate) host: Host,
    pub(crate) client: Client,
    pub(crate) options: Arc<VirtualNodeOptions>,
    pub(crate) table: PodTable,
    pub(crate) facts: watch::Receiver<Arc<NodeFacts>>,
    pub(crate) registered: watch::Receiver<Registered>,
    /// Set once all pods of the node are known.
    pub(crate) ready: watch::Sender<bool>,
    /// Incremented with each turn of the loop.
    pub(crate) turns: watch::Sender<u64>,
}

/// All pods of this node.
struct Pods {
    shared: Arc<Shared>,
    known: BTreeMap<String, Handle>,
    /// Pods that this node has removed, and whose objects finalizers still keep.
    removed: BTreeSet<String>,
    /// Uids whose absence is being confirmed.
    checking: BTreeSet<String>,
    /// Pods of the list that is being received; `None` between lists.
    listed: Option<BTreeSet<String>>,
    /// Pods that the last list did not contain.
    unlisted: BTreeSet<String>,
    synced: bool,
    jobs: JoinSet<Job>,
    stop: CancellationToken,
}

/// Pod and the channel to its task.
struct Handle {
    pod: PodId,
    seen: watch::Sender<PodVersion>,
}

/// Result of a job.
enum Job {
    Lived(PodId, Result<Ended, RuntimeError>),
    Checked(PodId, Fate),
    Swept,
}

/// Result of a fresh read of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The pod does not exist, or another pod has its name.
    Gone,
    /// The pod exists.
    Exists,
    /// The API server did not answer.
    Unknown,
}

/// Returns the directories for files of pods: on disk, and in memory.
pub(crate) fn directories(options: &VirtualNodeOptions, host: &Host) -> (PathBuf, PathBuf) {
    let config = host.config();
    let disk = options.pods_dir.clone().unwrap_or_else(|| config.state_dir.join("pods"));
    let memory = options.pods_memory_dir.clone().unwrap_or_else(|| config.run_dir.join("pods"));
    (disk, memory)
}

/// Reads the pods of a node once.
///
/// # Errors
/// The error of the API server, or a timeout.
pub(crate) async fn check_list(
    client: &Client,
    node: &str,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let of_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let pods: Api<Pod> = Api::all(client.clone());
    timeout(READ_LIMIT, pods.list_metadata(&of_node)).await??;
    Ok(())
}

/// Manages the pods of a node until `stop`. The pods keep running afterwards.
pub(crate) async fn run(config: PodsConfig, stop: CancellationToken) {
    let PodsConfig { host, client, options, table, facts, registered, ready, turns } = config;
    let helpers_stop = CancellationToken::new();
    let (recorder, sender) = Recorder::new(client.clone(), options.name.clone(), host.clock().clone());
    let (services, known) = watch::channel(None);
    let revision = known::Revision::new(0);
    let watches = ObjectWatches::new(client.clone(), known, revision.clone(), helpers_stop.child_token());
    let mut helpers = JoinSet::new();
    helpers.spawn(sender.run(helpers_stop.child_token()));
    helpers.spawn(services::follow(client.clone(), services, revision, helpers_stop.child_token()));
    let image_keys = options.image_policy.clone().map_or_else(NamespaceKeys::default, |namespace| {
        let (policy, known) = watch::channel(None);
        helpers.spawn(image_policy::follow(client.clone(), namespace, policy, helpers_stop.child_token()));
        image_policy::keys(known)
    });
    let ledger = admission::Ledger::default();
    let shared =
        Shared { host, client, options, table, ledger, recorder, watches, image_keys, facts, registered };
    let shared = Arc::new(shared);
    let mut pods = Pods {
        shared: shared.clone(),
        known: BTreeMap::new(),
        removed: BTreeSet::new(),
        checking: BTreeSet::new(),
        listed: None,
        unlisted: BTreeSet::new(),
        synced: false,
        jobs: JoinSet::new(),
        stop: stop.clone(),
    };
    pods.run_until_stopped(&stop, &ready, &turns).await;
    while pods.jobs.join_next().await.is_some() {}
    helpers_stop.cancel();
    shared.watches.join().await;
    while helpers.join_next().await.is_some() {}
}

impl Pods {
    async fn run_until_stopped(
        &mut self,
        stop: &CancellationToken,
        ready: &watch::Sender<bool>,
        turns: &watch::Sender<u64>,
    ) {
        let Shared { client, options, .. } = &*self.shared;
        let of_node = watcher::Config::default().fields(&format!("spec.nodeName={}", options.name));
        let mut events = std::pin::pin!(watcher(Api::<Pod>::all(client.clone()), of_node).default_backoff());
        let mut sweep = interval(options.intervals.sweep.max(Duration::from_millis(10)));
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let table = self.shared.table.clone();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(event) = events.next() => match event {
                    Ok(event) => self.handle_event(event),
                    Err(error) => tracing::warn!(%error, "watch pods failed"),
                },
                Some(job) = self.jobs.join_next(), if !self.jobs.is_empty() => match job {
                    Ok(job) => self.job_ended(job),
                    Err(error) => tracing::error!(%error, "the task of a pod ended abnormally"),
                },
                _ = sweep.tick() => self.sweep(),
                // Updates the metric of VM pods below.
                () = table.vm_pods_changed() => {}
            }
            if self.synced {
                ready.send_if_modified(|ready| !std::mem::replace(ready, true));
            }
            self.shared.options.vms.metrics.set_table_size(self.shared.table.vm_pods());
            turns.send_modify(|turns| *turns = turns.wrapping_add(1));
        }
    }

    fn handle_event(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.listed = Some(BTreeSet::new()),
            Event::InitApply(pod) => {
                if let (Some(listed), Some(uid)) = (&mut self.listed, &pod.metadata.uid) {
                    listed.insert(uid.clone());
                }
                // Running pods are counted before a new one is admitted.
                if let Some(uid) = pod.metadata.uid.as_ref().filter(|_| has_begun(&pod)) {
                    self.shared.ledger.reserve_running(uid, &pod);
                }
                self.handle_applied(pod);
            }
            Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                self.removed.retain(|uid| listed.contains(uid));
                self.unlisted = self.known.keys().filter(|uid| !listed.contains(*uid)).cloned().collect();
                if !std::mem::replace(&mut self.synced, true) {
                    self.remove_left_files();
                    self.treat_orphans();
                }
                self.sweep();
            }
            Event::Apply(pod) => self.handle_applied(pod),
            Event::Delete(pod) => self.handle_deletion(pod),
        }
    }

    /// Handles a pod that the watch reports.
    fn handle_applied(&mut self, mut pod: Pod) {
        pod.metadata.managed_fields = None;
        let Some(id) = id_of(&pod) else { return };
        self.unlisted.remove(&id.uid);
        if self.removed.contains(&id.uid) {
            return;
        }
        if let Some(status) = pod.status.as_mut().filter(|_| self.shared.table.has_own_status(&id.uid)) {
            // The pod's task reported these statuses and keeps them.
            status.container_statuses = None;
            status.init_container_statuses = None;
            status.ephemeral_container_statuses = None;
        }
        // The copy has no spare capacity; a decoded list has capacity for four entries.
        let pod = Arc::new(pod.clone());
        match self.known.get(&id.uid).filter(|handle| !handle.seen.is_closed()) {
            Some(handle) => handle.seen.send_modify(|seen| seen.pod = pod),
            None => self.begin(id, PodVersion { pod, forced: false }),
        }
    }

    fn begin(&mut self, pod: PodId, seen: PodVersion) {
        tracing::info!(
            ns = pod.namespace,
            name = pod.name,
            uid = pod.uid,
            forced = seen.forced,
            "pod of this node"
        );
        // The state of an earlier task was lost: the new task starts from the object.
        self.shared.table.remove(&pod.uid);
        let (seen, receiver) = watch::channel(seen);
        let (shared, subscription) = (self.shared.clone(), Subscription::default());
        let life = PodTask { shared, pod: pod.clone(), seen: receiver, subscription };
        let (stop, own) = (self.stop.clone(), pod.clone());
        self.jobs.spawn(async move { Job::Lived(own, life.run(stop).await) });
        self.known.insert(pod.uid.clone(), Handle { pod, seen });
    }

    /// Handles a deleted object: the remaining parts of the pod are ended at once.
    fn handle_deletion(&mut self, pod: Pod) {
        let Some(id) = id_of(&pod) else { return };
        self.removed.remove(&id.uid);
        self.force(&id.uid);
    }

    fn force(&mut self, uid: &str) {
        if let Some(handle) = self.known.get(uid) {
            handle.seen.send_modify(|seen| seen.forced = true);
        }
    }

    fn job_ended(&mut self, job: Job) {
        match job {
            Job::Lived(pod, Ok(Ended::Removed)) => {
                tracing::info!(ns = pod.namespace, name = pod.name, uid = pod.uid, "pod removed");
                let forced = self.known.remove(&pod.uid).is_some_and(|handle| handle.seen.borrow().forced);
                if !forced {
                    self.removed.insert(pod.uid.clone());
                }
                self.forget(&pod.uid);
            }
            Job::Lived(_, Ok(Ended::Stopped)) => {}
            Job::Lived(pod, Err(error)) => {
                tracing::error!(ns = pod.namespace, name = pod.name, %error, "pod cannot be run");
                self.known.remove(&pod.uid);
                self.removed.insert(pod.uid.clone());
                self.forget(&pod.uid);
            }
            Job::Checked(pod, fate) => {
                self.checking.remove(&pod.uid);
                self.handle_existence(pod, fate);
            }
            Job::Swept => {}
        }
    }

    fn forget(&mut self, uid: &str) {
        self.unlisted.remove(uid);
        self.shared.table.remove(uid);
        self.shared.ledger.release(uid);
    }

    fn handle_existence(&mut self, pod: PodId, fate: Fate) {
        match (fate, self.known.contains_key(&pod.uid)) {
            (Fate::Gone, true) => self.force(&pod.uid),
            (Fate::Gone, false) => {
                tracing::warn!(
                    ns = pod.namespace,
                    name = pod.name,
                    uid = pod.uid,
                    "end the VM of a pod that is gone"
                );
                let object = Pod {
                    metadata: ObjectMeta {
                        namespace: Some(pod.namespace.clone()),
                        name: Some(pod.name.clone()),
                        uid: Some(pod.uid.clone()),
                        ..ObjectMeta::default()
                    },
                    ..Pod::default()
                };
                self.begin(pod, PodVersion { pod: Arc::new(object), forced: true });
            }
            (Fate::Exists, _) => {
                self.unlisted.remove(&pod.uid);
                tracing::debug!(ns = pod.namespace, name = pod.name, "a pod outside of the list exists");
            }
            (Fate::Unknown, _) => {
                tracing::warn!(ns = pod.namespace, name = pod.name, "pod cannot be confirmed as gone")
            }
        }
    }

    /// Checks for what the watch does not show: VMs without a pod, and pods that the last list did not contain.
    fn sweep(&mut self) {
        if !self.synced {
            return;
        }
        let views = self.shared.host.list();
        let of_vms = views.iter().filter_map(|view| PodId::of(&view.record));
        let orphans = of_vms.filter(|pod| !self.known.contains_key(&pod.uid));
        let unlisted =
            self.unlisted.iter().filter_map(|uid| self.known.get(uid)).map(|handle| handle.pod.clone());
        let doubtful: Vec<_> = orphans.chain(unlisted).collect();
        for pod in doubtful {
            if self.checking.insert(pod.uid.clone()) {
                let client = self.shared.client.clone();
                self.jobs.spawn(async move {
                    let fate = check_existence(&client, &pod).await;
                    Job::Checked(pod, fate)
                });
            }
        }
    }

    /// Applies the orphan policy to VMs whose pods ended while this node was down.
    fn treat_orphans(&mut self) {
        let (host, vms) = (self.shared.host.clone(), self.shared.options.vms.clone());
        let known: BTreeSet<String> = self.known.keys().cloned().collect();
        self.jobs.spawn(async move {
            let treated = coracle_vm_pod::orphans::apply_policy(&host, vms.orphans, &vms.metrics, |uid| {
                known.contains(uid)
            });
            if let Err(error) = treated.await {
                tracing::warn!(error = error.chain(), "remove VMs of pods that are gone failed");
            }
            Job::Swept
        });
    }

    /// Removes directories of pods that are unknown to the cluster and the host core, because a crash prevented their VM.
    fn remove_left_files(&mut self) {
        let views = self.shared.host.list();
        let of_vms: BTreeSet<_> =
            views.iter().filter_map(|view| PodId::of(&view.record)).map(|pod| pod.uid).collect();
        let (disk, memory) = directories(&self.shared.options, &self.shared.host);
        let entries =
            [disk, memory].into_iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
        let left: Vec<_> = entries
            .filter(|entry| {
                let name = entry.file_name();
                let uid = name.to_string_lossy();
                !self.known.contains_key(&*uid) && !of_vms.contains(&*uid)
            })
            .map(|entry| entry.path())
            .collect();
        if left.is_empty() {
            return;
        }
        self.jobs.spawn(async move {
            let remove = move || left.iter().try_for_each(|path| coracle_files::remove_tree(path));
            if let Err(error) = coracle_files::blocking(remove).await {
                tracing::warn!(%error, "remove files of pods that are gone failed");
            }
            Job::Swept
        });
    }
}

fn id_of(pod: &Pod) -> Option<PodId> {
    let metadata = &pod.metadata;
    let (namespace, name, uid) = (metadata.namespace.clone()?, metadata.name.clone()?, metadata.uid.clone()?);
    Some(PodId { namespace, name, uid })
}

/// Reads the pod from the API server, bypassing all caches.
async fn check_existence(client: &Client, pod: &PodId) -> Fate {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    match timeout(READ_LIMIT, pods.get_metadata_opt(&pod.name)).await {
        Ok(Ok(Some(found))) if found.metadata.uid.as_deref() == Some(pod.uid.as_str()) => Fate::Exists,
        Ok(Ok(_)) => Fate::Gone,
        Ok(Err(error)) => {
            tracing::debug!(%error, "read a pod failed");
            Fate::Unknown
        }
        Err(_) => Fate::Unknown,
    }
}

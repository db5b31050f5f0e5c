//! What lives where: agents, their sizes, and the VMs that are declared, from watches; no polling.
//!
//! ```text
//!  Leases (coracle-system, coracle.dev/agent=true) ─┐
//!  Pods   (same label)                              ├─▶ tables ─▶ resolve · standing · candidates
//!  Nodes                                            ┘                       ▲
//!  MikromVMs ─▶ store ──────────────────────────────────── promised memory ─┘
//!      └─▶ work queue (each object at most once)
//! ```
//! A Lease lives as long as *we* see it renewed: its own times are another machine's clock.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use coracle_api::{MikromVM, keys};
use coracle_reconcile::Clock;
use futures_util::{Stream, StreamExt as _, future::ready, stream};
use jiff::Timestamp;
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        coordination::v1::Lease,
        core::v1::{Node, Pod},
    },
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    runtime::{
        WatchStreamExt as _,
        reflector::{self, ObjectRef, Store},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};
use tracing::warn;

use crate::{
    agent::AgentAddress,
    placement::{Candidate, Capacity, Overcommit, Refusal, Request, place},
};

/// A Lease that does not say how long it holds.
const LEASE_DEFAULT: Duration = Duration::from_secs(40);
/// How long a choice counts that the store does not show yet.
const ASSUMED_FOR: Duration = Duration::from_secs(300);
/// Most objects fetched in one page when a watch starts.
const PAGE: u32 = 250;

const LEASES: u8 = 1;
const PODS: u8 = 2;
const NODES: u8 = 4;
const OBJECTS: u8 = 8;
const ALL: u8 = LEASES | PODS | NODES | OBJECTS;

/// Whether a node is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is, as far as anyone says.
    Alive,
    /// It is not, since then.
    Gone {
        /// Since when.
        since: Timestamp,
    },
}

#[derive(Clone, Debug, PartialEq)]
struct Announcement {
    node: String,
    agent: AgentAddress,
    capacity: Option<Capacity>,
    /// End of the Lease by our own clock. `None`: a Pod, which has no end.
    until: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct NodeReady {
    ready: bool,
    since: Timestamp,
}

/// One kind's objects. A new list replaces the old one only when it is whole: in between nothing seems to be gone.
#[derive(Debug)]
struct Table<V> {
    rows: BTreeMap<String, V>,
    listing: Option<HashSet<String>>,
}

impl<V> Default for Table<V> {
    fn default() -> Self {
        Self { rows: BTreeMap::new(), listing: None }
    }
}

impl<V: Comparable> Table<V> {
    /// Takes one event; true when something changed that matters.
    fn take<K: Resource<DynamicType = ()>>(
        &mut self,
        event: &watcher::Event<K>,
        read: impl Fn(&K) -> Option<V>,
    ) -> bool {
        let key = |k: &K| format!("{}/{}", k.namespace().unwrap_or_default(), k.name_any());
        match event {
            watcher::Event::Init => {
                self.listing = Some(HashSet::new());
                false
            }
            watcher::Event::InitDone => {
                let listed = self.listing.take().unwrap_or_default();
                let before = self.rows.len();
                self.rows.retain(|key, _| listed.contains(key));
                self.rows.len() != before
            }
            watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
                if let Some(listing) = &mut self.listing {
                    listing.insert(key(object));
                }
                match (self.rows.get(&key(object)), read(object)) {
                    (old, Some(new)) => {
                        let changed = old.is_none_or(|old| !old.same(&new));
                        self.rows.insert(key(object), new);
                        changed
                    }
                    (_, None) => self.rows.remove(&key(object)).is_some(),
                }
            }
            watcher::Event::Delete(object) => self.rows.remove(&key(object)).is_some(),
        }
    }
}

#[derive(Debug, Default)]
struct Tables {
    leases: Table<Announcement>,
    pods: Table<Announcement>,
    nodes: Table<NodeReady>,
    /// Names that nothing announces: since when we know.
    missing: HashMap<String, Timestamp>,
    /// Sizes that agents told us when asked, by address.
    told: HashMap<String, Capacity>,
    assumed: HashMap<String, Assumed>,
    /// Addresses on objects, as of when the agents to follow were last taken.
    written: HashSet<String>,
}

#[derive(Clone, Debug)]
struct Assumed {
    node: String,
    size: Capacity,
    namespace: String,
    until: Timestamp,
}

/// Objects that want to be looked at, each once.
#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<HashSet<ObjectRef<MikromVM>>>,
    more: Notify,
}

/// Where the fleet is watched from.
#[derive(Clone, Debug)]
pub struct Scope {
    /// Only MikromVMs of this namespace; `None`: all.
    pub namespace: Option<String>,
    /// Where the Leases and agent Pods are.
    pub system_namespace: String,
}

impl Default for Scope {
    fn default() -> Self {
        Self { namespace: None, system_namespace: keys::SYSTEM_NAMESPACE.to_owned() }
    }
}

/// Agents and declared VMs, as last seen. Clones show the same.
#[derive(Clone)]
pub struct Fleet {
    tables: Arc<Mutex<Tables>>,
    vms: Store<MikromVM>,
    queue: Arc<Queue>,
    agents_changed: Arc<Notify>,
    /// Which kinds were listed once.
    listed: watch::Sender<u8>,
    clock: Arc<dyn Clock>,
    overcommit: Overcommit,
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet").field("vms", &self.vms.len()).finish_non_exhaustive()
    }
}

impl Fleet {
    /// The fleet, and the future that keeps it up to date: it never ends and must be polled.
    pub fn watch(
        client: &Client,
        scope: &Scope,
        overcommit: Overcommit,
        clock: Arc<dyn Clock>,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (vms, writer) = reflector::store();
        let (tables, queue) = (Arc::default(), Arc::default());
        let fleet = Self {
            tables,
            vms,
            queue,
            agents_changed: Arc::default(),
            listed: watch::Sender::new(0),
            clock,
            overcommit,
        };
        let work = fleet.clone().keep(client.clone(), scope.clone(), writer);
        (fleet, work)
    }

    async fn keep(self, client: Client, scope: Scope, mut vms: reflector::store::Writer<MikromVM>) {
        let labelled =
            watcher::Config::default().labels(&format!("{}=true", keys::node::AGENT_LABEL)).page_size(PAGE);
        let leases = system::<Lease>(&client, &scope, labelled.clone());
        let pods = system::<Pod>(&client, &scope, labelled);
        let nodes = follow(Api::<Node>::all(client.clone()), watcher::Config::default().page_size(PAGE));
        let api = scope
            .namespace
            .as_ref()
            .map_or_else(|| Api::all(client.clone()), |ns| Api::namespaced(client.clone(), ns));
        let objects = follow::<MikromVM>(api, watcher::Config::default().page_size(PAGE));
        let leases = leases.for_each(|event| {
            self.table(LEASES, &event, |t| &mut t.leases, |l| self.lease(l));
            ready(())
        });
        let pods = pods.for_each(|event| {
            self.table(PODS, &event, |t| &mut t.pods, pod);
            ready(())
        });
        let nodes = nodes.for_each(|event| {
            self.table(NODES, &event, |t| &mut t.nodes, node);
            ready(())
        });
        let objects = async {
            let mut objects = std::pin::pin!(objects);
            while let Some(event) = objects.next().await {
                vms.apply_watcher_event(&event);
                match &event {
                    watcher::Event::Apply(vm) | watcher::Event::InitApply(vm) => {
                        self.note_agent(vm);
                        self.enqueue(ObjectRef::from_obj(vm));
                    }
                    watcher::Event::Delete(vm) => self.forget(vm),
                    watcher::Event::InitDone => {
                        self.known(OBJECTS);
                        self.enqueue_all();
                    }
                    watcher::Event::Init => {}
                }
            }
        };
        tokio::join!(leases, pods, nodes, objects);
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one watch event into a table, and wakes those whose node changed in more than its renewal.
    fn table<K, V: Comparable>(
        &self,
        part: u8,
        event: &watcher::Event<K>,
        table: impl Fn(&mut Tables) -> &mut Table<V>,
        read: impl Fn(&K) -> Option<V>,
    ) where
        K: Resource<DynamicType = ()>,
    {
        let changed = table(&mut self.lock()).take(event, read);
        if matches!(event, watcher::Event::InitDone) {
            self.known(part);
        }
        if changed {
            self.agents_changed.notify_one();
            self.enqueue_all();
        }
    }

    fn known(&self, part: u8) {
        self.listed.send_modify(|known| *known |= part);
    }

    /// Waits until everything was listed once: before that an empty fleet means nothing.
    pub async fn ready(&self) {
        let mut listed = self.listed.subscribe();
        // An error would be the sender gone, and we hold it.
        let _ = listed.wait_for(|known| *known == ALL).await;
    }

    fn lease(&self, lease: &Lease) -> Option<Announcement> {
        let address = lease.annotations().get(keys::node::AGENT_ADDRESS)?.clone();
        let said = |key: &str| lease.annotations().get(key).filter(|v| !v.is_empty()).cloned();
        let duration =
            lease.spec.as_ref().and_then(|s| s.lease_duration_seconds).and_then(|s| u64::try_from(s).ok());
        let duration = duration.map_or(LEASE_DEFAULT, Duration::from_secs);
        Some(Announcement {
            node: said(keys::node::NODE).unwrap_or_else(|| lease.name_any()),
            agent: AgentAddress { address, server_name: said(keys::node::TLS_SERVER_NAME) },
            capacity: capacity(&said),
            until: self.clock.now().saturating_add(duration).ok(),
        })
    }

    /// The agent of `node` as it announces itself now.
    #[must_use]
    pub fn resolve(&self, node: &str) -> Option<AgentAddress> {
        let tables = self.lock();
        tables.announced().find(|a| a.node == node).map(|a| a.agent.clone())
    }

    /// The node whose agent has that address.
    #[must_use]
    pub fn node_at(&self, address: &str) -> Option<String> {
        let tables = self.lock();
        tables.announced().find(|a| a.agent.address == address).map(|a| a.node.clone())
    }

    /// Whether `node` is there. A Kubernetes Node that is Ready counts for more than a Lease: then only the agent is
    /// down, and it will come back. Remembers since when a name is announced by nobody.
    #[must_use]
    pub fn standing(&self, node: &str) -> Standing {
        let now = self.clock.now();
        let mut tables = self.lock();
        if let Some(known) = tables.nodes.rows.get(&format!("/{node}")).copied() {
            tables.missing.remove(node);
            return if known.ready { Standing::Alive } else { Standing::Gone { since: known.since } };
        }
        let until =
            tables.announced().filter(|a| a.node == node).map(|a| a.until.unwrap_or(Timestamp::MAX)).max();
        match until {
            Some(until) => {
                tables.missing.remove(node);
                if now < until { Standing::Alive } else { Standing::Gone { since: until } }
            }
            None => Standing::Gone { since: *tables.missing.entry(node.to_owned()).or_insert(now) },
        }
    }

    /// Every node that lives and has an agent, with what is promised on it. `except` is left out of the promises.
    #[must_use]
    pub fn candidates(&self, namespace: &str, except: Option<&MikromVM>) -> Vec<Candidate> {
        let except = except.and_then(kube::ResourceExt::uid);
        let vms = self.vms.state();
        let tables = self.lock();
        let now = self.clock.now();
        let mut nodes: BTreeMap<&str, Candidate> = BTreeMap::new();
        for a in tables.announced() {
            let lives = a.until.is_none_or(|until| now < until)
                && tables.nodes.rows.get(&format!("/{}", a.node)).is_none_or(|n| n.ready);
            if lives {
                let capacity = a.capacity.or_else(|| tables.told.get(&a.agent.address).copied());
                let (node, agent) = (a.node.clone(), a.agent.clone());
                let empty =
                    Candidate { node, agent, capacity, promised: Capacity::default(), namespace_vms: 0 };
                nodes.entry(&a.node).or_insert(empty);
            }
        }
        let mut promise = |node: &str, size: Capacity, in_namespace: bool| {
            if let Some(on) = nodes.get_mut(node) {
                on.promised.vcpus = on.promised.vcpus.saturating_add(size.vcpus);
                on.promised.memory_mib = on.promised.memory_mib.saturating_add(size.memory_mib);
                on.namespace_vms += usize::from(in_namespace);
            }
        };
        let mut bound = HashSet::new();
        for vm in vms.iter().filter(|vm| vm.uid() != except) {
            let status = vm.status.as_ref().map_or("", |s| s.node_name.as_str());
            let node = if status.is_empty() { vm.spec.node_name.as_str() } else { status };
            if !node.is_empty() {
                bound.extend(vm.uid());
                promise(node, size(vm), vm.namespace().as_deref() == Some(namespace));
            }
        }
        for (uid, a) in &tables.assumed {
            if now < a.until && !bound.contains(uid) && Some(uid) != except.as_ref() {
                promise(&a.node, a.size, a.namespace == namespace);
            }
        }
        nodes.into_values().collect()
    }

    /// Chooses a node for `vm` and counts the choice until the store shows it, so that two VMs that are placed at once
    /// do not both take the last place.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn choose(&self, vm: &MikromVM) -> Result<Candidate, Refusal> {
        let request = request(vm);
        let nodes = self.candidates(&request.namespace, Some(vm));
        let chosen = place(&request, &nodes, self.overcommit)?.clone();
        let now = self.clock.now();
        let until = now.saturating_add(ASSUMED_FOR).unwrap_or(now);
        let mut tables = self.lock();
        tables.assumed.retain(|_, a| now < a.until);
        let (node, namespace) = (chosen.node.clone(), request.namespace);
        tables
            .assumed
            .insert(vm.uid().unwrap_or_default(), Assumed { node, size: size(vm), namespace, until });
        Ok(chosen)
    }

    /// How much more than it has a node may promise.
    #[must_use]
    pub fn overcommit(&self) -> Overcommit {
        self.overcommit
    }

    /// The declared VMs.
    #[must_use]
    pub fn vms(&self) -> &Store<MikromVM> {
        &self.vms
    }

    /// Every address that an agent is expected at: announced, or written on an object.
    pub(crate) fn agents(&self) -> HashSet<AgentAddress> {
        let on_objects: HashSet<String> = self
            .vms
            .state()
            .iter()
            .filter_map(|vm| Some(vm.status.as_ref()?.agent_address.clone()))
            .collect();
        let mut tables = self.lock();
        let mut all: HashSet<_> = tables.announced().map(|a| a.agent.clone()).collect();
        for address in on_objects.iter().filter(|address| !address.is_empty()) {
            if all.iter().all(|a| a.address != *address) {
                all.insert(AgentAddress { address: address.clone(), server_name: None });
            }
        }
        tables.written = on_objects;
        all
    }

    pub(crate) fn has_capacity(&self, address: &str) -> bool {
        let tables = self.lock();
        tables.told.contains_key(address)
            || tables.announced().any(|a| a.agent.address == address && a.capacity.is_some())
    }

    pub(crate) fn tell_capacity(&self, address: &str, capacity: Capacity) {
        self.lock().told.insert(address.to_owned(), capacity);
        self.enqueue_all();
    }

    /// Waits until [`Self::agents`] may give something else. For one waiter.
    pub(crate) async fn agents_changed(&self) {
        self.agents_changed.notified().await;
    }

    /// An address that only an object names is followed too.
    fn note_agent(&self, vm: &MikromVM) {
        let address = vm.status.as_ref().map_or("", |s| s.agent_address.as_str());
        if !address.is_empty() && self.lock().written.insert(address.to_owned()) {
            self.agents_changed.notify_one();
        }
    }

    fn forget(&self, vm: &MikromVM) {
        self.lock().assumed.remove(&vm.uid().unwrap_or_default());
        self.enqueue(ObjectRef::from_obj(vm));
    }

    pub(crate) fn enqueue(&self, object: ObjectRef<MikromVM>) {
        self.queue.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(object);
        self.queue.more.notify_one();
    }

    pub(crate) fn enqueue_all(&self) {
        for vm in self.vms.state() {
            self.enqueue(ObjectRef::from_obj(vm.as_ref()));
        }
    }

    pub(crate) fn queued(&self) -> usize {
        self.queue.waiting.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Objects that want to be looked at. Bounded by the number of objects: one that waits is not queued again.
    pub(crate) fn queue(&self) -> impl Stream<Item = ObjectRef<MikromVM>> + Send + use<> {
        let queue = self.queue.clone();
        stream::unfold(queue, |queue| async move {
            loop {
                let next = {
                    let mut waiting = queue.waiting.lock().unwrap_or_else(PoisonError::into_inner);
                    let next = waiting.iter().next().cloned();
                    next.and_then(|object| waiting.take(&object))
                };
                match next {
                    Some(object) => return Some((object, queue)),
                    None => queue.more.notified().await,
                }
            }
        })
    }
}

impl Tables {
    fn announced(&self) -> impl Iterator<Item = &Announcement> {
        self.leases.rows.values().chain(self.pods.rows.values())
    }
}

/// Equal but for what moves all the time.
trait Comparable {
    fn same(&self, other: &Self) -> bool;
}

impl Comparable for Announcement {
    fn same(&self, other: &Self) -> bool {
        (&self.node, &self.agent, self.capacity) == (&other.node, &other.agent, other.capacity)
    }
}

impl Comparable for NodeReady {
    fn same(&self, other: &Self) -> bool {
        self.ready == other.ready
    }
}

/// What `vm` asks for.
#[must_use]
pub fn request(vm: &MikromVM) -> Request {
    let Capacity { vcpus, memory_mib } = size(vm);
    Request { vcpus, memory_mib, namespace: vm.namespace().unwrap_or_default() }
}

fn size(vm: &MikromVM) -> Capacity {
    let vcpus = u32::try_from(vm.spec.vcpu_count).unwrap_or(0);
    Capacity { vcpus, memory_mib: u64::try_from(vm.spec.memory_mib).unwrap_or(0) }
}

fn capacity(said: &dyn Fn(&str) -> Option<String>) -> Option<Capacity> {
    let vcpus = said(keys::node::CAPACITY_VCPUS)?.parse().ok()?;
    let memory_mib = said(keys::node::CAPACITY_MEMORY_MIB)?.parse().ok()?;
    Some(Capacity { vcpus, memory_mib })
}

fn pod(pod: &Pod) -> Option<Announcement> {
    let status = pod.status.as_ref()?;
    let ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    if !ready || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let said = |key: &str| pod.annotations().get(key).filter(|v| !v.is_empty()).cloned();
    let at_host = || {
        let ip = status.host_ip.as_deref().filter(|ip| !ip.is_empty())?;
        let ip = if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() };
        Some(format!("{ip}:{}", keys::node::AGENT_PORT))
    };
    Some(Announcement {
        node: said(keys::node::NODE).or_else(|| pod.spec.as_ref()?.node_name.clone())?,
        agent: AgentAddress {
            address: said(keys::node::AGENT_ADDRESS).or_else(at_host)?,
            server_name: said(keys::node::TLS_SERVER_NAME),
        },
        capacity: capacity(&said),
        until: None,
    })
}

fn node(node: &Node) -> Option<NodeReady> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|c| c.type_ == "Ready")?;
    let since = ready.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |t| t.0);
    Some(NodeReady { ready: ready.status == "True", since })
}

fn system<K>(
    client: &Client,
    scope: &Scope,
    config: watcher::Config,
) -> impl Stream<Item = watcher::Event<K>> + Send + use<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + fmt::Debug
        + Send
        + 'static,
{
    follow(Api::namespaced(client.clone(), &scope.system_namespace), config)
}

/// A watch that goes on after every error, with backoff, and keeps only what is read.
fn follow<K>(api: Api<K>, config: watcher::Config) -> impl Stream<Item = watcher::Event<K>> + Send + use<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    let strip = |object: &mut K| {
        object.managed_fields_mut().clear();
        object.annotations_mut().remove("kubectl.kubernetes.io/last-applied-configuration");
    };
    watcher(api, config).default_backoff().modify(strip).filter_map(|event| async {
        event
            .inspect_err(|error| {
                let error: &dyn std::error::Error = error;
                warn!(kind = %K::kind(&()), error, "watch interrupted");
            })
            .ok()
    })
}

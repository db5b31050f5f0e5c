//! Agents, their capacity, and the declared VMs, maintained by watches without polling.
//!
//! ```text
//!  Leases (coracle-system, coracle.dev/agent=true) ─┐
//!  Pods   (same label)                              ├─▶ tables ─▶ resolve · node_presence · candidates
//!  Nodes                                            ┘                       ▲
//!  ResourceQuotas ─▶ quotas (which VMs are bound)       │
//!  MikromVMs ─▶ store ──────────────────────────────────── promised memory ─┘
//!      └─▶ work queue (each object at most once)
//! ```
//! A node is alive while this process observes that its Lease is renewed: the times in the Lease come from another clock.

mod choose;
mod constrain;
mod disruption;
mod index;
mod lease;
mod namespaces;
mod node_presence;
mod nodes;
mod overlap;
mod reservations;
mod unreadable;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use coracle_api::{ImagePolicy, MikromVM, keys};
use coracle_reconcile::{Clock, WallTime as _, WorkQueue, watch, watch_config};
use coracle_vm_inputs::constraints::Labels;
use futures_util::{Stream, StreamExt as _, future::ready};
use jiff::Timestamp;
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        coordination::v1::Lease,
        core::v1::{ConfigMap, Node, Pod, ResourceQuota},
    },
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    runtime::{
        reflector::{self, ObjectRef, Store},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch as latest};

pub use choose::request;
pub use node_presence::NodePresence;

use self::{
    index::Index,
    lease::LeaseLiveness,
    nodes::{NodeReady, at_port, node},
    overlap::GuestSubnet,
    reservations::Reservations,
    unreadable::{Guarded, convert_event},
};
use crate::{
    agent::AgentAddress,
    allow::AgentRule,
    placement::{Capacity, Overcommit},
    quota::Quota,
};

/// Duration of a Lease that specifies none.
const LEASE_DEFAULT: Duration = Duration::from_secs(40);
/// Time for which a choice of a node counts before the store shows it.
const ASSUMED_FOR: Duration = Duration::from_secs(300);

const LEASES: u8 = 1;
const PODS: u8 = 2;
const NODES: u8 = 4;
const OBJECTS: u8 = 8;
const QUOTAS: u8 = 16;
const IMAGE_POLICY: u8 = 32;
const ALL: u8 = LEASES | PODS | NODES | OBJECTS | QUOTAS | IMAGE_POLICY;

#[derive(Clone, Debug, PartialEq)]
struct Announcement {
    node: String,
    agent: AgentAddress,
    capacity: Option<Capacity>,
    /// Labels of the node, used when no Kubernetes Node has them.
    labels: Labels,
    /// Network of the guests' addresses; `None`: the node does not announce it.
    subnet: Option<GuestSubnet>,
    /// Liveness by the Lease. `None`: announced by a Pod, which has no expiry.
    life: Option<LeaseLiveness>,
    resource_version: Option<String>,
}

/// Objects of one kind. A new list replaces the old one only when it is complete, so that no object seems deleted meanwhile.
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
    /// Applies one event. Returns true when a relevant field changed.
    fn take<K: Resource<DynamicType = ()>>(
        &mut self,
        event: &watcher::Event<K>,
        read: impl Fn(&K, Option<&V>) -> Option<V>,
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
                let old = self.rows.get(&key(object));
                match (old, read(object, old)) {
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
    quotas: Table<Quota>,
    image_policy: Table<ImagePolicy>,
    /// VMs that were admitted to the quotas of their namespace, by UID, until the store shows that they are bound.
    admitted: HashMap<String, Timestamp>,
    /// Names of nodes without an announcement, with the time of their first lookup.
    missing: HashMap<String, Timestamp>,
    /// Capacities that agents reported, by address.
    reported_capacities: HashMap<String, Capacity>,
    /// Resources that VMs use or reserve on nodes.
    reservations: Reservations,
    /// VMs that a drain may take down, by UID, until the store shows that they are down.
    disrupted: HashSet<String>,
    /// Agent addresses in objects at the last call of `agents`.
    known_addresses: HashSet<String>,
}

/// Watched namespaces, and allowed agents.
#[derive(Clone, Debug)]
pub struct Scope {
    /// Namespace of the watched MikromVMs; `None`: all.
    pub namespace: Option<String>,
    /// Namespace of the agent Pods.
    pub system_namespace: String,
    /// Namespace of the Leases of nodes.
    pub node_namespace: String,
    /// Agents outside the cluster that objects may name.
    pub allowed: Vec<AgentRule>,
}

impl Default for Scope {
    fn default() -> Self {
        Self {
            namespace: None,
            system_namespace: keys::SYSTEM_NAMESPACE.to_owned(),
            node_namespace: keys::NODE_NAMESPACE.to_owned(),
            allowed: vec![],
        }
    }
}

/// Agents and declared VMs, as last observed. Clones share the state.
#[derive(Clone)]
pub struct Fleet {
    tables: Arc<Mutex<Tables>>,
    vms: Store<MikromVM>,
    index: Arc<Mutex<Index>>,
    queue: WorkQueue<MikromVM>,
    agents_changed: Arc<Notify>,
    /// Notified when VMs or quotas have changed.
    usage_changed: Arc<Notify>,
    /// Kinds whose initial list is complete.
    listed: latest::Sender<u8>,
    clock: Clock,
    overcommit: Overcommit,
    allowed: Arc<[AgentRule]>,
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet").field("vms", &self.vms.len()).finish_non_exhaustive()
    }
}

impl Fleet {
    /// Returns the fleet, and the future that keeps it up to date. The future never ends and must be polled.
    pub fn watch(
        client: &Client,
        scope: &Scope,
        overcommit: Overcommit,
        clock: Clock,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (vms, writer) = reflector::store();
        let (tables, queue) = (Arc::default(), WorkQueue::default());
        let fleet = Self {
            tables,
            vms,
            index: Arc::default(),
            queue,
            agents_changed: Arc::default(),
            usage_changed: Arc::default(),
            listed: latest::Sender::new(0),
            clock,
            overcommit,
            allowed: scope.allowed.clone().into(),
        };
        let work = fleet.clone().run_watches(client.clone(), scope.clone(), writer);
        (fleet, work)
    }

    async fn run_watches(self, client: Client, scope: Scope, mut vms: reflector::store::Writer<MikromVM>) {
        let labelled = watch_config().labels(&format!("{}=true", keys::node::AGENT_LABEL));
        let leases = in_namespace::<Lease>(&client, &scope.node_namespace, labelled.clone());
        let pods = in_namespace::<Pod>(&client, &scope.system_namespace, labelled);
        let nodes = watch(Api::<Node>::all(client.clone()), watch_config());
        let policy = watch_config().fields(&format!("metadata.name={}", keys::IMAGE_POLICY));
        let policy = in_namespace::<ConfigMap>(&client, &scope.system_namespace, policy);
        let objects = watch::<Guarded>(scoped_api(&client, &scope), watch_config());
        let quotas = watch::<ResourceQuota>(scoped_api(&client, &scope), watch_config());
        let leases = leases.for_each(|event| {
            self.table(LEASES, &event, |t| &mut t.leases, |l, old| self.lease(l, old));
            ready(())
        });
        let pods = pods.for_each(|event| {
            self.table(PODS, &event, |t| &mut t.pods, |p, _| pod(p));
            ready(())
        });
        let nodes = nodes.for_each(|event| {
            self.table(NODES, &event, |t| &mut t.nodes, |n, _| node(n));
            ready(())
        });
        let quotas = quotas.for_each(|event| {
            self.table(QUOTAS, &event, |t| &mut t.quotas, |q, _| Quota::of(q));
            self.usage_changed.notify_one();
            ready(())
        });
        let policy = policy.for_each(|event| {
            self.table(IMAGE_POLICY, &event, |t| &mut t.image_policy, |c, _| Some(ImagePolicy::of(c)));
            ready(())
        });
        let objects = async {
            let mut objects = std::pin::pin!(objects);
            while let Some(event) = objects.next().await {
                let last_read = |unread: &ObjectRef<Guarded>| {
                    let object =
                        ObjectRef::new(&unread.name).within(unread.namespace.as_deref().unwrap_or(""));
                    self.vms.get(&object).map(|vm| vm.as_ref().clone())
                };
                let Some(event) = convert_event(event, last_read) else { continue };
                vms.apply_watcher_event(&event);
                match &event {
                    watcher::Event::Apply(vm) | watcher::Event::InitApply(vm) => {
                        self.index().insert(vm);
                        self.lock().reservations.store(vm);
                        self.note_agent(vm);
                        self.enqueue(ObjectRef::from_obj(vm));
                    }
                    watcher::Event::Delete(vm) => self.forget(vm),
                    watcher::Event::InitDone => {
                        let listed = self.vms.state();
                        *self.index() = listed.iter().map(AsRef::as_ref).collect();
                        self.lock().reservations.replace(listed.iter().map(AsRef::as_ref));
                        self.mark_listed(OBJECTS);
                        self.enqueue_all();
                    }
                    watcher::Event::Init => {}
                }
                self.usage_changed.notify_one();
            }
        };
        tokio::join!(leases, pods, nodes, quotas, policy, objects);
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the object with that UID, as last observed.
    pub(crate) fn object(&self, uid: &str) -> Option<Arc<MikromVM>> {
        let object = self.index().uid(uid)?;
        self.vms.get(&object).filter(|vm| vm.uid().as_deref() == Some(uid))
    }

    /// Returns every object whose VM has that id at the agents.
    pub(crate) fn objects_of(&self, vm_id: &str) -> Vec<ObjectRef<MikromVM>> {
        self.index().vm_id(vm_id)
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies one watch event to a table. Any change other than a renewal queues all objects.
    fn table<K, V: Comparable>(
        &self,
        part: u8,
        event: &watcher::Event<K>,
        table: impl Fn(&mut Tables) -> &mut Table<V>,
        read: impl Fn(&K, Option<&V>) -> Option<V>,
    ) where
        K: Resource<DynamicType = ()>,
    {
        let changed = table(&mut self.lock()).take(event, read);
        if matches!(event, watcher::Event::InitDone) {
            self.mark_listed(part);
        }
        if changed {
            self.agents_changed.notify_one();
            self.enqueue_all();
        }
    }

    fn mark_listed(&self, part: u8) {
        self.listed.send_modify(|known| *known |= part);
    }

    /// Waits until every kind was listed once: before that, an empty fleet has no meaning.
    pub async fn ready(&self) {
        let mut listed = self.listed.subscribe();
        // `wait_for` fails only without a sender, and `self` holds the sender.
        let _ = listed.wait_for(|known| *known == ALL).await;
    }

    fn lease(&self, lease: &Lease, old: Option<&Announcement>) -> Option<Announcement> {
        let address = lease.annotations().get(keys::node::AGENT_ADDRESS)?.clone();
        let said = |key: &str| lease.annotations().get(key).filter(|v| !v.is_empty()).cloned();
        let duration =
            lease.spec.as_ref().and_then(|s| s.lease_duration_seconds).and_then(|s| u64::try_from(s).ok());
        let duration = duration.map_or(LEASE_DEFAULT, Duration::from_secs);
        let renewed = lease.spec.as_ref().and_then(|s| s.renew_time.as_ref()).map(|t| t.0);
        let now = self.clock.timestamp();
        let life = match old.and_then(|old| old.life) {
            Some(life) => life.next(renewed, duration, now),
            None => LeaseLiveness::first(renewed, duration, now),
        };
        Some(Announcement {
            node: said(keys::node::NODE).unwrap_or_else(|| lease.name_any()),
            agent: AgentAddress {
                address,
                server_name: said(keys::node::TLS_SERVER_NAME),
                host_service: said(keys::node::HOST_ADDRESS),
            },
            capacity: capacity(&said),
            labels: labels(&said),
            subnet: said(keys::node::GUEST_SUBNET)
                .and_then(|subnet| GuestSubnet::of(&subnet, lease.metadata.creation_timestamp.as_ref())),
            life: Some(life),
            resource_version: lease.resource_version(),
        })
    }

    /// Returns the agent that `node` announces now.
    #[must_use]
    pub fn resolve(&self, node: &str) -> Option<AgentAddress> {
        let tables = self.lock();
        tables.announcements().find(|a| a.node == node).map(|a| a.agent.clone())
    }

    /// Returns the node whose agent has that address.
    #[must_use]
    pub fn node_at(&self, address: &str) -> Option<String> {
        let tables = self.lock();
        tables.announcements().find(|a| a.agent.address == address).map(|a| a.node.clone())
    }

    /// Returns the node with that address: by its announcement, or as a Kubernetes Node's own address.
    #[must_use]
    pub fn node_of(&self, address: &str) -> Option<String> {
        let own = || {
            let tables = self.lock();
            let mut nodes = tables.nodes.rows.iter();
            let found = nodes.find(|(_, node)| node.agents.iter().any(|agent| agent == address));
            found.map(|(key, _)| key.trim_start_matches('/').to_owned())
        };
        self.node_at(address).or_else(own)
    }

    /// True when an object may name the agent at that address.
    #[must_use]
    pub fn may_dial(&self, address: &str) -> bool {
        self.node_of(address).is_some() || self.allowed.iter().any(|rule| rule.allows(address))
    }

    /// True when the Kubernetes Node of that name is cordoned.
    pub(crate) fn is_cordoned(&self, node: &str) -> bool {
        self.lock().is_cordoned(node)
    }

    /// True when a drain may take `vm` down now: few enough VMs of its controller are down already. From then on `vm` counts as
    /// down.
    pub(crate) fn may_disrupt(&self, vm: &MikromVM) -> bool {
        let vms = self.vms.state();
        let mut tables = self.lock();
        let mut disrupted = std::mem::take(&mut tables.disrupted);
        disruption::forget_settled(&vms, &mut disrupted, |node| tables.is_cordoned(node));
        let may = disruption::may_disrupt(vm, &vms, &mut disrupted);
        tables.disrupted = disrupted;
        may
    }

    /// Returns the Leases that were not renewed for a day, by name and resource version.
    pub(crate) fn leases_to_remove(&self) -> Vec<(String, Option<String>)> {
        let now = self.clock.timestamp();
        let tables = self.lock();
        let over = tables.leases.rows.iter().filter(|(_, a)| a.life.is_some_and(|life| life.is_expired(now)));
        let name = |key: &str| key.split_once('/').map_or(key, |(_, name)| name).to_owned();
        over.map(|(key, a)| (name(key), a.resource_version.clone())).collect()
    }

    /// Returns the overcommit of CPUs and memory.
    #[must_use]
    pub fn overcommit(&self) -> Overcommit {
        self.overcommit
    }

    /// Returns the store of the declared VMs.
    #[must_use]
    pub fn vms(&self) -> &Store<MikromVM> {
        &self.vms
    }

    /// Returns the addresses of all agents that are announced or in the status of an object. A node that is announced by both
    /// its Lease and its Pod is one agent, by its Lease.
    pub(crate) fn agents(&self) -> HashSet<AgentAddress> {
        let on_objects: HashSet<String> = self
            .vms
            .state()
            .iter()
            .filter_map(|vm| Some(vm.status.as_ref()?.agent_address.clone()))
            .collect();
        let mut tables = self.lock();
        let mut all: HashMap<String, AgentAddress> = HashMap::new();
        for announced in tables.announcements().map(|a| &a.agent) {
            all.entry(announced.address.clone()).or_insert_with(|| announced.clone());
        }
        for address in on_objects.iter().filter(|address| !address.is_empty()).cloned() {
            all.entry(address.clone()).or_insert_with(|| AgentAddress { address, ..AgentAddress::default() });
        }
        tables.known_addresses = on_objects;
        all.into_values().collect()
    }

    pub(crate) fn has_capacity(&self, address: &str) -> bool {
        let tables = self.lock();
        tables.reported_capacities.contains_key(address)
            || tables.announcements().any(|a| a.agent.address == address && a.capacity.is_some())
    }

    pub(crate) fn set_reported_capacity(&self, address: &str, capacity: Capacity) {
        self.lock().reported_capacities.insert(address.to_owned(), capacity);
        self.enqueue_all();
    }

    /// Waits until [`Self::agents`] may have changed. Supports one waiter.
    pub(crate) async fn agents_changed(&self) {
        self.agents_changed.notified().await;
    }

    /// Notifies the waiter of an agent address that only an object names.
    fn note_agent(&self, vm: &MikromVM) {
        let address = vm.status.as_ref().map_or("", |s| s.agent_address.as_str());
        if !address.is_empty() && self.lock().known_addresses.insert(address.to_owned()) {
            self.agents_changed.notify_one();
        }
    }

    fn forget(&self, vm: &MikromVM) {
        self.index().remove(vm);
        let uid = vm.uid().unwrap_or_default();
        {
            let mut tables = self.lock();
            tables.reservations.remove(&uid);
            tables.admitted.remove(&uid);
        }
        let address = vm.status.as_ref().map_or("", |s| s.agent_address.as_str());
        if !address.is_empty() && self.node_at(address).is_none() {
            self.agents_changed.notify_one(); // this may have been the last object at that agent
        }
        self.enqueue(ObjectRef::from_obj(vm));
    }

    pub(crate) fn enqueue(&self, object: ObjectRef<MikromVM>) {
        self.queue.add(object);
    }

    pub(crate) fn enqueue_all(&self) {
        for vm in self.vms.state() {
            self.enqueue(ObjectRef::from_obj(vm.as_ref()));
        }
    }

    /// Returns the queue of the objects to reconcile.
    pub(crate) fn queue(&self) -> &WorkQueue<MikromVM> {
        &self.queue
    }
}

impl Tables {
    fn is_cordoned(&self, node: &str) -> bool {
        self.nodes.rows.get(&format!("/{node}")).is_some_and(|node| node.cordoned)
    }

    fn announcements(&self) -> impl Iterator<Item = &Announcement> {
        self.leases.rows.values().chain(self.pods.rows.values())
    }
}

impl Comparable for Quota {
    fn same(&self, other: &Self) -> bool {
        self.has_limits_of(other)
    }
}

impl Comparable for ImagePolicy {
    fn same(&self, other: &Self) -> bool {
        self == other
    }
}

/// Equality that ignores the fields that change with every renewal.
trait Comparable {
    fn same(&self, other: &Self) -> bool;
}

impl Comparable for Announcement {
    fn same(&self, other: &Self) -> bool {
        let alive = |a: &Self| a.life.is_none_or(LeaseLiveness::was_alive);
        (&self.node, &self.agent, self.capacity, &self.labels, self.subnet, alive(self))
            == (&other.node, &other.agent, other.capacity, &other.labels, other.subnet, alive(other))
    }
}

fn capacity(said: &dyn Fn(&str) -> Option<String>) -> Option<Capacity> {
    let vcpus = said(keys::node::CAPACITY_VCPUS)?.parse().ok()?;
    let memory_mib = said(keys::node::CAPACITY_MEMORY_MIB)?.parse().ok()?;
    Some(Capacity { vcpus, memory_mib })
}

/// Returns the labels that a node announces for itself.
fn labels(said: &dyn Fn(&str) -> Option<String>) -> Labels {
    let keys = [keys::node::DRIVER, keys::node::ACCELERATOR];
    keys.into_iter().filter_map(|key| Some((key.to_owned(), said(key)?))).collect()
}

fn pod(pod: &Pod) -> Option<Announcement> {
    let status = pod.status.as_ref()?;
    let ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    if !ready || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let said = |key: &str| pod.annotations().get(key).filter(|v| !v.is_empty()).cloned();
    let at_host = || status.host_ip.as_deref().filter(|ip| !ip.is_empty()).map(at_port);
    Some(Announcement {
        node: said(keys::node::NODE).or_else(|| pod.spec.as_ref()?.node_name.clone())?,
        agent: AgentAddress {
            address: said(keys::node::AGENT_ADDRESS).or_else(at_host)?,
            server_name: said(keys::node::TLS_SERVER_NAME),
            host_service: said(keys::node::HOST_ADDRESS),
        },
        capacity: capacity(&said),
        labels: labels(&said),
        subnet: None,
        life: None,
        resource_version: pod.resource_version(),
    })
}

/// Returns the API of the namespace to which a fleet is limited, else of all namespaces.
fn scoped_api<K>(client: &Client, scope: &Scope) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match &scope.namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

fn in_namespace<K>(
    client: &Client,
    namespace: &str,
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
    watch(Api::namespaced(client.clone(), namespace), config)
}

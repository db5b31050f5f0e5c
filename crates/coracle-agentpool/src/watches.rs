//! Caches of all watched kinds, and the reconciles that their changes trigger. Caches only trigger reconciles: steps that
//! create or destroy are planned on a fresh read.

use std::{
    collections::{BTreeSet, HashMap},
    fmt::Debug,
    hash::Hash,
    sync::Arc,
};

use coracle_api::agentpool::{
    VsphereAgent, VsphereAgentPool,
    foreign::{self, Agent, AgentMachine, ForeignKind, InfraEnv, Machine},
    names,
};
use coracle_reconcile::{WorkQueue, follow, watch_config};
use futures_util::future::{BoxFuture, join_all};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::ApiResource,
    discovery::Discovery,
    runtime::reflector::{ObjectRef, Store, store::Writer},
};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;

pub(crate) use crate::demand::pool_of;
use crate::{demand, machine::reuse::reuses};

/// Kinds of other projects, in the versions that this cluster serves.
#[derive(Clone, Debug)]
pub struct Kinds {
    pub(crate) machine: ApiResource,
    pub(crate) agent_machine: ApiResource,
    pub(crate) infra_env: ApiResource,
    pub(crate) agent: ApiResource,
}

impl Kinds {
    /// Reads from the API server which kinds it serves.
    ///
    /// # Errors
    /// When the API server cannot be reached.
    pub async fn discover(client: &Client) -> Result<Self, kube::Error> {
        let all = [foreign::MACHINE, foreign::AGENT_MACHINE, foreign::INFRA_ENV];
        let groups: BTreeSet<_> = all.iter().map(|k| k.group).collect();
        let groups: Vec<_> = groups.into_iter().collect();
        let found = Discovery::new(client.clone()).filter(&groups).run().await?;
        let of = |kind: &ForeignKind| {
            let served = |version: &&&str| {
                found.get(kind.group).is_some_and(|g| {
                    g.versioned_resources(version).iter().any(|(resource, _)| resource.kind == kind.kind)
                })
            };
            kind.resource(kind.versions.iter().find(served).unwrap_or(&kind.versions[0]))
        };
        Ok(Self {
            machine: of(&foreign::MACHINE),
            agent_machine: of(&foreign::AGENT_MACHINE),
            infra_env: of(&foreign::INFRA_ENV),
            agent: of(&foreign::AGENT),
        })
    }
}

/// Caches of the watched kinds.
#[derive(Clone, Debug)]
pub(crate) struct Caches {
    pub(crate) pools: Store<VsphereAgentPool>,
    pub(crate) requests: Store<VsphereAgent>,
    pub(crate) agent_machines: Store<AgentMachine>,
    pub(crate) machines: Store<Machine>,
    pub(crate) agents: Store<Agent>,
    pub(crate) infra_envs: Store<InfraEnv>,
    pub(crate) kinds: Kinds,
}

/// Work queues of the three controllers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Triggers {
    pub(crate) pools: WorkQueue<VsphereAgentPool>,
    pub(crate) requests: WorkQueue<VsphereAgent>,
    pub(crate) agent_machines: WorkQueue<AgentMachine>,
    /// Last known generation of each pool, and the path of its image, by UID.
    generations: Arc<Mutex<HashMap<String, (i64, String)>>>,
}

impl Triggers {
    /// Whether specification and image of the pool changed since the last call.
    fn changes(&self, pool: &VsphereAgentPool) -> (bool, bool) {
        let (uid, generation) = (pool.uid().unwrap_or_default(), pool.metadata.generation.unwrap_or(0));
        let iso = pool.status.as_ref().and_then(|s| s.iso.as_ref()).map(|iso| iso.path.clone());
        let now = (generation, iso.unwrap_or_default());
        let before = self.generations.lock().insert(uid, now.clone());
        (before.as_ref().map(|b| b.0) != Some(now.0), before.map(|b| b.1) != Some(now.1))
    }
}

impl Caches {
    /// Pools in `namespace` that a Machine or AgentMachine belongs to.
    pub(crate) fn pools_of(
        &self,
        namespace: Option<&str>,
        annotation: Option<&String>,
    ) -> Vec<ObjectRef<VsphereAgentPool>> {
        let all = self.pools.state();
        all.iter()
            .filter(|p| demand::belongs(namespace, annotation, p))
            .map(|p| ObjectRef::from_obj(p.as_ref()))
            .collect()
    }

    pub(crate) fn pool(&self, namespace: &str, name: &str) -> Option<Arc<VsphereAgentPool>> {
        self.pools.get(&ObjectRef::new(name).within(namespace))
    }

    /// Names of other live pools of the same NodePool.
    pub(crate) fn siblings(&self, pool: &VsphereAgentPool) -> Vec<String> {
        let (own, spec) = (pool.uid(), &pool.spec);
        let pools = self.pools.state();
        let same = pools.iter().filter(|p| p.uid() != own && p.namespace() == pool.namespace()).filter(|p| {
            p.metadata.deletion_timestamp.is_none()
                && p.spec.node_pool_ref == spec.node_pool_ref
                && p.spec.control_plane_namespace == spec.control_plane_namespace
        });
        let mut names: Vec<_> = same.map(|p| p.name_any()).collect();
        names.sort();
        names
    }

    /// VsphereAgents of a pool, including those being deleted.
    pub(crate) fn requests_of(&self, pool: &VsphereAgentPool) -> Vec<Arc<VsphereAgent>> {
        let (ns, name) = (pool.namespace(), pool.name_any());
        let mut all = self.requests.state();
        all.retain(|r| r.namespace() == ns && pool_of(r) == name);
        all
    }
}

/// Starts the watches. The returned future keeps caches and queues up to date; it never ends.
pub(crate) fn watch(
    client: &Client,
    kinds: Kinds,
    namespace: Option<&str>,
) -> (Caches, Triggers, impl Future<Output = ()> + Send + use<>) {
    let (pools, requests) = (Writer::<VsphereAgentPool>::new(()), Writer::<VsphereAgent>::new(()));
    let agent_machines = Writer::<AgentMachine>::new(kinds.agent_machine.clone());
    let machines = Writer::<Machine>::new(kinds.machine.clone());
    let agents = Writer::<Agent>::new(kinds.agent.clone());
    let infra_envs = Writer::<InfraEnv>::new(kinds.infra_env.clone());
    let caches = Caches {
        pools: pools.as_reader(),
        requests: requests.as_reader(),
        agent_machines: agent_machines.as_reader(),
        machines: machines.as_reader(),
        agents: agents.as_reader(),
        infra_envs: infra_envs.as_reader(),
        kinds: kinds.clone(),
    };
    let triggers = Triggers::default();
    let on = || {
        let (caches, triggers) = (caches.clone(), triggers.clone());
        move |changed: Changed<'_>| trigger_reconciles(&caches, &triggers, changed)
    };
    let all = [
        run_cache(api(client, namespace, ()), pools, on(), |o| Changed::Pool(o)),
        run_cache(api(client, namespace, ()), requests, on(), |o| Changed::Request(o)),
        run_cache(api(client, namespace, kinds.agent_machine), agent_machines, on(), |o| {
            Changed::AgentMachine(o)
        }),
        run_cache(api(client, namespace, kinds.machine), machines, on(), |o| Changed::Machine(o)),
        run_cache(api(client, namespace, kinds.agent), agents, on(), |o| Changed::Agent(o)),
        run_cache(api(client, namespace, kinds.infra_env), infra_envs, on(), |o| Changed::InfraEnv(o)),
    ];
    let keep = async move {
        join_all(all).await;
    };
    (caches, triggers, keep)
}

fn api<K>(client: &Client, namespace: Option<&str>, kind: K::DynamicType) -> Api<K>
where
    K: Resource + DynamicApi,
{
    K::api(client, namespace, &kind)
}

/// API of all namespaces or of one, for kinds of any scope type.
pub(crate) trait DynamicApi: Resource + Sized {
    fn api(client: &Client, namespace: Option<&str>, kind: &Self::DynamicType) -> Api<Self>;
}

impl<View> DynamicApi for foreign::Foreign<View> {
    fn api(client: &Client, namespace: Option<&str>, kind: &ApiResource) -> Api<Self> {
        match namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, kind),
            None => Api::all_with(client.clone(), kind),
        }
    }
}

macro_rules! typed_api {
    ($kind:ty) => {
        impl DynamicApi for $kind {
            fn api(client: &Client, namespace: Option<&str>, (): &()) -> Api<Self> {
                match namespace {
                    Some(namespace) => Api::namespaced(client.clone(), namespace),
                    None => Api::all(client.clone()),
                }
            }
        }
    };
}
typed_api!(VsphereAgentPool);
typed_api!(VsphereAgent);

/// Object that was created, changed or deleted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Changed<'a> {
    Pool(&'a VsphereAgentPool),
    Request(&'a VsphereAgent),
    AgentMachine(&'a AgentMachine),
    Machine(&'a Machine),
    Agent(&'a Agent),
    InfraEnv(&'a InfraEnv),
}

/// Keeps a cache up to date, and calls `on` for each change.
fn run_cache<K>(
    api: Api<K>,
    writer: Writer<K>,
    on: impl Fn(Changed<'_>) + Send + 'static,
    as_changed: for<'a> fn(&'a K) -> Changed<'a>,
) -> BoxFuture<'static, ()>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone + Send + Sync,
{
    Box::pin(follow(api, watch_config(), writer, move |seen| on(as_changed(seen.object()))))
}

/// Triggers the reconciles that a change requires.
fn trigger_reconciles(caches: &Caches, triggers: &Triggers, changed: Changed<'_>) {
    let pool = |r: ObjectRef<VsphereAgentPool>| triggers.pools.add(r);
    let request = |r: &VsphereAgent| triggers.requests.add(ObjectRef::from_obj(r));
    let am = |am: &AgentMachine| {
        triggers.agent_machines.add(ObjectRef::from_obj_with(am, caches.kinds.agent_machine.clone()));
    };
    match changed {
        Changed::Pool(p) => {
            pool(ObjectRef::from_obj(p));
            let (edited, has_image) = triggers.changes(p);
            let is_due =
                |r: &&Arc<VsphereAgent>| edited || (has_image && r.vm().is_none()) || is_affected(p, r);
            caches.requests_of(p).iter().filter(is_due).for_each(|r| request(r));
            // The status of a pool affects AgentMachines only if they may take its free Agents.
            if edited || reuses(p) {
                caches.agent_machines.state().iter().filter(|a| demand::is_of(a, p)).for_each(|a| am(a));
            }
        }
        Changed::Request(r) => {
            request(r);
            let ns = r.namespace().unwrap_or_default();
            pool(ObjectRef::new(&pool_of(r)).within(&ns));
            if let Some(p) = caches.pool(&ns, &pool_of(r)) {
                let key = ObjectRef::new_with(&r.name_any(), caches.kinds.agent_machine.clone());
                let key = key.within(&p.spec.control_plane_namespace);
                if caches.agent_machines.get(&key).is_some() {
                    triggers.agent_machines.add(key);
                }
            }
        }
        Changed::AgentMachine(a) => {
            am(a);
            caches
                .pools_of(a.namespace().as_deref(), a.annotations().get(names::NODEPOOL_ANNOTATION))
                .into_iter()
                .for_each(pool);
        }
        Changed::Machine(m) => {
            caches
                .pools_of(m.namespace().as_deref(), m.annotations().get(names::NODEPOOL_ANNOTATION))
                .into_iter()
                .for_each(pool);
        }
        Changed::Agent(a) => {
            let ours = |p: &&Arc<VsphereAgentPool>| p.namespace() == a.namespace();
            caches.pools.state().iter().filter(ours).for_each(|p| {
                pool(ObjectRef::from_obj(p.as_ref()));
                if p.spec.iso.as_ref().is_some_and(|iso| iso.eject_after_install) {
                    caches.requests_of(p).iter().filter(|r| is_agent_of(r, a)).for_each(|r| request(r));
                }
            });
        }
        Changed::InfraEnv(env) => {
            for p in caches.pools.state() {
                if p.namespace() == env.namespace() && p.spec.infra_env_ref.name == env.name_any() {
                    pool(ObjectRef::from_obj(p.as_ref()));
                    caches.requests_of(&p).iter().filter(|r| r.vm().is_none()).for_each(|r| request(r));
                }
            }
        }
    }
}

/// Whether the Agent was recognised in the VM of this VsphereAgent.
fn is_agent_of(request: &VsphereAgent, agent: &Agent) -> bool {
    let reference = request.vm().and_then(|vm| vm.agent_ref.as_ref());
    reference.and_then(|r| r.name.as_deref()) == Some(&agent.name_any())
}

/// Whether a change of a pool's status affects this VsphereAgent: the object is being deleted, or its row has another phase,
/// Agent or Machine. A pool's status changes often, and usually most VsphereAgents have nothing to do.
fn is_affected(pool: &VsphereAgentPool, request: &VsphereAgent) -> bool {
    let going = request.metadata.deletion_timestamp.is_some() || pool.metadata.deletion_timestamp.is_some();
    let Some(vm) = request.vm() else { return going };
    let rows = pool.status.as_ref().map(|s| s.owned_vms.as_slice()).unwrap_or_default();
    let differs = rows.iter().find(|r| r.name == vm.name).is_some_and(|r| {
        (&r.phase, &r.agent_ref, &r.machine_ref) != (&vm.phase, &vm.agent_ref, &vm.machine_ref)
    });
    going || differs
}

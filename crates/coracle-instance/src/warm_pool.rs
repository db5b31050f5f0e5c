//! Warm pool: paused clones that were warmed up, for the most recently started size classes. Paused clones take no CPU time.
//!
//! ```text
//! a start of a shape ends ─▶ want ─▶ the task makes clones, instances of the pool
//! the next one begins     ─▶ claim ─▶ assign: the instance is the VM's
//! cut off, failed, idle   ─────────▶ the task ends it
//! ```
//! As in a template, the guest holds no secret: it was only ever configured with dummy data. To be assigned to a VM, a pooled
//! clone takes the same steps as a new one.

mod kinds;
mod plan;
mod task;
mod warm_up;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_guest_client::GuestSession;
use coracle_hypervisor::{Driver as _, ProcessId, VmmConfig};
use coracle_net::Attachment;
use coracle_types::{InstanceId, VmId};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout};

pub use self::kinds::StartKind;
use self::kinds::{LatestStarts, WarmUps};
use self::plan::{Demand, MAKING_FIRST_GUESS, Memory, Step, depth, next};
pub use self::task::run as serve;
use crate::instances::InstanceOwner;
use crate::memory::memory_mib;
use crate::node::Node;
use crate::templates::Templates;
use crate::{HostError, TemplateKey, WarmPoolPolicy};

/// Maximum number of counted starts of one shape, the latest.
const STARTS_MAX: usize = 256;

/// Time limit of a call to a clone's agent, which answers at once unless the CPUs are busy.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Time that a start waits for a clone of its shape that is being made.
const NEARLY_THERE: Duration = Duration::from_secs(2);

/// Clone with an open session, not assigned to a VM.
#[derive(Debug)]
pub struct PooledVmm {
    /// Template that the clone was made from.
    pub key: TemplateKey,
    /// Config that the clone was launched with, including its premounted disk, if any.
    pub vmm_config: VmmConfig,
    /// VMM process.
    pub vmm: ProcessId,
    /// Session with the guest agent. HTTP/2 has begun only in a clone that was warmed up for Pods: a guest with one workload may
    /// never run its code.
    pub guest: GuestSession,
    /// Backend of the NIC.
    pub attachment: Attachment,
    /// Size of the premounted disk, MiB.
    pub disk_mib: u64,
    /// Whether the vCPUs are paused. The VM that the clone is assigned to resumes them once its disks are attached.
    pub paused: bool,
}

impl PooledVmm {
    /// Returns the disk that the guest has mounted.
    pub fn disk(&self) -> Option<&Path> {
        self.vmm_config.disk_in(self.vmm_config.slots.premounted()).map(|disk| disk.path.as_path())
    }
}

/// Pooled clones of a node.
#[derive(Debug)]
pub struct WarmPool {
    node: Arc<Node>,
    templates: Arc<Templates>,
    state: Mutex<State>,
    /// Wakes the task.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Started shapes, the latest first.
    shapes: Vec<Shape>,
    ready: Vec<PooledVmm>,
    making: Option<Making>,
    /// Time that the latest clone took to make.
    took: Option<Duration>,
    /// Dead clones of dropped claims, which the task ends.
    spent: Vec<InstanceId>,
}

/// Shape that was started.
#[derive(Clone, Debug)]
struct Shape {
    key: TemplateKey,
    /// VMM config of its latest VM.
    vmm_config: VmmConfig,
    started: Instant,
    latest: LatestStarts,
    /// Times at which its VMs were requested, within the policy's idle time.
    asked: VecDeque<Instant>,
}

impl Shape {
    fn demand(&self, making: Duration, policy: &WarmPoolPolicy, now: Instant) -> Demand<'_> {
        let asked = self.asked.iter().copied().filter(|at| *at + policy.idle_max > now);
        let asked: Vec<_> = asked.collect();
        Demand { key: &self.key, started: self.started, depth: depth(&asked, making, policy) }
    }
}

/// Clone that is being made, and the start that waits for it.
#[derive(Debug)]
struct Making {
    key: TemplateKey,
    id: InstanceId,
    first: Option<oneshot::Sender<Claim>>,
}

impl WarmPool {
    /// Creates an empty pool.
    pub fn new(node: Arc<Node>, templates: Arc<Templates>) -> Self {
        Self { node, templates, state: Mutex::default(), changed: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the shape of a removed template: the task ends its unassigned clones.
    pub fn forget(&self, key: &TemplateKey) {
        self.state().shapes.retain(|shape| shape.key != *key);
        self.changed.notify_one();
    }

    /// Returns the starts that a new clone of this shape is warmed up for.
    fn warm_ups(&self, key: &TemplateKey) -> WarmUps {
        let state = self.state();
        let shape = state.shapes.iter().find(|shape| shape.key == *key);
        let latest = shape.map(|shape| shape.latest).unwrap_or_default();
        latest.warm_ups(self.node.config.warm_pool.idle_max, Instant::now())
    }

    /// Returns whether a clone of this shape is pooled.
    pub fn has(&self, key: &TemplateKey) -> bool {
        self.state().ready.iter().any(|pooled| pooled.key == *key)
    }

    fn take(&self, key: &TemplateKey) -> Option<PooledVmm> {
        let mut state = self.state();
        let at = state.ready.iter().position(|pooled| pooled.key == *key)?;
        Some(state.ready.swap_remove(at))
    }

    /// Plans the next step.
    fn next(&self, now: Instant) -> Step {
        let state = self.state();
        let policy = &self.node.config.warm_pool;
        let making = state.took.unwrap_or(MAKING_FIRST_GUESS);
        let shapes: Vec<_> = state.shapes.iter().map(|shape| shape.demand(making, policy, now)).collect();
        let ready: Vec<_> = state.ready.iter().map(|pooled| &pooled.key).collect();
        let of_host = memory_mib();
        let memory = |key: &TemplateKey| {
            let shape = state.shapes.iter().find(|shape| shape.key == *key);
            shape.map_or(Memory::Enough, |shape| Memory::of(of_host, shape.vmm_config.memory))
        };
        next(&shapes, &ready, policy, memory, now)
    }

    /// Requests pooled clones of a shape after the start of one of its VMs, which was requested at `asked`, or after its template
    /// was taken (`kind` is `None` then). Never waits.
    pub fn want(&self, key: TemplateKey, vmm_config: &VmmConfig, asked: Instant, kind: Option<StartKind>) {
        let policy = &self.node.config.warm_pool;
        let able = self.node.driver.templates(vmm_config).is_some_and(|templates| templates.can_assign());
        if policy.shapes_max == 0 || !able {
            return;
        }
        let mut state = self.state();
        let now = Instant::now();
        let known = state.shapes.iter().position(|shape| shape.key == key).map(|at| state.shapes.remove(at));
        let (mut all, mut latest) = known.map(|shape| (shape.asked, shape.latest)).unwrap_or_default();
        if let Some(kind) = kind {
            latest.add(kind, now);
        }
        all.retain(|earlier| *earlier + policy.idle_max > now);
        all.push_back(asked);
        all.drain(..all.len().saturating_sub(STARTS_MAX));
        state
            .shapes
            .insert(0, Shape { key, vmm_config: vmm_config.clone(), started: now, latest, asked: all });
        state.shapes.truncate(policy.shapes_max);
        drop(state);
        self.changed.notify_one();
    }

    /// Claims the pooled clone of this shape, or the one that is being made, if it fits the VM. Cancel-safe.
    pub async fn claim(
        self: &Arc<Self>,
        key: &TemplateKey,
        fits: impl Fn(&PooledVmm) -> bool,
    ) -> Option<Claim> {
        let (making, coming) = {
            let mut state = self.state();
            if let Some(at) = state.ready.iter().position(|pooled| pooled.key == *key) {
                let pooled = fits(&state.ready[at]).then(|| state.ready.swap_remove(at))?;
                drop(state);
                return Claim::of(self, pooled).filter(fits);
            }
            let making = state.making.as_mut().filter(|m| m.key == *key && m.first.is_none())?;
            let (first, coming) = oneshot::channel();
            making.first = Some(first);
            (making.id.clone(), coming)
        };
        self.node.instances.to_foreground(&making).await;
        let claim = timeout(NEARLY_THERE, coming).await.ok()?.ok()?;
        claim.filter(fits)
    }
}

/// Clone that a start has claimed. A claim that is dropped before [`Claim::assign`] returns the clone to the pool, or ends it
/// if it has died.
#[derive(Debug)]
pub struct Claim {
    warm_pool: Arc<WarmPool>,
    /// `None`: assigned.
    pooled: Option<PooledVmm>,
}

impl Claim {
    fn of(warm_pool: &Arc<WarmPool>, pooled: PooledVmm) -> Self {
        Self { warm_pool: warm_pool.clone(), pooled: Some(pooled) }
    }

    /// Returns the claim if the clone fits the VM and is alive.
    fn filter(self, fits: impl Fn(&PooledVmm) -> bool) -> Option<Self> {
        let is_alive = |pooled: &PooledVmm| pooled.vmm.is_alive().is_ok_and(|alive| alive);
        let usable = self.pooled.as_ref().is_some_and(|pooled| fits(pooled) && is_alive(pooled));
        usable.then_some(self)
    }

    /// Assigns the instance to the VM, whose task ends it from then on. After an interruption, the owner in the instance's
    /// record ends it.
    ///
    /// # Errors
    /// [`HostError::State`]; the clone is ended.
    pub async fn assign(mut self, vm: &VmId) -> Result<PooledVmm, HostError> {
        let Some(pooled) = &self.pooled else { return Err(HostError::Stopping) };
        let id = pooled.vmm_config.id.clone();
        let instances = &self.warm_pool.node.instances;
        let assign = instances.assign(&id, InstanceOwner::Vm(vm.clone()));
        tokio::join!(assign, instances.to_foreground(&id)).0?;
        self.pooled.take().ok_or(HostError::Stopping)
    }

    /// Returns the clone, unclaimed.
    fn into_pooled(mut self) -> Option<PooledVmm> {
        self.pooled.take()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some(pooled) = self.pooled.take() else { return };
        let mut state = self.warm_pool.state();
        match pooled.vmm.is_alive() {
            Ok(true) => state.ready.push(pooled),
            _ => state.spent.push(pooled.vmm_config.id),
        }
        drop(state);
        self.warm_pool.changed.notify_one();
    }
}

//! Sizes: of a pod's VM, from requests and limits of its containers; and resource limits of each container. Pure.

use coracle_host::Resources;
use coracle_types::{MemoryMib, Vcpus};
use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};

use crate::declared::{ContainerKind, declared};
use crate::node::NodeFacts;
use coracle_api::Amount;

/// Period of CPU quotas in microseconds, and the smallest quota that the kernel accepts (sched-bwc.rst).
const PERIOD_US: u64 = 100_000;
const QUOTA_US_MIN: u64 = 1_000;
/// Shares of one CPU, the minimum, and the maximum (cgroup v1 `cpu.shares`, the unit in which requests are defined).
const SHARES_PER_CPU: u64 = 1024;
const SHARES_MIN: u64 = 2;
const SHARES_MAX: u64 = 262_144;
/// Priority from which a pod is critical to its node.
const CRITICAL_PRIORITY: i32 = 2_000_000_000;
/// OOM scores (`oom_score_adj`) of the classes (Kubernetes documentation, "Node out of memory behavior").
const OOM_GUARANTEED: i32 = -997;
const OOM_BEST_EFFORT: i32 = 1000;

/// Quality of service class of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QosClass {
    /// All containers have limits for CPU and memory, and requests equal to them or none.
    Guaranteed,
    /// Some request or limit is set.
    Burstable,
    /// No request or limit is set.
    BestEffort,
}

impl QosClass {
    /// Returns the name of the class in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Guaranteed => "Guaranteed",
            Self::Burstable => "Burstable",
            Self::BestEffort => "BestEffort",
        }
    }
}

fn amount(resources: Option<&ResourceRequirements>, of_limits: bool, name: &str) -> Option<Amount> {
    let resources = resources?;
    let map = if of_limits { &resources.limits } else { &resources.requests };
    map.as_ref()?.get(name).map(Amount::of).filter(|amount| !amount.is_zero())
}

/// Returns the quality of service class of a pod: by its pod-level resources if set, else by its containers.
#[must_use]
pub fn qos_class(pod: &Pod) -> QosClass {
    let own = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let is_set = |r: &&ResourceRequirements| r.limits.is_some() || r.requests.is_some();
    let lists: Vec<Option<ResourceRequirements>> = match own.filter(is_set) {
        Some(own) => vec![Some(own.clone())],
        None => declared(pod)
            .iter()
            .filter(|one| one.kind != ContainerKind::Ephemeral)
            .map(|one| one.container.resources.clone())
            .collect(),
    };
    let names = ["cpu", "memory"];
    let any = |r: &Option<ResourceRequirements>| {
        names
            .iter()
            .any(|name| [true, false].iter().any(|limits| amount(r.as_ref(), *limits, name).is_some()))
    };
    let guaranteed = |r: &Option<ResourceRequirements>| {
        names.iter().all(|name| {
            let limit = amount(r.as_ref(), true, name);
            limit.is_some() && amount(r.as_ref(), false, name).is_none_or(|request| Some(request) == limit)
        })
    };
    if !lists.iter().any(any) {
        QosClass::BestEffort
    } else if lists.iter().all(guaranteed) {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

/// Need of the containers for one resource: the total, and whether a container has no limit.
struct Need {
    total: Amount,
    unlimited: bool,
}

/// Returns the peak need of the containers: the app containers and sidecars together, or one init container with the sidecars
/// before it (Kubernetes documentation, "Sidecar containers", resource sharing).
fn peak_need(pod: &Pod, name: &str) -> Need {
    let of = |container: &Container| {
        let resources = container.resources.as_ref();
        amount(resources, true, name).or_else(|| amount(resources, false, name)).unwrap_or_default()
    };
    let (mut sidecars, mut apps, mut init) = (Amount::ZERO, Amount::ZERO, Amount::ZERO);
    let mut unlimited = false;
    for one in declared(pod) {
        let amount_of = of(&one.container);
        let limited = amount(one.container.resources.as_ref(), true, name).is_some();
        match one.kind {
            ContainerKind::Init => init = init.max(sidecars.plus(amount_of)),
            ContainerKind::Sidecar => {
                sidecars = sidecars.plus(amount_of);
                init = init.max(sidecars);
            }
            ContainerKind::App => apps = apps.plus(amount_of),
            ContainerKind::Ephemeral => continue,
        }
        unlimited |= !limited;
    }
    let own = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    match amount(own, true, name) {
        Some(limit) => Need { total: limit, unlimited: false },
        None => Need { total: init.max(apps.plus(sidecars)), unlimited },
    }
}

/// Returns the size of the VM of a pod: the limits, else the requests, of its containers, plus the overhead of its runtime
/// class and of the guest. If a container has no limit, the memory is at least the node's default.
#[must_use]
pub fn vm_size(pod: &Pod, node: &NodeFacts) -> (Vcpus, MemoryMib) {
    let overhead = pod.spec.as_ref().and_then(|spec| spec.overhead.as_ref());
    let extra = |name: &str| overhead.and_then(|all| all.get(name)).map(Amount::of).unwrap_or_default();
    let (cpu, memory) = (peak_need(pod, "cpu"), peak_need(pod, "memory"));
    let least = if memory.unlimited { node.default_memory.bytes() } else { 0 };
    let bytes = memory.total.units().max(least).saturating_add(extra("memory").units());
    let mib = bytes.div_ceil(1 << 20).saturating_add(node.guest_overhead_mib.into());
    let memory = MemoryMib::try_from(mib.max(MemoryMib::MIN.get().into())).unwrap_or(node.allocatable_memory);
    let cpus = cpu.total.plus(extra("cpu")).units().max(1);
    let cpus = u32::try_from(cpus).unwrap_or(u32::MAX).min(node.allocatable_cpus).clamp(1, 32);
    (Vcpus::try_from(cpus).unwrap_or(Vcpus::MIN), memory)
}

/// Returns the resource limits of a container in the guest.
#[must_use]
pub fn limits(container: &Container) -> Resources {
    let resources = container.resources.as_ref();
    let cpu_limit = amount(resources, true, "cpu");
    let cpu_request = amount(resources, false, "cpu").or(cpu_limit);
    Resources {
        cpu_quota_us: cpu_limit.map(|cpu| (cpu.millis().saturating_mul(PERIOD_US) / 1000).max(QUOTA_US_MIN)),
        cpu_weight: Some(weight(cpu_request.map_or(SHARES_MIN, |cpu| cpu.millis() * SHARES_PER_CPU / 1000))),
        memory_max_bytes: amount(resources, true, "memory").map(Amount::units),
        ..Resources::default()
    }
}

/// Converts shares of cgroup v1 to `cpu.weight` of cgroup v2, as the OCI runtimes do: 2 is 1, 1024 is 100, 262144 is 10000
/// (opencontainers/cgroups, ConvertCPUSharesToCgroupV2Value).
fn weight(shares: u64) -> u64 {
    let shares = shares.clamp(SHARES_MIN, SHARES_MAX);
    if shares == SHARES_MAX {
        return 10_000;
    }
    #[expect(clippy::cast_precision_loss, reason = "at most 262144")]
    let log = (shares as f64).log2();
    let exponent = (log * log + 125.0 * log) / 612.0 - 7.0 / 34.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 1 and 10000")]
    let weight = 10_f64.powf(exponent).ceil() as u64;
    weight.clamp(1, 10_000)
}

/// Returns the OOM score of a container. Its memory request is compared with the memory of its VM.
#[must_use]
pub fn oom_score_adj(pod: &Pod, container: &Container, vm: MemoryMib) -> i32 {
    let priority = pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    match qos_class(pod) {
        _ if priority >= CRITICAL_PRIORITY => OOM_GUARANTEED,
        QosClass::Guaranteed => OOM_GUARANTEED,
        QosClass::BestEffort => OOM_BEST_EFFORT,
        QosClass::Burstable => {
            let resources = container.resources.as_ref();
            let request = amount(resources, false, "memory").or_else(|| amount(resources, true, "memory"));
            let bytes = u128::from(request.unwrap_or_default().units());
            let share = bytes.saturating_mul(1000) / u128::from(vm.bytes());
            let score = 1000_i32.saturating_sub(i32::try_from(share).unwrap_or(1000));
            score.clamp(1000 + OOM_GUARANTEED, OOM_BEST_EFFORT - 1)
        }
    }
}

//! What is known at a time.

use coracle_proto::guest::{ContainerStatistics, MetricsResponse};

use crate::table::ProbeCount;

/// A pod whose VM runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodSample {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    /// When its VM started, milliseconds since 1970.
    pub(crate) started_ms: Option<i64>,
    /// When its guest reported, milliseconds since 1970. Before it did: now.
    pub(crate) time_ms: i64,
    /// What the guest said of itself.
    pub(crate) guest: Option<MetricsResponse>,
    /// Results of probes: container, kind, result, and how many.
    pub(crate) probes: Vec<(ProbeCount, u64)>,
    /// Those that run.
    pub(crate) containers: Vec<ContainerSample>,
}

/// A container that runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ContainerSample {
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) image: String,
    pub(crate) started_ms: Option<i64>,
    pub(crate) memory_limit_bytes: Option<u64>,
    /// Size of its log.
    pub(crate) log_bytes: Option<u64>,
    /// What the guest said of it.
    pub(crate) statistics: Option<ContainerStatistics>,
}

/// The machine of the node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NodeSample {
    pub(crate) time_ms: i64,
    pub(crate) boot_ms: Option<i64>,
    /// CPU time since boot, of all CPUs together, without idle time.
    pub(crate) cpu_ns: Option<u64>,
    pub(crate) memory_total_bytes: Option<u64>,
    pub(crate) memory_available_bytes: Option<u64>,
    pub(crate) memory_rss_bytes: Option<u64>,
    pub(crate) swap_total_bytes: Option<u64>,
    pub(crate) swap_free_bytes: Option<u64>,
    pub(crate) processes: Option<u64>,
    pub(crate) processes_max: Option<u64>,
    /// Of all interfaces but loopback.
    pub(crate) interfaces: Vec<Interface>,
    /// File system of the state directory, where images and disks are.
    pub(crate) disk: Option<DiskSpace>,
}

/// Counters of a network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) receive_bytes: u64,
    pub(crate) receive_errors: u64,
    pub(crate) transmit_bytes: u64,
    pub(crate) transmit_errors: u64,
}

/// Room of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskSpace {
    pub(crate) capacity_bytes: u64,
    pub(crate) available_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) inodes: u64,
    pub(crate) inodes_free: u64,
}

impl PodSample {
    /// CPU time of the VM's guest since its boot.
    pub(crate) fn cpu_ns(&self) -> Option<u64> {
        self.guest.map(|guest| guest.cpu_user_ns.saturating_add(guest.cpu_system_ns))
    }

    /// Memory of the guest that is not available.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        self.guest.map(|guest| guest.memory_total_bytes.saturating_sub(guest.memory_available_bytes))
    }

    /// The sum over containers that the guest has reported; `None`: it has reported none.
    pub(crate) fn sum(&self, of: fn(&ContainerStatistics) -> u64) -> Option<u64> {
        let known = self.containers.iter().filter_map(|container| container.statistics.as_ref());
        known.map(of).reduce(u64::saturating_add)
    }
}

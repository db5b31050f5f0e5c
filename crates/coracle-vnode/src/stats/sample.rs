//! Samples: known values at one time.

use coracle_proto::guest::{ContainerStatistics, MetricsResponse};

use crate::table::ProbeCount;

/// Sample of a pod whose VM runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodSample {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    /// Start of the VM, in milliseconds since 1970.
    pub(crate) started_ms: Option<i64>,
    /// Time of the guest's report, in milliseconds since 1970. Before the first report: the current time.
    pub(crate) time_ms: i64,
    /// Metrics of the whole guest.
    pub(crate) guest: Option<MetricsResponse>,
    /// Counts of probe results.
    pub(crate) probes: Vec<(ProbeCount, u64)>,
    /// Running containers.
    pub(crate) containers: Vec<ContainerSample>,
}

/// Sample of a running container.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ContainerSample {
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) image: String,
    pub(crate) started_ms: Option<i64>,
    pub(crate) memory_limit_bytes: Option<u64>,
    /// Size of the container's log.
    pub(crate) log_bytes: Option<u64>,
    /// Statistics that the guest reported for the container.
    pub(crate) statistics: Option<ContainerStatistics>,
}

/// Sample of the node's machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NodeSample {
    pub(crate) time_ms: i64,
    pub(crate) boot_ms: Option<i64>,
    /// CPU time of all CPUs since boot, without idle time.
    pub(crate) cpu_ns: Option<u64>,
    pub(crate) memory_total_bytes: Option<u64>,
    pub(crate) memory_available_bytes: Option<u64>,
    pub(crate) memory_rss_bytes: Option<u64>,
    pub(crate) swap_total_bytes: Option<u64>,
    pub(crate) swap_free_bytes: Option<u64>,
    pub(crate) processes: Option<u64>,
    pub(crate) processes_max: Option<u64>,
    /// All interfaces except loopback.
    pub(crate) interfaces: Vec<Interface>,
    /// File system of the state directory, which contains images and disks.
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

/// Space of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskSpace {
    pub(crate) capacity_bytes: u64,
    pub(crate) available_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) inodes: u64,
    pub(crate) inodes_free: u64,
}

impl PodSample {
    /// Returns the CPU time of the guest since its boot.
    pub(crate) fn cpu_ns(&self) -> Option<u64> {
        self.guest.map(|guest| guest.cpu_user_ns.saturating_add(guest.cpu_system_ns))
    }

    /// Returns the memory of the guest that is not available.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        self.guest.map(|guest| guest.memory_total_bytes.saturating_sub(guest.memory_available_bytes))
    }

    /// Returns the sum over containers that the guest has reported; `None`: it has reported none.
    pub(crate) fn sum(&self, of: fn(&ContainerStatistics) -> u64) -> Option<u64> {
        let known = self.containers.iter().filter_map(|container| container.statistics.as_ref());
        known.map(of).reduce(u64::saturating_add)
    }
}

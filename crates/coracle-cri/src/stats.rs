//! Statistics, from the last reports of the guests. Pure, except for the table: no call waits for a guest.

use std::sync::Arc;

use coracle_proto::cri::{
    ContainerAttributes, ContainerStats, ContainerStatsFilter, CpuUsage, FilesystemIdentifier,
    FilesystemUsage, LinuxPodSandboxStats, MemoryUsage, NetworkInterfaceUsage, NetworkUsage,
    PodSandboxAttributes, PodSandboxStats, PodSandboxStatsFilter, ProcessUsage, SwapUsage, UInt64Value,
};
use coracle_proto::guest::{ContainerStatistics, MetricsResponse, Statistics};
use tonic::Status;

use crate::lists::{fits_container_stats, fits_sandbox_stats};
use crate::server::CriServer;
use crate::status::nanoseconds;
use crate::table::{ContainerEntry, Pod};

/// Name of the network interface in guests.
pub(crate) const INTERFACE: &str = "eth0";

/// Last report of a pod, and its time.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) statistics: Arc<Statistics>,
    /// Time in nanoseconds since 1970, never 0.
    pub(crate) time: i64,
    /// Directory of the host that contains the VM's disk.
    pub(crate) disk: String,
}

impl Report {
    /// Returns the statistics of one container; zeros before the guest has reported it.
    pub(crate) fn container(&self, id: &str) -> ContainerStatistics {
        let found = self.statistics.containers.iter().find(|container| container.container == id);
        found.cloned().unwrap_or_default()
    }

    pub(crate) fn sandbox(&self) -> MetricsResponse {
        self.statistics.sandbox.unwrap_or_default()
    }
}

impl CriServer {
    /// Returns the last report of a pod; without one, an empty report with the current time.
    pub(crate) fn report(&self, pod: &Pod) -> Report {
        let statistics = match pod.containers.iter().rfind(|container| container.is_running()) {
            Some(container) if pod.facts.disk => {
                self.0.table.attended_by(&container.entry.id).and_then(|attended| attended.statistics)
            }
            _ => self.0.host.container_statistics(pod.id()).ok().flatten(),
        };
        let statistics = statistics.unwrap_or_default();
        let time = match statistics.time_unix_ns {
            0 => nanoseconds(self.0.host.clock().now()),
            time => time,
        };
        let state = &self.0.host.config().state_dir;
        let disk = state.join("vms").join(pod.record().id.as_str()).display().to_string();
        Report { statistics, time, disk }
    }

    pub(crate) fn container_stats(&self, id: &str) -> Result<ContainerStats, Status> {
        let (pod, container) = self.0.table.container(&self.0.host, id)?;
        Ok(of_container(&container, &self.report(&pod)))
    }

    /// Returns the statistics of running containers.
    pub(crate) fn list_container_stats(&self, filter: Option<&ContainerStatsFilter>) -> Vec<ContainerStats> {
        let mut all = Vec::new();
        for pod in self.0.table.pods(&self.0.host) {
            let fits = |container: &&ContainerEntry| {
                container.is_running()
                    && filter.is_none_or(|filter| fits_container_stats(&container.entry, filter))
            };
            let mut containers = pod.containers.iter().filter(fits).peekable();
            if containers.peek().is_some() {
                let report = self.report(&pod);
                all.extend(containers.map(|container| of_container(container, &report)));
            }
        }
        all
    }

    pub(crate) fn pod_sandbox_stats(&self, id: &str) -> Result<PodSandboxStats, Status> {
        let pod = self.0.table.pod(&self.0.host, id)?;
        Ok(of_pod(&pod, &self.report(&pod)))
    }

    pub(crate) fn list_pod_sandbox_stats(
        &self,
        filter: Option<&PodSandboxStatsFilter>,
    ) -> Vec<PodSandboxStats> {
        let pods = self.0.table.pods(&self.0.host);
        let fits = |pod: &&Arc<Pod>| {
            pod.is_ready() && filter.is_none_or(|filter| fits_sandbox_stats(&pod.entry, filter))
        };
        pods.iter().filter(fits).map(|pod| of_pod(pod, &self.report(pod))).collect()
    }
}

fn number(value: u64) -> Option<UInt64Value> {
    Some(UInt64Value { value })
}

fn of_container(container: &ContainerEntry, report: &Report) -> ContainerStats {
    let time = report.time;
    let statistics = report.container(&container.entry.id);
    let limit = container.record.spec.resources.memory_max_bytes.filter(|limit| *limit > 0);
    let entry = &container.entry;
    ContainerStats {
        attributes: Some(ContainerAttributes {
            id: entry.id.clone(),
            metadata: entry.metadata.clone(),
            labels: entry.labels.clone(),
            annotations: entry.annotations.clone(),
        }),
        cpu: Some(CpuUsage {
            timestamp: time,
            usage_core_nano_seconds: number(statistics.cpu_usage_ns),
            usage_nano_cores: None,
            psi: None,
        }),
        memory: Some(MemoryUsage {
            timestamp: time,
            working_set_bytes: number(statistics.memory_working_set_bytes),
            available_bytes: limit
                .and_then(|limit| number(limit.saturating_sub(statistics.memory_working_set_bytes))),
            usage_bytes: number(statistics.memory_usage_bytes),
            rss_bytes: number(statistics.memory_rss_bytes),
            page_faults: number(statistics.page_faults),
            major_page_faults: number(statistics.major_page_faults),
            psi: None,
        }),
        writable_layer: Some(FilesystemUsage {
            timestamp: time,
            fs_id: Some(FilesystemIdentifier { mountpoint: report.disk.clone() }),
            used_bytes: number(statistics.filesystem_used_bytes),
            inodes_used: number(statistics.filesystem_inodes),
        }),
        swap: Some(SwapUsage {
            timestamp: time,
            swap_available_bytes: number(0),
            swap_usage_bytes: number(statistics.memory_swap_bytes),
        }),
        io: None,
    }
}

fn of_pod(pod: &Pod, report: &Report) -> PodSandboxStats {
    let (time, guest, entry) = (report.time, report.sandbox(), &pod.entry);
    let used = guest.memory_total_bytes.saturating_sub(guest.memory_available_bytes);
    let interface = NetworkInterfaceUsage {
        name: INTERFACE.to_owned(),
        rx_bytes: number(guest.net_receive_bytes),
        rx_errors: number(guest.net_receive_errors),
        tx_bytes: number(guest.net_transmit_bytes),
        tx_errors: number(guest.net_transmit_errors),
    };
    let running = pod.containers.iter().filter(|container| container.is_running());
    let containers: Vec<_> = running.map(|container| of_container(container, report)).collect();
    let sum = |of: fn(&ContainerStatistics) -> u64| -> u64 {
        report.statistics.containers.iter().map(of).fold(0, u64::saturating_add)
    };
    PodSandboxStats {
        attributes: Some(PodSandboxAttributes {
            id: entry.id.clone(),
            metadata: entry.metadata.clone(),
            labels: entry.labels.clone(),
            annotations: entry.annotations.clone(),
        }),
        linux: Some(LinuxPodSandboxStats {
            cpu: Some(CpuUsage {
                timestamp: time,
                usage_core_nano_seconds: number(guest.cpu_user_ns.saturating_add(guest.cpu_system_ns)),
                usage_nano_cores: None,
                psi: None,
            }),
            memory: Some(MemoryUsage {
                timestamp: time,
                working_set_bytes: number(used),
                available_bytes: number(guest.memory_available_bytes),
                usage_bytes: number(used),
                rss_bytes: number(sum(|container| container.memory_rss_bytes)),
                page_faults: number(sum(|container| container.page_faults)),
                major_page_faults: number(sum(|container| container.major_page_faults)),
                psi: None,
            }),
            network: Some(NetworkUsage {
                timestamp: time,
                default_interface: Some(interface.clone()),
                interfaces: vec![interface],
            }),
            process: Some(ProcessUsage { timestamp: time, process_count: number(guest.processes.into()) }),
            containers,
            io: None,
        }),
    }
}

//! `/stats/summary` (`k8s.io/kubelet/pkg/apis/stats/v1alpha1`). Pure but for the rates.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::cadvisor::INTERFACE;
use super::rates::Rates;
use super::sample::{ContainerSample, DiskSpace, Interface, NodeSample, PodSample};

/// Input of a summary.
#[derive(Debug)]
pub(crate) struct Summary<'a> {
    /// Name of the node.
    pub(crate) node_name: &'a str,
    pub(crate) node: &'a NodeSample,
    pub(crate) pods: &'a [PodSample],
    pub(crate) rates: &'a Rates,
    /// Whether everything except CPU and memory is left out.
    pub(crate) only_cpu_and_memory: bool,
}

/// Returns the summary. Unknown values are left out.
pub(crate) fn summary(of: &Summary<'_>) -> Value {
    of.rates.retain(|key| {
        let pod = |pod: &PodSample| key.split_once('/').is_some_and(|(uid, _)| uid == pod.uid);
        key == "node" || of.pods.iter().any(pod)
    });
    let pods: Vec<_> = of.pods.iter().map(|pod| of_pod(of, pod)).collect();
    without_unknown(json!({"node": of_node(of), "pods": pods}))
}

fn of_node(of: &Summary<'_>) -> Value {
    let node = of.node;
    let at = time(node.time_ms);
    let used = node.memory_total_bytes.zip(node.memory_available_bytes);
    let used = used.map(|(total, available)| total.saturating_sub(available));
    let swap = node.swap_total_bytes.zip(node.swap_free_bytes);
    let mut value = json!({
        "nodeName": of.node_name,
        "systemContainers": [],
        "startTime": node.boot_ms.map(time),
        "cpu": cpu(of.rates, "node", node.time_ms, node.cpu_ns),
        "memory": {
            "time": at,
            "availableBytes": node.memory_available_bytes,
            "usageBytes": used,
            "workingSetBytes": used,
            "rssBytes": node.memory_rss_bytes,
        },
        "swap": swap.map(|(total, free)| json!({
            "time": at, "swapAvailableBytes": free, "swapUsageBytes": total.saturating_sub(free),
        })),
    });
    if !of.only_cpu_and_memory {
        let disk = node.disk.map(|disk| disk_space(node.time_ms, &disk));
        let more = json!({
            "network": network(node.time_ms, &node.interfaces),
            "fs": disk,
            "runtime": {"imageFs": disk, "containerFs": disk},
            "rlimit": {"time": at, "maxpid": node.processes_max, "curproc": node.processes},
        });
        merge(&mut value, more);
    }
    value
}

fn of_pod(of: &Summary<'_>, pod: &PodSample) -> Value {
    let containers: Vec<_> =
        pod.containers.iter().map(|container| of_container(of, pod, container)).collect();
    let at = time(pod.time_ms);
    let memory = pod.guest.map(|guest| {
        json!({
            "time": at,
            "availableBytes": guest.memory_available_bytes,
            "usageBytes": pod.memory_bytes(),
            "workingSetBytes": pod.memory_bytes(),
            "rssBytes": pod.sum(|container| container.memory_rss_bytes),
            "pageFaults": pod.sum(|container| container.page_faults),
            "majorPageFaults": pod.sum(|container| container.major_page_faults),
        })
    });
    let mut value = json!({
        "podRef": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid},
        "startTime": pod.started_ms.map(time),
        "containers": containers,
        "cpu": cpu(of.rates, &format!("{}/", pod.uid), pod.time_ms, pod.cpu_ns()),
        "memory": memory,
        "swap": pod.sum(|c| c.memory_swap_bytes).map(|bytes| json!({"time": at, "swapUsageBytes": bytes})),
    });
    if let Some(guest) = pod.guest.filter(|_| !of.only_cpu_and_memory) {
        let interface = Interface {
            name: INTERFACE.to_owned(),
            receive_bytes: guest.net_receive_bytes,
            receive_errors: guest.net_receive_errors,
            transmit_bytes: guest.net_transmit_bytes,
            transmit_errors: guest.net_transmit_errors,
        };
        let logs = pod.containers.iter().filter_map(|container| container.log_bytes);
        let written = pod.sum(|container| container.filesystem_used_bytes);
        let used = logs.chain(written).reduce(u64::saturating_add);
        let disk = of.node.disk;
        let more = json!({
            "network": network(pod.time_ms, &[interface]),
            "ephemeral-storage": {
                "time": at,
                "availableBytes": disk.map(|disk| disk.available_bytes),
                "capacityBytes": disk.map(|disk| disk.capacity_bytes),
                "usedBytes": used,
                "inodesUsed": pod.sum(|container| container.filesystem_inodes),
            },
            "process_stats": {"process_count": guest.processes},
        });
        merge(&mut value, more);
    }
    value
}

fn of_container(of: &Summary<'_>, pod: &PodSample, container: &ContainerSample) -> Value {
    let at = time(pod.time_ms);
    let known = container.statistics.as_ref();
    let memory = known.map(|statistics| {
        let working_set = statistics.memory_working_set_bytes;
        json!({
            "time": at,
            "availableBytes": container.memory_limit_bytes.map(|limit| limit.saturating_sub(working_set)),
            "usageBytes": statistics.memory_usage_bytes,
            "workingSetBytes": working_set,
            "rssBytes": statistics.memory_rss_bytes,
            "pageFaults": statistics.page_faults,
            "majorPageFaults": statistics.major_page_faults,
        })
    });
    let key = format!("{}/{}", pod.uid, container.id);
    let mut value = json!({
        "name": container.name,
        "startTime": container.started_ms.map(time),
        "cpu": cpu(of.rates, &key, pod.time_ms, known.map(|statistics| statistics.cpu_usage_ns)),
        "memory": memory,
        "swap": known.map(|statistics| json!({"time": at, "swapUsageBytes": statistics.memory_swap_bytes})),
    });
    if !of.only_cpu_and_memory {
        let disk = of.node.disk;
        let more = json!({
            "rootfs": known.map(|statistics| json!({
                "time": at,
                "availableBytes": pod.guest.map(|guest| guest.overlay_available_bytes),
                "capacityBytes": pod.guest.map(|guest| guest.overlay_total_bytes),
                "usedBytes": statistics.filesystem_used_bytes,
                "inodesUsed": statistics.filesystem_inodes,
            })),
            "logs": container.log_bytes.map(|bytes| json!({
                "time": at,
                "availableBytes": disk.map(|disk| disk.available_bytes),
                "capacityBytes": disk.map(|disk| disk.capacity_bytes),
                "usedBytes": bytes,
            })),
        });
        merge(&mut value, more);
    }
    value
}

fn cpu(rates: &Rates, key: &str, time_ms: i64, total_ns: Option<u64>) -> Option<Value> {
    let total_ns = total_ns?;
    let now = rates.add(key, time_ms, total_ns);
    Some(json!({"time": time(time_ms), "usageNanoCores": now, "usageCoreNanoSeconds": total_ns}))
}

fn network(time_ms: i64, interfaces: &[Interface]) -> Option<Value> {
    let of = |interface: &Interface| {
        json!({
            "name": interface.name,
            "rxBytes": interface.receive_bytes,
            "rxErrors": interface.receive_errors,
            "txBytes": interface.transmit_bytes,
            "txErrors": interface.transmit_errors,
        })
    };
    let mut value = json!({"time": time(time_ms)});
    merge(&mut value, of(interfaces.first()?));
    merge(&mut value, json!({"interfaces": interfaces.iter().map(of).collect::<Vec<_>>()}));
    Some(value)
}

fn disk_space(time_ms: i64, disk: &DiskSpace) -> Value {
    json!({
        "time": time(time_ms),
        "availableBytes": disk.available_bytes,
        "capacityBytes": disk.capacity_bytes,
        "usedBytes": disk.used_bytes,
        "inodesFree": disk.inodes_free,
        "inodes": disk.inodes,
        "inodesUsed": disk.inodes.saturating_sub(disk.inodes_free),
    })
}

/// Returns a time in the format of the API machinery: RFC 3339 in whole seconds.
fn time(milliseconds: i64) -> String {
    let time = Timestamp::from_second(milliseconds.div_euclid(1000)).unwrap_or(Timestamp::UNIX_EPOCH);
    format!("{time:.0}")
}

/// Adds the members of one object to another.
fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
    }
}

/// Removes members that are null.
fn without_unknown(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            let known = members.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(known.map(|(key, value)| (key, without_unknown(value))).collect::<Map<_, _>>())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(without_unknown).collect()),
        other => other,
    }
}

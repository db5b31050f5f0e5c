//! Resource limits of containers. Pure.

use coracle_host::Resources;
use coracle_proto::cri::LinuxContainerResources;

/// Period of CPU quotas in the guest, in microseconds.
const GUEST_PERIOD_US: i64 = 100_000;

/// Returns the limits of a container's cgroup. CPU sets and memory nodes of the host do not apply in a VM.
pub(crate) fn limits(resources: &LinuxContainerResources) -> Resources {
    let period = if resources.cpu_period > 0 { resources.cpu_period } else { GUEST_PERIOD_US };
    let cpu_quota_us = match resources.cpu_quota {
        0 => None,
        quota if quota < 0 => Some(0),
        quota => {
            u64::try_from(quota.saturating_mul(GUEST_PERIOD_US) / period).ok().map(|quota| quota.max(1000))
        }
    };
    let memory_max_bytes = match resources.memory_limit_in_bytes {
        0 => None,
        limit => Some(u64::try_from(limit).unwrap_or(0)),
    };
    let shares = u64::try_from(resources.cpu_shares).unwrap_or(0);
    Resources {
        cpu_quota_us,
        cpu_weight: (shares > 0).then(|| weight(shares)),
        memory_max_bytes,
        pids_max: None,
        unified: resources.unified.iter().filter(|(key, _)| is_of_guest(key)).map(to_owned_pair).collect(),
    }
}

fn to_owned_pair((key, value): (&String, &String)) -> (String, String) {
    (key.clone(), value.clone())
}

/// Returns whether a cgroup setting applies in the guest. CPU sets are those of the host.
fn is_of_guest(key: &str) -> bool {
    ["cpu.", "memory.", "pids.", "io."].iter().any(|controller| key.starts_with(controller))
}

/// Converts cgroup v1 shares, 2 to 262144, to a cgroup v2 weight, 1 to 10000 (mapping of the OCI runtimes).
fn weight(shares: u64) -> u64 {
    let shares = shares.clamp(2, 262_144);
    1 + (shares - 2) * 9999 / 262_142
}

/// Returns the resources of a container after an update, in which zero means unchanged.
pub(crate) fn merge_resources(
    old: LinuxContainerResources,
    update: &LinuxContainerResources,
) -> LinuxContainerResources {
    let or = |new: i64, old: i64| if new == 0 { old } else { new };
    LinuxContainerResources {
        cpu_period: or(update.cpu_period, old.cpu_period),
        cpu_quota: or(update.cpu_quota, old.cpu_quota),
        cpu_shares: or(update.cpu_shares, old.cpu_shares),
        memory_limit_in_bytes: or(update.memory_limit_in_bytes, old.memory_limit_in_bytes),
        oom_score_adj: or(update.oom_score_adj, old.oom_score_adj),
        memory_swap_limit_in_bytes: or(update.memory_swap_limit_in_bytes, old.memory_swap_limit_in_bytes),
        unified: old.unified.into_iter().chain(update.unified.clone()).collect(),
        ..old
    }
}

/// Returns the reported resources, with the kernel's defaults for values that the caller did not set.
pub(crate) fn effective(resources: &LinuxContainerResources) -> LinuxContainerResources {
    LinuxContainerResources {
        cpu_period: if resources.cpu_period > 0 { resources.cpu_period } else { GUEST_PERIOD_US },
        cpu_shares: if resources.cpu_shares > 0 { resources.cpu_shares } else { 1024 },
        ..resources.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resources(quota: i64, period: i64, shares: i64, memory: i64) -> LinuxContainerResources {
        LinuxContainerResources {
            cpu_quota: quota,
            cpu_period: period,
            cpu_shares: shares,
            memory_limit_in_bytes: memory,
            ..LinuxContainerResources::default()
        }
    }

    #[test]
    fn limits_table() {
        for (why, given, want) in [
            ("nothing", resources(0, 0, 0, 0), (None, None, None)),
            ("unlimited", resources(-1, 0, 0, -1), (Some(0), None, Some(0))),
            ("half a CPU", resources(50_000, 100_000, 0, 0), (Some(50_000), None, None)),
            ("half a CPU of a short period", resources(5_000, 10_000, 0, 0), (Some(50_000), None, None)),
            ("less than the kernel takes", resources(1, 100_000, 0, 0), (Some(1000), None, None)),
            ("least weight", resources(0, 0, 2, 0), (None, Some(1), None)),
            ("one CPU's shares", resources(0, 0, 1024, 0), (None, Some(39), None)),
            ("most weight", resources(0, 0, 262_144, 0), (None, Some(10_000), None)),
            ("memory", resources(0, 0, 0, 15 << 20), (None, None, Some(15 << 20))),
        ] {
            let got = limits(&given);
            assert_eq!((got.cpu_quota_us, got.cpu_weight, got.memory_max_bytes), want, "{why}");
        }
    }

    #[test]
    fn host_cpuset_is_removed_from_unified_limits() {
        let unified =
            [("memory.oom.group", "1"), ("cpuset.cpus", "3")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let given = LinuxContainerResources { unified: unified.into(), ..resources(0, 0, 0, 0) };
        assert_eq!(limits(&given).unified.keys().collect::<Vec<_>>(), ["memory.oom.group"]);
    }

    #[test]
    fn update_keeps_unspecified_resources() {
        let merged = merge_resources(resources(1, 2, 3, 4), &resources(0, 0, 7, 0));
        assert_eq!(merged, resources(1, 2, 7, 4));
        assert_eq!(effective(&resources(0, 0, 0, 0)).cpu_shares, 1024);
    }
}

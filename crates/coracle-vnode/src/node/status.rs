//! Status of the Node object. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeFeatures,
    NodeRuntimeHandler, NodeRuntimeHandlerFeatures, NodeStatus,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::facts::{Identity, Resources};
use crate::pressure::PressureThresholds;

/// Percentage of the disk that pods may use.
const DISK_PODS_PERCENT: u64 = 90;
/// Node condition that is False if the host does not support a part of the VMMs' jail; its message lists these parts.
const JAILED: &str = "coracle.dev/VMMsJailed";
/// Declared features of the node, sorted. The API server forwards WebSocket upgrades to a node that declares this one.
const FEATURES: [&str; 1] = ["ExtendWebSocketsToKubelet"];

/// Returns the status of the node. `ready`: the node can run pods. `before` provides the times of unchanged conditions.
pub(super) fn derive(
    identity: &Identity,
    resources: &Resources,
    ready: bool,
    before: Option<&NodeStatus>,
    now: Timestamp,
) -> NodeStatus {
    let address = |type_: &str, address: String| NodeAddress { type_: type_.to_owned(), address };
    let images = resources.images.iter().map(|(names, size)| ContainerImage {
        names: Some(names.clone()),
        size_bytes: i64::try_from(*size).ok(),
    });
    NodeStatus {
        addresses: Some(vec![
            address("InternalIP", identity.address.to_string()),
            address("Hostname", identity.hostname.clone()),
        ]),
        capacity: Some(amounts(identity, resources, resources.memory_bytes, resources.disk_bytes)),
        allocatable: Some(amounts(
            identity,
            resources,
            resources.allocatable_memory_bytes,
            resources.disk_bytes / 100 * DISK_PODS_PERCENT,
        )),
        conditions: Some(conditions(identity.pressure, resources, ready, before, now)),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint { port: identity.port.into() }),
        }),
        node_info: Some(identity.info.clone()),
        images: Some(images.collect()),
        runtime_handlers: Some(vec![NodeRuntimeHandler {
            name: Some(String::new()),
            features: Some(NodeRuntimeHandlerFeatures {
                recursive_read_only_mounts: Some(false),
                user_namespaces: Some(false),
            }),
        }]),
        features: Some(NodeFeatures { supplemental_groups_policy: Some(true) }),
        declared_features: Some(FEATURES.map(str::to_owned).to_vec()),
        ..NodeStatus::default()
    }
}

fn amounts(identity: &Identity, resources: &Resources, memory: u64, disk: u64) -> BTreeMap<String, Quantity> {
    let amounts = [
        ("cpu", resources.cpus.to_string()),
        ("memory", format!("{}Ki", memory >> 10)),
        ("ephemeral-storage", format!("{}Ki", disk >> 10)),
        ("pods", identity.pods_max.to_string()),
    ];
    amounts.map(|(name, amount)| (name.to_owned(), Quantity(amount))).into()
}

fn condition_fields<'a>(
    holds: bool,
    yes: (&'a str, &'a str),
    no: (&'a str, &'a str),
) -> (bool, &'a str, &'a str) {
    let (reason, message) = if holds { yes } else { no };
    (holds, reason, message)
}

fn conditions(
    pressure: PressureThresholds,
    resources: &Resources,
    ready: bool,
    before: Option<&NodeStatus>,
    now: Timestamp,
) -> Vec<NodeCondition> {
    let memory_low = pressure.memory_is_low(resources.memory_available_bytes, resources.memory_bytes);
    let disk_low = pressure.disk_is_low(resources.disk_available_bytes, resources.disk_bytes);
    let little_memory = format!("less than {} of memory are available", pressure.memory_text());
    let little_disk = format!("less than {} of the disk are available", pressure.disk_text());
    let jail_missing = resources.jail_missing.join("; ");
    let wanted = [
        (
            "MemoryPressure",
            condition_fields(
                memory_low,
                ("KubeletHasInsufficientMemory", &little_memory),
                ("KubeletHasSufficientMemory", "memory is available"),
            ),
        ),
        (
            "DiskPressure",
            condition_fields(
                disk_low,
                ("KubeletHasDiskPressure", &little_disk),
                ("KubeletHasNoDiskPressure", "disk space is available"),
            ),
        ),
        // The processes of pods belong to their guests.
        ("PIDPressure", (false, "KubeletHasSufficientPID", "processes of pods run in guests")),
        // For nodes of a kubelet, the cloud provider sets this condition. The virtual node has its own routes.
        ("NetworkUnavailable", (false, "RouteCreated", "guests have the network of the node")),
        (
            JAILED,
            condition_fields(
                jail_missing.is_empty(),
                ("JailComplete", "each VMM runs in a whole jail"),
                ("JailPartsMissing", &jail_missing),
            ),
        ),
        (
            "Ready",
            condition_fields(
                ready,
                ("KubeletReady", "the virtual node runs pods"),
                ("KubeletNotReady", "the pods of the node are not known yet"),
            ),
        ),
    ];
    let old = |kind: &str| before?.conditions.iter().flatten().find(|one| one.type_ == kind);
    let condition = |(kind, (holds, reason, message)): (&str, (bool, &str, &str))| {
        let status = if holds { "True" } else { "False" };
        let since = old(kind).filter(|one| one.status == status);
        let since = since.and_then(|one| one.last_transition_time.clone());
        NodeCondition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_heartbeat_time: Some(seconds(now)),
            last_transition_time: Some(since.unwrap_or_else(|| seconds(now))),
        }
    };
    wanted.map(condition).to_vec()
}

/// Returns a time in whole seconds, as the API server stores it.
fn seconds(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

/// Returns whether the statuses differ in anything but heartbeat times, so that the change is reported at once.
pub(super) fn differs(old: &NodeStatus, new: &NodeStatus) -> bool {
    let without_heartbeat = |status: &NodeStatus| {
        let mut status = status.clone();
        status.conditions.iter_mut().flatten().for_each(|one| one.last_heartbeat_time = None);
        status
    };
    without_heartbeat(old) != without_heartbeat(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::VirtualNodeOptions;

    fn identity() -> Identity {
        let mut options = VirtualNodeOptions::new("vm-1");
        options.address = Some("192.0.2.1".parse().unwrap());
        Identity::read(&options, "0.0.0.0:10250".parse().unwrap(), "0.1.0")
    }

    fn resources() -> Resources {
        Resources {
            cpus: 8,
            memory_bytes: 16 << 30,
            allocatable_memory_bytes: 12 << 30,
            memory_available_bytes: 8 << 30,
            disk_bytes: 100 << 30,
            disk_available_bytes: 50 << 30,
            images: vec![(vec!["a:1".into()], 7)],
            jail_missing: vec![],
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn status_has_what_schedulers_and_clients_read() {
        let status = derive(&identity(), &resources(), true, None, at(100));
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!(json["daemonEndpoints"]["kubeletEndpoint"]["Port"], 10250);
        assert_eq!(json["addresses"][0], serde_json::json!({"type": "InternalIP", "address": "192.0.2.1"}));
        assert_eq!(json["addresses"][1], serde_json::json!({"type": "Hostname", "address": "vm-1"}));
        assert_eq!(
            (&json["capacity"]["cpu"], &json["capacity"]["memory"]),
            (&"8".into(), &"16777216Ki".into())
        );
        assert_eq!(json["allocatable"]["memory"], "12582912Ki");
        assert_eq!((&json["capacity"]["pods"], &json["images"][0]["sizeBytes"]), (&"110".into(), &7.into()));
        assert_eq!(json["declaredFeatures"], serde_json::json!(["ExtendWebSocketsToKubelet"]));
    }

    #[test]
    fn conditions_follow_available_resources() {
        for (why, change, ready, want) in [
            ("all well", (8 << 30, 50 << 30), true, ["False", "False", "False", "False", "True", "True"]),
            (
                "little memory",
                (99 << 20, 50 << 30),
                true,
                ["True", "False", "False", "False", "True", "True"],
            ),
            ("little disk", (8 << 30, 4 << 30), true, ["False", "True", "False", "False", "True", "True"]),
            ("not synced", (8 << 30, 50 << 30), false, ["False", "False", "False", "False", "True", "False"]),
        ] {
            let (memory_available_bytes, disk_available_bytes) = change;
            let resources = Resources { memory_available_bytes, disk_available_bytes, ..resources() };
            let conditions = conditions(PressureThresholds::default(), &resources, ready, None, at(1));
            let got: Vec<_> = conditions.iter().map(|one| one.status.as_str()).collect();
            assert_eq!(got, want, "{why}");
        }
    }

    #[test]
    fn condition_names_the_missing_parts_of_the_jail() {
        let jail_missing = vec!["jail cgroup: read-only".to_owned(), "jail disks: overlay".to_owned()];
        let resources = Resources { jail_missing, ..resources() };
        let conditions = conditions(PressureThresholds::NONE, &resources, true, None, at(1));
        let jailed = conditions.iter().find(|one| one.type_ == JAILED).unwrap();
        assert_eq!((&*jailed.status, jailed.reason.as_deref()), ("False", Some("JailPartsMissing")));
        assert_eq!(jailed.message.as_deref(), Some("jail cgroup: read-only; jail disks: overlay"));
    }

    #[test]
    fn transition_time_moves_with_the_status_alone() {
        let (identity, resources) = (identity(), resources());
        let first = derive(&identity, &resources, false, None, at(100));
        let second = derive(&identity, &resources, true, Some(&first), at(200));
        let third = derive(&identity, &resources, true, Some(&second), at(300));
        let transitions = |status: &NodeStatus| -> Vec<i64> {
            let conditions = status.conditions.iter().flatten();
            conditions.map(|one| one.last_transition_time.as_ref().unwrap().0.as_second()).collect()
        };
        assert_eq!(transitions(&third), [100, 100, 100, 100, 100, 200]);
        assert!(differs(&first, &second));
        assert!(!differs(&second, &third), "a heartbeat alone changes nothing");
    }
}

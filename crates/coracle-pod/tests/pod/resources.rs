use crate::support::node;
use serde_json::{Value, json};

use coracle_pod::resources::*;
use k8s_openapi::api::core::v1::Pod;

fn pod(spec: Value) -> Pod {
    serde_json::from_value(json!({"spec": spec})).unwrap()
}

fn one(name: &str, requests: Value, limits: Value) -> Value {
    json!({"name": name, "resources": {"requests": requests, "limits": limits}})
}

#[test]
fn qos_class_follows_requests_and_limits() {
    let full = json!({"cpu": "1", "memory": "1Gi"});
    for (why, spec, want) in [
        ("nothing", json!({"containers": [{"name": "a"}]}), QosClass::BestEffort),
        ("limits alone", json!({"containers": [one("a", json!({}), full.clone())]}), QosClass::Guaranteed),
        (
            "equal in another form",
            json!({"containers": [one("a", json!({"cpu": "1000m", "memory": "1024Mi"}), full.clone())]}),
            QosClass::Guaranteed,
        ),
        (
            "a request",
            json!({"containers": [one("a", json!({"cpu": "1m"}), json!({}))]}),
            QosClass::Burstable,
        ),
        (
            "one of two",
            json!({"containers": [one("a", json!({}), full.clone()), {"name": "b"}]}),
            QosClass::Burstable,
        ),
        (
            "an init container without",
            json!({"initContainers": [{"name": "i"}], "containers": [one("a", json!({}), full.clone())]}),
            QosClass::Burstable,
        ),
        (
            "zero is nothing",
            json!({"containers": [one("a", json!({"cpu": "0"}), json!({}))]}),
            QosClass::BestEffort,
        ),
        (
            "of the pod",
            json!({"containers": [{"name": "a"}], "resources": {"limits": full}}),
            QosClass::Guaranteed,
        ),
    ] {
        assert_eq!(qos_class(&pod(spec)), want, "{why}");
    }
}

#[test]
fn vm_size_covers_containers_that_run_at_once() {
    let node = node(); // default 512 MiB, overhead 64 MiB, 8 CPUs
    let limits = |cpu: &str, memory: &str| json!({"cpu": cpu, "memory": memory});
    let sidecar = |name: &str, memory: &str| {
        let mut one = one(name, json!({}), limits("1", memory));
        one["restartPolicy"] = json!("Always");
        one
    };
    for (why, spec, want) in [
        ("no limits: the default", json!({"containers": [{"name": "a"}]}), (1, 576)),
        ("limits", json!({"containers": [one("a", json!({}), limits("1500m", "200Mi"))]}), (2, 264)),
        (
            "the sum",
            json!({"containers": [one("a", json!({}), limits("1", "100Mi")), one("b", json!({}), limits("2", "200Mi"))]}),
            (3, 364),
        ),
        (
            "a large request without limit",
            json!({"containers": [one("a", json!({"memory": "1Gi"}), json!({}))]}),
            (1, 1088),
        ),
        (
            "an init container beyond the app",
            json!({"initContainers": [one("i", json!({}), limits("4", "1Gi"))], "containers": [one("a", json!({}), limits("1", "100Mi"))]}),
            (4, 1088),
        ),
        (
            "sidecars stay",
            json!({"initContainers": [sidecar("s", "100Mi"), one("i", json!({}), limits("1", "150Mi"))],
                   "containers": [one("a", json!({}), limits("1", "100Mi"))]}),
            (2, 314),
        ),
        (
            "overhead",
            json!({"containers": [one("a", json!({}), limits("1", "100Mi"))], "overhead": {"memory": "36Mi", "cpu": "1"}}),
            (2, 200),
        ),
        (
            "of the pod",
            json!({"containers": [{"name": "a"}], "resources": {"limits": limits("2", "300Mi")}}),
            (2, 364),
        ),
        (
            "more than the node has",
            json!({"containers": [one("a", json!({}), limits("99", "200Mi"))]}),
            (8, 264),
        ),
    ] {
        let (vcpus, memory) = vm_size(&pod(spec), &node);
        assert_eq!((vcpus.get(), memory.get()), want, "{why}");
    }
}

#[test]
fn container_limits_become_cgroup_values() {
    for (requests, wanted, want) in [
        (json!({}), json!({}), (None, Some(1), None)),
        (json!({"cpu": "1"}), json!({}), (None, Some(100), None)),
        (
            json!({"cpu": "250m"}),
            json!({"cpu": "500m", "memory": "64Mi"}),
            (Some(50_000), Some(35), Some(64 << 20)),
        ),
        (json!({}), json!({"cpu": "1m"}), (Some(1_000), Some(1), None)),
        (json!({"cpu": "1k"}), json!({}), (None, Some(10_000), None)),
    ] {
        let container = serde_json::from_value(one("a", requests.clone(), wanted.clone())).unwrap();
        let got = limits(&container);
        assert_eq!((got.cpu_quota_us, got.cpu_weight, got.memory_max_bytes), want, "{requests} {wanted}");
    }
}

#[test]
fn oom_score_follows_the_class() {
    let score = |spec: Value| {
        let pod = pod(spec);
        let container = &pod.spec.as_ref().unwrap().containers[0];
        oom_score_adj(&pod, container, 1000.try_into().unwrap())
    };
    let full = json!({"cpu": "1", "memory": "100Mi"});
    assert_eq!(score(json!({"containers": [{"name": "a"}]})), 1000);
    assert_eq!(score(json!({"containers": [one("a", json!({}), full)]})), -997);
    assert_eq!(score(json!({"containers": [one("a", json!({"memory": "100Mi"}), json!({}))]})), 900);
    assert_eq!(score(json!({"containers": [one("a", json!({"memory": "9Gi"}), json!({}))]})), 3);
    assert_eq!(score(json!({"containers": [one("a", json!({"cpu": "1m"}), json!({}))]})), 999);
    assert_eq!(score(json!({"priority": 2_000_001_000, "containers": [{"name": "a"}]})), -997);
}

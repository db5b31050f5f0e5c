//! Compares a pod with the pod that its set wants. Pure.

use std::collections::BTreeMap;

use coracle_api::Amount;
use coracle_api::cocoon::{VmRuntimeAnnotations, VmSpecAnnotations, keys};
use k8s_openapi::api::core::v1::{Container, EnvFromSource, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Returns the first part in which `pod` differs from `wanted`. Fields that the API server and other writers add do not count.
pub(crate) fn first_difference(pod: &Pod, wanted: &Pod) -> Option<&'static str> {
    if spec(pod) != spec(wanted) {
        return Some("the VM");
    }
    if !spec(wanted).managed {
        let (is, want) = (VmRuntimeAnnotations::from_pod(pod), VmRuntimeAnnotations::from_pod(wanted));
        if (is.id, is.ip) != (want.id, want.ip) {
            return Some("the static VM");
        }
    }
    if selector(pod) != selector(wanted) {
        return Some("the pool");
    }
    if account(pod) != account(wanted) {
        return Some("the service account");
    }
    if env_from(pod) != env_from(wanted) {
        return Some("envFrom");
    }
    (!has_resources(pod, wanted)).then_some("resources")
}

/// Returns the VM specification without the parts that change during the life of a pod.
fn spec(pod: &Pod) -> VmSpecAnnotations {
    VmSpecAnnotations {
        hibernate: false,
        restore_from_hibernate: false,
        keep_snapshot_on_delete: false,
        generation: None,
        ..VmSpecAnnotations::from_pod(pod)
    }
}

fn selector(pod: &Pod) -> [Option<&String>; 2] {
    let selector = pod.spec.as_ref().and_then(|spec| spec.node_selector.as_ref());
    [keys::POOL_LABEL, keys::CPU_CLASS_LABEL].map(|key| selector.and_then(|all| all.get(key)))
}

/// Returns the service account. The API server writes `default` when none is named.
fn account(pod: &Pod) -> &str {
    let named = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
    named.filter(|name| !name.is_empty()).unwrap_or("default")
}

fn container(pod: &Pod) -> Option<&Container> {
    pod.spec.as_ref()?.containers.iter().find(|container| container.name == keys::CONTAINER_NAME)
}

fn env_from(pod: &Pod) -> &[EnvFromSource] {
    container(pod).and_then(|container| container.env_from.as_deref()).unwrap_or_default()
}

/// True when the pod has all wanted resources. It may have more: requests that the API server copied from limits, and defaults
/// of a LimitRange.
fn has_resources(pod: &Pod, wanted: &Pod) -> bool {
    let of = |pod| container(pod).and_then(|container| container.resources.clone()).unwrap_or_default();
    let (is, want): (ResourceRequirements, ResourceRequirements) = (of(pod), of(wanted));
    let has = |is: Option<BTreeMap<String, Quantity>>, want: Option<BTreeMap<String, Quantity>>| {
        let is = is.unwrap_or_default();
        want.unwrap_or_default()
            .iter()
            .all(|(name, amount)| is.get(name).is_some_and(|is| is_same(is, amount)))
    };
    has(is.requests, want.requests) && has(is.limits, want.limits)
}

/// True for equal amounts: `1000m` is `1`, and `1024Mi` is `1Gi`.
fn is_same(one: &Quantity, other: &Quantity) -> bool {
    if one == other {
        return true;
    }
    matches!((Amount::parse(&one.0), Amount::parse(&other.0)), (Ok(one), Ok(other)) if one == other)
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt as _;
    use serde_json::{Value, json};

    use super::*;
    use crate::set::pods::main_pod;
    use crate::set::testing::{pod_in, set_with};

    fn main_pod_of(spec: Value) -> Pod {
        main_pod(&set_with(spec), None).unwrap()
    }

    #[test]
    fn drift_table() {
        let of = |agent: Value| json!({"agent": agent});
        let small = || of(json!({"image": "u", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}));
        let stored = pod_in(main_pod_of(small()), "ready");
        for (why, wanted, want) in [
            ("the same", small(), None),
            (
                "the same amounts",
                of(json!({"image": "u", "resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}}})),
                None,
            ),
            (
                "image",
                of(json!({"image": "v", "resources": {"requests": {"cpu": 1, "memory": "1Gi"}}})),
                Some("the VM"),
            ),
            ("more CPU", of(json!({"image": "u", "resources": {"requests": {"cpu": 2}}})), Some("resources")),
            ("account", of(json!({"image": "u", "serviceAccountName": "x"})), Some("the service account")),
            ("pool", json!({"agent": {"image": "u"}, "nodePool": "gpu"}), Some("the pool")),
            ("class", json!({"agent": {"image": "u"}, "snapshotCompatibilityClass": "c"}), Some("the pool")),
            ("env", of(json!({"image": "u", "envFrom": [{"secretRef": {"name": "s"}}]})), Some("envFrom")),
        ] {
            assert_eq!(first_difference(&stored, &main_pod_of(wanted)), want, "{why}");
        }
    }

    #[test]
    fn runtime_changes_of_a_pod_are_not_drift() {
        let wanted = main_pod_of(json!({"agent": {"image": "u"}}));
        let mut stored = pod_in(wanted.clone(), "hibernated");
        stored.annotations_mut().insert(keys::RESTORE_FROM_HIBERNATE.into(), "true".into());
        stored.annotations_mut().insert(keys::GENERATION.into(), "9".into());
        stored.spec.as_mut().unwrap().service_account_name = Some("default".into());
        assert_eq!(first_difference(&stored, &wanted), None);
    }
}

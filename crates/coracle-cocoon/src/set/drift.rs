//! Whether a pod is what its set wants. Pure.

use std::collections::BTreeMap;

use coracle_api::cocoon::{VmRuntimeAnnotations, VmSpecAnnotations, keys};
use k8s_openapi::api::core::v1::{Container, EnvFromSource, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The first thing in which `pod` differs from `wanted`. What the API server and other writers add does not count.
pub(crate) fn differs(pod: &Pod, wanted: &Pod) -> Option<&'static str> {
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

/// What the VM should be, without what changes in the life of a pod.
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

/// The API server writes `default` where no account is named.
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

/// All that is wanted is there. Requests that the API server copied from limits, and defaults of a LimitRange, are too.
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

/// `1000m` is `1`, and `1024Mi` is `1Gi`.
fn is_same(one: &Quantity, other: &Quantity) -> bool {
    if one == other {
        return true;
    }
    match (value(&one.0), value(&other.0)) {
        (Some(a), Some(b)) => (a - b).abs() <= a.abs().max(b.abs()) * 1e-9,
        _ => false,
    }
}

fn value(text: &str) -> Option<f64> {
    const SUFFIXES: [(&str, f64); 15] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("Ei", 1_152_921_504_606_846_976.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("E", 1e18),
    ];
    let text = text.trim();
    if let Ok(plain) = text.parse::<f64>() {
        return Some(plain).filter(|value| value.is_finite());
    }
    let (suffix, factor) = SUFFIXES.iter().find(|(suffix, _)| text.ends_with(suffix))?;
    let number: f64 = text.strip_suffix(suffix)?.parse().ok()?;
    Some(number * factor).filter(|value| value.is_finite())
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt as _;
    use serde_json::{Value, json};

    use super::*;
    use crate::set::pods::main_pod;
    use crate::set::testing::{pod_in, set_with};

    fn made(spec: Value) -> Pod {
        main_pod(&set_with(spec), None).unwrap()
    }

    #[test]
    fn drift_table() {
        let of = |agent: Value| json!({"agent": agent});
        let small = || of(json!({"image": "u", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}));
        let stored = pod_in(made(small()), "ready");
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
            assert_eq!(differs(&stored, &made(wanted)), want, "{why}");
        }
    }

    #[test]
    fn what_changes_in_the_life_of_a_pod_is_no_drift() {
        let wanted = made(json!({"agent": {"image": "u"}}));
        let mut stored = pod_in(wanted.clone(), "hibernated");
        stored.annotations_mut().insert(keys::RESTORE_FROM_HIBERNATE.into(), "true".into());
        stored.annotations_mut().insert(keys::GENERATION.into(), "9".into());
        stored.spec.as_mut().unwrap().service_account_name = Some("default".into());
        assert_eq!(differs(&stored, &wanted), None);
    }
}

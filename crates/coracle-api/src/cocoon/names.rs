//! Names of pods, VMs and snapshots, and what the name or the labels of a pod say about its VM.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use super::{Role, VmSpecAnnotations, keys};

/// Longest name of a VM.
pub const VM_NAME_MAX: usize = 63;

/// Returns the pod name of an agent; slot 0 is the main agent.
#[must_use]
pub fn agent_pod_name(set: &str, slot: u32) -> String {
    format!("{set}-{slot}")
}

/// Returns the pod name of a toolbox.
#[must_use]
pub fn toolbox_pod_name(set: &str, toolbox: &str) -> String {
    format!("{set}-{toolbox}")
}

/// Returns the VM name of an agent of a set, or of a slot of a Deployment.
#[must_use]
pub fn agent_vm_name(namespace: &str, set_or_deployment: &str, slot: u32) -> String {
    format!("vk-{namespace}-{set_or_deployment}-{slot}")
}

/// Returns the VM name of a toolbox, by the name of its pod.
#[must_use]
pub fn toolbox_vm_name(namespace: &str, pod: &str) -> String {
    format!("vk-{namespace}-{pod}")
}

/// Returns the VM name of a toolbox under the early rule, by which toolboxes of two sets could have one name. Such names are
/// recognised, but not given to new VMs.
#[must_use]
pub fn legacy_toolbox_vm_name(namespace: &str, toolbox: &str) -> String {
    format!("vk-{namespace}-{toolbox}")
}

/// Returns the VM name of a pod without a set or a Deployment.
#[must_use]
pub fn bare_pod_vm_name(namespace: &str, pod: &str) -> String {
    format!("vk-{namespace}-{pod}")
}

/// Returns the name of the snapshot on the node that VMs are forked from.
#[must_use]
pub fn fork_snapshot(source_vm: &str) -> String {
    format!("fork-{source_vm}")
}

/// Returns the name of the snapshot on the node that a hibernated VM is woken from.
#[must_use]
pub fn hibernate_import(vm: &str) -> String {
    format!("{vm}-hibernate-import")
}

/// True for `^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$`.
#[must_use]
pub fn is_valid_vm_name(name: &str) -> bool {
    name.len() <= VM_NAME_MAX
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// Returns the slot in the name of a VM: the digits behind the last dash. The name of a toolbox `db-0` has such digits, too;
/// [`slot_of_pod`] tells them apart.
#[must_use]
pub fn slot_of(vm_name: &str) -> Option<u32> {
    let (_, digits) = vm_name.rsplit_once('-')?;
    (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// Returns the slot of a pod's VM: by the labels of its set, else by the name of its VM.
#[must_use]
pub fn slot_of_pod(pod: &Pod) -> Option<u32> {
    let labels = pod.metadata.labels.as_ref();
    let label = |key: &str| labels.and_then(|all| all.get(key)).map(String::as_str);
    match label(keys::SET_ROLE_LABEL).and_then(Role::parse) {
        Some(Role::Main) => Some(0),
        Some(Role::SubAgent) => label(keys::SET_SLOT_LABEL).and_then(|slot| slot.parse().ok()),
        Some(Role::Toolbox) => None,
        None => slot_of(&VmSpecAnnotations::from_pod(pod).vm_name),
    }
}

/// True when the pod tolerates the taint of VM nodes by its key. A toleration of every taint does not count, because pods that
/// run on every node have it.
#[must_use]
pub fn is_cocoon_pod(pod: &Pod) -> bool {
    let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
    tolerations.iter().any(|toleration| toleration.key.as_deref() == Some(keys::TAINT_KEY))
}

/// Returns the pool of a pod: by its node selector, its labels or its annotations, else the default.
#[must_use]
pub fn pool_of(pod: &Pod) -> String {
    let selector = pod.spec.as_ref().and_then(|spec| spec.node_selector.as_ref());
    let named = |map: Option<&BTreeMap<String, String>>| {
        map.and_then(|map| map.get(keys::POOL_LABEL)).filter(|pool| !pool.is_empty()).cloned()
    };
    named(selector)
        .or_else(|| named(pod.metadata.labels.as_ref()))
        .or_else(|| named(pod.metadata.annotations.as_ref()))
        .unwrap_or_else(|| keys::DEFAULT_POOL.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(value: serde_json::Value) -> Pod {
        serde_json::from_value(value).expect("a pod of a test")
    }

    #[test]
    fn names_have_the_forms_of_the_contract() {
        assert_eq!(agent_pod_name("demo", 0), "demo-0");
        assert_eq!(agent_vm_name("prod", "demo", 2), "vk-prod-demo-2");
        assert_eq!(toolbox_vm_name("prod", "demo-db"), "vk-prod-demo-db");
        assert_eq!(legacy_toolbox_vm_name("prod", "db"), "vk-prod-db");
        assert_eq!(fork_snapshot("vk-prod-demo-0"), "fork-vk-prod-demo-0");
        assert_eq!(hibernate_import("vk-prod-demo-0"), "vk-prod-demo-0-hibernate-import");
    }

    #[test]
    fn vm_name_table() {
        for (name, want) in [
            ("vk-prod-demo-0", true),
            ("A.b_c-1", true),
            ("", false),
            ("-a", false),
            ("a/b", false),
            ("ä", false),
            (&"a".repeat(63), true),
            (&"a".repeat(64), false),
        ] {
            assert_eq!(is_valid_vm_name(name), want, "{name}");
        }
    }

    #[test]
    fn slot_of_name_table() {
        for (name, want) in [
            ("vk-prod-demo-0", Some(0)),
            ("vk-prod-demo-12", Some(12)),
            ("vk-prod-demo", None),
            ("vk-prod-demo-", None),
            ("vk-prod-demo-1a", None),
            ("0", None),
            ("x-99999999999", None),
        ] {
            assert_eq!(slot_of(name), want, "{name}");
        }
    }

    #[test]
    fn toolbox_that_ends_in_zero_has_no_slot() {
        let labels = serde_json::json!({keys::SET_ROLE_LABEL: "toolbox", keys::SET_SLOT_LABEL: "db-0"});
        let annotations = serde_json::json!({keys::VM_NAME: "vk-prod-demo-db-0"});
        let named = pod(serde_json::json!({"metadata": {"annotations": annotations}}));
        assert_eq!(slot_of_pod(&named), Some(0));
        let toolbox = pod(serde_json::json!({"metadata": {"annotations": annotations, "labels": labels}}));
        assert_eq!(slot_of_pod(&toolbox), None);
    }

    #[test]
    fn pod_tolerating_every_taint_is_not_a_cocoon_pod() {
        for (toleration, want) in [
            (serde_json::json!({"key": keys::TAINT_KEY, "operator": "Exists"}), true),
            (serde_json::json!({"key": keys::TAINT_KEY, "value": "cocoon"}), true),
            (serde_json::json!({"operator": "Exists"}), false),
            (serde_json::json!({"key": "other", "operator": "Exists"}), false),
        ] {
            let pod = pod(serde_json::json!({"spec": {"containers": [], "tolerations": [toleration]}}));
            assert_eq!(is_cocoon_pod(&pod), want, "{toleration}");
        }
    }

    #[test]
    fn pool_is_looked_up_in_order() {
        let of = |value| pool_of(&pod(value));
        let map = |pool: &str| serde_json::json!({keys::POOL_LABEL: pool});
        assert_eq!(of(serde_json::json!({})), "default");
        assert_eq!(of(serde_json::json!({"metadata": {"annotations": map("c")}})), "c");
        let both = serde_json::json!({"annotations": map("c"), "labels": map("b")});
        assert_eq!(of(serde_json::json!({"metadata": both})), "b");
        let spec = serde_json::json!({"containers": [], "nodeSelector": map("a")});
        assert_eq!(of(serde_json::json!({"metadata": both, "spec": spec})), "a");
    }
}

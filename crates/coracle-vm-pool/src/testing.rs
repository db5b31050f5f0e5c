//! Pools and VMs for table tests.

use coracle_api::{MikromVM, MikromVMPool, keys};
use serde_json::json;

use crate::plan::{member, template_hash};

pub(crate) fn pool(replicas: i32, max_unavailable: i32, max_surge: i32) -> MikromVMPool {
    serde_json::from_value(json!({
        "apiVersion": "coracle.dev/v1alpha1", "kind": "MikromVMPool",
        "metadata": {"name": "web", "namespace": "team", "uid": "p1", "generation": 3, "finalizers": [keys::POOL_FINALIZER]},
        "spec": {
            "replicas": replicas, "maxUnavailable": max_unavailable, "maxSurge": max_surge,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"image": "i:2", "vcpuCount": 1, "memoryMB": 128}},
        },
    }))
    .unwrap()
}

/// Returns VMs of a pool: `u` has the present template, `o` an older one, capitals are Ready, `d` is being deleted, `x` belongs
/// to another owner.
pub(crate) fn vms(pool: &MikromVMPool, all: &str) -> Vec<MikromVM> {
    let hash = template_hash(&pool.spec.template);
    let one = |(n, kind): (usize, char)| {
        let hash = if "uUd".contains(kind) { hash.as_str() } else { "0ld" };
        let mut vm = member(pool, format!("web-{hash}-{n}"), hash);
        vm.metadata.uid = Some(format!("vm-{n}"));
        let ready = if kind.is_uppercase() { "True" } else { "False" };
        let condition = json!({"type": "Ready", "status": ready, "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-02T03:04:05Z"});
        vm.status = Some(serde_json::from_value(json!({"conditions": [condition]})).unwrap());
        if kind == 'd' {
            vm.metadata.deletion_timestamp =
                Some(serde_json::from_value(json!("2026-01-02T03:04:05Z")).unwrap());
        }
        if kind == 'x' {
            vm.metadata.owner_references = None;
        }
        vm
    };
    all.chars().enumerate().map(one).collect()
}

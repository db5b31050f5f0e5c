//! Definitions of agent-forge, and objects that its other implementations wrote.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use coracle_api::{VsphereAgent, VsphereAgentPool};

#[test]
fn zero_structs_and_nulls_of_go_are_read_as_absent() {
    for status in [
        serde_json::json!({"vm": {"name": "", "lastTransitionTime": null}, "conditions": null}),
        serde_json::json!({"vm": null}),
        serde_json::json!({}),
        serde_json::json!({"vm": {"name": null, "agentRef": null, "newField": 1}, "future": {}}),
    ] {
        let agent: VsphereAgent = serde_json::from_value(serde_json::json!({
            "apiVersion": "agent-forge.containeroo.ch/v1alpha1", "kind": "VsphereAgent",
            "metadata": {"name": "a"}, "spec": {"poolRef": {"name": "p"}}, "status": status,
        }))
        .unwrap();
        assert_eq!(agent.vm(), None, "{status}");
    }
}

#[test]
fn missing_fields_of_existing_pools_get_defaults() {
    let pool: VsphereAgentPool = serde_json::from_value(serde_json::json!({
        "apiVersion": "agent-forge.containeroo.ch/v1alpha1", "kind": "VsphereAgentPool", "metadata": {"name": "p"},
        "spec": {
            "hostedClusterRef": {"name": "demo"}, "nodePoolRef": {"name": "demo-worker"}, "infraEnvRef": {"name": "demo"},
            "controlPlaneNamespace": "demo-demo", "template": {}, "agent": {"labels": {"a": "b"}},
            "vsphere": {
                "credentialsSecretRef": {"name": "s"}, "datastoreCluster": "d", "isoDatastore": "i",
                "resourcePool": "c/Resources", "network": "VM Network",
            },
        },
    }))
    .unwrap();
    let (v, t, a) = (&pool.spec.vsphere, &pool.spec.template, &pool.spec.agent);
    assert_eq!(
        (v.datacenter.as_str(), v.guest_id.as_str(), v.scsi_type.as_str()),
        ("dc1", "rhel9_64Guest", "pvscsi")
    );
    assert_eq!((t.num_cpus, t.memory_mib, t.disk_gib), (4, 16384, 100));
    assert_eq!((a.role.as_str(), a.approve), ("worker", Some(true)));
}

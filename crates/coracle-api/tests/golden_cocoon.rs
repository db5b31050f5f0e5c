//! Definitions of CocoonSet and CocoonHibernation compared with their contract: names, enumerations, defaults and columns.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use coracle_api::cocoon::{CocoonHibernationSpec, CocoonSetSpec, Desire, Mode};
use coracle_api::{CocoonHibernation, CocoonSet};
use kube::CustomResourceExt as _;
use serde_json::{Value, json};

fn columns(version: &Value) -> Vec<(&str, &str, &str)> {
    let text = |column: &'_ Value, key: &str| column[key].as_str().unwrap().to_owned();
    let leak = |text: String| -> &'static str { text.leak() };
    version["additionalPrinterColumns"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (leak(text(c, "name")), leak(text(c, "type")), leak(text(c, "jsonPath"))))
        .collect()
}

fn names(crd: &Value) -> Value {
    let spec = &crd["spec"];
    assert_eq!(spec["versions"].as_array().unwrap().len(), 1);
    let version = &spec["versions"][0];
    assert_eq!((&version["name"], &version["subresources"]), (&json!("v1"), &json!({"status": {}})));
    json!([spec["group"], spec["scope"], spec["names"]])
}

#[test]
fn cocoonset_names_defaults_and_columns_are_unchanged() {
    let crd = serde_json::to_value(CocoonSet::crd()).unwrap();
    let want = json!({"plural": "cocoonsets", "singular": "cocoonset", "kind": "CocoonSet",
        "shortNames": ["cs", "cocoonsets"], "categories": ["cocoon"]});
    assert_eq!(names(&crd), json!(["cocoonset.cocoonstack.io", "Namespaced", want]));
    let version = &crd["spec"]["versions"][0];
    assert_eq!(
        columns(version),
        [
            ("Phase", "string", ".status.phase"),
            ("Ready", "integer", ".status.readyAgents"),
            ("Desired", "integer", ".status.desiredAgents"),
            ("Age", "date", ".metadata.creationTimestamp"),
        ]
    );
    let root = &version["schema"]["openAPIV3Schema"]["properties"];
    let os = json!(["linux", "windows", "android", "macos"]);
    for (path, want) in [
        ("/spec/required", json!(["agent"])),
        ("/spec/properties/suspend/default", json!(false)),
        ("/spec/properties/snapshotPolicy/enum", json!(["always", "main-only", "never"])),
        ("/spec/properties/snapshotPolicy/default", json!("always")),
        ("/spec/properties/nodePool/default", json!("default")),
        ("/spec/properties/hibernatePolicy/enum", json!(["retain", "release"])),
        ("/spec/properties/agent/required", json!(["image"])),
        ("/spec/properties/agent/properties/image/minLength", json!(1)),
        ("/spec/properties/agent/properties/replicas/default", json!(0)),
        ("/spec/properties/agent/properties/replicas/minimum", json!(0.0)),
        ("/spec/properties/agent/properties/mode/enum", json!(["clone", "run"])),
        ("/spec/properties/agent/properties/mode/default", json!("clone")),
        ("/spec/properties/agent/properties/os/enum", os),
        ("/spec/properties/agent/properties/storage/x-kubernetes-int-or-string", json!(true)),
        ("/spec/properties/agent/properties/backend/default", json!("cloud-hypervisor")),
        ("/spec/properties/agent/properties/noDirectIO/type", json!("boolean")),
        ("/spec/properties/toolboxes/x-kubernetes-list-map-keys", json!(["name"])),
        ("/spec/properties/toolboxes/items/properties/mode/default", json!("run")),
        ("/spec/properties/toolboxes/items/properties/mode/enum", json!(["run", "clone", "static"])),
        ("/spec/properties/toolboxes/items/properties/staticIP/type", json!("string")),
        ("/spec/properties/toolboxes/items/properties/staticVMID/type", json!("string")),
        ("/status/properties/agents/x-kubernetes-list-map-keys", json!(["slot"])),
        ("/status/properties/toolboxes/x-kubernetes-list-map-keys", json!(["name"])),
        ("/status/properties/conditions/x-kubernetes-list-map-keys", json!(["type"])),
        ("/status/properties/agents/items/properties/vmID/type", json!("string")),
    ] {
        assert_eq!(root.pointer(path), Some(&want), "{path}");
    }
}

#[test]
fn cocoonhibernation_names_and_columns_are_unchanged() {
    let crd = serde_json::to_value(CocoonHibernation::crd()).unwrap();
    let want = json!({"plural": "cocoonhibernations", "singular": "cocoonhibernation", "kind": "CocoonHibernation",
        "shortNames": ["ch", "cocoonhibernations"], "categories": ["cocoon"]});
    assert_eq!(names(&crd), json!(["cocoonset.cocoonstack.io", "Namespaced", want]));
    let version = &crd["spec"]["versions"][0];
    assert_eq!(
        columns(version),
        [
            ("Pod", "string", ".spec.podRef.name"),
            ("Desire", "string", ".spec.desire"),
            ("Phase", "string", ".status.phase"),
            ("Age", "date", ".metadata.creationTimestamp"),
        ]
    );
    let spec = &version["schema"]["openAPIV3Schema"]["properties"]["spec"];
    assert_eq!(spec["required"], json!(["desire", "podRef"]));
    assert_eq!(spec["properties"]["desire"]["enum"], json!(["Hibernate", "Wake"]));
    assert_eq!(spec["properties"]["podRef"]["properties"]["name"]["minLength"], 1);
}

#[test]
fn manifest_with_numbers_and_unknown_fields_is_read() {
    let spec: CocoonSetSpec = serde_json::from_value(json!({
        "agent": {"image": "ubuntu:24.04", "storage": 10_737_418_240_i64, "resources": {"requests": {"cpu": 2, "memory": "1Gi"}},
            "later": true},
        "toolboxes": [{"name": "db", "image": "db:1"}],
    }))
    .unwrap();
    assert_eq!((spec.desired_agents(), spec.agent.mode, spec.toolboxes[0].mode), (1, Mode::Clone, Mode::Run));
    let resources = spec.agent.resources.unwrap();
    let core: k8s_openapi::api::core::v1::ResourceRequirements = (&resources).into();
    assert_eq!(core.requests.unwrap()["cpu"].0, "2");
    assert_eq!(spec.agent.storage.unwrap().0, "10737418240");
    let hibernation: CocoonHibernationSpec =
        serde_json::from_value(json!({"podRef": {"name": "demo-0"}, "desire": "Wake"})).unwrap();
    assert_eq!((hibernation.pod_ref.name.as_str(), hibernation.desire), ("demo-0", Desire::Wake));
}

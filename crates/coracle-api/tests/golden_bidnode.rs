//! Definition of BidNode compared with existing manifests: names, enumerations, defaults, limits and columns.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use kube::CustomResourceExt as _;
use serde_json::{Value, json};

fn crd() -> Value {
    serde_json::to_value(coracle_api::BidNode::crd()).unwrap()
}

/// Acceptance criterion 1, first sentence.
#[test]
fn bidnode_crd_matches_existing_manifests() {
    let crd = crd();
    let spec = &crd["spec"];
    assert_eq!(crd["metadata"]["name"], "bidnodes.kubebid.io");
    assert_eq!((&spec["group"], &spec["scope"]), (&json!("kubebid.io"), &json!("Namespaced")));
    assert_eq!(
        (
            &spec["names"]["plural"],
            &spec["names"]["singular"],
            &spec["names"]["kind"],
            &spec["names"]["shortNames"]
        ),
        (&json!("bidnodes"), &json!("bidnode"), &json!("BidNode"), &json!(["bn"]))
    );
    assert_eq!(spec["versions"].as_array().unwrap().len(), 1);
    let version = &spec["versions"][0];
    assert_eq!(
        (&version["name"], &version["served"], &version["storage"]),
        (&json!("v1"), &json!(true), &json!(true))
    );
    assert_eq!(version["subresources"], json!({"status": {}}));
    let root = &version["schema"]["openAPIV3Schema"];
    let fields = &root["properties"]["spec"]["properties"];
    for (path, want) in [
        ("/instanceType/type", json!("string")),
        ("/instanceType/enum", json!(["h100-8x", "h100-4x", "a100-8x", "a100-4x", "l40s-4x"])),
        ("/region/type", json!("string")),
        ("/maxBid/type", json!("number")),
        ("/maxBid/minimum", json!(0.01)),
        ("/minNodes/type", json!("integer")),
        ("/minNodes/minimum", json!(0.0)),
        ("/minNodes/default", json!(1)),
        ("/maxNodes/type", json!("integer")),
        ("/maxNodes/minimum", json!(1.0)),
        ("/maxNodes/default", json!(10)),
        ("/bidStrategy/type", json!("string")),
        ("/bidStrategy/enum", json!(["cost-optimized", "balanced", "availability-optimized"])),
        ("/bidStrategy/default", json!("balanced")),
        ("/nodeSelector/type", json!("object")),
        ("/nodeSelector/additionalProperties/type", json!("string")),
        ("/taints/type", json!("array")),
        ("/taints/items/properties/key/type", json!("string")),
        ("/taints/items/properties/value/type", json!("string")),
        ("/taints/items/properties/effect/enum", json!(["NoSchedule", "PreferNoSchedule", "NoExecute"])),
    ] {
        assert_eq!(fields.pointer(path), Some(&want), "spec{path}");
    }
    assert_eq!(root["properties"]["spec"]["required"], json!(["instanceType", "maxBid"]));
    assert_eq!(root["required"], json!(["spec"]), "the article forgot that");
    let rule = &root["properties"]["spec"]["x-kubernetes-validations"][0];
    assert_eq!(rule["message"], "minNodes must not exceed maxNodes");
    let status = &root["properties"]["status"]["properties"];
    for (field, kind) in [
        ("phase", "string"),
        ("activeNodes", "integer"),
        ("pendingBids", "integer"),
        ("averagePrice", "number"),
        ("lastBidTime", "string"),
        ("conditions", "array"),
        ("observedGeneration", "integer"),
        ("desiredNodes", "integer"),
        ("provisioningNodes", "integer"),
        ("preemptingNodes", "integer"),
        ("marketPrice", "number"),
        ("bidPrice", "number"),
        ("hourlyCost", "number"),
        ("raisedFrom", "object"),
        ("region", "string"),
    ] {
        assert_eq!(status[field]["type"], kind, "status.{field}");
    }
    assert_eq!(status["lastBidTime"]["format"], "date-time");
    assert_eq!(status["conditions"]["x-kubernetes-list-map-keys"], json!(["type"]));
    for field in ["type", "status", "reason", "message", "lastTransitionTime"] {
        assert_eq!(status["conditions"]["items"]["properties"][field]["type"], "string", "{field}");
    }
    columns(&version["additionalPrinterColumns"]);
}

fn columns(columns: &Value) {
    let all: Vec<_> = columns
        .as_array()
        .unwrap()
        .iter()
        .map(|c| {
            (
                c["name"].as_str().unwrap(),
                c["type"].as_str().unwrap(),
                c["jsonPath"].as_str().unwrap(),
                c["priority"].as_i64().unwrap_or(0),
            )
        })
        .collect();
    let shown: Vec<_> = all.iter().filter(|c| c.3 == 0).map(|c| (c.0, c.1, c.2)).collect();
    assert_eq!(
        shown,
        [
            ("Instance", "string", ".spec.instanceType"),
            ("Nodes", "integer", ".status.activeNodes"),
            ("Price", "number", ".status.averagePrice"),
            ("Phase", "string", ".status.phase"),
        ]
    );
    let wide: Vec<_> = all.iter().filter(|c| c.3 == 1).map(|c| c.0).collect();
    assert_eq!(wide, ["Desired", "Bids", "Bid", "Market", "Strategy", "Region", "Age"]);
}

#[test]
fn more_instance_types_can_be_added_to_the_enumeration() {
    let crd =
        serde_json::to_value(coracle_api::bidnode::crd_with(&["t4-1x".into(), "a100-4x".into()])).unwrap();
    let kinds = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        ["instanceType"]["enum"];
    assert_eq!(kinds, &json!(["h100-8x", "h100-4x", "a100-8x", "a100-4x", "l40s-4x", "t4-1x"]));
}

#[test]
fn manifest_round_trip_is_unchanged() {
    let spec = json!({
        "instanceType": "a100-4x", "region": "us-west-2", "maxBid": 4.5, "minNodes": 1, "maxNodes": 10,
        "bidStrategy": "cost-optimized", "nodeSelector": {"workload": "ml-training"},
        "taints": [{"key": "dedicated", "value": "ml-training", "effect": "NoSchedule"}],
    });
    let read: coracle_api::bidnode::BidNodeSpec = serde_json::from_value(spec.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), spec);
}

#[test]
fn node_names_are_short_and_differ() {
    use coracle_api::bidnode::names::node_name;
    let long = "x".repeat(60);
    let name = node_name(&long, "01JABCDEFGHJKMNPQRSTVWXYZ0");
    assert_eq!((name.len(), &name[..4]), (3 + 40 + 1 + 8, "bn-x"));
    assert_ne!(name, node_name(&long, "01JABCDEFGHJKMNPQRSTVWXYZ1"));
    assert!(node_name("ml", "a").starts_with("bn-ml-"));
}

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    Container, EphemeralContainer, PodSecurityContext, PodSpec, SecurityContext, Volume,
};
use serde_json::{Map, Value, json};

use coracle_pod::fields::*;
use k8s_openapi::api::core::v1::Pod;

/// Returns a pod, as JSON, that sets a field to a value of the row.
fn pod_with_field(field: &Field) -> Value {
    let leaf = match field.when {
        When::Set => json!("x"),
        When::Is(text) => json!(text),
        When::IsNot(text) => json!(format!("not-{text}")),
    };
    let parts: Vec<&str> = field.path.split('.').collect();
    parts.iter().rev().fold(leaf, |inner, part| match part.strip_suffix("[]") {
        Some(name) => json!({name: [inner]}),
        None => json!({*part: inner}),
    })
}

#[test]
fn field_rows_match_only_their_own_value() {
    for field in FIELDS {
        assert!(field.is_set(&pod_with_field(field)), "{}", field.path);
        assert!(!field.is_set(&json!({"spec": {}})), "{}", field.path);
        let other = Field { when: When::Is("another value"), ..*field };
        assert!(
            !field.is_set(&pod_with_field(&other)) || matches!(field.when, When::Set | When::IsNot(_)),
            "{}",
            field.path
        );
    }
}

#[test]
fn unhonoured_fields_have_a_reason() {
    for field in FIELDS.iter().filter(|field| field.support != Support::Honoured) {
        assert!(!field.note.is_empty(), "{}", field.path);
        assert_eq!(field.reason.is_empty(), field.support != Support::Rejected, "{}", field.path);
    }
    let rows: BTreeSet<_> = FIELDS.iter().map(|field| (field.path, format!("{:?}", field.when))).collect();
    assert_eq!(rows.len(), FIELDS.len(), "a row is there twice");
}

/// Returns the names of all fields of an API type, from its schema.
fn properties<T: schemars::JsonSchema>() -> Vec<String> {
    let schema = schemars::schema_for!(T).to_value();
    let properties = schema.get("properties").and_then(Value::as_object).cloned();
    properties.unwrap_or_else(Map::new).keys().cloned().collect()
}

#[test]
fn pod_api_fields_all_have_a_row() {
    let lists = [
        ("spec.", properties::<PodSpec>()),
        ("spec.containers[].", properties::<Container>()),
        ("spec.containers[].", properties::<EphemeralContainer>()),
        ("spec.securityContext.", properties::<PodSecurityContext>()),
        ("spec.containers[].securityContext.", properties::<SecurityContext>()),
        ("spec.volumes[].", properties::<Volume>()),
    ];
    let mut missing = Vec::new();
    for (prefix, names) in lists {
        assert!(!names.is_empty(), "{prefix} has no schema");
        for name in names {
            let path = format!("{prefix}{name}");
            let below = format!("{path}.");
            if !FIELDS.iter().any(|field| field.path == path || field.path.starts_with(&below)) {
                missing.push(path);
            }
        }
    }
    assert_eq!(missing, Vec::<String>::new());
}

#[test]
fn review_sorts_fields_of_a_pod() {
    let pod = |spec: Value| serde_json::from_value::<Pod>(json!({"spec": spec})).unwrap();
    let paths = |fields: &[&Field]| -> Vec<&str> { fields.iter().map(|field| field.path).collect() };
    let plain =
        review(&pod(json!({"containers": [{"name": "a"}], "hostNetwork": false, "os": {"name": "linux"}})));
    assert_eq!(plain, Review::default());
    let odd = review(&pod(json!({
        "hostNetwork": true,
        "containers": [{"name": "a"}],
        "initContainers": [{"name": "i", "securityContext": {"seLinuxOptions": {"level": "s0"}}}],
        "volumes": [{"name": "v", "hostPath": {"path": "/x", "type": "Socket"}}],
    })));
    assert_eq!(paths(&odd.rejected), ["spec.hostNetwork", "spec.volumes[].hostPath.type"]);
    assert_eq!(paths(&odd.ignored), ["spec.containers[].securityContext.seLinuxOptions"]);
    let windows = review(&pod(json!({"containers": [], "os": {"name": "windows"}})));
    assert_eq!(windows.rejected[0].reason, "PodOSNotSupported");
    let seccomp =
        review(&pod(json!({"containers": [], "securityContext": {"seccompProfile": {"type": "Localhost"}}})));
    assert_eq!(paths(&seccomp.rejected), ["spec.securityContext.seccompProfile.type"]);
}

#[test]
fn page_has_a_line_for_each_row() {
    let page = markdown();
    assert_eq!(page.lines().filter(|line| line.starts_with("| `")).count(), FIELDS.len());
    assert!(
        page.contains("| `spec.hostNetwork` |  | rejected | a VM has a network interface of its own |\n")
    );
    assert!(page.contains("| `spec.os.name` | other than `linux` | rejected | guests run Linux |\n"));
}

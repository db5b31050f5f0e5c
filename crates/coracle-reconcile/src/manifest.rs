//! Deployment objects as JSON values, shared by the manifests of all controllers.

use serde_json::{Value, json};

/// Objects as one file of YAML documents.
///
/// # Panics
/// Never: every value can be written as YAML.
#[must_use]
pub fn yaml(objects: &[Value]) -> String {
    let documents: Vec<_> =
        objects.iter().map(|o| serde_saphyr::to_string(o).expect("a value is YAML")).collect();
    documents.join("---\n")
}

/// A kustomization of those files.
#[must_use]
pub fn kustomization(resources: &[Value]) -> Value {
    json!({"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources})
}

/// Objects of one file, by its name.
pub type Part = (&'static str, Vec<Value>);

/// Files of a directory below `deploy/`, with the kustomization that names them: path and YAML.
#[must_use]
pub fn files(dir: &str, parts: &[Part]) -> Vec<(String, String)> {
    let names: Vec<Value> = parts.iter().map(|(name, _)| json!(name)).collect();
    let path = |name: &str| format!("{dir}/{name}");
    let mut files: Vec<_> = parts.iter().map(|(name, objects)| (path(name), yaml(objects))).collect();
    files.push((path("kustomization.yaml"), yaml(&[kustomization(&names)])));
    files
}

/// Rights to resources of a group.
#[must_use]
pub fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": [group], "resources": resources, "verbs": verbs})
}

/// A rule for objects of these names alone.
#[must_use]
pub fn named(mut rule: Value, names: &[&str]) -> Value {
    rule["resourceNames"] = json!(names);
    rule
}

/// A Role or ClusterRole.
#[must_use]
pub fn role(kind: &str, metadata: Value, rules: &[Value]) -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": metadata, "rules": rules})
}

/// A binding of a role to the ServiceAccount `account` of `namespace`.
#[must_use]
pub fn bind(
    kind: &str,
    metadata: Value,
    role_kind: &str,
    role: &str,
    namespace: &str,
    account: &str,
) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    })
}

/// An environment variable from a field of the Pod.
#[must_use]
pub fn field_env(name: &str, path: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
}

/// Rights of an operator to its own Lease.
#[must_use]
pub fn lease_rights(name: &str) -> [Value; 2] {
    let leases = |verbs: &[&str]| rule("coordination.k8s.io", &["leases"], verbs);
    // RBAC cannot limit a creation to a name.
    [leases(&["create"]), named(leases(&["get", "update", "patch"]), &[name])]
}

/// Environment from which an operator knows its Pod.
#[must_use]
pub fn identity_env() -> [Value; 2] {
    [field_env("POD_NAME", "metadata.name"), field_env("POD_NAMESPACE", "metadata.namespace")]
}

/// Security context of a container that needs no privileges.
#[must_use]
pub fn restricted() -> Value {
    json!({
        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
    })
}

//! Deployment objects as JSON values, shared by the manifests of all controllers.

use serde_json::{Value, json};

/// Formats objects as one file of YAML documents.
///
/// # Panics
/// Never: every value can be written as YAML.
#[must_use]
pub fn yaml(objects: &[Value]) -> String {
    let documents: Vec<_> =
        objects.iter().map(|o| serde_saphyr::to_string(o).expect("a value is YAML")).collect();
    documents.join("---\n")
}

/// Returns a kustomization of those files.
#[must_use]
pub fn kustomization(resources: &[Value]) -> Value {
    json!({"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources})
}

/// File name and its objects.
pub type Part = (&'static str, Vec<Value>);

/// Returns the files of a directory below `deploy/`, with the kustomization that names them: path and YAML.
#[must_use]
pub fn files(dir: &str, parts: &[Part]) -> Vec<(String, String)> {
    let names: Vec<Value> = parts.iter().map(|(name, _)| json!(name)).collect();
    let path = |name: &str| format!("{dir}/{name}");
    let mut files: Vec<_> = parts.iter().map(|(name, objects)| (path(name), yaml(objects))).collect();
    files.push((path("kustomization.yaml"), yaml(&[kustomization(&names)])));
    files
}

/// Returns a rule for resources of an API group.
#[must_use]
pub fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": [group], "resources": resources, "verbs": verbs})
}

/// Restricts a rule to objects of these names.
#[must_use]
pub fn named(mut rule: Value, names: &[&str]) -> Value {
    rule["resourceNames"] = json!(names);
    rule
}

/// Returns a Role or ClusterRole.
#[must_use]
pub fn role(kind: &str, metadata: Value, rules: &[Value]) -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": metadata, "rules": rules})
}

/// Returns a binding of a role to the ServiceAccount `account` of `namespace`.
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

/// Returns an environment variable from a field of the Pod.
#[must_use]
pub fn field_env(name: &str, path: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
}

/// Returns the rules for an operator's own Lease.
#[must_use]
pub fn lease_rights(name: &str) -> [Value; 2] {
    let leases = |verbs: &[&str]| rule("coordination.k8s.io", &["leases"], verbs);
    // RBAC cannot restrict `create` to a name.
    [leases(&["create"]), named(leases(&["get", "update", "patch"]), &[name])]
}

/// Returns the environment that tells an operator its Pod.
#[must_use]
pub fn identity_env() -> [Value; 2] {
    [field_env("POD_NAME", "metadata.name"), field_env("POD_NAMESPACE", "metadata.namespace")]
}

/// Returns the security context of a container that needs no privileges.
#[must_use]
pub fn restricted() -> Value {
    json!({
        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
    })
}

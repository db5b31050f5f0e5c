//! Webhook configurations for the API server.

use coracle_api::cocoon::keys;
use serde_json::{Value, json};

use super::review::{MUTATE, VALIDATE, VALIDATE_HIBERNATION, VALIDATE_SET};

/// Namespaces whose pods the webhook does not review: a cluster must be able to start without it.
const EXCLUDED: [&str; 5] =
    ["kube-system", "kube-node-lease", "kube-public", "cocoon-system", "cert-manager"];
/// Timeout of a review in seconds.
const TIMEOUT_SECONDS: u8 = 5;

/// Returns both configurations with the name `name`. `client_config` tells how the API server reaches a path. Limited to
/// `namespace`, if it is set.
#[must_use]
pub fn configurations(
    name: &str,
    namespace: Option<&str>,
    client_config: &dyn Fn(&str) -> Value,
) -> Vec<Value> {
    let selector = match namespace {
        Some(namespace) => json!({"matchLabels": {"kubernetes.io/metadata.name": namespace}}),
        None => json!({"matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": EXCLUDED}]}),
    };
    let hook = |short: &str, path: &str, rules: Value, side_effects: &str, conditions: Value| {
        json!({
            "name": format!("{short}.webhook.cocoonstack.io"), "clientConfig": client_config(path), "rules": rules,
            "matchConditions": conditions, "namespaceSelector": selector, "failurePolicy": "Fail",
            "sideEffects": side_effects, "timeoutSeconds": TIMEOUT_SECONDS, "admissionReviewVersions": ["v1"],
        })
    };
    let rule = |group: &str, version: &str, resources: &[&str], operations: &[&str]| {
        json!([{"apiGroups": [group], "apiVersions": [version], "resources": resources, "operations": operations,
            "scope": "Namespaced"}])
    };
    // The API server must not call this webhook for pods that do not run as VMs.
    let tolerates = format!(
        "has(object.spec.tolerations) && object.spec.tolerations.exists(t, has(t.key) && t.key == '{}')",
        keys::TAINT_KEY
    );
    let tolerates = json!([{"name": "runs-as-vm", "expression": tolerates}]);
    let workloads = ["deployments", "deployments/scale", "statefulsets", "statefulsets/scale"];
    let fewer = "!has(object.spec.replicas) || (has(oldObject.spec.replicas) && object.spec.replicas < oldObject.spec.replicas)";
    let fewer = json!([{"name": "scales-down", "expression": fewer}]);
    // Finalizers stay writable when the webhook is down: deletion must not depend on it.
    let changes = json!([{"name": "spec-changes",
        "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec"}]);
    let group = "cocoonset.cocoonstack.io";
    let both = ["CREATE", "UPDATE"];
    let metadata = json!({"name": name, "labels": {"app.kubernetes.io/managed-by": "coracle-operator",
        "app.kubernetes.io/name": "coracle", "app.kubernetes.io/component": "webhook"}});
    let api = "admissionregistration.k8s.io/v1";
    let mutating =
        vec![hook("pods", MUTATE, rule("", "v1", &["pods"], &["CREATE"]), "NoneOnDryRun", tolerates)];
    let sets = rule(group, "v1", &["cocoonsets"], &both);
    let hibernations = rule(group, "v1", &["cocoonhibernations"], &both);
    let validating = vec![
        hook("workloads", VALIDATE, rule("apps", "v1", &workloads, &["UPDATE"]), "None", fewer),
        hook("cocoonsets", VALIDATE_SET, sets, "None", changes.clone()),
        hook("cocoonhibernations", VALIDATE_HIBERNATION, hibernations, "None", changes),
    ];
    vec![
        json!({"apiVersion": api, "kind": "MutatingWebhookConfiguration", "metadata": metadata, "webhooks": mutating}),
        json!({"apiVersion": api, "kind": "ValidatingWebhookConfiguration", "metadata": metadata, "webhooks": validating}),
    ]
}

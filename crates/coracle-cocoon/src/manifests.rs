//! Manifests for CocoonSets: permissions, the operator with its webhook, and its Service.
//!
//! `cargo xtask codegen` writes these to `deploy/`; a test applies them by server-side dry run.

use coracle_api::cocoon::keys;
use coracle_reconcile::manifest::{
    Part, bind, files, identity_env, lease_rights, named, restricted, role, rule,
};
use serde_json::{Value, json};

/// Namespace of the operator.
pub const NAMESPACE: &str = keys::SYSTEM_NAMESPACE;
const NAME: &str = "cocoon-operator";
const WEBHOOK: &str = "coracle-webhook";
/// Name of the webhook configurations.
const CONFIGURATIONS: &str = "coracle-cocoon";
/// Secret of the webhook's certificate authority.
const AUTHORITY: &str = "coracle-webhook-ca";
/// Secret with the token of the registry, key `token`.
const TOKEN: &str = "epoch-token";

/// Returns the files below `deploy/`: path and YAML. `image` is the container image in them.
#[must_use]
pub fn manifests(image: &str) -> Vec<(String, String)> {
    files("kustomize/cocoon", &parts(image))
}

/// Returns the objects by file.
#[must_use]
pub fn parts(image: &str) -> Vec<Part> {
    vec![
        ("namespace.yaml", vec![namespace()]),
        ("rbac.yaml", rights()),
        ("operator.yaml", vec![operator(image)]),
        ("webhook-service.yaml", vec![service()]),
    ]
}

fn labels() -> Value {
    json!({"app.kubernetes.io/name": "coracle", "app.kubernetes.io/component": "cocoon",
        "app.kubernetes.io/part-of": "coracle"})
}

fn meta(name: &str) -> Value {
    json!({"name": name, "namespace": NAMESPACE, "labels": labels()})
}

fn namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels()}})
}

/// Returns the least permissions of controllers and webhook.
fn rights() -> Vec<Value> {
    let group = "cocoonset.cocoonstack.io";
    let admission = "admissionregistration.k8s.io";
    let configurations = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"];
    let everywhere = [
        rule(group, &["cocoonsets", "cocoonhibernations"], &["get", "list", "watch", "patch"]),
        rule(group, &["cocoonsets/status", "cocoonhibernations/status"], &["patch"]),
        rule(group, &["cocoonsets/finalizers", "cocoonhibernations/finalizers"], &["update", "patch"]),
        rule("", &["pods"], &["get", "list", "watch", "create", "patch", "delete"]),
        rule("", &["nodes"], &["list"]),
        rule("coordination.k8s.io", &["leases"], &["list"]),
        rule("apps", &["deployments", "statefulsets"], &["get"]),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
        // RBAC cannot restrict `create` to a name.
        rule(admission, &configurations, &["create"]),
        named(rule(admission, &configurations, &["get", "patch"]), &[CONFIGURATIONS]),
    ];
    let mut own = vec![
        rule("", &["configmaps"], &["get", "list", "create", "update"]),
        rule("", &["secrets"], &["create"]),
        named(rule("", &["secrets"], &["get", "update"]), &[AUTHORITY]),
    ];
    own.extend(lease_rights(keys::LEASE));
    let cluster = json!({"name": NAME, "labels": labels()});
    vec![
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(NAME)}),
        role("ClusterRole", cluster.clone(), &everywhere),
        bind("ClusterRoleBinding", cluster, "ClusterRole", NAME, NAMESPACE, NAME),
        role("Role", meta(NAME), &own),
        bind("RoleBinding", meta(NAME), "Role", NAME, NAMESPACE, NAME),
    ]
}

fn probe(path: &str) -> Value {
    json!({"httpGet": {"path": path, "port": "admin"}})
}

fn operator(image: &str) -> Value {
    let token = json!({"name": "CORACLE_OPERATOR_COCOON_REGISTRY_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": TOKEN, "key": "token", "optional": true}}});
    let mut env = identity_env().to_vec();
    env.push(token);
    let container = json!({
        "name": "operator",
        "image": image,
        "args": [
            "operator", "--controllers=cocoonset", "--admin-listen=0.0.0.0:8081", "--webhook-listen=0.0.0.0:9443",
            format!("--webhook-namespace={NAMESPACE}"),
            "--cocoon-registry=http://epoch.cocoon-system.svc:8080",
        ],
        "env": env,
        "ports": [{"name": "admin", "containerPort": 8081}, {"name": "webhook", "containerPort": 9443}],
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": restricted(),
    });
    let security =
        json!({"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}});
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta(NAME),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels()},
            "template": {
                "metadata": {"labels": labels()},
                "spec": {"serviceAccountName": NAME, "securityContext": security, "containers": [container]},
            },
        },
    })
}

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": meta(WEBHOOK),
        "spec": {"selector": labels(), "ports": [{"name": "webhook", "port": 443, "targetPort": "webhook"}]},
    })
}

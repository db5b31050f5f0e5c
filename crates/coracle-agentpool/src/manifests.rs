//! Manifests for pools: permissions and the operator, under the names of the original operator, so that it is replaced in
//! place.
//!
//! `cargo xtask codegen` writes these to `deploy/`; a test applies them by server-side dry run.

use coracle_api::agentpool::names::LEASE;
use coracle_reconcile::manifest::{Part, bind, files, identity_env, lease_rights, restricted, role, rule};
use serde_json::{Value, json};

/// Namespace of the original operator.
pub const NAMESPACE: &str = "agent-forge-operator-system";
const PREFIX: &str = "agent-forge-operator";
const GROUP: &str = "agent-forge.containeroo.ch";
/// All verbs for objects of this operator.
const ALL: [&str; 7] = ["get", "list", "watch", "create", "update", "patch", "delete"];

/// Files below `deploy/`: path and YAML. `image` is the container image.
#[must_use]
pub fn manifests(image: &str) -> Vec<(String, String)> {
    files("kustomize/agent-forge", &parts(image))
}

/// Objects, grouped by file.
#[must_use]
pub fn parts(image: &str) -> Vec<Part> {
    vec![
        ("namespace.yaml", vec![namespace()]),
        ("rbac.yaml", rights()),
        ("helper-roles.yaml", helpers()),
        ("operator.yaml", vec![operator(image), metrics_service()]),
    ]
}

fn labels() -> Value {
    json!({
        "app.kubernetes.io/name": PREFIX, "app.kubernetes.io/part-of": "coracle", "control-plane": "controller-manager",
    })
}

fn selector() -> Value {
    json!({"app.kubernetes.io/name": PREFIX, "control-plane": "controller-manager"})
}

fn meta(name: &str) -> Value {
    json!({"name": format!("{PREFIX}-{name}"), "namespace": NAMESPACE, "labels": labels()})
}

fn cluster_meta(name: &str) -> Value {
    json!({"name": format!("{PREFIX}-{name}"), "labels": labels()})
}

fn namespace() -> Value {
    let mut labels = labels();
    labels["pod-security.kubernetes.io/enforce"] = json!("restricted");
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
}

/// Least permissions of the controllers.
fn rights() -> Vec<Value> {
    let everywhere = [
        rule(GROUP, &["vsphereagentpools", "vsphereagents"], &ALL),
        rule(GROUP, &["vsphereagentpools/status", "vsphereagents/status"], &["get", "update", "patch"]),
        rule(GROUP, &["vsphereagentpools/finalizers", "vsphereagents/finalizers"], &["update"]),
        rule("agent-install.openshift.io", &["agents"], &["get", "list", "watch", "patch", "delete"]),
        rule("agent-install.openshift.io", &["infraenvs"], &["get", "list", "watch"]),
        rule(
            "capi-provider.agent-install.openshift.io",
            &["agentmachines"],
            &["get", "list", "watch", "patch"],
        ),
        rule("cluster.x-k8s.io", &["machines"], &["get", "list", "watch"]),
        rule("", &["secrets"], &["get"]),
        rule("events.k8s.io", &["events"], &["create", "patch", "update"]),
        // Permissions to check who may read metrics.
        rule("authentication.k8s.io", &["tokenreviews"], &["create"]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
    ];
    let account = format!("{PREFIX}-controller-manager");
    let (manager, leader) = (format!("{PREFIX}-manager-role"), format!("{PREFIX}-leader-election-role"));
    let reader = json!({"nonResourceURLs": ["/metrics"], "verbs": ["get"]});
    vec![
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta("controller-manager")}),
        role("ClusterRole", cluster_meta("manager-role"), &everywhere),
        bind(
            "ClusterRoleBinding",
            cluster_meta("manager-rolebinding"),
            "ClusterRole",
            &manager,
            NAMESPACE,
            &account,
        ),
        role("Role", meta("leader-election-role"), &lease_rights(LEASE)),
        bind("RoleBinding", meta("leader-election-rolebinding"), "Role", &leader, NAMESPACE, &account),
        role("ClusterRole", cluster_meta("metrics-reader"), &[reader]),
    ]
}

/// Roles for users, to be bound as needed.
fn helpers() -> Vec<Value> {
    let kinds = [("vsphereagentpool", "vsphereagentpools"), ("vsphereagent", "vsphereagents")];
    let people = [
        ("admin", &["*"][..]),
        ("editor", &["create", "delete", "get", "list", "patch", "update", "watch"]),
        ("viewer", &["get", "list", "watch"]),
    ];
    kinds
        .iter()
        .flat_map(|(kind, plural)| {
            people.iter().map(move |(who, verbs)| {
                let status = format!("{plural}/status");
                let rules = [rule(GROUP, &[plural], verbs), rule(GROUP, &[&status], &["get"])];
                role("ClusterRole", cluster_meta(&format!("{kind}-{who}-role")), &rules)
            })
        })
        .collect()
}

fn operator(image: &str) -> Value {
    let probe = |path: &str| json!({"httpGet": {"path": path, "port": 8081}});
    let container = json!({
        "name": "manager",
        "image": image,
        "args": [PREFIX, "--leader-elect", "--health-probe-bind-address=:8081", "--metrics-bind-address=:8443"],
        "env": identity_env(),
        "ports": [{"name": "https", "containerPort": 8443}, {"name": "health", "containerPort": 8081}],
        "livenessProbe": probe("/healthz"),
        "readinessProbe": probe("/readyz"),
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "128Mi"}},
        "securityContext": restricted(),
    });
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta("controller-manager"),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": selector()},
            "template": {
                "metadata": {"labels": labels()},
                "spec": {
                    "serviceAccountName": format!("{PREFIX}-controller-manager"),
                    "terminationGracePeriodSeconds": 10,
                    "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [container],
                },
            },
        },
    })
}

fn metrics_service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": meta("controller-manager-metrics-service"),
        "spec": {
            "selector": selector(),
            "ports": [{"name": "https", "port": 8443, "targetPort": "https", "protocol": "TCP"}],
        },
    })
}

//! What is applied to a cluster for BidNodes: rights, the operator, and the market beside it.
//!
//! `cargo xtask codegen` writes these to `deploy/`; a test applies them by server-side dry run.

use coracle_reconcile::manifest::{bind, field_env, kustomization, named, role, rule, yaml};
use serde_json::{Value, json};

use crate::LEASE;

/// Where operator and market are deployed.
pub const NAMESPACE: &str = "coracle-system";
const NAME: &str = "coracle-bidnode";
const MARKET: &str = "coracle-market";
/// Secret with the token that the operator shows to the market, key `token`.
const TOKEN: &str = "coracle-market-token";

/// Files below `deploy/`: path and YAML. `image` is the one that they start.
#[must_use]
pub fn manifests(image: &str) -> Vec<(String, String)> {
    let base = [
        ("rbac.yaml", rights()),
        ("market.yaml", vec![market_claim(), market(image), market_service()]),
        ("operator.yaml", vec![operator(image)]),
    ];
    let names: Vec<Value> = base.iter().map(|(name, _)| json!(name)).collect();
    let path = |name: &str| format!("kustomize/bidnode/{name}");
    let mut files: Vec<_> = base.iter().map(|(name, objects)| (path(name), yaml(objects))).collect();
    files.push((path("kustomization.yaml"), yaml(&[kustomization(&names)])));
    files
}

fn labels(component: &str) -> Value {
    json!({
        "app.kubernetes.io/name": "coracle",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "coracle",
    })
}

fn meta(name: &str, component: &str) -> Value {
    json!({"name": name, "namespace": NAMESPACE, "labels": labels(component)})
}

/// What each call of the controller needs, and no more.
fn rights() -> Vec<Value> {
    let everywhere = [
        rule("kubebid.io", &["bidnodes"], &["get", "list", "watch", "patch"]),
        rule("kubebid.io", &["bidnodes/status", "bidnodes/finalizers"], &["patch"]),
        rule("", &["nodes"], &["get", "list", "watch", "create", "patch", "delete"]),
        rule("", &["pods"], &["get", "list", "watch", "delete"]),
        rule("", &["pods/eviction"], &["create"]),
        rule("policy", &["poddisruptionbudgets"], &["list", "watch"]),
        rule("apps", &["daemonsets"], &["list", "watch"]),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
    ];
    let own = [
        rule("coordination.k8s.io", &["leases"], &["create"]),
        named(rule("coordination.k8s.io", &["leases"], &["get", "update", "patch"]), &[LEASE]),
    ];
    let cluster = json!({"name": NAME, "labels": labels("bidnode")});
    vec![
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(NAME, "bidnode")}),
        role("ClusterRole", cluster.clone(), &everywhere),
        bind("ClusterRoleBinding", cluster, "ClusterRole", NAME, NAMESPACE, NAME),
        role("Role", meta(NAME, "bidnode"), &own),
        bind("RoleBinding", meta(NAME, "bidnode"), "Role", NAME, NAMESPACE, NAME),
    ]
}

fn restricted() -> Value {
    json!({
        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
    })
}

fn pod_security() -> Value {
    json!({
        "runAsNonRoot": true, "runAsUser": 65532, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"},
    })
}

fn probe(path: &str) -> Value {
    json!({"httpGet": {"path": path, "port": "admin"}})
}

fn token_env(name: &str) -> Value {
    json!({"name": name, "valueFrom": {"secretKeyRef": {"name": TOKEN, "key": "token"}}})
}

fn operator(image: &str) -> Value {
    let container = json!({
        "name": "operator",
        "image": image,
        "args": [
            "operator", "--controllers=bidnode", "--admin-listen=0.0.0.0:8081",
            format!("--market=http://{MARKET}.{NAMESPACE}.svc:7700"),
        ],
        "env": [
            token_env("CORACLE_OPERATOR_MARKET_TOKEN"),
            field_env("POD_NAME", "metadata.name"), field_env("POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": [{"name": "admin", "containerPort": 8081}],
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "320Mi"}},
        "securityContext": restricted(),
    });
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta(NAME, "bidnode"),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels("bidnode")},
            "template": {
                "metadata": {"labels": labels("bidnode")},
                "spec": {
                    "serviceAccountName": NAME, "securityContext": pod_security(), "containers": [container],
                },
            },
        },
    })
}

/// One writer and its file: a second copy would only stand by, so there is one, replaced by recreation.
fn market(image: &str) -> Value {
    let container = json!({
        "name": "market",
        "image": image,
        "args": [
            "market", "serve", "--store=sqlite:/data/market.db", "--grpc=0.0.0.0:7700",
            "--http=0.0.0.0:7701", "--admin-listen=0.0.0.0:7702", "--region=local",
        ],
        "env": [token_env("CORACLE_MARKET_ADMIN_TOKEN")],
        "ports": [
            {"name": "grpc", "containerPort": 7700}, {"name": "http", "containerPort": 7701},
            {"name": "admin", "containerPort": 7702},
        ],
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": restricted(),
    });
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta(MARKET, "market"),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels("market")},
            "template": {
                "metadata": {"labels": labels("market")},
                "spec": {
                    "automountServiceAccountToken": false,
                    "securityContext": pod_security(),
                    "containers": [container],
                    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": MARKET}}],
                },
            },
        },
    })
}

fn market_claim() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta(MARKET, "market"),
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}},
    })
}

fn market_service() -> Value {
    let port =
        |name: &str, port: u16| json!({"name": name, "port": port, "targetPort": name, "protocol": "TCP"});
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": meta(MARKET, "market"),
        "spec": {"selector": labels("market"), "ports": [port("grpc", 7700), port("http", 7701)]},
    })
}

//! Manifests for BidNodes: permissions, the operator, and the market.
//!
//! `cargo xtask codegen` writes these to `deploy/`; a test applies them by server-side dry run.

use coracle_reconcile::manifest::{Part, bind, files, identity_env, lease_rights, restricted, role, rule};
use serde_json::{Value, json};

use crate::LEASE;

/// Namespace of operator and market.
pub const NAMESPACE: &str = "coracle-system";
/// Name of the operator.
pub const NAME: &str = "coracle-bidnode";
/// Name of the market.
pub const MARKET: &str = "coracle-market";
/// Secret with the token of the market's administrator in key `token`. If it is missing, the market has no administrator.
const TOKEN: &str = "coracle-market-token";
/// Directory of the operator's token for the market: a service account token with the market's audience.
const TOKENS: &str = "/var/run/secrets/coracle.dev/market";
/// Secret with the market's certificate: `tls.crt` and `tls.key` for [`market_host`], and its authority `ca.crt`.
pub const TLS: &str = "coracle-market-tls";
/// Directory where that Secret is mounted.
const CERTIFICATES: &str = "/etc/coracle/market";
/// Lifetime of such a token in seconds; the kubelet replaces it well before.
const TOKEN_S: i64 = 3600;
/// Audience of the token, which the market requires.
const AUDIENCE: &str = "coracle-market";

/// Files below `deploy/`: path and YAML. `image` is the container image.
#[must_use]
pub fn manifests(image: &str) -> Vec<(String, String)> {
    let mut all = files("kustomize/bidnode", &parts(image));
    all.extend(files("kustomize/market", &market_parts(image)));
    all
}

/// Objects of the operator, grouped by file.
#[must_use]
pub fn parts(image: &str) -> Vec<Part> {
    vec![("rbac.yaml", rights()), ("operator.yaml", vec![operator(image)])]
}

/// Objects of the market, grouped by file.
#[must_use]
pub fn market_parts(image: &str) -> Vec<Part> {
    let objects = vec![market_claim(), market(image), market_service()];
    vec![("rbac.yaml", market_rights()), ("market.yaml", objects)]
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

/// Least permissions of the controller.
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
    let cluster = json!({"name": NAME, "labels": labels("bidnode")});
    vec![
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(NAME, "bidnode")}),
        role("ClusterRole", cluster.clone(), &everywhere),
        bind("ClusterRoleBinding", cluster, "ClusterRole", NAME, NAMESPACE, NAME),
        role("Role", meta(NAME, "bidnode"), &lease_rights(LEASE)),
        bind("RoleBinding", meta(NAME, "bidnode"), "Role", NAME, NAMESPACE, NAME),
    ]
}

/// All permissions of the market: token reviews and access reviews.
fn market_rights() -> Vec<Value> {
    let reviews = [
        rule("authentication.k8s.io", &["tokenreviews"], &["create"]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
    ];
    let reviewer = json!({"name": MARKET, "labels": labels("market")});
    vec![
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(MARKET, "market")}),
        role("ClusterRole", reviewer.clone(), &reviews),
        bind("ClusterRoleBinding", reviewer, "ClusterRole", MARKET, NAMESPACE, MARKET),
    ]
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
    json!({"name": name, "valueFrom": {"secretKeyRef": {"name": TOKEN, "key": "token", "optional": true}}})
}

/// DNS name of the market in the cluster, which its certificate must contain.
#[must_use]
pub fn market_host() -> String {
    format!("{MARKET}.{NAMESPACE}.svc")
}

/// Volume with the market's certificate. `keys`: keys of the Secret; the operator gets the authority only.
fn certificates(keys: &[&str]) -> Value {
    let items: Vec<_> = keys.iter().map(|key| json!({"key": key, "path": key})).collect();
    json!({"name": "market-tls", "secret": {"secretName": TLS, "items": items}})
}

fn certificates_mount() -> Value {
    json!({"name": "market-tls", "mountPath": CERTIFICATES, "readOnly": true})
}

/// Volume with a token of the pod's service account that is valid for the market only.
fn market_token() -> Value {
    let token = json!({"audience": AUDIENCE, "expirationSeconds": TOKEN_S, "path": "token"});
    json!({"name": "market-token", "projected": {"sources": [{"serviceAccountToken": token}]}})
}

fn operator(image: &str) -> Value {
    let container = json!({
        "name": "operator",
        "image": image,
        "args": [
            "operator", "--controllers=bidnode", "--admin-listen=0.0.0.0:8081",
            format!("--market=https://{}:7700", market_host()),
            format!("--market-ca={CERTIFICATES}/ca.crt"),
            format!("--market-token-file={TOKENS}/token"),
        ],
        "env": identity_env(),
        "ports": [{"name": "admin", "containerPort": 8081}],
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "volumeMounts": [
            {"name": "market-token", "mountPath": TOKENS, "readOnly": true}, certificates_mount(),
        ],
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
                    "volumes": [market_token(), certificates(&["ca.crt"])],
                },
            },
        },
    })
}

/// Deployment of the market. There is one writer with one file: a second replica would be idle, so there is one replica, and
/// updates recreate it.
fn market(image: &str) -> Value {
    let container = json!({
        "name": "market",
        "image": image,
        "args": [
            "market", "serve", "--store=sqlite:/data/market.db", "--grpc=0.0.0.0:7700",
            "--http=0.0.0.0:7701", "--admin-listen=0.0.0.0:7702", "--region=local", "--accounts=in-cluster",
            format!("--operator={NAMESPACE}/{NAME}"), format!("--tls-cert={CERTIFICATES}/tls.crt"),
            format!("--tls-key={CERTIFICATES}/tls.key"),
        ],
        "env": [token_env("CORACLE_MARKET_ADMIN_TOKEN")],
        "ports": [
            {"name": "grpc", "containerPort": 7700}, {"name": "http", "containerPort": 7701},
            {"name": "admin", "containerPort": 7702},
        ],
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, certificates_mount()],
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
                    "serviceAccountName": MARKET,
                    "securityContext": pod_security(),
                    "containers": [container],
                    "volumes": [
                        {"name": "data", "persistentVolumeClaim": {"claimName": MARKET}},
                        certificates(&["tls.crt", "tls.key"]),
                    ],
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

//! Manifests of a cluster: definitions, rights, the operator, the node's DaemonSet, the webhook's Service.
//!
//! `cargo xtask codegen` writes these to `deploy/`; a test applies them by server-side dry run.

use serde_json::{Value, json};

use coracle_api::keys::{SYSTEM_NAMESPACE, node};
use coracle_reconcile::manifest::{bind, field_env, kustomization, named, role, rule, yaml};

/// Image of the manifests; overlays and the chart replace it.
pub const IMAGE: &str = "localhost/coracle/coracle:0.1.0";

/// Exactly what the node agent needs instead of `privileged`.
pub const NODE_CAPABILITIES: [&str; 12] = [
    "NET_ADMIN",
    "SYS_ADMIN",
    "SYS_CHROOT",
    "SETUID",
    "SETGID",
    "MKNOD",
    "CHOWN",
    "FOWNER",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "KILL",
    "NET_RAW",
];

/// Files below `deploy/`, in the order in which to apply them: path and YAML.
///
/// # Panics
/// Never: every value is one of ours and can be written as YAML.
#[must_use]
pub fn manifests() -> Vec<(String, String)> {
    let mut files: Vec<(String, String)> = coracle_api::crd_files()
        .expect("a definition of ours is YAML")
        .into_iter()
        .map(|(name, text)| (format!("kustomize/crds/{name}"), text))
        .collect();
    let names: Vec<Value> = files.iter().map(|(path, _)| json!(path.rsplit('/').next())).collect();
    files.push(("kustomize/crds/kustomization.yaml".into(), yaml(&[kustomization(&names)])));
    let base = [
        ("namespace.yaml", vec![namespace()]),
        ("rbac-operator.yaml", operator_rights()),
        ("rbac-node.yaml", node_rights()),
        ("operator.yaml", vec![operator(), disruption_budget()]),
        ("node.yaml", vec![node_daemon_set()]),
        ("webhook-service.yaml", vec![webhook_service()]),
    ];
    let names: Vec<Value> = base.iter().map(|(name, _)| json!(name)).collect();
    files.extend(base.iter().map(|(name, objects)| (format!("kustomize/base/{name}"), yaml(objects))));
    files.push(("kustomize/base/kustomization.yaml".into(), yaml(&[kustomization(&names)])));
    files
}

fn labels(component: &str) -> Value {
    json!({
        "app.kubernetes.io/name": "coracle",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "coracle",
        "app.kubernetes.io/managed-by": "coracle-operator",
    })
}

fn selector(component: &str) -> Value {
    json!({"app.kubernetes.io/name": "coracle", "app.kubernetes.io/component": component})
}

fn meta(name: &str, component: &str) -> Value {
    json!({"name": name, "namespace": SYSTEM_NAMESPACE, "labels": labels(component)})
}

fn cluster_meta(name: &str, component: &str) -> Value {
    json!({"name": name, "labels": labels(component)})
}

fn namespace() -> Value {
    let mut labels = labels("system");
    // The node's DaemonSet uses the host's network and devices.
    labels["pod-security.kubernetes.io/enforce"] = json!("privileged");
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM_NAMESPACE, "labels": labels}})
}

fn account(name: &str, component: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(name, component)})
}

/// Exactly the rights that the controller and the webhook need.
fn operator_rights() -> Vec<Value> {
    let (name, component) = ("coracle-operator", "operator");
    let everywhere = [
        rule("vm.mikrom.es", &["mikromvms"], &["get", "list", "watch", "patch"]),
        rule("vm.mikrom.es", &["mikromvms/status"], &["get", "patch"]),
        rule("vm.mikrom.es", &["mikromvms/finalizers"], &["update"]),
        rule("", &["nodes"], &["get", "list", "watch"]),
        // Its UID is the cluster's.
        named(rule("", &["namespaces"], &["get"]), &["kube-system"]),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
        // Server-side apply creates under a name, which RBAC cannot limit; changing is limited to ours.
        rule("admissionregistration.k8s.io", &["validatingwebhookconfigurations"], &["create"]),
        named(
            rule("admissionregistration.k8s.io", &["validatingwebhookconfigurations"], &["get", "patch"]),
            &["coracle-mikromvm"],
        ),
        // The owner of that configuration.
        named(rule("rbac.authorization.k8s.io", &["clusterroles"], &["get"]), &["coracle-operator"]),
    ];
    let system = [
        rule("coordination.k8s.io", &["leases"], &["get", "list", "watch", "create", "update", "delete"]),
        rule("", &["pods"], &["get", "list", "watch"]),
        rule("", &["secrets"], &["create"]),
        named(rule("", &["secrets"], &["get", "update"]), &["coracle-webhook-ca"]),
    ];
    vec![
        account(name, component),
        role("ClusterRole", cluster_meta(name, component), &everywhere),
        bind(
            "ClusterRoleBinding",
            cluster_meta(name, component),
            "ClusterRole",
            name,
            SYSTEM_NAMESPACE,
            name,
        ),
        role("Role", meta(name, component), &system),
        bind("RoleBinding", meta(name, component), "Role", name, SYSTEM_NAMESPACE, name),
    ]
}

/// Rights of a node: its own announcement, the networks of guests, and the pod CIDR of its Node.
fn node_rights() -> Vec<Value> {
    let (name, component) = ("coracle-node", "node");
    let system = [rule("coordination.k8s.io", &["leases"], &["get", "create", "update", "patch", "delete"])];
    // Guests are kept from the addresses of the API server.
    let endpoints = named(rule("discovery.k8s.io", &["endpointslices"], &["get"]), &["kubernetes"]);
    let everywhere = [rule("", &["nodes"], &["get"]), endpoints];
    vec![
        account(name, component),
        role("ClusterRole", cluster_meta(name, component), &everywhere),
        bind(
            "ClusterRoleBinding",
            cluster_meta(name, component),
            "ClusterRole",
            name,
            SYSTEM_NAMESPACE,
            name,
        ),
        role("Role", meta(name, component), &system),
        bind("RoleBinding", meta(name, component), "Role", name, SYSTEM_NAMESPACE, name),
    ]
}

fn probe(path: &str) -> Value {
    json!({"httpGet": {"path": path, "port": "admin"}})
}

fn operator() -> Value {
    let container = json!({
        "name": "operator",
        "image": IMAGE,
        "args": [
            "operator", "--controllers=mikromvm", "--admin-listen=0.0.0.0:8080", "--webhook-listen=0.0.0.0:9443",
            "--agent-ca=/etc/coracle/agent-tls/ca.crt", "--agent-cert=/etc/coracle/agent-tls/tls.crt",
            "--agent-key=/etc/coracle/agent-tls/tls.key",
        ],
        "env": [field_env("POD_NAME", "metadata.name"), field_env("POD_NAMESPACE", "metadata.namespace")],
        "ports": [{"name": "admin", "containerPort": 8080}, {"name": "webhook", "containerPort": 9443}],
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "agent-tls", "mountPath": "/etc/coracle/agent-tls", "readOnly": true}],
    });
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta("coracle-operator", "operator"),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": selector("operator")},
            "template": {
                "metadata": {"labels": labels("operator")},
                "spec": {
                    "serviceAccountName": "coracle-operator",
                    "priorityClassName": "system-cluster-critical",
                    "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
                    "topologySpreadConstraints": [{
                        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": {"matchLabels": selector("operator")},
                    }],
                    "containers": [container],
                    "volumes": [{"name": "agent-tls", "secret": {"secretName": "coracle-agent-client"}}],
                },
            },
        },
    })
}

fn disruption_budget() -> Value {
    json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta("coracle-operator", "operator"),
        "spec": {"minAvailable": 1, "selector": {"matchLabels": selector("operator")}},
    })
}

/// Its VMMs outlive the container: they live in cgroups and folders of the host. Without `privileged` a
/// container opens only devices that its runtime allows: the node needs a device plugin (or the runtime's own
/// list) for the three below; one that is absent is left out by `coracle node` (no `/dev/kvm`: QEMU's TCG,
/// and a label that says so).
fn node_daemon_set() -> Value {
    let mut labels = labels("node");
    labels[node::AGENT_LABEL] = json!("true");
    let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path});
    let folder = |name: &str, path: &str| json!({"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}});
    // No type: a device that is not there must not keep the Pod from starting.
    let device = |name: &str| json!({"name": name, "hostPath": {"path": format!("/dev/{}", name.replace("net-tun", "net/tun"))}});
    let port = |name: &str, number: u16| json!({"name": name, "containerPort": number, "hostPort": number});
    let container = json!({
        "name": "node",
        "image": IMAGE,
        "args": [
            "node", format!("--agent-listen=0.0.0.0:{}", node::AGENT_PORT),
            format!("--host-listen=0.0.0.0:{}", node::HOST_PORT), "--admin-listen=127.0.0.1:9090",
            "--state=/var/lib/coracle", "--in-cluster", "--tls-cert=/etc/coracle/tls/tls.crt",
            "--tls-key=/etc/coracle/tls/tls.key", "--tls-client-ca=/etc/coracle/tls/ca.crt",
        ],
        "env": [
            field_env("CORACLE_NODE_NAME", "spec.nodeName"),
            field_env("HOST_IP", "status.hostIP"),
            json!({"name": "CORACLE_NODE_ADVERTISE", "value": format!("$(HOST_IP):{}", node::AGENT_PORT)}),
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": [port("agent", node::AGENT_PORT), port("host", node::HOST_PORT)],
        "readinessProbe": {"tcpSocket": {"port": "agent"}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        "securityContext": {
            "privileged": false, "allowPrivilegeEscalation": true, "runAsUser": 0,
            "capabilities": {"drop": ["ALL"], "add": NODE_CAPABILITIES},
        },
        "volumeMounts": [
            {"name": "state", "mountPath": "/var/lib/coracle", "mountPropagation": "None"},
            mount("run", "/run/coracle"),
            mount("cgroup", "/sys/fs/cgroup"),
            mount("kvm", "/dev/kvm"),
            mount("net-tun", "/dev/net/tun"),
            mount("userfaultfd", "/dev/userfaultfd"),
            {"name": "tls", "mountPath": "/etc/coracle/tls", "readOnly": true},
        ],
    });
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta("coracle-node", "node"),
        "spec": {
            "selector": {"matchLabels": selector("node")},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "serviceAccountName": "coracle-node",
                    "priorityClassName": "system-node-critical",
                    "hostNetwork": true,
                    // VMMs are found again by pid after the container is replaced.
                    "hostPID": true,
                    "dnsPolicy": "ClusterFirstWithHostNet",
                    "nodeSelector": {"kubernetes.io/os": "linux"},
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [container],
                    "volumes": [
                        folder("state", "/var/lib/coracle"), folder("run", "/run/coracle"),
                        {"name": "cgroup", "hostPath": {"path": "/sys/fs/cgroup"}},
                        device("kvm"), device("net-tun"), device("userfaultfd"),
                        {"name": "tls", "secret": {"secretName": "coracle-agent-server"}},
                    ],
                },
            },
        },
    })
}

fn webhook_service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": meta("coracle-webhook", "webhook"),
        "spec": {
            "selector": selector("operator"),
            "ports": [{"name": "webhook", "port": 443, "targetPort": "webhook"}],
        },
    })
}

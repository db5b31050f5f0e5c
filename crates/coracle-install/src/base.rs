//! Objects of every cluster: RBAC rules, the operator with its certificate authority, the node's DaemonSet, and the policy that
//! restricts a node to its own Lease.

use serde_json::{Value, json};

use coracle_api::keys::certificates::{CA_CONFIG_MAP, NODE_ACCOUNT, NODE_SIGNER};
use coracle_api::keys::{IMAGE_POLICY, NODE_NAMESPACE, SYSTEM_NAMESPACE, node};
use coracle_reconcile::manifest::{Part, bind, field_env, named, role, rule};

/// Port of a node for metrics and health, in addition to the ports of its services.
const ADMIN_PORT: u16 = 50053;

/// Returns the objects by file. `image` is the container image in them.
pub(crate) fn parts(image: &str) -> Vec<Part> {
    vec![
        ("namespace.yaml", vec![namespace(), node_namespace()]),
        ("rbac-operator.yaml", operator_rights()),
        ("rbac-node.yaml", node_rights()),
        ("node-policy.yaml", node_policy()),
        ("operator.yaml", vec![operator(image), disruption_budget()]),
        ("node.yaml", vec![node_daemon_set(image)]),
    ]
}

pub(crate) fn labels(component: &str) -> Value {
    json!({
        "app.kubernetes.io/name": "coracle",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "coracle",
        "app.kubernetes.io/managed-by": "coracle-operator",
    })
}

pub(crate) fn selector(component: &str) -> Value {
    json!({"app.kubernetes.io/name": "coracle", "app.kubernetes.io/component": component})
}

pub(crate) fn meta(name: &str, component: &str) -> Value {
    json!({"name": name, "namespace": SYSTEM_NAMESPACE, "labels": labels(component)})
}

/// Binds the ClusterRole of that name to a ServiceAccount of the installation, in the whole cluster.
pub(crate) fn bind_cluster_role(name: &str, component: &str, account: &str) -> Value {
    let metadata = cluster_meta(name, component);
    bind("ClusterRoleBinding", metadata, "ClusterRole", name, SYSTEM_NAMESPACE, account)
}

pub(crate) fn cluster_meta(name: &str, component: &str) -> Value {
    json!({"name": name, "labels": labels(component)})
}

fn namespace() -> Value {
    let mut labels = labels("system");
    // The node's DaemonSet uses the host's network and devices.
    labels["pod-security.kubernetes.io/enforce"] = json!("privileged");
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM_NAMESPACE, "labels": labels}})
}

/// Returns the namespace of the nodes' Leases, without Pods.
fn node_namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NODE_NAMESPACE, "labels": labels("node")}})
}

fn node_meta(name: &str) -> Value {
    json!({"name": name, "namespace": NODE_NAMESPACE, "labels": labels("node")})
}

pub(crate) fn account(name: &str, component: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(name, component)})
}

/// Returns exactly the rules that the controllers and the webhook need.
fn operator_rights() -> Vec<Value> {
    let (name, component) = ("coracle-operator", "operator");
    let everywhere = [
        rule("vm.mikrom.es", &["mikromvms"], &["get", "list", "watch", "patch"]),
        rule("vm.mikrom.es", &["mikromvms/status"], &["get", "update"]),
        rule("vm.mikrom.es", &["mikromvms/finalizers"], &["update"]),
        rule("", &["nodes", "resourcequotas"], &["get", "list", "watch"]),
        rule("", &["resourcequotas/status"], &["patch"]),
        // Objects that the specs of VMs refer to are read one by one when a VM is created.
        rule("", &["secrets", "configmaps", "persistentvolumeclaims", "persistentvolumes"], &["get"]),
        // Snapshots, and VMs that are restored from them.
        rule("vm.mikrom.es", &["mikromvms"], &["create"]),
        rule("coracle.dev", &["vmsnapshots"], &["get", "list", "watch", "patch", "delete"]),
        rule("coracle.dev", &["vmrestores"], &["get", "list", "watch"]),
        rule("coracle.dev", &["vmsnapshots/status", "vmrestores/status"], &["patch"]),
        rule("coracle.dev", &["vmsnapshots/finalizers"], &["update"]),
        // Pools, whose VMs are created and deleted.
        rule("vm.mikrom.es", &["mikromvms"], &["delete"]),
        rule("coracle.dev", &["mikromvmpools"], &["get", "list", "watch", "patch"]),
        rule("coracle.dev", &["mikromvmpools/status"], &["patch"]),
        rule("coracle.dev", &["mikromvmpools/finalizers"], &["update"]),
        // Services of VMs with ports.
        rule("", &["services"], &["get", "list", "watch", "create", "patch", "delete"]),
        rule("discovery.k8s.io", &["endpointslices"], &["get", "list", "watch", "create", "patch", "delete"]),
        // The UID of this namespace identifies the cluster.
        named(rule("", &["namespaces"], &["get"]), &["kube-system"]),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
        // Certificates of nodes.
        rule("certificates.k8s.io", &["certificatesigningrequests"], &["get", "list", "watch"]),
        rule("certificates.k8s.io", &["certificatesigningrequests/approval"], &["patch"]),
        rule("certificates.k8s.io", &["certificatesigningrequests/status"], &["patch"]),
        named(rule("certificates.k8s.io", &["signers"], &["approve", "sign"]), &[NODE_SIGNER]),
    ];
    let system = [
        rule("coordination.k8s.io", &["leases"], &["get", "list", "watch", "create", "update", "delete"]),
        rule("", &["pods"], &["get", "list", "watch"]),
        rule("", &["secrets"], &["create"]),
        named(rule("", &["secrets"], &["get", "update"]), &["coracle-ca"]),
        rule("", &["configmaps"], &["create"]),
        named(rule("", &["configmaps"], &["get", "patch"]), &[CA_CONFIG_MAP]),
        // A rule for `list` with a name permits a list with that name as field selector.
        named(rule("", &["configmaps"], &["get", "list", "watch"]), &[IMAGE_POLICY]),
    ];
    let nodes = [rule("coordination.k8s.io", &["leases"], &["get", "list", "watch", "update", "delete"])];
    vec![
        account(name, component),
        role("ClusterRole", cluster_meta(name, component), &everywhere),
        bind_cluster_role(name, component, name),
        role("Role", meta(name, component), &system),
        bind("RoleBinding", meta(name, component), "Role", name, SYSTEM_NAMESPACE, name),
        role("Role", node_meta(name), &nodes),
        bind("RoleBinding", node_meta(name), "Role", name, SYSTEM_NAMESPACE, name),
    ]
}

/// Returns the rules of a node: its own announcement, the networks of guests, the pod CIDRs of Nodes, and its certificate.
fn node_rights() -> Vec<Value> {
    let (name, component) = (NODE_ACCOUNT, "node");
    let leases = [rule("coordination.k8s.io", &["leases"], &["get", "create", "update", "patch", "delete"])];
    let system = [named(rule("", &["configmaps"], &["get", "list", "watch"]), &[CA_CONFIG_MAP])];
    let requests =
        rule("certificates.k8s.io", &["certificatesigningrequests"], &["create", "get", "list", "watch"]);
    // Guests must not reach the addresses of the API server.
    let endpoints = named(rule("discovery.k8s.io", &["endpointslices"], &["get"]), &["kubernetes"]);
    let everywhere = [rule("", &["nodes"], &["get", "list", "watch"]), endpoints, requests];
    vec![
        account(name, component),
        role("ClusterRole", cluster_meta(name, component), &everywhere),
        bind_cluster_role(name, component, name),
        role("Role", meta(name, component), &system),
        bind("RoleBinding", meta(name, component), "Role", name, SYSTEM_NAMESPACE, name),
        role("Role", node_meta(name), &leases),
        bind("RoleBinding", node_meta(name), "Role", name, SYSTEM_NAMESPACE, name),
    ]
}

/// Returns the policy that restricts a node to its own Lease. RBAC knows only the ServiceAccount that all nodes share, but the
/// token of each node names it (`authentication.kubernetes.io/node-name`, Kubernetes 1.32 and later). All nodes share the Lease
/// with the networks of guests; each node changes only its own entries.
fn node_policy() -> Vec<Value> {
    let (name, component) = ("coracle-node-leases", "node");
    let annotations = |of: &str| {
        format!("{of} != null && has({of}.metadata.annotations) ? {of}.metadata.annotations : {{}}")
    };
    let own =
        |key: &str| format!("(!('{key}' in variables.new) || variables.new['{key}'] == variables.node)");
    let is_table = format!("request.name == '{}'", node::GUEST_SUBNETS);
    let own_entries = "variables.new.all(k, k in variables.old ? variables.old[k] == variables.new[k] : \
                       variables.new[k] == variables.node) && \
                       variables.old.all(k, k in variables.new || variables.old[k] == variables.node)";
    let validation = |expression: String, message: &str| json!({"expression": expression, "message": message, "reason": "Forbidden"});
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": cluster_meta(name, component),
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{
                "apiGroups": ["coordination.k8s.io"], "apiVersions": ["v1"], "resources": ["leases"],
                "operations": ["CREATE", "UPDATE", "DELETE"], "scope": "Namespaced",
            }], "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NODE_NAMESPACE}}},
            "matchConditions": [{
                "name": "nodes",
                "expression": format!("request.userInfo.username == 'system:serviceaccount:{SYSTEM_NAMESPACE}:{NODE_ACCOUNT}'"),
            }],
            "variables": [
                {
                    "name": "node",
                    "expression": "'authentication.kubernetes.io/node-name' in request.userInfo.extra ? \
                                   request.userInfo.extra['authentication.kubernetes.io/node-name'][0] : ''",
                },
                {"name": "old", "expression": annotations("oldObject")},
                {"name": "new", "expression": annotations("object")},
            ],
            "validations": [
                validation("variables.node != ''".into(), "the token is not bound to a node"),
                validation(
                    format!("{is_table} || request.name == variables.node"),
                    "a node writes its own Lease alone",
                ),
                validation(
                    format!("{is_table} || ({} && {})", own(node::NODE), own(node::TLS_SERVER_NAME)),
                    "a node announces its own name alone",
                ),
                validation(
                    format!("!({is_table}) || (request.operation != 'DELETE' && {own_entries})"),
                    "a node changes its own networks alone",
                ),
            ],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": cluster_meta(name, component),
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    });
    vec![policy, binding]
}

pub(crate) fn probe(path: &str) -> Value {
    json!({"httpGet": {"path": path, "port": "admin"}})
}

fn operator(image: &str) -> Value {
    let container = json!({
        "name": "operator",
        "image": image,
        "args": [
            "operator", "--controllers=mikromvm", "--admin-listen=0.0.0.0:8080",
            "--node-authority=/run/coracle/certificates",
        ],
        "env": [field_env("POD_NAME", "metadata.name"), field_env("POD_NAMESPACE", "metadata.namespace")],
        "ports": [{"name": "admin", "containerPort": 8080}],
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "certificates", "mountPath": "/run/coracle/certificates"}],
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
                    "volumes": [{"name": "certificates", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}],
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

/// Returns the DaemonSet of the node daemon. Its VMMs outlive the container: they live in cgroups and directories of the host.
/// Without `privileged` a container opens only devices that its runtime allows, so the node would need a device plugin (or the
/// runtime's own list) for its devices, such as /dev/kvm. `coracle node` does without a device that is absent (no `/dev/kvm`:
/// QEMU's TCG, and a label that says so).
fn node_daemon_set(image: &str) -> Value {
    let mut labels = labels("node");
    labels[node::AGENT_LABEL] = json!("true");
    let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path});
    let folder = |name: &str, path: &str| json!({"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}});
    let port = |name: &str, number: u16| json!({"name": name, "containerPort": number, "hostPort": number});
    let container = json!({
        "name": "node",
        "image": image,
        "args": [
            "node", format!("--agent-listen=0.0.0.0:{}", node::AGENT_PORT),
            format!("--host-listen=0.0.0.0:{}", node::HOST_PORT), format!("--admin-listen=0.0.0.0:{ADMIN_PORT}"),
            "--state=/var/lib/coracle", "--in-cluster", "--boot=/usr/share/coracle/boot",
        ],
        "env": [
            field_env("CORACLE_NODE_NAME", "spec.nodeName"),
            field_env("HOST_IP", "status.hostIP"),
            json!({"name": "CORACLE_NODE_ADVERTISE", "value": format!("$(HOST_IP):{}", node::AGENT_PORT)}),
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": [
            port("agent", node::AGENT_PORT), port("host", node::HOST_PORT), port("admin", ADMIN_PORT),
        ],
        "readinessProbe": {"tcpSocket": {"port": "agent"}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        // A container's device filter refuses /dev/kvm, and its AppArmor profile refuses mounts, even with all capabilities. A
        // privileged container has the devices of the host. A hostPath volume of an absent device would create a directory in
        // its place.
        "securityContext": {"privileged": true, "runAsUser": 0},
        "volumeMounts": [
            {"name": "state", "mountPath": "/var/lib/coracle", "mountPropagation": "None"},
            mount("run", "/run/coracle"),
            mount("cgroup", "/sys/fs/cgroup"),
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
                    // VMMs are found by pid after the container was replaced.
                    "hostPID": true,
                    "dnsPolicy": "ClusterFirstWithHostNet",
                    "nodeSelector": {"kubernetes.io/os": "linux"},
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [container],
                    "volumes": [
                        folder("state", "/var/lib/coracle"), folder("run", "/run/coracle"),
                        {"name": "cgroup", "hostPath": {"path": "/sys/fs/cgroup"}},
                    ],
                },
            },
        },
    })
}

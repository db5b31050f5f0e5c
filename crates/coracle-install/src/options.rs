//! Options that an administrator may add to the base: additional objects, and items in lists of the base's objects.

use coracle_api::keys::SYSTEM_NAMESPACE;
use coracle_api::keys::certificates::{CA_CONFIG_MAP, CA_KEY, NODE_ACCOUNT};
use coracle_reconcile::manifest::{Part, bind, named, restricted, role, rule};
use serde_json::{Value, json};

use crate::base::{bind_cluster_role, cluster_meta, labels, meta, probe, selector};
use crate::extension_api::extension_api;
use crate::monitoring::monitoring;

/// Secret with the certificate of the registry.
const REGISTRY_TLS: &str = "coracle-registry-tls";
const REGISTRY: &str = "coracle-registry";
const REGISTRY_PORT: u16 = 5000;
/// Directory in a node with the registry's certificate authority.
const REGISTRY_CONFIG: &str = "/etc/coracle/registries";
const OPERATOR: &str = "coracle-operator";
/// JSON pointers to lists of a Pod template with one container.
const ARGS: &str = "/spec/template/spec/containers/0/args";
const PORTS: &str = "/spec/template/spec/containers/0/ports";
const MOUNTS: &str = "/spec/template/spec/containers/0/volumeMounts";
const VOLUMES: &str = "/spec/template/spec/volumes";

/// Option that an administrator may add.
pub(crate) struct Component {
    /// Name of the kustomize component.
    pub(crate) name: &'static str,
    /// Key in the values of the chart.
    pub(crate) key: &'static str,
    /// One-line description in `values.yaml`.
    pub(crate) description: &'static str,
    /// Objects of the option, by file.
    pub(crate) parts: Vec<Part>,
    /// Directory of the option's objects beside that of the base, with a kustomization of its own, to which the component
    /// refers.
    pub(crate) shared: Option<&'static str>,
    pub(crate) additions: Vec<Addition>,
}

/// Items that are appended to a list in an object of the base.
pub(crate) struct Addition {
    pub(crate) kind: &'static str,
    pub(crate) name: &'static str,
    /// Namespace of the object, when several objects have its name.
    pub(crate) namespace: Option<&'static str>,
    /// JSON pointer to the list.
    pub(crate) list: &'static str,
    pub(crate) items: Vec<Value>,
}

/// Returns all options. `image` is the container image in their objects.
pub(crate) fn components(image: &str) -> Vec<Component> {
    let whole = |name, key, description, dir, parts| Component {
        name,
        key,
        description,
        parts,
        shared: Some(dir),
        additions: vec![],
    };
    let mut market = whole(
        "market",
        "market",
        "The market of nodes, with a certificate of the cluster's authority",
        "market",
        coracle_bidnode::manifests::market_parts(image),
    );
    market.additions = serving(coracle_bidnode::manifests::TLS, &coracle_bidnode::manifests::market_host());
    let bidnode = coracle_bidnode::manifests::parts(image);
    let pools = coracle_agentpool::manifests::parts(image);
    vec![
        webhook(),
        market,
        whole("bidnode", "bidnode", "The controller of BidNodes; it needs a market", "bidnode", bidnode),
        registry(image),
        whole("agent-forge", "agentForge", "The controller of VsphereAgentPools", "agent-forge", pools),
        whole(
            "cocoon",
            "cocoon",
            "The controllers of CocoonSets",
            "cocoon",
            coracle_cocoon::manifests::parts(image),
        ),
        virtual_node(),
        monitoring(),
    ]
}

fn to_operator(list: &'static str, items: Vec<Value>) -> Addition {
    Addition { kind: "Deployment", name: OPERATOR, namespace: None, list, items }
}

fn to_node(list: &'static str, items: Vec<Value>) -> Addition {
    Addition { kind: "DaemonSet", name: "coracle-node", namespace: None, list, items }
}

/// Returns the additions with which the operator keeps a certificate for `host` in a Secret.
fn serving(secret: &str, host: &str) -> Vec<Addition> {
    let right = named(rule("", &["secrets"], &["get", "update"]), &[secret]);
    vec![
        to_operator(ARGS, vec![json!(format!("--serving-certificate={secret}={host}"))]),
        Addition {
            kind: "Role",
            name: OPERATOR,
            namespace: Some(SYSTEM_NAMESPACE),
            list: "/rules",
            items: vec![right],
        },
    ]
}

/// Returns the option for the admission of MikromVMs. The ClusterRole owns the webhook configuration that the operator
/// installs, so that the configuration is deleted with it.
fn webhook() -> Component {
    let (name, component) = ("coracle-webhook", "webhook");
    let configurations =
        |verbs: &[&str]| rule("admissionregistration.k8s.io", &["validatingwebhookconfigurations"], verbs);
    let rights = [
        // Server-side apply needs `create`, which RBAC cannot restrict to a name; changes are restricted to this configuration.
        configurations(&["create"]),
        named(configurations(&["get", "patch"]), &["coracle-mikromvm"]),
        // Owner of that configuration.
        named(rule("rbac.authorization.k8s.io", &["clusterroles"], &["get"]), &[name]),
    ];
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": meta(name, component),
        "spec": {
            "selector": selector("operator"),
            "ports": [{"name": "webhook", "port": 443, "targetPort": "webhook"}],
        },
    });
    let bound = bind_cluster_role(name, component, OPERATOR);
    let rights = role("ClusterRole", cluster_meta(name, component), &rights);
    Component {
        name: "webhook",
        key: "webhook",
        description: "Admission of MikromVMs, and the extension API: exec, console, log, port-forward and cp",
        parts: vec![
            ("webhook.yaml", vec![rights, bound, service]),
            ("subresources.yaml", extension_api(OPERATOR)),
        ],
        shared: None,
        additions: vec![
            to_operator(
                ARGS,
                vec![
                    json!("--webhook-listen=0.0.0.0:9443"),
                    json!(format!("--webhook-namespace={SYSTEM_NAMESPACE}")),
                ],
            ),
            to_operator(PORTS, vec![json!({"name": "webhook", "containerPort": 9443})]),
        ],
    }
}

/// Returns the option for the registry on one volume. Nodes trust its certificate, which the cluster's authority has signed.
fn registry(image: &str) -> Component {
    let host = format!("{REGISTRY}.{SYSTEM_NAMESPACE}.svc");
    let component = "registry";
    let tls = "/etc/coracle/registry";
    let container = json!({
        "name": "registry",
        "image": image,
        "args": [
            "registry", "serve", "--state=/data", format!("--listen=0.0.0.0:{REGISTRY_PORT}"),
            "--admin-listen=0.0.0.0:5001", format!("--tls-cert={tls}/tls.crt"), format!("--tls-key={tls}/tls.key"),
        ],
        "ports": [
            {"name": "registry", "containerPort": REGISTRY_PORT}, {"name": "admin", "containerPort": 5001},
        ],
        "livenessProbe": probe("/livez"),
        "readinessProbe": probe("/readyz"),
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"}, {"name": "tls", "mountPath": tls, "readOnly": true},
        ],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": restricted(),
    });
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta(REGISTRY, component),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": selector(component)},
            "template": {
                "metadata": {"labels": labels(component)},
                "spec": {
                    "automountServiceAccountToken": false,
                    "securityContext": {
                        "runAsNonRoot": true, "runAsUser": 65532, "fsGroup": 65532,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [container],
                    "volumes": [
                        {"name": "data", "persistentVolumeClaim": {"claimName": REGISTRY}},
                        {"name": "tls", "secret": {"secretName": REGISTRY_TLS}},
                    ],
                },
            },
        },
    });
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta(REGISTRY, component),
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}},
    });
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": meta(REGISTRY, component),
        "spec": {
            "selector": selector(component),
            "ports": [{"name": "registry", "port": REGISTRY_PORT, "targetPort": "registry"}],
        },
    });
    Component {
        name: "registry",
        key: "registry",
        description: "A registry of images and snapshots, with a certificate of the cluster's authority",
        parts: vec![("registry.yaml", vec![claim, deployment, service, registry_hosts(&host)])],
        shared: None,
        additions: registry_additions(&host),
    }
}

/// Returns the registry configuration of nodes.
fn registry_hosts(host: &str) -> Value {
    let server = format!("https://{host}:{REGISTRY_PORT}");
    let ca = format!("{REGISTRY_CONFIG}/{host}:{REGISTRY_PORT}/ca.crt");
    let text = format!("server = \"{server}\"\n\n[host.\"{server}\"]\nca = \"{ca}\"\n");
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta(REGISTRY, "registry"), "data": {"hosts.toml": text},
    })
}

fn registry_additions(host: &str) -> Vec<Addition> {
    let mut additions = serving(REGISTRY_TLS, host);
    let source = |name: &str, key: &str, path: &str| json!({"configMap": {"name": name, "items": [{"key": key, "path": path}]}});
    let sources =
        json!([source(CA_CONFIG_MAP, CA_KEY, "ca.crt"), source(REGISTRY, "hosts.toml", "hosts.toml")]);
    let mount = format!("{REGISTRY_CONFIG}/{host}:{REGISTRY_PORT}");
    additions.extend([
        to_node(ARGS, vec![json!(format!("--registry-config={REGISTRY_CONFIG}"))]),
        to_node(MOUNTS, vec![json!({"name": "registries", "mountPath": mount, "readOnly": true})]),
        to_node(VOLUMES, vec![json!({"name": "registries", "projected": {"sources": sources}})]),
    ]);
    additions
}

/// Returns the option for a virtual node beside each kubelet. With it the ServiceAccount of all nodes may do what a kubelet may
/// do as `system:node:NAME`, including reads of the Secrets of Pods.
fn virtual_node() -> Component {
    let (name, component) = ("coracle-virtual-node", "node");
    let everywhere = [
        rule("", &["nodes"], &["create", "get", "patch", "delete"]),
        rule("", &["nodes/status"], &["patch"]),
        rule("", &["pods"], &["get", "list", "watch", "patch", "delete"]),
        rule("", &["pods/status"], &["patch"]),
        rule("", &["configmaps", "secrets"], &["get", "list", "watch"]),
        rule("", &["services"], &["list", "watch"]),
        rule("", &["persistentvolumeclaims", "persistentvolumes", "serviceaccounts"], &["get"]),
        rule("", &["serviceaccounts/token"], &["create"]),
        rule("", &["events"], &["create", "patch"]),
        rule("authentication.k8s.io", &["tokenreviews"], &["create"]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
    ];
    let authority = named(rule("", &["configmaps"], &["get"]), &["extension-apiserver-authentication"]);
    let in_namespace =
        |namespace: &str| json!({"name": name, "namespace": namespace, "labels": labels(component)});
    let lease = rule("coordination.k8s.io", &["leases"], &["get", "create", "update", "patch"]);
    let mut objects = vec![
        role("ClusterRole", cluster_meta(name, component), &everywhere),
        bind_cluster_role(name, component, NODE_ACCOUNT),
    ];
    for (namespace, right) in [("kube-system", authority), ("kube-node-lease", lease)] {
        objects.push(role("Role", in_namespace(namespace), &[right]));
        let to = in_namespace(namespace);
        objects.push(bind("RoleBinding", to, "Role", name, SYSTEM_NAMESPACE, NODE_ACCOUNT));
    }
    Component {
        name: "virtual-node",
        key: "virtualNode",
        description: "A virtual node beside each kubelet; the ServiceAccount of nodes may read Secrets then",
        parts: vec![("rbac.yaml", objects)],
        shared: None,
        additions: vec![to_node(
            ARGS,
            // The kubelet uses port 10250.
            vec![
                json!("--virtual-node=vm-$(CORACLE_NODE_NAME)"),
                json!("--virtual-node-listen=0.0.0.0:10260"),
                json!(format!("--virtual-node-image-policy={SYSTEM_NAMESPACE}")),
            ],
        )],
    }
}

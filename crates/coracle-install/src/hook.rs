//! Hook before `helm uninstall`, while the operator still runs: a Job that removes the webhooks and the objects that only the
//! operator can finalize (Helm documentation, "Chart Hooks"). Helm removes everything else, and nothing when the Job fails.

use coracle_api::keys::SYSTEM_NAMESPACE;
use coracle_reconcile::manifest::{named, role, rule};
use serde_json::{Value, json};

use crate::base::{account, bind_cluster_role, cluster_meta, labels, meta};

/// Name of the Job and of its ServiceAccount.
const NAME: &str = "coracle-uninstall";
/// Value of the component label.
const COMPONENT: &str = "uninstall";
/// Time limit of the Job, below Helm's default of 5 minutes.
const TIMEOUT: &str = "--timeout=270s";

/// Returns the Job, preceded by its ServiceAccount and RBAC objects. `more` is appended to its arguments.
pub(crate) fn before_uninstall(image: &str, more: &str) -> Vec<Value> {
    let mut objects = vec![
        account(NAME, COMPONENT),
        role("ClusterRole", cluster_meta(NAME, COMPONENT), &rights()),
        bind_cluster_role(NAME, COMPONENT, NAME),
        job(image, more),
    ];
    for (weight, object) in objects.iter_mut().enumerate() {
        object["metadata"]["annotations"] = json!({
            "helm.sh/hook": "pre-delete",
            "helm.sh/hook-weight": weight.to_string(),
            "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded",
        });
    }
    objects
}

/// Returns the rules to find and delete custom resources, webhooks and certificate requests of nodes, and to see the operator.
fn rights() -> Vec<Value> {
    let of_users = coracle_api::crds().into_iter().map(|definition| {
        rule(&definition.spec.group, &[&definition.spec.names.plural], &["list", "delete"])
    });
    let hooks = ["validatingwebhookconfigurations", "mutatingwebhookconfigurations"];
    let own = [
        rule("admissionregistration.k8s.io", &hooks, &["list", "delete"]),
        rule("apiregistration.k8s.io", &["apiservices"], &["list", "delete"]),
        rule("certificates.k8s.io", &["certificatesigningrequests"], &["list", "delete"]),
        named(rule("apps", &["deployments"], &["get"]), &["coracle-operator"]),
    ];
    of_users.chain(own).collect()
}

fn job(image: &str, more: &str) -> Value {
    json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": meta(NAME, COMPONENT),
        "spec": {
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": labels(COMPONENT)},
                "spec": {
                    "serviceAccountName": NAME,
                    "restartPolicy": "Never",
                    "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [{
                        "name": COMPONENT,
                        "image": image,
                        "args": [
                            "uninstall", "--cluster", "--keep-workloads",
                            format!("--namespace={SYSTEM_NAMESPACE}"), TIMEOUT, more,
                        ],
                        "securityContext": {
                            "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }],
                },
            },
        },
    })
}

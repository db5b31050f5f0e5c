//! What runs before `helm uninstall`, while the operator is there: a Job that removes what only the operator can end, and the
//! webhooks (Helm documentation, "Chart Hooks"). Helm removes all the rest, and nothing where the Job fails.

use coracle_api::keys::SYSTEM_NAMESPACE;
use coracle_reconcile::manifest::{named, role, rule};
use serde_json::{Value, json};

use crate::base::{account, bind_cluster_role, cluster_meta, labels, meta};

/// Name of the Job, and of the account that it has.
const NAME: &str = "coracle-uninstall";
/// Component in the labels.
const COMPONENT: &str = "uninstall";
/// Helm waits for 5 minutes by default.
const TIMEOUT: &str = "--timeout=270s";

/// The Job, and its account and rights before it. `more` stands behind its arguments.
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

/// To find and delete objects of our kinds, webhooks and requests of nodes, and to see the operator.
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

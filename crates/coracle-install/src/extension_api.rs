//! RBAC rules of the extension API and of its users.

use coracle_api::keys::SYSTEM_NAMESPACE;
use coracle_api::subresources::{self, Subresource};
use coracle_reconcile::manifest::{bind, named, role, rule};
use serde_json::{Value, json};

use crate::base::{bind_cluster_role, cluster_meta};

/// Returns the rules that the extension API needs for its own registration and the access reviews of its users, and the roles
/// of users. Those are aggregated to the roles `view`, `edit` and `admin` that every cluster has (Kubernetes documentation,
/// "Using RBAC Authorization").
pub(crate) fn extension_api(operator: &str) -> Vec<Value> {
    let (name, component, group) = ("coracle-subresources", "subresources", subresources::GROUP);
    let registration = |verbs: &[&str]| rule("apiregistration.k8s.io", &["apiservices"], verbs);
    let rights = [
        registration(&["create"]),
        named(registration(&["get", "patch"]), &[subresources::API_SERVICE]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
    ];
    let mut reader = cluster_meta(name, component);
    reader["namespace"] = json!("kube-system");
    let with_verb = |verb: &str| {
        let all = Subresource::ALL.into_iter().filter(|s| s.verb() == verb);
        all.map(|s| format!("{}/{}", subresources::RESOURCE, s.name())).collect::<Vec<_>>()
    };
    let (reading, entering) = (with_verb("get"), with_verb("create"));
    let kinds = ["vmsnapshots", "vmrestores", "mikromvmpools"];
    let view = ["get", "list", "watch"];
    let change = ["create", "update", "patch", "delete", "deletecollection"];
    let view = [
        rule("vm.mikrom.es", &["mikromvms"], &view),
        rule("coracle.dev", &kinds, &view),
        rule(group, &as_strs(&reading), &["get"]),
    ];
    let edit = [
        rule("vm.mikrom.es", &["mikromvms"], &change),
        rule("coracle.dev", &kinds, &change),
        // A WebSocket begins with a GET, but the subresource requires `create`.
        rule(group, &as_strs(&entering), &["get", "create"]),
    ];
    let user = |name: &str, to: &[&str], rules: &[Value]| {
        let mut metadata = cluster_meta(name, component);
        for role in to {
            metadata["labels"][format!("rbac.authorization.k8s.io/aggregate-to-{role}")] = json!("true");
        }
        role("ClusterRole", metadata, rules)
    };
    vec![
        role("ClusterRole", cluster_meta(name, component), &rights),
        bind_cluster_role(name, component, operator),
        bind(
            "RoleBinding",
            reader,
            "Role",
            "extension-apiserver-authentication-reader",
            SYSTEM_NAMESPACE,
            operator,
        ),
        user("coracle-view", &["view", "edit", "admin"], &view),
        user("coracle-edit", &["edit", "admin"], &edit),
    ]
}

fn as_strs(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

//! Discovery documents, by which the API server learns the kinds of the group (Kubernetes API concepts, "API discovery").

use axum::Json;
use coracle_api::subresources::{GROUP, RESOURCE, Subresource, VERSION};
use serde_json::{Value, json};

fn this_group() -> Value {
    let version = json!({"groupVersion": format!("{GROUP}/{VERSION}"), "version": VERSION});
    json!({"name": GROUP, "versions": [version], "preferredVersion": version})
}

/// Returns the document of `/apis/GROUP`.
pub(crate) async fn group() -> Json<Value> {
    let mut group = this_group();
    group["kind"] = json!("APIGroup");
    group["apiVersion"] = json!("v1");
    Json(group)
}

/// Returns the document of `/apis/GROUP/VERSION`. It contains only subresources: the group has no objects that are stored,
/// listed or deleted.
pub(crate) async fn resources() -> Json<Value> {
    let resources = Subresource::ALL.map(|subresource| {
        json!({
            "name": format!("{RESOURCE}/{}", subresource.name()), "singularName": "", "namespaced": true,
            "kind": "MikromVM", "group": "vm.mikrom.es", "version": VERSION, "verbs": [subresource.verb()],
        })
    });
    Json(json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("{GROUP}/{VERSION}"),
        "resources": resources,
    }))
}

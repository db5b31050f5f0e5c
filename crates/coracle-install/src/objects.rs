//! Objects of the installation, for checking a cluster and for uninstalling.

use coracle_api::keys::SYSTEM_NAMESPACE;
use serde_json::{Value, json};

use crate::{IMAGE, base};

/// Returns the objects of the base, with the operator in `namespace`.
pub(crate) fn base_objects(namespace: &str) -> Vec<Value> {
    let objects = base::parts(IMAGE).into_iter().flat_map(|(_, objects)| objects);
    objects.map(|object| replace_namespace(object, namespace)).collect()
}

/// Returns the definitions of all kinds.
pub(crate) fn definition_objects() -> Vec<Value> {
    coracle_api::crds().iter().map(|definition| json!(definition)).collect()
}

/// Replaces the default namespace by another one in every text of the object.
fn replace_namespace(object: Value, namespace: &str) -> Value {
    match object {
        Value::String(text) => json!(text.replace(SYSTEM_NAMESPACE, namespace)),
        Value::Array(items) => items.into_iter().map(|item| replace_namespace(item, namespace)).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(key, value)| (key, replace_namespace(value, namespace))).collect()
        }
        other => other,
    }
}

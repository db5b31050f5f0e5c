//! The objects themselves, for those who look at a cluster or clean it up.

use coracle_api::keys::SYSTEM_NAMESPACE;
use serde_json::{Value, json};

use crate::{IMAGE, base};

/// Objects of the base, with the operator in `namespace`.
pub(crate) fn base_objects(namespace: &str) -> Vec<Value> {
    let objects = base::parts(IMAGE).into_iter().flat_map(|(_, objects)| objects);
    objects.map(|object| moved(object, namespace)).collect()
}

/// Definitions of all kinds.
pub(crate) fn definition_objects() -> Vec<Value> {
    coracle_api::crds().iter().map(|definition| json!(definition)).collect()
}

/// The object with another namespace in the place of the usual one, wherever a text names it.
fn moved(object: Value, namespace: &str) -> Value {
    match object {
        Value::String(text) => json!(text.replace(SYSTEM_NAMESPACE, namespace)),
        Value::Array(items) => items.into_iter().map(|item| moved(item, namespace)).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(key, value)| (key, moved(value, namespace))).collect()
        }
        other => other,
    }
}

//! Objects that this version may not be able to decode.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, core::error_boundary::InvalidObject};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};
use serde_json::Value;

/// Object of a list or a watch, or its metadata and the decoding error: one such object does not hide the others. kube's
/// `DeserializeGuard` does the same with two more copies of each object, which is too expensive for many objects.
#[derive(Clone, Debug)]
pub struct Guarded<K>(pub Result<K, InvalidObject>);

impl<'de, K: Resource + DeserializeOwned> Deserialize<'de> for Guarded<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut object = Value::deserialize(deserializer)?;
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            metadata.remove("managedFields"); // no controller reads them
        }
        let invalid = |error: serde_json::Error| {
            let metadata = object.get("metadata").map(ObjectMeta::deserialize).transpose();
            let metadata = metadata.map_err(D::Error::custom)?.unwrap_or_default();
            Ok(Guarded(Err(InvalidObject { error: error.to_string(), metadata })))
        };
        K::deserialize(&object).map_or_else(invalid, |object| Ok(Guarded(Ok(object))))
    }
}

impl<K: Resource> Resource for Guarded<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(of: &K::DynamicType) -> Cow<'_, str> {
        K::kind(of)
    }

    fn group(of: &K::DynamicType) -> Cow<'_, str> {
        K::group(of)
    }

    fn version(of: &K::DynamicType) -> Cow<'_, str> {
        K::version(of)
    }

    fn plural(of: &K::DynamicType) -> Cow<'_, str> {
        K::plural(of)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.as_ref().map_or_else(|invalid| &invalid.metadata, K::meta)
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.as_mut().map_or_else(|invalid| &mut invalid.metadata, K::meta_mut)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::api::{ObjectList, WatchEvent};
    use serde_json::json;

    use super::*;

    fn object(name: &str, data: Value) -> Value {
        let metadata = json!({"name": name, "uid": "u", "managedFields": [{"manager": "kubectl"}]});
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    }

    #[test]
    fn unreadable_object_has_its_metadata_and_hides_no_other() {
        let items = [object("good", json!({"a": "b"})), object("bad", json!(["a"]))];
        let list = json!({"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {}, "items": items});
        let list: ObjectList<Guarded<ConfigMap>> = serde_json::from_str(&list.to_string()).unwrap();
        let [good, bad] = list.items.try_into().unwrap();
        assert_eq!(good.meta().managed_fields, None);
        assert_eq!(good.0.unwrap().data.unwrap()["a"], "b");
        let invalid = bad.0.unwrap_err();
        assert_eq!(
            (invalid.metadata.name.as_deref(), invalid.metadata.uid.as_deref()),
            (Some("bad"), Some("u"))
        );
        assert!(invalid.error.contains("expected a map"), "{}", invalid.error);
    }

    #[test]
    fn object_of_a_watch_is_read_in_either_order_of_fields() {
        let object = object("good", json!({}));
        for line in [
            format!(r#"{{"type":"ADDED","object":{object}}}"#),
            format!(r#"{{"object":{object},"type":"ADDED"}}"#),
        ] {
            let event: WatchEvent<Guarded<ConfigMap>> = serde_json::from_str(&line).unwrap();
            assert!(matches!(event, WatchEvent::Added(Guarded(Ok(_)))), "{line}");
        }
    }
}

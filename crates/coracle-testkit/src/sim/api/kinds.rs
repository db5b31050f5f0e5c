//! Kinds that the API server serves: some built-in ones, and those of applied CustomResourceDefinitions.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// How server-side apply treats the items of a list (Kubernetes API, "Merge strategy").
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ListType {
    /// The list is a single value.
    Atomic,
    /// Items are scalars. Each item has owners of its own.
    Set,
    /// Items are objects, identified by these fields.
    Map(Vec<String>),
}

/// Kind that is served.
#[derive(Clone, Debug)]
pub(super) struct Kind {
    pub(super) group: String,
    pub(super) versions: Vec<String>,
    pub(super) plural: String,
    pub(super) kind: String,
    pub(super) namespaced: bool,
    /// True when the status is written through the subresource `status` only.
    pub(super) has_status: bool,
    /// True when `metadata.generation` counts changes of the spec.
    pub(super) has_generation: bool,
    /// True when a PUT without a resource version is refused.
    pub(super) needs_version: bool,
    /// List types by path of field names. An object in this map is a single value.
    lists: BTreeMap<Vec<String>, ListType>,
    /// OpenAPI schema of a custom resource.
    schema: Option<Value>,
}

impl Kind {
    fn built_in(group: &str, plural: &str, kind: &str, namespaced: bool) -> Self {
        Self {
            group: group.into(),
            versions: vec!["v1".into()],
            plural: plural.into(),
            kind: kind.into(),
            namespaced,
            has_status: false,
            has_generation: false,
            needs_version: false,
            lists: common_lists(),
            schema: None,
        }
    }

    /// Kind of a CustomResourceDefinition. `None` when the definition lacks a required field.
    pub(super) fn of_definition(definition: &Value) -> Option<Self> {
        let spec = &definition["spec"];
        let versions = spec["versions"].as_array()?;
        let served = |v: &&Value| v["served"] == json!(true);
        let names: Vec<_> =
            versions.iter().filter(served).filter_map(|v| v["name"].as_str()).map(str::to_owned).collect();
        let stored = versions.iter().find(|v| v["storage"] == json!(true))?;
        let schema = stored["schema"]["openAPIV3Schema"].clone();
        let mut lists = common_lists();
        collect_lists(&schema, &mut Vec::new(), &mut lists);
        Some(Self {
            group: spec["group"].as_str()?.into(),
            versions: names,
            plural: spec["names"]["plural"].as_str()?.into(),
            kind: spec["names"]["kind"].as_str()?.into(),
            namespaced: spec["scope"] == json!("Namespaced"),
            has_status: stored["subresources"]["status"].is_object(),
            has_generation: true,
            needs_version: true,
            lists,
            schema: Some(schema),
        })
    }

    /// Name of the resource in error messages, such as `mikromvms.vm.mikrom.es`.
    pub(super) fn qualified_name(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// Value of `apiVersion`, such as `vm.mikrom.es/v1alpha1`.
    pub(super) fn api_version(&self, version: &str) -> String {
        if self.group.is_empty() { version.to_owned() } else { format!("{}/{version}", self.group) }
    }

    pub(super) fn list_type(&self, path: &[String]) -> &ListType {
        self.lists.get(path).unwrap_or(&ListType::Atomic)
    }

    /// True for an object that is a single value.
    pub(super) fn is_atomic(&self, path: &[String]) -> bool {
        self.lists.get(path) == Some(&ListType::Atomic)
    }

    /// Sets defaults and drops fields that the schema does not contain, as the API server does for custom resources.
    pub(super) fn apply_schema(&self, object: &mut Value) {
        let Some(properties) = self.schema.as_ref().and_then(|s| s["properties"].as_object()) else { return };
        for part in ["spec", "status"] {
            if let (Some(schema), Some(value)) = (properties.get(part), object.get_mut(part)) {
                apply_schema(schema, value);
            }
        }
    }
}

fn apply_schema(schema: &Value, value: &mut Value) {
    if let Some(items) = value.as_array_mut() {
        items.iter_mut().for_each(|item| apply_schema(&schema["items"], item));
        return;
    }
    let Some(fields) = value.as_object_mut() else { return };
    let keeps_unknown = schema["x-kubernetes-preserve-unknown-fields"] == json!(true);
    if let Some(properties) = schema["properties"].as_object() {
        fields.retain(|name, _| keeps_unknown || properties.contains_key(name));
        for (name, schema) in properties {
            if let Some(default) = schema.get("default")
                && !fields.contains_key(name)
            {
                fields.insert(name.clone(), default.clone());
            }
            if let Some(field) = fields.get_mut(name) {
                apply_schema(schema, field);
            }
        }
        // An absent optional field is stored as absent, not as null.
        fields.retain(|name, field| {
            !field.is_null() || properties.get(name).is_some_and(|s| s["nullable"] == json!(true))
        });
    } else if schema["additionalProperties"].is_object() {
        fields.values_mut().for_each(|field| apply_schema(&schema["additionalProperties"], field));
    }
}

fn common_lists() -> BTreeMap<Vec<String>, ListType> {
    let path = |text: &str| text.split('.').map(str::to_owned).collect::<Vec<_>>();
    let map = |key: &str| ListType::Map(vec![key.into()]);
    BTreeMap::from([
        (path("metadata.finalizers"), ListType::Set),
        (path("metadata.ownerReferences"), map("uid")),
        (path("status.conditions"), map("type")),
        (path("status.addresses"), map("type")),
        (path("spec.containers"), map("name")),
    ])
}

fn collect_lists(schema: &Value, path: &mut Vec<String>, lists: &mut BTreeMap<Vec<String>, ListType>) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        path.push(name.clone());
        match field["x-kubernetes-list-type"].as_str() {
            Some("map") => {
                let keys = field["x-kubernetes-list-map-keys"].as_array().into_iter().flatten();
                let keys = keys.filter_map(Value::as_str).map(str::to_owned).collect();
                lists.insert(path.clone(), ListType::Map(keys));
            }
            Some("set") => drop(lists.insert(path.clone(), ListType::Set)),
            _ if field["type"] == json!("array") || field["x-kubernetes-map-type"] == json!("atomic") => {
                drop(lists.insert(path.clone(), ListType::Atomic));
            }
            _ => {}
        }
        let below = if field["items"].is_object() { &field["items"] } else { field };
        collect_lists(below, path, lists);
        path.pop();
    }
}

/// Kinds that exist without a definition.
pub(super) fn built_in() -> Vec<Kind> {
    let with_status = |kind: Kind| Kind { has_status: true, ..kind };
    vec![
        with_status(Kind::built_in("", "namespaces", "Namespace", false)),
        with_status(Kind::built_in("", "nodes", "Node", false)),
        with_status(Kind::built_in("", "pods", "Pod", true)),
        with_status(Kind::built_in("apps", "daemonsets", "DaemonSet", true)),
        Kind::built_in("", "configmaps", "ConfigMap", true),
        Kind::built_in("", "resourcequotas", "ResourceQuota", true),
        Kind::built_in("", "secrets", "Secret", true),
        Kind::built_in("", "services", "Service", true),
        Kind::built_in("discovery.k8s.io", "endpointslices", "EndpointSlice", true),
        Kind::built_in("", "serviceaccounts", "ServiceAccount", true),
        Kind::built_in("", "events", "Event", true),
        Kind::built_in("events.k8s.io", "events", "Event", true),
        Kind { needs_version: true, ..Kind::built_in("coordination.k8s.io", "leases", "Lease", true) },
        Kind {
            has_generation: true,
            needs_version: true,
            ..with_status(Kind::built_in(
                "apiextensions.k8s.io",
                "customresourcedefinitions",
                "CustomResourceDefinition",
                false,
            ))
        },
    ]
}

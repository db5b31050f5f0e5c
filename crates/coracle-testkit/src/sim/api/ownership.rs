//! Field ownership and server-side apply (Kubernetes API, "Server-Side Apply"). Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::kinds::{Kind, ListType};

/// Element of a path: a field, or an item of a list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Field(String),
    /// Item with this value or these key fields, as JSON.
    Item(String),
}

type Path = Vec<Part>;

/// Writer of fields: name, whether by apply, and the subresource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Manager {
    pub(super) name: String,
    pub(super) applies: bool,
    pub(super) subresource: String,
}

/// Fields of one object by manager.
#[derive(Clone, Debug, Default)]
pub(super) struct Owners(BTreeMap<Manager, BTreeSet<Path>>);

/// Fields that identify an object and have no owner.
const IDENTITY: [&str; 10] = [
    "name",
    "generateName",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
];

impl Owners {
    /// Merges `patch` into `live` on behalf of `manager`, removes fields that the manager applied before but no longer does,
    /// and records the owners.
    ///
    /// # Errors
    /// Without `force`, the fields that another manager has set to another value.
    pub(super) fn apply(
        &mut self,
        kind: &Kind,
        live: &Value,
        patch: &Value,
        manager: &Manager,
        force: bool,
    ) -> Result<Value, Vec<String>> {
        let wanted = owned_paths(kind, patch);
        let others = || self.0.iter().filter(|(other, _)| *other != manager);
        let mut conflicts = Vec::new();
        for path in &wanted {
            let (now, then) = (get(kind, live, path), get(kind, patch, path));
            if now.is_some() && now != then {
                let owners = others().filter(|(_, paths)| paths.contains(path));
                conflicts.extend(owners.map(|(owner, _)| (path.clone(), owner.name.clone())));
            }
        }
        if !force && !conflicts.is_empty() {
            return Err(conflicts
                .iter()
                .map(|(path, owner)| format!("conflict with {owner:?}: {path:?}"))
                .collect());
        }
        let mut merged = live.clone();
        merge(kind, &mut merged, patch, &mut Vec::new());
        let before = self.0.get(manager).cloned().unwrap_or_default();
        let mut dropped: Vec<_> = before.difference(&wanted).cloned().collect();
        // Removes an item before its fields: without its key fields it would not be found.
        dropped.sort_by_key(Vec::len);
        for path in dropped {
            let owned = |paths: &BTreeSet<Path>| paths.iter().any(|other| other.starts_with(&path));
            if !owned(&wanted) && !others().any(|(_, paths)| owned(paths)) {
                remove(kind, &mut merged, &path);
            }
        }
        for (path, _) in &conflicts {
            for (_, paths) in self.0.iter_mut().filter(|(other, _)| *other != manager) {
                paths.remove(path);
            }
        }
        self.0.insert(manager.clone(), wanted);
        Ok(merged)
    }

    /// Records a write other than an apply: the writer becomes the only owner of what it changed.
    pub(super) fn record_update(&mut self, kind: &Kind, old: &Value, new: &Value, manager: &Manager) {
        let (before, after) = (owned_paths(kind, old), owned_paths(kind, new));
        let changed: BTreeSet<_> =
            after.iter().filter(|path| get(kind, old, path) != get(kind, new, path)).cloned().collect();
        for paths in self.0.values_mut() {
            paths.retain(|path| after.contains(path) && !changed.contains(path));
        }
        if !changed.is_empty() || before != after {
            self.0.entry(manager.clone()).or_default().extend(changed);
        }
    }
}

/// Paths of all values that have owners.
fn owned_paths(kind: &Kind, object: &Value) -> BTreeSet<Path> {
    let mut all = BTreeSet::new();
    for (name, value) in object.as_object().into_iter().flatten() {
        if name == "apiVersion" || name == "kind" {
            continue;
        }
        let mut path = vec![Part::Field(name.clone())];
        if name == "metadata" {
            for (field, value) in value.as_object().into_iter().flatten() {
                if !IDENTITY.contains(&field.as_str()) {
                    path.push(Part::Field(field.clone()));
                    walk(kind, value, &mut path, &mut all);
                    path.pop();
                }
            }
        } else {
            walk(kind, value, &mut path, &mut all);
        }
    }
    all
}

fn walk(kind: &Kind, value: &Value, path: &mut Path, all: &mut BTreeSet<Path>) {
    match value {
        Value::Object(fields) if !fields.is_empty() && !kind.is_atomic(&names(path)) => {
            for (name, value) in fields {
                path.push(Part::Field(name.clone()));
                walk(kind, value, path, all);
                path.pop();
            }
        }
        Value::Array(items) => match kind.list_type(&names(path)) {
            ListType::Atomic => drop(all.insert(path.clone())),
            list => {
                for item in items {
                    path.push(Part::Item(key(list, item)));
                    all.insert(path.clone());
                    if let ListType::Map(_) = list {
                        walk(kind, item, path, all);
                    }
                    path.pop();
                }
            }
        },
        _ => drop(all.insert(path.clone())),
    }
}

/// Field names of a path, under which list types are stored.
fn names(path: &[Part]) -> Vec<String> {
    let name = |part: &Part| match part {
        Part::Field(name) => Some(name.clone()),
        Part::Item(_) => None,
    };
    path.iter().filter_map(name).collect()
}

/// Key of an item in its list.
fn key(list: &ListType, item: &Value) -> String {
    match list {
        ListType::Map(keys) => {
            keys.iter().map(|k| (k.clone(), item[k.as_str()].clone())).collect::<Map<_, _>>().into_value()
        }
        ListType::Set | ListType::Atomic => item.clone(),
    }
    .to_string()
}

trait IntoValue {
    fn into_value(self) -> Value;
}

impl IntoValue for Map<String, Value> {
    fn into_value(self) -> Value {
        Value::Object(self)
    }
}

fn get<'a>(kind: &Kind, object: &'a Value, path: &[Part]) -> Option<&'a Value> {
    let mut value = object;
    for (depth, part) in path.iter().enumerate() {
        value = match part {
            Part::Field(name) => value.get(name)?,
            Part::Item(wanted) => {
                let list = kind.list_type(&names(&path[..depth]));
                value.as_array()?.iter().find(|item| key(list, item) == *wanted)?
            }
        };
    }
    // An item of a map is compared by its fields, which have paths of their own.
    match (path.last(), value) {
        (Some(Part::Item(_)), Value::Object(_)) => Some(&Value::Null),
        _ => Some(value),
    }
}

fn remove(kind: &Kind, object: &mut Value, path: &[Part]) {
    let Some((last, parents)) = path.split_last() else { return };
    let mut value = object;
    for (depth, part) in parents.iter().enumerate() {
        let next = match part {
            Part::Field(name) => value.get_mut(name),
            Part::Item(wanted) => {
                let list = kind.list_type(&names(&path[..depth])).clone();
                value
                    .as_array_mut()
                    .and_then(|items| items.iter_mut().find(|item| key(&list, item) == *wanted))
            }
        };
        let Some(next) = next else { return };
        value = next;
    }
    match last {
        Part::Field(name) => drop(value.as_object_mut().map(|fields| fields.remove(name))),
        Part::Item(wanted) => {
            let list = kind.list_type(&names(parents)).clone();
            if let Some(items) = value.as_array_mut() {
                items.retain(|item| key(&list, item) != *wanted);
            }
        }
    }
}

/// Merges `patch` into `into`: objects field by field, lists by their type.
fn merge(kind: &Kind, into: &mut Value, patch: &Value, path: &mut Vec<String>) {
    match (&mut *into, patch) {
        (Value::Object(into), Value::Object(fields)) if !kind.is_atomic(path) => {
            for (name, value) in fields {
                path.push(name.clone());
                merge(kind, into.entry(name.clone()).or_insert(Value::Null), value, path);
                path.pop();
            }
        }
        (Value::Array(into), Value::Array(items)) => match kind.list_type(path) {
            ListType::Atomic => into.clone_from(items),
            list => {
                for item in items {
                    match into.iter_mut().find(|i| key(list, i) == key(list, item)) {
                        Some(existing) => merge(kind, existing, item, path),
                        None => into.push(item.clone()),
                    }
                }
            }
        },
        _ => *into = patch.clone(),
    }
}

/// JSON merge patch (RFC 7386).
pub(super) fn merge_patch(into: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    let Some(into) = into.as_object_mut() else { return };
    for (name, value) in fields {
        if value.is_null() {
            into.remove(name);
        } else {
            merge_patch(into.entry(name.clone()).or_insert(Value::Null), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::api::kinds::built_in;

    fn pod() -> Kind {
        built_in().into_iter().find(|kind| kind.kind == "Pod").unwrap()
    }

    fn manager_named(name: &str) -> Manager {
        Manager { name: name.into(), applies: true, subresource: String::new() }
    }

    #[test]
    fn apply_removes_what_the_manager_no_longer_sets() {
        let (kind, mut owners) = (pod(), Owners::default());
        let mut apply = |live: &Value, patch: Value, who: &str| {
            owners.apply(&kind, live, &patch, &manager_named(who), false).unwrap()
        };
        let one = apply(
            &json!({}),
            json!({"metadata": {"labels": {"a": "1", "b": "1"}, "finalizers": ["x"]}}),
            "m",
        );
        let two = apply(&one, json!({"metadata": {"labels": {"b": "1"}, "finalizers": ["y"]}}), "n");
        assert_eq!(two["metadata"], json!({"labels": {"a": "1", "b": "1"}, "finalizers": ["x", "y"]}));
        let three = apply(&two, json!({"metadata": {"labels": {}}}), "m");
        assert_eq!(
            three["metadata"],
            json!({"labels": {"b": "1"}, "finalizers": ["y"]}),
            "n still owns b and y"
        );
    }

    #[test]
    fn apply_of_anothers_field_needs_force() {
        let (kind, mut owners) = (pod(), Owners::default());
        let patch = |ready: &str| json!({"status": {"conditions": [{"type": "Ready", "status": ready}]}});
        let live = owners.apply(&kind, &json!({}), &patch("True"), &manager_named("m"), false).unwrap();
        assert!(owners.apply(&kind, &live, &patch("False"), &manager_named("n"), false).is_err());
        let forced = owners.apply(&kind, &live, &patch("False"), &manager_named("n"), true).unwrap();
        assert_eq!(forced["status"]["conditions"], json!([{"type": "Ready", "status": "False"}]));
        assert!(
            owners.apply(&kind, &forced, &patch("True"), &manager_named("n"), false).is_ok(),
            "n owns it now"
        );
    }

    #[test]
    fn update_takes_ownership_of_changed_fields() {
        let (kind, mut owners) = (pod(), Owners::default());
        let one = json!({"metadata": {"labels": {"a": "1"}}});
        let live = owners.apply(&kind, &json!({}), &one, &manager_named("m"), false).unwrap();
        let two = json!({"metadata": {"labels": {"a": "2"}}});
        let user = Manager { applies: false, ..manager_named("user") };
        owners.record_update(&kind, &live, &two, &user);
        assert!(owners.apply(&kind, &two, &one, &manager_named("m"), false).is_err());
        let released = owners.apply(&kind, &two, &json!({}), &manager_named("m"), false).unwrap();
        assert_eq!(released, two, "the user's value stays");
    }

    #[test]
    fn merge_patch_follows_rfc_7386() {
        let mut value = json!({"a": {"b": 1, "c": 2}, "d": [1, 2]});
        merge_patch(&mut value, &json!({"a": {"b": null, "e": {"f": 1}}, "d": [3]}));
        assert_eq!(value, json!({"a": {"c": 2, "e": {"f": 1}}, "d": [3]}));
    }
}

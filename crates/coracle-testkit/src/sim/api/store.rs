//! Objects and their history. One lock protects both, so each request is atomic.

use std::collections::BTreeMap;

use jiff::Timestamp;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

use super::{
    failure::Failure,
    kinds::{Kind, built_in},
    ownership::{Manager, Owners, merge_patch},
};

/// Letters of the suffix that the API server appends to `generateName`.
const SUFFIX: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// Length of the suffix.
const SUFFIX_LENGTH: usize = 5;

/// Group, plural, namespace and name.
pub(super) type Key = (String, String, String, String);

#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) object: Value,
    owners: Owners,
}

/// Change of an object, as watches see it.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) revision: u64,
    pub(super) key: Key,
    /// Object before the change. `None` when the object was created.
    pub(super) before: Option<Value>,
    /// Object after the change. For a deletion, its last state.
    pub(super) object: Value,
    pub(super) deleted: bool,
}

/// Part of an object that an update writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Everything except the status, if the kind has the subresource.
    Main,
    /// Status only.
    Status,
}

/// Write request in one of three forms.
#[derive(Clone, Copy, Debug)]
pub(super) enum Write<'a> {
    /// PUT.
    Replace(&'a Value),
    /// JSON merge patch.
    Merge(&'a Value),
    /// Server-side apply.
    Apply { patch: &'a Value, force: bool },
}

#[derive(Debug)]
pub(super) struct Store {
    pub(super) kinds: Vec<Kind>,
    pub(super) objects: BTreeMap<Key, Stored>,
    pub(super) history: Vec<Change>,
    pub(super) revision: u64,
    /// Watches from older revisions have expired.
    pub(super) compacted: u64,
    random: StdRng,
}

impl Store {
    pub(super) fn new(seed: u64, now: Timestamp) -> Self {
        let mut store = Self {
            kinds: built_in(),
            objects: BTreeMap::new(),
            history: Vec::new(),
            revision: 1,
            compacted: 0,
            random: StdRng::seed_from_u64(seed),
        };
        let namespaces = store.kinds.iter().find(|kind| kind.kind == "Namespace").cloned();
        for name in ["default", "kube-system", "kube-public"] {
            let body = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            let by = Manager { name: "sim".into(), applies: false, subresource: String::new() };
            let made = namespaces.as_ref().map(|kind| store.create(kind, "", body, &by, now));
            debug_assert!(matches!(made, Some(Ok(_))), "a new store is empty");
        }
        store
    }

    pub(super) fn key(kind: &Kind, namespace: &str, name: &str) -> Key {
        (kind.group.clone(), kind.plural.clone(), namespace.to_owned(), name.to_owned())
    }

    pub(super) fn get(&self, kind: &Kind, namespace: &str, name: &str) -> Result<&Value, Failure> {
        let found = self.objects.get(&Self::key(kind, namespace, name));
        found.map(|stored| &stored.object).ok_or_else(|| Failure::not_found(kind, name))
    }

    pub(super) fn create(
        &mut self,
        kind: &Kind,
        namespace: &str,
        mut object: Value,
        by: &Manager,
        now: Timestamp,
    ) -> Result<Value, Failure> {
        self.check_namespace(kind, namespace)?;
        let name = self.new_name(kind, &object)?;
        let key = Self::key(kind, namespace, &name);
        if self.objects.contains_key(&key) {
            return Err(Failure::already_exists(kind, &name));
        }
        let uid = self.uid();
        let meta = metadata(&mut object);
        for field in [
            "resourceVersion",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "managedFields",
            "selfLink",
        ] {
            meta.remove(field);
        }
        meta.insert("name".into(), json!(name));
        if kind.namespaced {
            meta.insert("namespace".into(), json!(namespace));
        }
        meta.insert("uid".into(), json!(uid));
        meta.insert("creationTimestamp".into(), json!(seconds(now)));
        if kind.has_generation {
            meta.insert("generation".into(), json!(1));
        }
        if kind.has_status && kind.has_generation {
            object.as_object_mut().map(|fields| fields.remove("status"));
        }
        self.admit(kind, &mut object);
        let mut owners = Owners::default();
        owners.record_update(kind, &json!({}), &object, by);
        Ok(self.put(key, Stored { object, owners }, None))
    }

    /// Sets what controllers and strategies of the real API server set on a new object, as far as clients depend on it.
    fn admit(&mut self, kind: &Kind, object: &mut Value) {
        kind.apply_schema(object);
        match kind.kind.as_str() {
            "CustomResourceDefinition" => {
                self.kinds.retain(|k| Some(k.plural.as_str()) != object["spec"]["names"]["plural"].as_str());
                self.kinds.extend(Kind::of_definition(object));
                object["status"] = json!({
                    "acceptedNames": object["spec"]["names"],
                    "storedVersions": [],
                    "conditions": [
                        {"type": "NamesAccepted", "status": "True", "reason": "NoConflicts", "message": ""},
                        {"type": "Established", "status": "True", "reason": "InitialNamesAccepted", "message": ""},
                    ],
                });
            }
            "Namespace" => object["status"] = json!({"phase": "Active"}),
            "Pod" => object["status"] = json!({"phase": "Pending"}),
            _ => {}
        }
    }

    fn check_namespace(&self, kind: &Kind, namespace: &str) -> Result<(), Failure> {
        let namespaces = self.kinds.iter().find(|k| k.kind == "Namespace");
        match (kind.namespaced, namespaces) {
            (true, Some(namespaces)) => self.get(namespaces, "", namespace).map(drop),
            _ => Ok(()),
        }
    }

    fn new_name(&mut self, kind: &Kind, object: &Value) -> Result<String, Failure> {
        let text = |field: &str| object["metadata"][field].as_str().filter(|text| !text.is_empty());
        if let Some(name) = text("name") {
            return Ok(name.to_owned());
        }
        let Some(prefix) = text("generateName") else {
            return Err(Failure::invalid(
                kind,
                "",
                "metadata.name: Required value: name or generateName is required",
            ));
        };
        let letter = |random: &mut StdRng| char::from(SUFFIX[random.random_range(0..SUFFIX.len())]);
        Ok(prefix.chars().chain((0..SUFFIX_LENGTH).map(|_| letter(&mut self.random))).collect())
    }

    fn uid(&mut self) -> String {
        let bytes: [u8; 16] = self.random.random();
        let hex = hex::encode(bytes);
        format!("{}-{}-4{}-a{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
    }

    /// Replaces, patches or applies an object. Returns `true` when the object was created.
    pub(super) fn write(
        &mut self,
        kind: &Kind,
        at: (&str, &str),
        write: Write<'_>,
        part: Part,
        by: &Manager,
        now: Timestamp,
    ) -> Result<(Value, bool), Failure> {
        let (namespace, name) = at;
        let key = Self::key(kind, namespace, name);
        let Some(stored) = self.objects.get(&key).cloned() else {
            return self.write_absent(kind, at, write, part, by, now).map(|made| (made, true));
        };
        let body = match write {
            Write::Replace(body) | Write::Merge(body) | Write::Apply { patch: body, .. } => body,
        };
        check_preconditions(kind, name, &stored.object, body, write)?;
        let Stored { object: old, mut owners } = stored;
        let mut new = match write {
            Write::Replace(body) => body.clone(),
            Write::Merge(patch) => {
                let mut new = old.clone();
                merge_patch(&mut new, patch);
                new
            }
            Write::Apply { patch, force } => {
                let patch = writable_fields(kind, patch, part);
                let merged = owners.apply(kind, &old, &patch, by, force);
                merged.map_err(|conflicts| Failure::apply_conflict(&conflicts))?
            }
        };
        restrict(kind, &old, &mut new, part);
        kind.apply_schema(&mut new);
        check_finalizers(kind, name, &old, &new)?;
        if !by.applies {
            owners.record_update(kind, &old, &new, by);
        }
        if new == old {
            self.objects.insert(key, Stored { object: old.clone(), owners });
            return Ok((old, false));
        }
        if kind.has_generation && is_other_spec(&old, &new) {
            let generation = old["metadata"]["generation"].as_i64().unwrap_or(0);
            new["metadata"]["generation"] = json!(generation.saturating_add(1));
        }
        if is_finished(&new) {
            return Ok((self.remove(key, new), false));
        }
        Ok((self.put(key, Stored { object: new, owners }, Some(old)), false))
    }

    fn write_absent(
        &mut self,
        kind: &Kind,
        (namespace, name): (&str, &str),
        write: Write<'_>,
        part: Part,
        by: &Manager,
        now: Timestamp,
    ) -> Result<Value, Failure> {
        let (Write::Apply { patch, .. }, Part::Main) = (write, part) else {
            return Err(Failure::not_found(kind, name));
        };
        if let Some(uid) = patch["metadata"]["uid"].as_str() {
            let why = format!(
                "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
            );
            return Err(Failure::conflict(kind, name, &why));
        }
        let object = writable_fields(kind, patch, part);
        if object["metadata"]["name"].as_str() != Some(name) {
            let why = format!(
                "the name of the object ({name} based on URL) was undeterminable: name must be provided"
            );
            return Err(Failure::bad_request(why));
        }
        let made = self.create(kind, namespace, object.clone(), by, now)?;
        if let Some(stored) = self.objects.get_mut(&Self::key(kind, namespace, name)) {
            stored.owners = Owners::default();
            // A new object has no other owners.
            let _ = stored.owners.apply(kind, &json!({}), &object, by, true);
        }
        Ok(made)
    }

    /// Deletes an object, or marks it for deletion while finalizers or a grace period hold it. Returns `true` when the object
    /// is gone.
    pub(super) fn delete(
        &mut self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        options: &Value,
        now: Timestamp,
    ) -> Result<(Value, bool), Failure> {
        let object = self.get(kind, namespace, name)?.clone();
        let wanted = &options["preconditions"];
        for field in ["uid", "resourceVersion"] {
            if wanted[field].is_string() && wanted[field] != object["metadata"][field] {
                let why = format!("the {field} in the precondition ({}) does not match", wanted[field]);
                return Err(Failure::conflict(kind, name, &why));
            }
        }
        let key = Self::key(kind, namespace, name);
        let grace = grace(kind, &object, options);
        let held = object["metadata"]["finalizers"].as_array().is_some_and(|f| !f.is_empty());
        if !held && grace == 0 {
            return Ok((self.remove(key, object), true));
        }
        let mut marked = object.clone();
        let meta = metadata(&mut marked);
        if !meta.contains_key("deletionTimestamp") {
            let end = now.saturating_add(jiff::SignedDuration::from_secs(grace)).unwrap_or(now);
            meta.insert("deletionTimestamp".into(), json!(seconds(end)));
            meta.insert("deletionGracePeriodSeconds".into(), json!(grace));
            if let Some(generation) = meta.get("generation").and_then(Value::as_i64) {
                meta.insert("generation".into(), json!(generation.saturating_add(1)));
            }
        }
        if marked == object {
            return Ok((object, false));
        }
        let owners = self.objects.get(&key).map(|s| s.owners.clone()).unwrap_or_default();
        Ok((self.put(key, Stored { object: marked, owners }, Some(object)), false))
    }

    fn put(&mut self, key: Key, mut stored: Stored, before: Option<Value>) -> Value {
        let object = self.next_revision(&mut stored.object);
        let change = Change {
            revision: self.revision,
            key: key.clone(),
            before,
            object: object.clone(),
            deleted: false,
        };
        self.history.push(change);
        self.objects.insert(key, stored);
        object
    }

    fn remove(&mut self, key: Key, mut object: Value) -> Value {
        let before = self.objects.remove(&key).map(|stored| stored.object);
        let object = self.next_revision(&mut object);
        self.history.push(Change {
            revision: self.revision,
            key,
            before,
            object: object.clone(),
            deleted: true,
        });
        object
    }

    fn next_revision(&mut self, object: &mut Value) -> Value {
        self.revision += 1;
        metadata(object).insert("resourceVersion".into(), json!(self.revision.to_string()));
        object.clone()
    }
}

fn metadata(object: &mut Value) -> &mut serde_json::Map<String, Value> {
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    object["metadata"].as_object_mut().expect("it was made an object above")
}

fn seconds(at: Timestamp) -> String {
    Timestamp::from_second(at.as_second()).unwrap_or(at).to_string()
}

/// Fields of an applied configuration that this endpoint writes.
fn writable_fields(kind: &Kind, patch: &Value, part: Part) -> Value {
    let mut patch = patch.clone();
    if let (true, Some(fields)) = (kind.has_status, patch.as_object_mut()) {
        match part {
            Part::Main => drop(fields.remove("status")),
            Part::Status => {
                fields.retain(|name, _| matches!(name.as_str(), "apiVersion" | "kind" | "status"));
            }
        }
    }
    patch
}

/// Restores the fields that this endpoint may not change.
fn restrict(kind: &Kind, old: &Value, new: &mut Value, part: Part) {
    let keep = |new: &mut Value, field: &str| match old.get(field) {
        Some(value) => new[field] = value.clone(),
        None => drop(new.as_object_mut().map(|fields| fields.remove(field))),
    };
    keep(new, "apiVersion");
    keep(new, "kind");
    match part {
        Part::Main if kind.has_status => keep(new, "status"),
        Part::Main => {}
        Part::Status => {
            let status = new.get("status").cloned();
            *new = old.clone();
            match status {
                Some(status) => new["status"] = status,
                None => drop(new.as_object_mut().map(|fields| fields.remove("status"))),
            }
        }
    }
    let meta = metadata(new);
    let identity =
        ["uid", "name", "namespace", "generateName", "creationTimestamp", "generation", "resourceVersion"];
    for field in identity.into_iter().chain(["deletionTimestamp", "deletionGracePeriodSeconds"]) {
        match old["metadata"].get(field) {
            Some(value) => drop(meta.insert(field.into(), value.clone())),
            None => drop(meta.remove(field)),
        }
    }
    meta.remove("managedFields");
    // The API server does not store empty lists and maps here.
    for field in ["finalizers", "ownerReferences", "labels", "annotations"] {
        let is_empty = |v: &Value| {
            v.is_null()
                || v.as_array().is_some_and(Vec::is_empty)
                || v.as_object().is_some_and(serde_json::Map::is_empty)
        };
        if meta.get(field).is_some_and(is_empty) {
            meta.remove(field);
        }
    }
}

fn check_preconditions(
    kind: &Kind,
    name: &str,
    old: &Value,
    body: &Value,
    write: Write<'_>,
) -> Result<(), Failure> {
    let (wanted, found) = (&body["metadata"], &old["metadata"]);
    if wanted["uid"].is_string() && wanted["uid"] != found["uid"] {
        let (wanted, found) =
            (wanted["uid"].as_str().unwrap_or_default(), found["uid"].as_str().unwrap_or_default());
        if !matches!(write, Write::Replace(_)) {
            let why = format!("metadata.uid: Invalid value: {wanted:?}: field is immutable");
            return Err(Failure::invalid(kind, name, &why));
        }
        let why = format!("Precondition failed: UID in precondition: {wanted}, UID in object meta: {found}");
        return Err(Failure::conflict(kind, name, &why));
    }
    let is_put = matches!(write, Write::Replace(_));
    match wanted["resourceVersion"].as_str().filter(|version| !version.is_empty()) {
        Some(version) if Some(version) != found["resourceVersion"].as_str() => {
            Err(Failure::stale(kind, name))
        }
        None if is_put && kind.needs_version => {
            let why = "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update";
            Err(Failure::invalid(kind, name, why))
        }
        _ => Ok(()),
    }
}

fn check_finalizers(kind: &Kind, name: &str, old: &Value, new: &Value) -> Result<(), Failure> {
    let of = |object: &Value| object["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
    let added = of(new).into_iter().any(|finalizer| !of(old).contains(&finalizer));
    if added && old["metadata"]["deletionTimestamp"].is_string() {
        let why =
            "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted";
        return Err(Failure::invalid(kind, name, why));
    }
    Ok(())
}

/// True when anything except metadata and status differs.
fn is_other_spec(old: &Value, new: &Value) -> bool {
    let rest = |object: &Value| {
        let mut rest = object.as_object().cloned().unwrap_or_default();
        rest.retain(|name, _| name != "metadata" && name != "status");
        rest
    };
    rest(old) != rest(new)
}

/// True when the object is marked for deletion, and nothing holds it any more.
fn is_finished(object: &Value) -> bool {
    let meta = &object["metadata"];
    let free = meta["finalizers"].as_array().is_none_or(Vec::is_empty);
    meta["deletionTimestamp"].is_string()
        && free
        && meta["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) == 0
}

/// Grace period of a Pod on a node, seconds. The kubelet then deletes the Pod with zero.
fn grace(kind: &Kind, object: &Value, options: &Value) -> i64 {
    let scheduled = object["spec"]["nodeName"].as_str().is_some_and(|node| !node.is_empty());
    if kind.kind != "Pod" || !scheduled {
        return 0;
    }
    let default = object["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(30);
    options["gracePeriodSeconds"].as_i64().unwrap_or(default)
}

//! Writes of a controller that its cache does not contain yet.

use std::{
    cmp::Ordering,
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, runtime::reflector::ObjectRef};

use crate::watch::strip;

/// Objects as this controller wrote them, until its cache has them. A reconcile that begins with an older object would read it
/// again, or plan steps that are already done.
#[derive(Debug)]
pub struct OwnWrites<K: Resource<DynamicType = ()>>(Mutex<HashMap<ObjectRef<K>, Arc<K>>>);

impl<K: Resource<DynamicType = ()>> Default for OwnWrites<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Resource<DynamicType = ()>> OwnWrites<K> {
    /// Stores `object` as the API server returned it.
    pub fn remember(&self, mut object: K) {
        strip(&mut object);
        self.entries().insert(ObjectRef::from_obj(&object), Arc::new(object));
    }

    /// Returns the newer of `cached` and the stored write of the same object.
    #[must_use]
    pub fn latest(&self, cached: Arc<K>) -> Arc<K> {
        let object = ObjectRef::from_obj(cached.as_ref());
        let mut entries = self.entries();
        match entries.get(&object) {
            Some(written) if is_older(cached.as_ref(), written) => written.clone(),
            Some(_) => {
                entries.remove(&object);
                cached
            }
            None => cached,
        }
    }

    /// Removes an object that was deleted.
    pub fn forget(&self, object: &ObjectRef<K>) {
        self.entries().remove(object);
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<ObjectRef<K>, Arc<K>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// True when `cached` is older. Resource versions of one object are comparable when they are decimal numbers (KEP-5504); other
/// versions are not compared.
fn is_older<K: Resource>(cached: &K, written: &K) -> bool {
    let (cached, written) = (cached.meta(), written.meta());
    let version = |meta: &ObjectMeta| meta.resource_version.clone().unwrap_or_default();
    cached.uid == written.uid && compare(&version(cached), &version(written)) == Some(Ordering::Less)
}

fn compare(a: &str, b: &str) -> Option<Ordering> {
    let is_number = |text: &str| {
        !text.is_empty() && !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit())
    };
    (is_number(a) && is_number(b)).then(|| a.len().cmp(&b.len()).then_with(|| a.cmp(b)))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::json;

    use super::*;

    fn object(version: &str) -> ConfigMap {
        let metadata = json!({"name": "a", "uid": "u", "resourceVersion": version});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    #[test]
    fn newer_of_own_write_and_cache_is_used() {
        for (why, written, cached, want) in [
            ("the cache is behind", "100", "99", "100"),
            ("it caught up", "100", "100", "100"),
            ("another wrote since", "100", "101", "101"),
            ("versions are not numbers", "b", "a", "a"),
            ("one is not a number", "100", "99x", "99x"),
        ] {
            let writes = OwnWrites::default();
            writes.remember(object(written));
            let latest = writes.latest(Arc::new(object(cached)));
            assert_eq!(latest.metadata.resource_version.as_deref(), Some(want), "{why}");
        }
    }

    #[test]
    fn own_write_is_dropped_if_the_uid_differs() {
        let writes = OwnWrites::default();
        writes.remember(object("100"));
        let mut new = object("99");
        new.metadata.uid = Some("v".into());
        assert_eq!(writes.latest(Arc::new(new.clone())).as_ref(), &new);
        assert!(writes.entries().is_empty());
    }

    #[test]
    fn own_write_is_forgotten_once_cached() {
        let writes = OwnWrites::default();
        writes.remember(object("100"));
        let _caught_up = writes.latest(Arc::new(object("100")));
        assert!(writes.entries().is_empty());
        writes.remember(object("102"));
        writes.forget(&ObjectRef::from_obj(&object("102")));
        assert!(writes.entries().is_empty());
    }
}

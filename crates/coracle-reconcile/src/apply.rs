//! Writes to objects: server-side apply under the controller's own name, and only when something differs.

use std::fmt::Debug;

use k8s_openapi::NamespaceResourceScope;
use kube::{
    Api, Resource, ResourceExt as _,
    api::{Patch, PatchParams},
    core::Status,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;

/// A write that did not happen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The API server refused or could not be reached.
    #[error("{operation} of {kind} {namespace}/{name}")]
    Api {
        /// What was tried.
        operation: &'static str,
        /// Kind of the object.
        kind: String,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Why.
        source: Box<kube::Error>,
    },
}

impl ApplyError {
    /// True when another writer was faster: read again and decide anew.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        let Self::Api { source, .. } = self;
        matches!(source.as_ref(), kube::Error::Api(status) if status.code == 409)
    }
}

/// Writes `status` unless it equals the `stored` one. An object that is gone meanwhile is `Ok(None)`.
///
/// # Errors
/// [`ApplyError`]. Cancel-safe: the write happened or it did not.
pub async fn apply_status<K, S>(
    api: &Api<K>,
    object: &K,
    stored: Option<&S>,
    status: &S,
    manager: &str,
) -> Result<Option<K>, ApplyError>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Debug,
    S: Serialize + PartialEq,
{
    if stored == Some(status) {
        return Ok(Some(object.clone()));
    }
    // The UID keeps a write meant for a deleted object off a new one with its name.
    let patch = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()),
        "metadata": {"name": object.name_any(), "uid": object.uid()},
        "status": status,
    });
    let params = PatchParams::apply(manager).force();
    gone_is_none(
        api.patch_status(&object.name_any(), &params, &Patch::Apply(&patch)).await,
        "apply status",
        object,
    )
}

/// Adds `finalizer`. Idempotent. An object that is gone meanwhile is `Ok(None)`, and is not made anew.
///
/// # Errors
/// [`ApplyError`].
pub async fn add_finalizer<K>(
    api: &Api<K>,
    object: &K,
    finalizer: &str,
    manager: &str,
) -> Result<Option<K>, ApplyError>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    // An apply without the UID would create the object when it is gone; with it the API server answers Conflict.
    let patch = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()),
        "metadata": {"name": object.name_any(), "uid": object.uid(), "finalizers": [finalizer]},
    });
    let params = PatchParams::apply(manager).force();
    gone_is_none(api.patch(&object.name_any(), &params, &Patch::Apply(&patch)).await, "add finalizer", object)
}

/// Removes `finalizer`, whoever added it, and nothing else. An object that is gone already is `Ok(())`.
///
/// # Errors
/// [`ApplyError`]; a conflict when the object changed since `object` was read.
pub async fn remove_finalizer<K>(
    api: &Api<K>,
    object: &K,
    finalizer: &str,
    manager: &str,
) -> Result<(), ApplyError>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    if !object.finalizers().iter().any(|f| f == finalizer) {
        return Ok(());
    }
    // Server-side apply cannot take away an entry that another manager owns too, so this is a merge patch; the resource
    // version makes it fail rather than undo someone's change of the list.
    let rest: Vec<_> = object.finalizers().iter().filter(|f| *f != finalizer).collect();
    let patch = json!({"metadata": {
        "uid": object.uid(), "resourceVersion": object.resource_version(), "finalizers": rest,
    }});
    let params = PatchParams { field_manager: Some(manager.to_owned()), ..PatchParams::default() };
    let done: Result<K, _> = api.patch(&object.name_any(), &params, &Patch::Merge(&patch)).await;
    gone_is_none(done, "remove finalizer", object).map(drop)
}

fn gone_is_none<K>(
    result: kube::Result<K>,
    operation: &'static str,
    object: &K,
) -> Result<Option<K>, ApplyError>
where
    K: Resource<DynamicType = ()>,
{
    match result {
        Ok(object) => Ok(Some(object)),
        Err(kube::Error::Api(status)) if is_gone(&status) => Ok(None),
        Err(source) => Err(ApplyError::Api {
            operation,
            kind: K::kind(&()).into_owned(),
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
            source: Box::new(source),
        }),
    }
}

/// Not found, or found under the name with another UID.
fn is_gone(status: &Status) -> bool {
    status.code == 404 || (status.code == 409 && status.message.contains("uid mismatch"))
}

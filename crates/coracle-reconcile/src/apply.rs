//! Writes to objects with the controller's field manager, only when a field differs: server-side apply, merge patches of the
//! list of finalizers, and replacement of the status.

use std::fmt::Debug;

use k8s_openapi::NamespaceResourceScope;
use kube::{
    Api, Resource, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
    core::{Status, object::HasStatus},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;

use crate::watch::strip;

/// A failed write.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The API server refused the write or could not be reached.
    #[error("{operation} of {kind} {namespace}/{name}")]
    Api {
        /// Operation that failed.
        operation: &'static str,
        /// Kind of the object.
        kind: String,
        /// Namespace of the object.
        namespace: String,
        /// Name of the object.
        name: String,
        /// Error of the API server.
        source: Box<kube::Error>,
    },
}

impl ApplyError {
    /// True when the object has changed since it was read: observe and plan again.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        let Self::Api { source, .. } = self;
        matches!(source.as_ref(), kube::Error::Api(status) if status.code == 409)
    }
}

/// Writes `status` unless it equals the `stored` status. Returns `Ok(None)` when the object is gone.
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
    // The UID prevents that a write for a deleted object affects a new object with its name.
    let patch = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()),
        "metadata": {"name": object.name_any(), "uid": object.uid()},
        "status": status,
    });
    let params = PatchParams::apply(manager).force();
    none_if_not_found(
        api.patch_status(&object.name_any(), &params, &Patch::Apply(&patch)).await,
        "apply status",
        object,
    )
}

/// Like [`apply_status`], for a status that is valid only for the version that was read. This costs the API server less. The
/// caller owns the whole status: do not mix this with [`apply_status`] for one kind, which would leave fields behind.
///
/// # Errors
/// The errors of [`apply_status`]; a conflict when the object has changed since.
pub async fn replace_status<K>(
    api: &Api<K>,
    object: &K,
    status: &K::Status,
    manager: &str,
) -> Result<Option<K>, ApplyError>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + HasStatus,
    K: Clone + Serialize + DeserializeOwned + Debug,
    K::Status: Clone + PartialEq,
{
    let mut wanted = object.clone();
    if wanted.status_mut().replace(status.clone()).as_ref() == Some(status) {
        return Ok(Some(wanted));
    }
    strip(&mut wanted); // the API server keeps its own metadata in a write of the status
    let params = PostParams { field_manager: Some(manager.to_owned()), ..PostParams::default() };
    none_if_not_found(
        api.replace_status(&object.name_any(), &params, &wanted).await,
        "replace status",
        object,
    )
}

/// Adds `finalizer`. Idempotent. Returns `Ok(None)` when the object is gone; the object is not created.
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
    // An apply without the UID would create an object that is gone; with the UID the API server answers Conflict.
    let patch = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()),
        "metadata": {"name": object.name_any(), "uid": object.uid(), "finalizers": [finalizer]},
    });
    let params = PatchParams::apply(manager).force();
    none_if_not_found(
        api.patch(&object.name_any(), &params, &Patch::Apply(&patch)).await,
        "add finalizer",
        object,
    )
}

/// Like [`add_finalizer`], but fails when the object has changed since it was read. This costs the API server less.
///
/// # Errors
/// The errors of [`add_finalizer`]; a conflict when the object has changed since.
pub async fn add_finalizer_if_unchanged<K>(
    api: &Api<K>,
    object: &K,
    finalizer: &str,
    manager: &str,
) -> Result<Option<K>, ApplyError>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    if object.finalizers().iter().any(|f| f == finalizer) {
        return Ok(Some(object.clone()));
    }
    let all = object.finalizers().iter().map(String::as_str).chain([finalizer]).collect();
    write_finalizers(api, object, all, manager, "add finalizer").await
}

/// Removes `finalizer`, regardless of the manager that added it. Returns `Ok(())` when the object is gone.
///
/// # Errors
/// [`ApplyError`]; a conflict when the object has changed since `object` was read.
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
    // Server-side apply cannot remove an entry that another manager owns, too.
    let rest = object.finalizers().iter().filter(|f| *f != finalizer).map(String::as_str).collect();
    write_finalizers(api, object, rest, manager, "remove finalizer").await.map(drop)
}

/// Replaces the list by a merge patch. With the resource version the patch fails instead of reverting another writer's change.
async fn write_finalizers<K>(
    api: &Api<K>,
    object: &K,
    finalizers: Vec<&str>,
    manager: &str,
    operation: &'static str,
) -> Result<Option<K>, ApplyError>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let patch = json!({"metadata": {
        "uid": object.uid(), "resourceVersion": object.resource_version(), "finalizers": finalizers,
    }});
    let params = PatchParams { field_manager: Some(manager.to_owned()), ..PatchParams::default() };
    none_if_not_found(api.patch(&object.name_any(), &params, &Patch::Merge(&patch)).await, operation, object)
}

fn none_if_not_found<K>(
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

/// True when the object was not found, or another object has its name. kube-apiserver answers a patch with the UID of a deleted
/// object with 409 when the name is free, and with 422 when the name is taken; it answers a replacement with 409 when the name
/// is taken.
fn is_gone(status: &Status) -> bool {
    match status.code {
        404 => true,
        409 => ["uid mismatch", "UID in precondition"].iter().any(|text| status.message.contains(text)),
        422 => status.message.contains("metadata.uid"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deleted_objects_are_recognised_by_the_answers_to_patches() {
        for (why, code, message, want) in [
            ("the name is free", 404, "widgets \"a\" not found", true),
            (
                "the name is free, applied with a UID",
                409,
                "uid mismatch: the provided object specified uid 1",
                true,
            ),
            (
                "another object has the name",
                422,
                "Widget \"a\" is invalid: metadata.uid: Invalid value: \"1\": field is immutable",
                true,
            ),
            (
                "another object has the name, replaced",
                409,
                "StorageError: invalid object, AdditionalErrorMsg: Precondition failed: UID in precondition: 1, UID in object meta: 2",
                true,
            ),
            ("a lost race", 409, "the object has been modified", false),
            ("an invalid status", 422, "Widget \"a\" is invalid: status.phase: Unsupported value", false),
        ] {
            let status = Status { code, message: message.to_owned(), ..Status::default() };
            assert_eq!(is_gone(&status), want, "{why}");
        }
    }
}

//! Calls to the API server about one object, with errors that name the object.

use std::fmt::Debug;

use k8s_openapi::NamespaceResourceScope;
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};
use serde::{Serialize, de::DeserializeOwned};

/// A failed call to the API server about an object.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {object}")]
pub struct ApiError {
    /// Verb of the operation.
    pub operation: &'static str,
    /// Kind and `namespace/name`.
    pub object: String,
    /// Answer of the API server, or the reason why there is none.
    pub source: Box<kube::Error>,
}

impl ApiError {
    /// Converts an error of `operation` on an object of kind `K`: `call.await.map_err(ApiError::of::<K>("read", ns, name))`.
    pub fn of<K: Resource<DynamicType = ()>>(
        operation: &'static str,
        namespace: &str,
        name: &str,
    ) -> impl FnOnce(kube::Error) -> Self + use<K> {
        Self::on(operation, format!("{} {namespace}/{name}", K::kind(&())))
    }

    /// Converts an error of `operation` on the object that `object` names.
    pub fn on(operation: &'static str, object: String) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self { operation, object, source: Box::new(source) }
    }

    /// Returns the HTTP code of the API server's answer; `None` without an answer.
    #[must_use]
    pub fn code(&self) -> Option<u16> {
        match &*self.source {
            kube::Error::Api(status) => Some(status.code),
            _ => None,
        }
    }

    /// True when another writer changed or created the object concurrently: observe and plan again.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }
}

/// True for an answer of the API server with one of these HTTP codes.
fn has_code(error: &kube::Error, codes: &[u16]) -> bool {
    matches!(error, kube::Error::Api(status) if codes.contains(&status.code))
}

/// Returns the API of one namespace, or of all.
#[must_use]
pub fn scoped<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Reads the present object; `None` when it does not exist.
///
/// # Errors
/// [`ApiError`]. Cancel-safe.
pub async fn read<K>(client: &Client, namespace: &str, name: &str) -> Result<Option<K>, ApiError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
{
    let api = scoped::<K>(client, Some(namespace));
    api.get_opt(name).await.map_err(ApiError::of::<K>("read", namespace, name))
}

/// Creates the object in its namespace.
///
/// # Errors
/// [`ApiError`], a conflict when the name is taken. Cancel-safe: the object was created or it was not.
pub async fn create<K>(client: &Client, object: &K, manager: &str) -> Result<(), ApiError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned,
{
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let params = PostParams { field_manager: Some(manager.to_owned()), ..PostParams::default() };
    let created = scoped::<K>(client, Some(&namespace)).create(&params, object).await;
    created.map(drop).map_err(ApiError::of::<K>("create", &namespace, &name))
}

/// Applies the object by server-side apply, with force over fields of other managers. With the UID that was read, an object
/// that is gone is not created again. Idempotent.
///
/// # Errors
/// [`ApiError`], a conflict when another object has the name. Cancel-safe.
pub async fn apply<K>(client: &Client, object: &K, manager: &str) -> Result<(), ApiError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned,
{
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let params = PatchParams::apply(manager).force();
    let applied = scoped::<K>(client, Some(&namespace)).patch(&name, &params, &Patch::Apply(object)).await;
    applied.map(drop).map_err(ApiError::of::<K>("apply", &namespace, &name))
}

/// Deletes the object with this UID, in the background. Idempotent: returns `Ok` when the object is gone or another object has
/// its name.
///
/// # Errors
/// [`ApiError`]. Cancel-safe.
pub async fn delete<K>(client: &Client, namespace: &str, name: &str, uid: &str) -> Result<(), ApiError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
{
    let only = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
    let params = DeleteParams { preconditions: Some(only), ..DeleteParams::background() };
    match scoped::<K>(client, Some(namespace)).delete(name, &params).await {
        Err(error) if has_code(&error, &[404, 409]) => Ok(()),
        deleted => deleted.map(drop).map_err(ApiError::of::<K>("delete", namespace, name)),
    }
}

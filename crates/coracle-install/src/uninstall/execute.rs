//! Removes one object.

use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;

use super::UninstallError;
use super::observe::api_error;
use super::plan::Target;

fn api(client: &Client, target: &Target) -> Api<DynamicObject> {
    match &target.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &target.resource),
        None => Api::all_with(client.clone(), &target.resource),
    }
}

fn ignore_not_found<T>(result: Result<T, kube::Error>, operation: &str) -> Result<(), UninstallError> {
    match result {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(api_error(operation)(error)),
    }
}

/// Deletes the object. Idempotent.
pub(super) async fn delete(client: &Client, target: &Target) -> Result<(), UninstallError> {
    let deleted = api(client, target).delete(&target.name, &DeleteParams::background()).await;
    ignore_not_found(deleted, &format!("delete {target}"))
}

/// Removes the finalizers of the object. Idempotent.
pub(super) async fn abandon(client: &Client, target: &Target) -> Result<(), UninstallError> {
    let none = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    let patched = api(client, target).patch(&target.name, &PatchParams::default(), &none).await;
    ignore_not_found(patched, &format!("remove the finalizers of {target}"))
}

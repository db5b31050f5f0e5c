//! Helpers that the API tests of all controllers share, on clusters and in simulations.

use std::fmt::Debug;

use k8s_openapi::{
    api::events::v1::Event, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
    runtime::{conditions::is_crd_established, wait::await_condition},
};
use serde::de::DeserializeOwned;
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{LIMIT, eventually};

/// Applies custom resource definitions and waits until they are served. Idempotent.
///
/// # Errors
/// When the API server refuses one, or does not establish it within [`LIMIT`].
pub async fn install(client: &Client, crds: &[CustomResourceDefinition]) -> anyhow::Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for crd in crds {
        let name = crd.name_any();
        api.patch(&name, &PatchParams::apply("test").force(), &Patch::Apply(crd)).await?;
        timeout(LIMIT, await_condition(api.clone(), &name, is_crd_established())).await??;
    }
    Ok(())
}

/// Waits until `test` holds for the object, which may be absent.
///
/// # Errors
/// When `test` does not hold within [`LIMIT`]. The message contains the current object.
pub async fn until<K>(
    api: &Api<K>,
    name: &str,
    what: &str,
    test: impl Fn(Option<&K>) -> bool,
) -> anyhow::Result<Option<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let condition = |object: Option<&K>| test(object);
    match timeout(LIMIT, await_condition(api.clone(), name, condition)).await {
        Ok(found) => Ok(found?),
        Err(_) => anyhow::bail!("{name} is not {what}: {:#?}", api.get_opt(name).await?),
    }
}

/// Waits for an Event with the given reason about the object `name`, and returns its note.
///
/// # Errors
/// When there is no such Event within [`LIMIT`].
pub async fn until_event(
    client: &Client,
    namespace: &str,
    name: &str,
    reason: &str,
) -> anyhow::Result<String> {
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    let fits = |event: &Event| {
        event.reason.as_deref() == Some(reason)
            && event.regarding.as_ref().and_then(|object| object.name.as_deref()) == Some(name)
    };
    let found = eventually(&format!("Event {reason} about {name}"), async || {
        api.list(&ListParams::default()).await.ok()?.into_iter().find(fits)
    })
    .await?;
    Ok(found.note.unwrap_or_default())
}

/// Running controller, killed on drop.
#[derive(Debug)]
pub struct Process<E> {
    stop: CancellationToken,
    task: JoinSet<Result<(), E>>,
}

impl<E: Send + Sync + std::error::Error + 'static> Process<E> {
    /// Starts `run`, which ends when its token is cancelled.
    pub fn start<F>(run: impl FnOnce(CancellationToken) -> F) -> Self
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
    {
        let stop = CancellationToken::new();
        let mut task = JoinSet::new();
        task.spawn(run(stop.clone()));
        Self { stop, task }
    }

    /// Asks the controller to stop, and waits for it.
    ///
    /// # Errors
    /// The error of the controller, or that it does not stop within [`LIMIT`].
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        let ended = timeout(LIMIT, self.task.join_next()).await?;
        ended.transpose()?.transpose()?;
        Ok(())
    }

    /// Kills the controller, and waits until its tasks have ended.
    pub async fn kill(mut self) {
        self.task.shutdown().await;
    }
}

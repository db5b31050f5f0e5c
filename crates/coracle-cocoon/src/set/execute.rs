//! Carries out the steps of a plan. Every step may be repeated; a step on an object that is gone succeeds.

use coracle_api::CocoonSet;
use coracle_api::cocoon::keys;
use coracle_reconcile::{add_finalizer, remove_finalizer};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};
use serde_json::{Value, json};
use tracing::info;

use super::step::{PodId, Step};
use crate::context::{Context, owner_of};
use crate::error::{Error, api};

/// Field manager of the controller for sets and pods.
pub(crate) const MANAGER: &str = "coracle-cocoonset";

/// Carries out one step. Returns the present set, or `None` when it was deleted.
pub(crate) async fn execute(cx: &Context, set: CocoonSet, step: &Step) -> Result<Option<CocoonSet>, Error> {
    let (namespace, name) = (set.namespace().unwrap_or_default(), set.name_any());
    info!(ns = namespace, name, step = step.verb(), "CocoonSet step");
    let sets: Api<CocoonSet> = cx.api(&namespace);
    let pods: Api<Pod> = cx.api(&namespace);
    let metrics = &cx.config.cocoon_metrics;
    match step {
        Step::AddFinalizer => return Ok(add_finalizer(&sets, &set, keys::SET_FINALIZER, MANAGER).await?),
        Step::RemoveFinalizer => {
            remove_finalizer(&sets, &set, keys::SET_FINALIZER, MANAGER).await?;
            return Ok(None);
        }
        Step::RecordVms(names) => {
            return annotate_set(&sets, &set, keys::DELETE_VM_NAMES, Some(&names.join(","))).await;
        }
        Step::Annotate(key, value) => {
            if *key == keys::REBUILD_HISTORY && value.is_some() {
                metrics.count_rebuild(namespace, name);
            }
            return annotate_set(&sets, &set, key, value.as_deref()).await;
        }
        Step::CreatePod(pod) => {
            create(&pods, &set, pod).await?;
            if pod.annotations().contains_key(keys::RESTORE_FROM_HIBERNATE) {
                metrics.count_released_wake(set.annotations().contains_key(keys::HIBERNATED_ON_NODE));
            }
        }
        Step::DeletePod(pod) => delete(&pods, pod).await?,
        Step::Hibernate(pod) => {
            // The generation that requests the state is stored, too: the node copies it when the state is reached.
            let generation = set.metadata.generation.map(|generation| generation.to_string());
            let all = json!({keys::HIBERNATE: "true", keys::GENERATION: generation});
            annotate_pod(&pods, pod, &all, MANAGER).await?;
        }
        Step::Wake(pod) => {
            let generation = set.metadata.generation.map(|generation| generation.to_string());
            let all = json!({keys::HIBERNATE: null, keys::GENERATION: generation});
            annotate_pod(&pods, pod, &all, MANAGER).await?;
        }
        Step::KeepSnapshot(pod) => {
            metrics.count_released_pod();
            annotate_pod(&pods, pod, &json!({keys::KEEP_SNAPSHOT_ON_DELETE: "true"}), MANAGER).await?;
        }
        Step::DeadLetter(pod) => {
            metrics.count_dead_letter(namespace, name);
            annotate_pod(&pods, pod, &json!({keys::DEAD_LETTER: "true"}), MANAGER).await?;
        }
        Step::DeleteTag { vm, tag } => cx.config.registry.delete(vm, tag).await?,
    }
    Ok(Some(set))
}

async fn create(pods: &Api<Pod>, set: &CocoonSet, pod: &Pod) -> Result<(), Error> {
    let (namespace, name) = (set.namespace().unwrap_or_default(), pod.name_any());
    let shown = format!("{namespace}/{name}");
    let params = PostParams { field_manager: Some(MANAGER.into()), ..PostParams::default() };
    match pods.create(&params, pod).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => {
            let found = pods.get_opt(&name).await.map_err(api("read pod", &shown))?;
            // The pod was created by an interrupted reconcile, or is gone again.
            let is_ours = |pod: &Pod| owner_of(pod).is_some_and(|owner| Some(owner.uid) == set.uid());
            if found.is_none_or(|found| is_ours(&found)) {
                Ok(())
            } else {
                Err(Error::NameTaken { pod: shown })
            }
        }
        Err(error) => Err(api("create pod", shown)(error)),
    }
}

async fn delete(pods: &Api<Pod>, pod: &PodId) -> Result<(), Error> {
    let same = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
    let params = DeleteParams { preconditions: Some(same), ..DeleteParams::default() };
    match pods.delete(&pod.name, &params).await {
        Ok(_) => Ok(()),
        // The pod is gone, or another pod has the name.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(api("delete pod", &pod.name)(error)),
    }
}

/// Merges annotations into a pod, `null` to remove one. Returns `Ok` when the pod is gone.
pub(crate) async fn annotate_pod(
    pods: &Api<Pod>,
    pod: &PodId,
    annotations: &Value,
    manager: &str,
) -> Result<(), Error> {
    let patch = json!({"metadata": {"uid": pod.uid, "annotations": annotations}});
    let params = PatchParams { field_manager: Some(manager.to_owned()), ..PatchParams::default() };
    match pods.patch_metadata(&pod.name, &params, &Patch::Merge(patch)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if is_gone(status.code, &status.message) => Ok(()),
        Err(error) => Err(api("annotate pod", &pod.name)(error)),
    }
}

/// True when the pod was not found, or another pod has the name: the API server answers a patch with another UID with 409 or
/// 422.
fn is_gone(code: u16, message: &str) -> bool {
    code == 404
        || (code == 409 && message.contains("uid"))
        || (code == 422 && message.contains("metadata.uid"))
}

/// Stores or removes an annotation, unless the set has changed since it was read.
async fn annotate_set(
    sets: &Api<CocoonSet>,
    set: &CocoonSet,
    key: &str,
    value: Option<&str>,
) -> Result<Option<CocoonSet>, Error> {
    let patch = json!({"metadata": {
        "uid": set.uid(), "resourceVersion": set.resource_version(), "annotations": {key: value},
    }});
    let params = PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
    match sets.patch(&set.name_any(), &params, &Patch::Merge(patch)).await {
        Ok(set) => Ok(Some(set)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(api("annotate CocoonSet", set.name_any())(error)),
    }
}

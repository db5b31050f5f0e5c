//! Observation of a set: from the caches to detect work, from the API server to do it.

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::cocoon::{Desire, keys};
use coracle_api::{CocoonHibernation, CocoonSet};
use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt as _, api::ListParams, runtime::reflector::ObjectRef};

use super::plan;
use crate::context::{Context, owner_of};
use crate::error::{Error, api};

/// Source of the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Caches: cheap, but possibly older than the last write.
    Cache,
    /// The API server.
    Server,
}

/// Inputs of a plan that are read from the cluster and the registry.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) set: CocoonSet,
    pub(crate) pods: Vec<Pod>,
    pub(crate) held: BTreeSet<String>,
    pub(crate) saved: BTreeMap<String, bool>,
    pub(crate) taken: BTreeMap<String, String>,
}

/// Reads the objects of `set`. `None`: the set is gone, or another set has its name.
pub(crate) async fn observe(cx: &Context, set: &CocoonSet, from: Source) -> Result<Option<Snapshot>, Error> {
    let namespace = set.namespace().unwrap_or_default();
    let (set, pods, held) = match from {
        Source::Cache => {
            let here = |other: Option<String>| other.as_ref() == Some(&namespace);
            let pods = cx.pods.state().into_iter().filter(|pod| here(pod.namespace()));
            let pods: Vec<_> = pods.map(|pod| pod.as_ref().clone()).collect();
            let objects = cx.hibernations.state();
            let objects = objects.iter().filter(|object| here(object.namespace()));
            let held = objects.filter_map(|object| held_pod(object.0.as_ref().ok()?)).collect();
            (set.clone(), pods, held)
        }
        Source::Server => {
            let failed = |what| api(what, format!("{namespace}/{}", set.name_any()));
            let found = cx.api::<CocoonSet>(&namespace).get_opt(&set.name_any()).await;
            let found = found.map_err(failed("read CocoonSet"))?;
            let Some(fresh) = found.filter(|fresh| fresh.uid() == set.uid()) else { return Ok(None) };
            let of_set =
                ListParams::default().labels(&format!("{}={}", keys::SET_NAME_LABEL, set.name_any()));
            let pods = cx.api::<Pod>(&namespace).list(&of_set).await.map_err(failed("list pods of"))?.items;
            let all = cx.api::<CocoonHibernation>(&namespace).list(&ListParams::default()).await;
            let all = all.map_err(failed("list hibernations of"))?;
            (fresh, pods, all.iter().filter_map(held_pod).collect())
        }
    };
    let uid = set.uid().unwrap_or_default();
    let mut pods: Vec<_> =
        pods.into_iter().filter(|pod| owner_of(pod).is_some_and(|owner| owner.uid == uid)).collect();
    pods.sort_by_key(|pod| pod.name_any());
    let mut saved = BTreeMap::new();
    for vm in plan::questions(&set, &pods, &cx.config.settings) {
        let is_saved = cx.config.registry.has(&vm, keys::TAG_HIBERNATE).await?;
        saved.insert(vm, is_saved);
    }
    // Steps are planned on what the API server returns, and only they need the names.
    let taken = if from == Source::Server { taken_names(cx, &set) } else { BTreeMap::new() };
    Ok(Some(Snapshot { set, pods, held, saved, taken }))
}

/// Returns the pod that a hibernation keeps hibernated.
fn held_pod(hibernation: &CocoonHibernation) -> Option<String> {
    let holds =
        hibernation.spec.desire == Desire::Hibernate && hibernation.metadata.deletion_timestamp.is_none();
    holds.then(|| hibernation.spec.pod_ref.name.clone())
}

/// Returns VM names of other pods with the same prefix as the names of this set. Dashes join namespace, set and slot, so the
/// names of two sets can collide.
fn taken_names(cx: &Context, set: &CocoonSet) -> BTreeMap<String, String> {
    let uid = set.uid().unwrap_or_default();
    let prefix = format!("vk-{}-{}-", set.namespace().unwrap_or_default(), set.name_any());
    let others = cx.pods.state().into_iter().filter_map(|pod| {
        let vm = pod.annotations().get(keys::VM_NAME)?;
        let is_other = owner_of(&pod).is_none_or(|owner| owner.uid != uid);
        let managed = pod.annotations().get(keys::MANAGED).is_some_and(|managed| managed == "true");
        (is_other && managed && vm.starts_with(&prefix))
            .then(|| (vm.clone(), ObjectRef::from_obj(pod.as_ref())))
    });
    let shown = |pod: ObjectRef<Pod>| format!("{}/{}", pod.namespace.unwrap_or_default(), pod.name);
    others.map(|(vm, pod)| (vm, shown(pod))).collect()
}

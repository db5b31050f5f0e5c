//! Reconcile of one CocoonHibernation.

use std::sync::Arc;

use coracle_api::cocoon::{HibernationPhase, VmSpecAnnotations, keys};
use coracle_api::{CocoonHibernation, CocoonSet};
use coracle_reconcile::{Action, Reconciler, WallTime as _, apply_status, remove_finalizer, spread};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Resource as _, ResourceExt as _, api::ListParams};
use serde_json::json;
use std::time::Duration;
use tracing::{info, warn};

use super::plan::{Observed, Plan, Step, phase_event, plan, status};
use crate::context::{Context, HibernationGuard, owner_of};
use crate::error::{Error, api};
use crate::set::annotate_pod;

/// Field manager of the controller.
const MANAGER: &str = "coracle-cocoonhibernation";

/// Controller of hibernations.
#[derive(Debug)]
pub(crate) struct Hibernations(pub(crate) Arc<Context>);

impl Reconciler for Hibernations {
    type Object = HibernationGuard;
    type Error = Error;

    async fn reconcile(&self, cached: Arc<HibernationGuard>) -> Result<Action, Error> {
        match &cached.0 {
            Ok(hibernation) => reconcile(&self.0, hibernation).await,
            Err(_) => Ok(Action::await_change()),
        }
    }

    fn is_expected(&self, error: &Error) -> bool {
        error.is_transient()
    }
}

/// Inputs of a plan that are read from the cluster and the registry.
struct Snapshot {
    hibernation: CocoonHibernation,
    pod: Option<Pod>,
    is_saved: bool,
    suspended_by: Option<String>,
    rival: Option<String>,
    since: Timestamp,
}

async fn reconcile(cx: &Context, cached: &CocoonHibernation) -> Result<Action, Error> {
    let Some(snapshot) = observe(cx, cached).await? else {
        cx.forget(&cached.uid().unwrap_or_default());
        return Ok(Action::await_change());
    };
    let now = cx.config.clock.timestamp();
    let planned = plan(&Observed {
        hibernation: &snapshot.hibernation,
        pod: snapshot.pod.as_ref(),
        is_saved: snapshot.is_saved,
        suspended_by: snapshot.suspended_by.as_deref(),
        rival: snapshot.rival.as_deref(),
        since: snapshot.since,
        now,
        times: &cx.config.settings.times,
    });
    let object = &snapshot.hibernation;
    if let Some(step) = &planned.step {
        let done = execute(cx, object, step).await;
        if *step == Step::RemoveFinalizer {
            return done.map(|()| Action::await_change());
        }
        match (step, done) {
            (_, Ok(())) => {}
            // The VM runs whether or not its old state is removed; the next reconcile tries again.
            (Step::DropTag { vm, .. }, Err(error)) => {
                warn!(vm, error = &error as &dyn std::error::Error, "remove saved state failed");
            }
            (_, Err(error)) => return Err(error),
        }
    }
    report(cx, &snapshot, &planned, now).await?;
    let wait = if planned.step.is_some() { cx.config.settings.times.poll } else { planned.requeue };
    Ok(Action::requeue(spread(wait)))
}

async fn observe(cx: &Context, cached: &CocoonHibernation) -> Result<Option<Snapshot>, Error> {
    let (namespace, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let shown = format!("{namespace}/{name}");
    let all: Api<CocoonHibernation> = cx.api(&namespace);
    let found = all.get_opt(&name).await.map_err(api("read CocoonHibernation", &shown))?;
    let Some(hibernation) = found.filter(|found| found.uid() == cached.uid()) else { return Ok(None) };
    let pod_name = &hibernation.spec.pod_ref.name;
    let pod = cx.api::<Pod>(&namespace).get_opt(pod_name).await;
    let pod = pod.map_err(api("read pod of CocoonHibernation", &shown))?;
    let others =
        all.list(&ListParams::default()).await.map_err(api("list CocoonHibernations for", &shown))?.items;
    let vm = pod.as_ref().map(|pod| VmSpecAnnotations::from_pod(pod).vm_name).unwrap_or_default();
    let rival = rival(&hibernation, &others).or_else(|| holder(cx, pod.as_ref()?, &vm));
    let is_going = hibernation.metadata.deletion_timestamp.is_some();
    let is_saved = match vm.is_empty() || is_going || rival.is_some() {
        true => false,
        false => cx.config.registry.has(&vm, keys::TAG_HIBERNATE).await?,
    };
    let suspended_by = match pod.as_ref().and_then(owner_of) {
        Some(owner) => {
            let set = cx.api::<CocoonSet>(&namespace).get_opt(&owner.name).await;
            let set = set.map_err(api("read CocoonSet for", &shown))?;
            set.filter(|set| set.spec.suspend).map(|set| set.name_any())
        }
        None => None,
    };
    let uid = hibernation.uid().unwrap_or_default();
    let since = cx.since(&uid, hibernation.metadata.generation, cx.config.clock.timestamp());
    Ok(Some(Snapshot { hibernation, pod, is_saved, suspended_by, rival, since }))
}

/// Returns the oldest hibernation of the pod, when it is not this one: two hibernations with opposite desires would alternate
/// forever.
fn rival(own: &CocoonHibernation, all: &[CocoonHibernation]) -> Option<String> {
    let age = |object: &CocoonHibernation| {
        (object.metadata.creation_timestamp.as_ref().map(|time| time.0), object.name_any())
    };
    let same = all.iter().filter(|other| {
        other.spec.pod_ref == own.spec.pod_ref && other.metadata.deletion_timestamp.is_none()
    });
    let oldest = same.min_by_key(|other| age(other))?;
    (oldest.uid() != own.uid()).then(|| format!("CocoonHibernation {:?}", oldest.name_any()))
}

/// Returns an older pod of another namespace with the same VM name: the saved state belongs to its VM.
fn holder(cx: &Context, pod: &Pod, vm: &str) -> Option<String> {
    let age = |pod: &Pod| (pod.metadata.creation_timestamp.as_ref().map(|time| time.0), pod.namespace());
    let own = age(pod);
    let is_holder = |other: &Arc<Pod>| {
        let named = other.annotations().get(keys::VM_NAME).is_some_and(|name| name == vm);
        named && other.uid() != pod.uid() && age(other) < own
    };
    let holder = cx.pods.state().into_iter().find(is_holder)?;
    Some(format!("pod {}/{}", holder.namespace().unwrap_or_default(), holder.name_any()))
}

async fn execute(cx: &Context, hibernation: &CocoonHibernation, step: &Step) -> Result<(), Error> {
    let (namespace, name) = (hibernation.namespace().unwrap_or_default(), hibernation.name_any());
    info!(ns = namespace, name, ?step, "CocoonHibernation step");
    let pods: Api<Pod> = cx.api(&namespace);
    match step {
        Step::Hibernate(pod) => annotate_pod(&pods, pod, &json!({keys::HIBERNATE: "true"}), MANAGER).await,
        Step::Wake(pod) => annotate_pod(&pods, pod, &json!({keys::HIBERNATE: null}), MANAGER).await,
        Step::DropTag { pod, vm } => {
            // The pod is read again: if another writer has requested a hibernation meanwhile, its saved state would be lost.
            let fresh = pods.get_opt(&pod.name).await.map_err(api("read pod", &pod.name))?;
            let runs = fresh.is_some_and(|fresh| {
                fresh.uid().as_ref() == Some(&pod.uid) && !VmSpecAnnotations::from_pod(&fresh).hibernate
            });
            if runs {
                cx.config.registry.delete(vm, keys::TAG_HIBERNATE).await?;
            }
            Ok(())
        }
        Step::RemoveFinalizer => {
            // The saved state stays: the pod is still annotated, or its set removes both.
            let api: Api<CocoonHibernation> = cx.api(&namespace);
            Ok(remove_finalizer(&api, hibernation, keys::HIBERNATION_FINALIZER, MANAGER).await?)
        }
    }
}

async fn report(cx: &Context, snapshot: &Snapshot, planned: &Plan, now: Timestamp) -> Result<(), Error> {
    let object = &snapshot.hibernation;
    if object.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let wanted = status(object, planned, now);
    let api: Api<CocoonHibernation> = cx.api(&object.namespace().unwrap_or_default());
    apply_status(&api, object, object.status.as_ref(), &wanted, MANAGER).await?;
    if let Some(event) = phase_event(object, planned) {
        let took = Duration::try_from(now.duration_since(snapshot.since)).unwrap_or_default();
        let metrics = &cx.config.cocoon_metrics;
        match (planned.phase, event.reason) {
            (HibernationPhase::Hibernated, _) => metrics.observe_hibernate(true, took),
            (HibernationPhase::Active, _) => metrics.observe_wake(true, took),
            (_, "HibernateTimedOut") => metrics.observe_hibernate(false, took),
            (_, "WakeTimedOut") => metrics.observe_wake(false, took),
            _ => {}
        }
        cx.recorder.publish(&event, &object.object_ref(&())).await;
    }
    Ok(())
}

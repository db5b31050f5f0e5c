//! Lists of pods: those assigned to the node, and the running ones.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use coracle_host::{Access, ContainerState};
use k8s_openapi::List;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::context::Context;
use crate::table::{ContainerEntry, PodEntry};

pub(super) async fn assigned(State(context): State<Context>) -> Json<List<Pod>> {
    let items = context.pods.list().iter().map(|entry| entry.pod_with_status()).collect();
    Json(List { items, ..List::default() })
}

/// Handles the list of running pods, which contains names and images but no specs.
pub(super) async fn running(State(context): State<Context>) -> Json<List<Pod>> {
    let items = context.pods.list().iter().filter_map(|entry| of_vm(&context, entry)).collect();
    Json(List { items, ..List::default() })
}

/// Returns a running pod; `None`: none of its containers runs.
fn of_vm(context: &Context, entry: &Arc<PodEntry>) -> Option<Pod> {
    let view = context.host.find(entry.vm.as_deref()?, Access::Change).ok()?;
    let running = |entry: &ContainerEntry| {
        let record = view.containers.get(&entry.id)?;
        let (name, image) = (entry.name.clone(), Some(record.spec.image.clone()));
        let container = Container { name, image, ..Container::default() };
        (record.state == ContainerState::Running).then_some(container)
    };
    let containers: Vec<_> = entry.containers.iter().filter_map(running).collect();
    let of = &entry.pod.metadata;
    let metadata = ObjectMeta {
        name: of.name.clone(),
        namespace: of.namespace.clone(),
        uid: of.uid.clone(),
        ..ObjectMeta::default()
    };
    let has_containers = !containers.is_empty();
    let spec = Some(PodSpec { containers, ..PodSpec::default() });
    has_containers.then_some(Pod { metadata, spec, ..Pod::default() })
}

//! Pod or container that a path names.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;

use super::context::Context;
use super::http_failure::HttpFailure;
use crate::table::{ContainerEntry, PodEntry, PodTable};

/// Path parameters `/{namespace}/{pod}[/{uid}]`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct PodTarget {
    pub(super) namespace: String,
    pub(super) pod: String,
    #[serde(default)]
    pub(super) uid: Option<String>,
}

/// Path parameters `/{namespace}/{pod}[/{uid}]/{container}`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ContainerTarget {
    pub(super) namespace: String,
    pub(super) pod: String,
    #[serde(default)]
    pub(super) uid: Option<String>,
    pub(super) container: String,
}

/// Container that was created.
pub(super) struct Found {
    pub(super) vm: String,
    pub(super) container: ContainerEntry,
}

impl PodTarget {
    /// Returns the pod.
    ///
    /// # Errors
    /// 404: the pod is not on this node.
    pub(super) fn find(&self, pods: &PodTable) -> Result<Arc<PodEntry>, HttpFailure> {
        pods.find(&self.namespace, &self.pod, self.uid.as_deref()).ok_or_else(|| {
            HttpFailure::not_found(format!("pod \"{}/{}\" not found", self.namespace, self.pod))
        })
    }

    /// Returns the name of the pod's VM.
    ///
    /// # Errors
    /// 404; 400: the pod has no VM.
    pub(super) fn vm(&self, context: &Context) -> Result<String, HttpFailure> {
        let entry = self.find(&context.pods)?;
        let waits =
            || HttpFailure::bad_request(format!("pod \"{}/{}\" does not run", self.namespace, self.pod));
        entry.vm.clone().ok_or_else(waits)
    }
}

impl ContainerTarget {
    /// Returns the pod, if its spec has a container of this name.
    ///
    /// # Errors
    /// 404.
    pub(super) fn find_pod(&self, pods: &PodTable) -> Result<Arc<PodEntry>, HttpFailure> {
        let Self { namespace, pod, uid, container } = self;
        let target = PodTarget { namespace: namespace.clone(), pod: pod.clone(), uid: uid.clone() };
        let entry = target.find(pods)?;
        if !container_names(&entry.pod).any(|name| name == container) {
            let message = format!("container not found (\"{container}\" in pod \"{namespace}/{pod}\")");
            return Err(HttpFailure::not_found(message));
        }
        Ok(entry)
    }

    /// Returns the container's newest attempt.
    ///
    /// # Errors
    /// 404; 400: the container was not created yet.
    pub(super) fn find(&self, pods: &PodTable) -> Result<Found, HttpFailure> {
        let entry = self.find_pod(pods)?;
        match (&entry.vm, entry.container(&self.container)) {
            (Some(vm), Some(container)) => Ok(Found { vm: vm.clone(), container: container.clone() }),
            _ => {
                let Self { namespace, pod, container, .. } = self;
                let message =
                    format!("container \"{container}\" in pod \"{namespace}/{pod}\" is waiting to start");
                Err(HttpFailure::bad_request(message))
            }
        }
    }
}

/// Returns the names of all containers: init containers, regular ones and ephemeral ones.
fn container_names(pod: &Pod) -> impl Iterator<Item = &String> {
    let spec = pod.spec.as_ref();
    let containers = spec.into_iter().flat_map(|spec| {
        let init = spec.init_containers.iter().flatten();
        spec.containers.iter().chain(init).map(|container| &container.name)
    });
    let ephemeral = spec.into_iter().flat_map(|spec| spec.ephemeral_containers.iter().flatten());
    containers.chain(ephemeral.map(|container| &container.name))
}

//! Pod sandboxes, each of which is one VM.

use std::sync::Arc;
use std::time::Duration;

use coracle_host::{ContainerState, HostError};
use coracle_oci::NoProgress;
use coracle_proto::cri::{
    PodSandboxConfig, PodSandboxMetadata, PodSandboxStatusResponse, RunPodSandboxRequest,
    UpdatePodSandboxResourcesRequest,
};
use tonic::Status;

use crate::facts::SandboxFacts;
use crate::handlers::{self, Mode};
use crate::refusal::{Refusal, of_host};
use crate::server::{CriServer, new_id};
use crate::status;
use crate::table::{ContainerEntry, Pod};
use crate::translate::sandbox::{check_resize, vm_spec};

impl CriServer {
    /// Starts the VM of a pod and returns the sandbox's id. Repeating the request returns the same id.
    pub(crate) async fn run_pod_sandbox(&self, request: RunPodSandboxRequest) -> Result<String, Status> {
        let config = request.config.unwrap_or_default();
        let handler = handlers::find(&self.0.handlers, &request.runtime_handler)?;
        let disk = handler.mode == Mode::Disk;
        let facts = SandboxFacts { config, handler: request.runtime_handler, disk };
        let id = new_id();
        let spec = vm_spec(&id, &facts, &handler.driver, &self.0.options)?;
        let name = name_of(&facts.config);
        let exists = |id: &str| Refusal::Exists { what: "sandbox", name: name.clone(), id: id.to_owned() };
        let claim = self.claim(name.clone()).ok_or_else(|| exists("one that is being created"))?;
        let pods = self.0.table.pods(&self.0.host);
        if let Some(pod) = pods.iter().find(|pod| name_of(&pod.facts.config) == name) {
            return if pod.is_ready() { Ok(pod.id().to_owned()) } else { Err(exists(pod.id()).into()) };
        }
        let (host, vm) = (self.0.host.clone(), id.clone());
        let work = async move {
            host.create(spec, Arc::new(NoProgress)).await.map_err(|e| of_host(&e))?;
            // The container of a disk pod is a VM of its own. The sandbox VM only holds its address.
            if !disk {
                host.start(&vm, None).await.map_err(|e| of_host(&e))?;
            }
            Ok(vm)
        };
        let host = self.0.host.clone();
        let undo = async move {
            let _until_it_is_gone = claim;
            match host.delete(&id, true, None).await {
                Ok(()) | Err(HostError::NotFound { .. }) => {}
                Err(error) => tracing::warn!(vm = id, error = error.chain(), "remove sandbox failed"),
            }
        };
        self.run_or_undo(work, undo).await
    }

    /// Stops the containers and the VM. `Ok` for a sandbox that is off or unknown.
    pub(crate) async fn stop_pod_sandbox(&self, id: &str) -> Result<(), Status> {
        let Ok(pod) = self.0.table.pod(&self.0.host, id) else { return Ok(()) };
        let running = pod.containers.iter().filter(|container| container.is_running());
        let ends = running.map(|container| self.end_container(&pod, container));
        for ended in futures_util::future::join_all(ends).await {
            match ended {
                Err(error) if pod.facts.disk => return Err(error),
                Err(error) => {
                    tracing::debug!(
                        sandbox = id,
                        error = error.message(),
                        "end container failed, its VM ends"
                    );
                }
                Ok(()) => {}
            }
        }
        match self.0.host.stop(id, Duration::ZERO, None).await {
            Ok(_) | Err(HostError::NotFound { .. }) => Ok(()),
            Err(error) => Err(of_host(&error)),
        }
    }

    /// Checks whether a resize of a pod fits its VM, which keeps the size that it started with.
    pub(crate) fn update_pod_sandbox(
        &self,
        request: &UpdatePodSandboxResourcesRequest,
    ) -> Result<(), Status> {
        let pod = self.0.table.pod(&self.0.host, &request.pod_sandbox_id)?;
        if pod.facts.disk {
            let (what, why) = ("resize of a disk pod", "its VM keeps the size that it started with");
            return Err(Refusal::Unsupported { what, why }.into());
        }
        let vm = (pod.record().vcpus, pod.record().memory);
        let resources = request.resources.clone().unwrap_or_default();
        Ok(check_resize(&resources, vm, &self.0.options)?)
    }

    async fn end_container(&self, pod: &Pod, container: &ContainerEntry) -> Result<(), Status> {
        if pod.facts.disk {
            return self.stop_disk_container(&container.entry.id, Duration::ZERO).await;
        }
        let ended = self.0.host.stop_container(pod.id(), &container.record.id, Duration::ZERO).await;
        ended.map(drop).map_err(|e| of_host(&e))
    }

    /// Removes a sandbox with everything in it. `Ok` for an unknown one.
    pub(crate) async fn remove_pod_sandbox(&self, id: &str) -> Result<(), Status> {
        let Ok(pod) = self.0.table.pod(&self.0.host, id) else { return Ok(()) };
        // VMs that use the address of this VM are removed first.
        for vm in &pod.vms {
            self.remove_disk_container(vm.view.record.name.as_str()).await?;
        }
        match self.0.host.delete(id, true, None).await {
            Ok(()) | Err(HostError::NotFound { .. }) => Ok(()),
            Err(error) => Err(of_host(&error)),
        }
    }

    pub(crate) fn pod_sandbox_status(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<PodSandboxStatusResponse, Status> {
        let pod = self.0.table.pod(&self.0.host, id)?;
        let statuses = container_statuses(&pod);
        Ok(PodSandboxStatusResponse {
            status: Some(status::pod_sandbox_status(pod.record(), &pod.facts)),
            info: if verbose { info(&pod) } else { Default::default() },
            containers_statuses: statuses,
            timestamp: status::nanoseconds(self.0.host.clock().now()),
        })
    }
}

pub(crate) fn container_statuses(pod: &Pod) -> Vec<coracle_proto::cri::ContainerStatus> {
    let one = |container: &ContainerEntry| {
        status::container_status(&container.record, &container.facts, &pod.facts.config)
    };
    pod.containers.iter().map(one).collect()
}

/// Returns details for verbose output.
fn info(pod: &Pod) -> std::collections::BTreeMap<String, String> {
    let record = pod.record();
    let running = pod.containers.iter().filter(|c| c.record.state == ContainerState::Running).count();
    let facts = serde_json::json!({
        "vm": record.id.to_string(),
        "vcpus": record.vcpus.get(),
        "memoryMib": record.memory.get(),
        "bootMs": record.boot_ms,
        "clone": record.template.is_some(),
        "pooled": record.pooled,
        "runningContainers": running,
    });
    [("vm".to_owned(), facts.to_string())].into()
}

/// Returns a name that is unique to the sandbox.
fn name_of(config: &PodSandboxConfig) -> String {
    let PodSandboxMetadata { name, uid, namespace, attempt } = config.metadata.clone().unwrap_or_default();
    format!("{namespace}/{name}/{uid}/{attempt}")
}

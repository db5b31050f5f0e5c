//! Container of a disk pod: a VM of its own over a disk image.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use coracle_host::{ContainerState, HostError, VmSpec};
use coracle_oci::NoProgress;
use coracle_pod::events::PodEvent;
use coracle_proto::cri::ContainerConfig;
use coracle_types::VmState;
use tonic::Status;

use crate::facts::ContainerFacts;
use crate::images::Content;
use crate::refusal::{Refusal, of_host};
use crate::server::CriServer;
use crate::table::{ContainerEntry, Pod};
use crate::translate::disk::{self, Inputs};

/// Reasons of events.
const DISK_CLONED: &str = "DiskCloned";
const VMM_STARTED: &str = "VMMStarted";
/// Time limit for the last lines of a log after the VM is off.
const LOG_LIMIT: Duration = Duration::from_secs(10);

impl CriServer {
    /// Creates the VM of a container without starting it. Its disk is an empty overlay on the image.
    pub(crate) async fn create_disk_container(
        &self,
        pod: &Arc<Pod>,
        id: &str,
        config: ContainerConfig,
    ) -> Result<(), Status> {
        check_alone(pod, &config)?;
        let spec = self.plan_disk_container(pod, id, config).await?;
        let made = self.0.host.create(spec, Arc::new(NoProgress)).await;
        made.map_err(|e| of_host(&e))?;
        self.record_event(id, |record| {
            PodEvent::normal(
                DISK_CLONED,
                None,
                format!("Made a copy-on-write disk on image {}", record.image),
            )
        });
        Ok(())
    }

    async fn plan_disk_container(
        &self,
        pod: &Arc<Pod>,
        id: &str,
        mut config: ContainerConfig,
    ) -> Result<VmSpec, Status> {
        let wanted = config.image.clone().unwrap_or_default().image;
        let stored = self.stored_image(&wanted).await?;
        let stored = stored.ok_or_else(|| Refusal::NotFound { what: "image", id: wanted.clone() })?;
        self.check_stored(pod.namespace(), &stored).await?;
        let Content::Disk(image) = &stored.content else {
            let why =
                format!("{wanted} is a container image: choose a RuntimeClass with the handler coracle");
            return Err(Refusal::invalid("image", why).into());
        };
        let name = image.names.first().ok_or(Refusal::NotFound { what: "image", id: wanted })?;
        let (found, _) = self.look_at_mounts(pod.namespace(), &mut config.mounts).await?;
        let facts = ContainerFacts { config, image_id: stored.id.clone(), image_ref: stored.reference() };
        let options = &self.0.options;
        let inputs =
            Inputs { id, pod: pod.id(), facts: &facts, sandbox: &pod.facts, image: name, found: &found };
        Ok(disk::vm_spec(&inputs, options)?)
    }

    /// Starts the VM of a container and returns when its VMM runs. The guest is still booting then, and its display is
    /// available.
    pub(crate) async fn start_disk_container(&self, container: &ContainerEntry) -> Result<(), Status> {
        let id = &container.entry.id;
        let mut view = self.0.host.observe(id).map_err(|e| of_host(&e))?;
        self.attend(container, true);
        let gone = || Refusal::Start { id: id.clone(), why: "it was removed".to_owned() };
        let started = view.wait_for(|view| {
            let record = &view.record;
            let runs = record.state.has_vmm() && record.process.is_some();
            runs || matches!(record.state, VmState::Stopped | VmState::Failed)
        });
        let left = async {
            self.0.table.wait_unattended(id).await;
        };
        tokio::select! {
            biased;
            started = started => {
                let record = &started.map_err(|_| gone())?.record;
                match record.state {
                    VmState::Failed => {
                        Err(Refusal::Start { id: id.clone(), why: record.message.clone() }.into())
                    }
                    _ => {
                        self.record_event(id, |record| {
                            let accelerator = record.accelerator.map_or("", |accelerator| accelerator.as_str());
                            let vmm = format!("Its VMM runs: {} with {accelerator}", record.driver);
                            PodEvent::normal(VMM_STARTED, None, vmm)
                        });
                        Ok(())
                    }
                }
            }
            () = left => {
                Err(Refusal::Start { id: id.clone(), why: "its VM could not be started".to_owned() }.into())
            }
        }
    }

    /// Powers the guest off, after its command was stopped; kills the VMM after `grace`. Returns when the log is complete.
    pub(crate) async fn stop_disk_container(&self, id: &str, grace: Duration) -> Result<(), Status> {
        match self.0.host.stop(id, grace, None).await {
            Ok(_) => {}
            Err(HostError::NotFound { .. }) => return Ok(()),
            Err(error) => return Err(of_host(&error)),
        }
        let _late = tokio::time::timeout(LOG_LIMIT, self.0.table.wait_unattended(id)).await;
        Ok(())
    }

    /// Kills and removes the VM of a container, with its disk.
    pub(crate) async fn remove_disk_container(&self, id: &str) -> Result<(), Status> {
        match self.0.host.delete(id, true, None).await {
            Ok(()) | Err(HostError::NotFound { .. }) => {}
            Err(error) => return Err(of_host(&error)),
        }
        self.0.table.detach_task(id);
        Ok(())
    }

    /// Continues the log of a container in a new file, after the kubelet has renamed the old one.
    pub(crate) async fn reopen_disk_log(&self, id: &str) -> Result<(), Status> {
        let log = self.0.table.attended_by(id).and_then(|attended| attended.log);
        let log = log.ok_or_else(|| Refusal::NotFound { what: "log of container", id: id.to_owned() })?;
        let reopen = move || log.lock().unwrap_or_else(PoisonError::into_inner).reopen();
        let reopened = tokio::task::spawn_blocking(reopen).await;
        let reopened = reopened.map_err(|_| Status::unavailable("the server is stopping"))?;
        reopened.map_err(|e| Status::internal(format!("cannot reopen the log of container \"{id}\": {e}")))
    }

    /// Waits until the VM of a container has booted, for at most `limit`. The caller must check whether the VM runs.
    pub(crate) async fn await_boot(&self, vm: &str, limit: Option<Duration>) {
        let Ok(mut view) = self.0.host.observe(vm) else { return };
        let booted = view.wait_for(|view| view.record.state != VmState::Starting);
        match limit {
            None => drop(booted.await),
            Some(limit) => drop(tokio::time::timeout(limit, booted).await),
        }
    }

    /// Returns the VM of the pod's running container.
    ///
    /// # Errors
    /// [`Refusal::State`] when no container runs.
    pub(crate) fn running_vm<'a>(&self, pod: &'a Pod) -> Result<&'a str, Refusal> {
        if !pod.facts.disk {
            return Ok(pod.id());
        }
        let running = pod.containers.iter().find(|container| container.is_running());
        let (operation, id, why) = ("reach", pod.id().to_owned(), "its container does not run");
        running.map(|container| pod.vm(container)).ok_or(Refusal::State {
            operation,
            what: "sandbox",
            id,
            why,
        })
    }
}

/// Checks that a disk pod has only one container, and one attempt of it at a time.
fn check_alone(pod: &Pod, config: &ContainerConfig) -> Result<(), Refusal> {
    let name = |config: &ContainerConfig| config.metadata.clone().unwrap_or_default().name;
    let wanted = name(config);
    for other in pod.containers.iter() {
        if name(&other.facts.config) != wanted {
            let why =
                format!("a pod of disks has one container, and this one has {}", name(&other.facts.config));
            return Err(Refusal::invalid("container", why));
        }
        if other.record.state != ContainerState::Exited {
            let (operation, what, id) = ("make a container in", "sandbox", pod.id().to_owned());
            return Err(Refusal::State { operation, what, id, why: "its container has not ended" });
        }
    }
    Ok(())
}

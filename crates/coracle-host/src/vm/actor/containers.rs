//! Containers of a sandbox.
//!
//! ```text
//! create   slot of the image ─▶ record Created ─▶ guest
//! start    guest ─▶ record Running          (a crash between: the next session settles it)
//! end      output in the log ─▶ record Exited
//! remove   guest ─▶ no record ─▶ slot of the image, if no other container has it
//! ```
//! Nothing is acknowledged before its record is written.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_guest_client::GuestError;
use coracle_hypervisor::Driver as _;
use coracle_logs::CriLog;
use coracle_proto::guest as pb;
use coracle_record::{
    AttachedImage, ContainerId, ContainerRecord, ContainerSpec, ContainerState, ProcessUser, Resources,
};
use coracle_types::Op;

use super::Actor;
use crate::containers::{Settle, create_request, limits, settle};
use crate::events::EventKind;
use crate::files::blocking;
use crate::vm::container_table::{ContainerEnd, ContainerImage, ContainerReply, ContainerRequest};
use crate::vm::text::bounded;
use crate::vm::{JobEvent, JobEventKind};
use crate::vmm_config::image_disk;
use crate::volumes::free_slot;
use crate::{Exit, GuestClient, HostError, files};

/// Size at which a log turns over whose place the node chose; others belong to who chose the place.
const LOG_ROTATE_BYTES: u64 = 10 << 20;

impl Actor {
    pub(super) async fn container_request(&mut self, request: ContainerRequest, reply: ContainerReply) {
        let done = match request {
            ContainerRequest::Create { id, spec, image, mounted } => {
                self.create_container(id, *spec, image, mounted).await
            }
            ContainerRequest::Start { id } => self.start_container(&id).await,
            ContainerRequest::Stop { id, grace } => return self.stop_container(id, grace, reply),
            ContainerRequest::Kill { id, signal } => self.kill_container(&id, signal).await,
            ContainerRequest::Update { id, resources, metadata } => {
                self.update_container(&id, resources, metadata).await
            }
            ContainerRequest::Remove { id } => self.remove_container(&id).await,
        };
        let _caller_gone = reply.send(done);
    }

    async fn create_container(
        &mut self,
        id: ContainerId,
        spec: ContainerSpec,
        image: ContainerImage,
        mounted: Vec<ContainerImage>,
    ) -> Result<ContainerRecord, HostError> {
        if let Some(existing) = self.containers.records.get(&id) {
            let vm = self.record.name.to_string();
            let same = existing.spec == spec;
            return if same {
                Ok(existing.clone())
            } else {
                Err(HostError::ContainerExists { vm, id: id.into() })
            };
        }
        let guest = self.container_guest("make a container")?;
        let mut record = ContainerRecord::new(id, spec, image.digest.clone(), self.shared.node.clock.now());
        match self.make_container(&guest, &record, [vec![image], mounted].concat()).await {
            Ok(user) => record.user = user,
            Err(error) => {
                self.forget_container(&record.id).await?;
                return Err(error);
            }
        }
        self.save_container(&record).await?;
        self.containers.put(record.clone());
        self.publish(EventKind::Updated);
        Ok(record)
    }

    /// Gives who its process runs as, if the guest knows. What a failure leaves is for the caller to remove.
    async fn make_container(
        &mut self,
        guest: &GuestClient,
        record: &ContainerRecord,
        images: Vec<ContainerImage>,
    ) -> Result<Option<ProcessUser>, HostError> {
        for image in images {
            self.attach_image(&image.digest, image.rootfs).await?;
        }
        self.save_container(record).await?;
        self.open_log(record)?;
        let missing = || HostError::Invalid { message: "an image of a mount is not on this node".to_owned() };
        let request = create_request(record, |digest| self.slot_of(digest)).ok_or_else(missing)?;
        let made = guest.create_container(request).await;
        made.map(|user| user.map(process_user)).map_err(|e| self.guest_failed("make a container", e))
    }

    fn slot_of(&self, digest: &str) -> Option<usize> {
        self.record.images.iter().find(|image| image.digest == digest).map(|image| image.slot)
    }

    async fn start_container(&mut self, id: &ContainerId) -> Result<ContainerRecord, HostError> {
        let record = self.container(id)?;
        match record.state {
            ContainerState::Running => return Ok(record),
            ContainerState::Exited => return Err(self.container_refused(id, "start", "it has ended")),
            ContainerState::Created => {}
        }
        let guest = self.container_guest("start a container")?;
        let started = guest.start_container(id.as_str()).await;
        let failure = started.map_err(|error| self.guest_failed("start a container", error))?;
        self.container_started(id).await?;
        if let Some(exit) = failure {
            let exit = Exit { code: exit.code, signal: exit.signal, error: bounded(exit.error) };
            self.container_exited(ContainerEnd { id: id.clone(), exit, oom_killed: false }).await?;
        }
        self.container(id)
    }

    /// The guest ends it in a job; the end is acknowledged when it is recorded.
    fn stop_container(&mut self, id: ContainerId, grace: Duration, reply: ContainerReply) {
        let refused = match self.container(&id) {
            Ok(record) if record.state == ContainerState::Running => None,
            Ok(record) if record.state == ContainerState::Exited => Some(Ok(record)),
            Ok(_) => Some(Err(self.container_refused(&id, "stop", "it was not started"))),
            Err(error) => Some(Err(error)),
        };
        let guest = match refused {
            None => self.container_guest("stop a container"),
            Some(answer) => {
                let _caller_gone = reply.send(answer);
                return;
            }
        };
        match guest {
            Ok(guest) => {
                self.containers.stoppers.entry(id.clone()).or_default().push(reply);
                let (events, boot) = (self.job_events.clone(), self.record.boots);
                self.jobs.spawn(async move {
                    if let Err(error) = guest.stop_container(id.as_str(), grace).await {
                        let kind = JobEventKind::ContainerStopFailed(id, error);
                        let _task_gone = events.send(JobEvent { boot, kind }).await;
                    }
                });
            }
            Err(error) => {
                let _caller_gone = reply.send(Err(error));
            }
        }
    }

    async fn kill_container(&mut self, id: &ContainerId, signal: i32) -> Result<ContainerRecord, HostError> {
        let record = self.container(id)?;
        if record.state != ContainerState::Running {
            return Err(self.container_refused(id, "signal", "it is not running"));
        }
        let guest = self.container_guest("signal a container")?;
        let killed = guest.kill_container(id.as_str(), signal).await;
        killed.map(|()| record).map_err(|error| self.guest_failed("signal a container", error))
    }

    async fn update_container(
        &mut self,
        id: &ContainerId,
        resources: Resources,
        metadata: BTreeMap<String, String>,
    ) -> Result<ContainerRecord, HostError> {
        let mut record = self.container(id)?;
        if record.state == ContainerState::Exited {
            return Err(self.container_refused(id, "update", "it has ended"));
        }
        let guest = self.container_guest("update a container")?;
        let updated = guest.update_container(id.as_str(), limits(&resources)).await;
        updated.map_err(|error| self.guest_failed("update a container", error))?;
        let old = record.spec.resources;
        record.spec.metadata.extend(metadata);
        record.spec.resources = Resources {
            cpu_quota_us: resources.cpu_quota_us.or(old.cpu_quota_us),
            cpu_weight: resources.cpu_weight.or(old.cpu_weight),
            memory_max_bytes: resources.memory_max_bytes.or(old.memory_max_bytes),
            pids_max: resources.pids_max.or(old.pids_max),
            unified: old.unified.into_iter().chain(resources.unified).collect(),
        };
        self.save_container(&record).await?;
        self.containers.put(record.clone());
        self.publish(EventKind::Updated);
        Ok(record)
    }

    /// A container of a VM that does not run has no guest that would have to remove it.
    async fn remove_container(&mut self, id: &ContainerId) -> Result<ContainerRecord, HostError> {
        let record = self.container(id)?;
        if self.record.state.has_vmm() {
            let guest = self.container_guest("remove a container")?;
            let removed = guest.remove_container(id.as_str()).await;
            removed.map_err(|error| self.guest_failed("remove a container", error))?;
        }
        self.forget_container(id).await?;
        self.answer_stoppers(id);
        self.publish(EventKind::Updated);
        Ok(record)
    }

    /// Makes guest and records agree, with a new session. A guest that does not answer is asked once.
    pub(super) async fn settle_containers(&mut self, guest: &GuestClient) {
        if self.record.sandbox.is_none() {
            return;
        }
        let listed = match guest.list_containers().await {
            Ok(listed) => listed,
            Err(error) => {
                tracing::warn!(vm = %self.record.id, %error, "containers not settled");
                return;
            }
        };
        let states: BTreeMap<_, _> =
            listed.iter().filter_map(|s| Some((s.id.parse().ok()?, s.state()))).collect();
        let recorded = self.containers.records();
        let ids = recorded.keys().chain(states.keys().filter(|id| !recorded.contains_key(id)));
        for id in ids {
            let record = recorded.get(id);
            let decision = settle(record.map(|record| record.state), states.get(id).copied());
            if let Err(error) = self.settle_container(guest, id, decision).await {
                tracing::warn!(vm = %self.record.id, container = %id, ?decision, error = error.chain(), "container not settled");
            }
        }
    }

    async fn settle_container(
        &mut self,
        guest: &GuestClient,
        id: &ContainerId,
        decision: Settle,
    ) -> Result<(), HostError> {
        match decision {
            Settle::Keep => Ok(()),
            Settle::Make => {
                let record = self.container(id)?;
                let Some(request) = create_request(&record, |digest| self.slot_of(digest)) else {
                    return self.lose_container(id, "its image was detached").await;
                };
                let made = guest.create_container(request).await;
                made.map(drop).map_err(|error| self.guest_failed("make a container", error))
            }
            Settle::Started => self.container_started(id).await,
            Settle::Lost => self.lose_container(id, "the guest does not have it any more").await,
            Settle::Remove => {
                let removed = guest.remove_container(id.as_str()).await;
                removed.map_err(|error| self.guest_failed("remove a container", error))
            }
        }
    }

    pub(super) async fn container_started(&mut self, id: &ContainerId) -> Result<(), HostError> {
        let mut record = self.container(id)?;
        if record.state == ContainerState::Created {
            record.state = ContainerState::Running;
            record.started_at = Some(self.shared.node.clock.now());
            self.save_container(&record).await?;
            self.containers.put(record);
            self.publish(EventKind::Updated);
        }
        Ok(())
    }

    pub(super) async fn container_exited(&mut self, end: ContainerEnd) -> Result<(), HostError> {
        let mut record = self.container(&end.id)?;
        if record.state != ContainerState::Exited {
            let now = self.shared.node.clock.now();
            record.state = ContainerState::Exited;
            record.started_at = record.started_at.or(Some(now));
            (record.finished_at, record.exit, record.oom_killed) =
                (Some(now), Some(end.exit), end.oom_killed);
            self.save_container(&record).await?;
            self.containers.put(record);
            self.publish(EventKind::Updated);
        }
        self.answer_stoppers(&end.id);
        Ok(())
    }

    pub(super) fn container_stop_failed(&mut self, id: &ContainerId, error: GuestError) {
        let waiting = self.containers.stoppers.remove(id).unwrap_or_default();
        let mut error = Some(self.guest_failed("stop a container", error));
        for reply in waiting {
            let why = || self.container_refused(id, "stop", "the guest did not end it");
            let _caller_gone = reply.send(Err(error.take().unwrap_or_else(why)));
        }
    }

    /// The VM has ended, and its containers with it.
    pub(super) async fn lose_containers(&mut self, why: &str) {
        for id in self.containers.records().keys() {
            if let Err(error) = self.lose_container(id, why).await {
                tracing::warn!(vm = %self.record.id, container = %id, error = error.chain(), "write container record failed");
            }
        }
        self.record.images.clear();
    }

    async fn lose_container(&mut self, id: &ContainerId, why: &str) -> Result<(), HostError> {
        let mut record = self.container(id)?;
        if record.state != ContainerState::Exited {
            record.lose(why, self.shared.node.clock.now());
            self.containers.put(record.clone());
            self.save_container(&record).await?;
            self.publish(EventKind::Updated);
        }
        self.answer_stoppers(id);
        Ok(())
    }

    fn answer_stoppers(&mut self, id: &ContainerId) {
        for reply in self.containers.stoppers.remove(id).unwrap_or_default() {
            let _caller_gone = reply.send(self.container(id));
        }
    }

    /// The slot of an image, attached if no container has it yet.
    async fn attach_image(&mut self, digest: &str, rootfs: PathBuf) -> Result<usize, HostError> {
        if let Some(slot) = self.slot_of(digest) {
            return Ok(slot);
        }
        let slot = free_slot(&self.record.volumes, &self.record.images, true);
        let slot = slot.map_err(|message| HostError::Invalid { message })?;
        let image = AttachedImage { digest: digest.to_owned(), rootfs, slot };
        let without = self.vmm_config();
        self.record.images.push(image.clone());
        if let Err(error) = self.save().await {
            self.record.images.retain(|known| *known != image);
            return Err(error);
        }
        let attached = self.shared.node.driver.attach_disk(&without, &image_disk(&image)).await;
        if let Err(source) = attached {
            self.detach_image(digest).await?;
            return Err(HostError::Driver { name: self.record.name.to_string(), source });
        }
        Ok(slot)
    }

    /// Empties the slot of an image.
    async fn detach_image(&mut self, digest: &str) -> Result<(), HostError> {
        let Some(image) = self.record.images.iter().find(|image| image.digest == digest).cloned() else {
            return Ok(());
        };
        if self.record.state.has_vmm() {
            let mut without = self.vmm_config();
            without.disks.retain(|disk| disk.slot != image.slot);
            let detached = self.shared.node.driver.detach_disk(&without, image.slot).await;
            detached.map_err(|source| HostError::Driver { name: self.record.name.to_string(), source })?;
        }
        self.record.images.retain(|known| *known != image);
        self.save().await
    }

    /// Removes the record of a container that the guest does not have, and what only it had.
    async fn forget_container(&mut self, id: &ContainerId) -> Result<(), HostError> {
        self.container_logs.lock().remove(id);
        let dir = self.paths.containers();
        let names = ["json", "log", "log.1", "position"].map(|kind| dir.join(format!("{id}.{kind}")));
        let removed = blocking(move || names.iter().try_for_each(|path| files::remove_file(path))).await;
        removed.map_err(self.files_failed("remove the files of a container"))?;
        Arc::make_mut(&mut self.containers.records).remove(id);
        let digests: Vec<_> = self.record.images.iter().map(|image| image.digest.clone()).collect();
        let used = |digest: &String| {
            self.containers.records.values().any(|container| container.images().any(|image| image == digest))
        };
        let unused: Vec<_> = digests.into_iter().filter(|digest| !used(digest)).collect();
        for digest in unused {
            self.detach_image(&digest).await?;
        }
        Ok(())
    }

    /// Logs of the containers that a restart of the daemon finds.
    pub(super) fn open_logs(&self) {
        for record in self.containers.records.values() {
            self.log_container_error(&record.id, self.open_log(record));
        }
    }

    /// For what no caller waits for.
    pub(super) fn log_container_error(&self, id: &ContainerId, done: Result<(), HostError>) {
        if let Err(error) = done {
            tracing::warn!(vm = %self.record.id, container = %id, error = error.chain(), "container not up to date");
        }
    }

    fn open_log(&self, record: &ContainerRecord) -> Result<(), HostError> {
        let dir = self.paths.containers();
        let own = dir.join(format!("{}.log", record.id));
        let position = dir.join(format!("{}.position", record.id));
        let (path, rotate) = match &record.spec.log_path {
            Some(path) => (path, None),
            None => (&own, Some(LOG_ROTATE_BYTES)),
        };
        let log =
            CriLog::open(path, &position, rotate).map_err(self.files_failed("open a container's log"))?;
        self.container_logs.lock().insert(record.id.clone(), log);
        Ok(())
    }

    async fn save_container(&self, record: &ContainerRecord) -> Result<(), HostError> {
        let (dir, record) = (self.paths.containers(), record.clone());
        let saved = blocking(move || {
            std::fs::create_dir_all(&dir)?;
            record.save(&dir.join(format!("{}.json", record.id)))
        });
        saved.await.map_err(self.files_failed("write the record of a container"))
    }

    fn container(&self, id: &ContainerId) -> Result<ContainerRecord, HostError> {
        let missing = || HostError::NoContainer { vm: self.record.name.to_string(), id: id.to_string() };
        self.containers.records.get(id).cloned().ok_or_else(missing)
    }

    fn container_refused(&self, id: &ContainerId, operation: &'static str, why: &'static str) -> HostError {
        HostError::ContainerState { vm: self.record.name.to_string(), id: id.to_string(), operation, why }
    }

    /// The guest of a sandbox that runs.
    fn container_guest(&self, operation: &'static str) -> Result<GuestClient, HostError> {
        let name = || self.record.name.to_string();
        if self.record.sandbox.is_none() {
            let message = format!("VM {} has a workload of its own and no containers", name());
            return Err(HostError::Invalid { message });
        }
        let refused = |source| HostError::Refused { name: name(), source };
        self.record.state.admit(Op::Guest).map_err(refused)?;
        self.present_guest(operation)
    }
}

fn process_user(user: pb::ProcessUser) -> ProcessUser {
    ProcessUser { uid: user.uid, gid: user.gid, groups: user.groups }
}

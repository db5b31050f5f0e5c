//! Containers of a pod sandbox.
//!
//! ```text
//! create   slot of the image ─▶ record Created ─▶ guest
//! start    guest ─▶ record Running          (a crash between: the next session settles it)
//! end      output in the log ─▶ record Exited
//! remove   guest ─▶ no record ─▶ slot of the image, if no other container has it
//! ```
//! Nothing is acknowledged before its record is written.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_record::{AttachedImage, ContainerRecord, ContainerSpec, ContainerState, Resources};
use coracle_types::Op;

use super::input::{JobOutcome, JobResult, SessionId, Ticket};
use super::lifecycle::copy_error;
use super::{Action, Answer, Failure, Scope, StepContext, Then};
use crate::container_request::{ContainerEnd, ContainerImage, ContainerRequest};
use crate::events::EventKind;
use crate::guest_requests::{create_request, limits};
use crate::volume::free_slot;
use crate::{ContainerId, Exit, HostError};
use coracle_instance::vmm_config::image_disk;

/// Job of a container that is under way; each variant names what is done when its job ends.
#[derive(Debug)]
pub(crate) enum ContainerWork {
    /// The guest has created the container, or an earlier action failed.
    Create { ticket: Ticket, record: Arc<ContainerRecord> },
    /// The user of the process is recorded.
    UserRecorded { ticket: Ticket, record: Arc<ContainerRecord> },
    /// The process runs, or could not be started.
    Start { ticket: Ticket, id: ContainerId },
    /// The signal was sent.
    Kill { ticket: Ticket, id: ContainerId },
    /// The new limits are set.
    Update { ticket: Ticket, id: ContainerId, resources: Box<Resources>, metadata: BTreeMap<String, String> },
    /// The change is recorded.
    Recorded { ticket: Ticket, id: ContainerId },
    /// The guest has removed the container.
    Remove { ticket: Ticket, record: Arc<ContainerRecord> },
    /// The files of the container are removed.
    Removed { ticket: Ticket, record: Arc<ContainerRecord> },
    /// Unused images are detached from their slots.
    Detached { digests: Vec<String>, end: Box<PendingAnswer> },
    /// The detachment is recorded.
    DetachRecorded { end: Box<PendingAnswer> },
    /// A start or an exit that the guest reported is recorded.
    Changed { id: ContainerId },
    /// The guest was asked to stop the container.
    Stop { id: ContainerId },
}

/// Answer that is due when a container is completely removed.
#[derive(Debug)]
pub(crate) struct PendingAnswer {
    ticket: Ticket,
    /// The last record, or the error that prevented the creation.
    outcome: Result<Arc<ContainerRecord>, HostError>,
}

impl ContainerWork {
    pub(super) fn ticket(&self) -> Option<Ticket> {
        match self {
            Self::Create { ticket, .. }
            | Self::UserRecorded { ticket, .. }
            | Self::Start { ticket, .. }
            | Self::Kill { ticket, .. }
            | Self::Update { ticket, .. }
            | Self::Recorded { ticket, .. }
            | Self::Remove { ticket, .. }
            | Self::Removed { ticket, .. } => Some(*ticket),
            Self::Detached { end, .. } | Self::DetachRecorded { end } => Some(end.ticket),
            Self::Changed { .. } | Self::Stop { .. } => None,
        }
    }
}

impl StepContext {
    fn container_job(&mut self, actions: Vec<Action>, work: ContainerWork) {
        self.begin_job(Scope::Run, actions, Then::Container(work));
    }

    pub(super) fn container_request(&mut self, ticket: Ticket, request: ContainerRequest) {
        let begun = match request {
            ContainerRequest::Create { id, spec, image, mounted } => {
                self.create_container(ticket, id, *spec, [vec![image], mounted].concat())
            }
            ContainerRequest::Start { id } => self.start_container(ticket, id),
            ContainerRequest::Stop { id, grace } => self.stop_container(ticket, id, grace),
            ContainerRequest::Kill { id, signal } => self.kill_container(ticket, id, signal),
            ContainerRequest::Update { id, resources, metadata } => {
                self.update_container(ticket, id, resources, metadata)
            }
            ContainerRequest::Remove { id } => self.remove_container(ticket, &id),
        };
        if let Err(error) = begun {
            self.answer(ticket, Answer::Failed(error));
        }
    }

    fn create_container(
        &mut self,
        ticket: Ticket,
        id: ContainerId,
        spec: ContainerSpec,
        images: Vec<ContainerImage>,
    ) -> Result<(), HostError> {
        if let Some(existing) = self.state.containers.get(&id) {
            if existing.spec != spec {
                return Err(HostError::ContainerExists { vm: self.name(), id: id.into() });
            }
            let record = existing.clone();
            self.answer(ticket, Answer::Container(record));
            return Ok(());
        }
        self.container_guest("make a container")?;
        let digest = images.first().map(|image| image.digest.clone()).unwrap_or_default();
        let record = ContainerRecord::new(id, spec, digest, self.now.time);
        let known = self.state.record.images.len();
        let planned = self.plan_images(images).and_then(|()| {
            let missing =
                || HostError::Invalid { message: "an image of a mount is not on this node".to_owned() };
            create_request(&record, |digest| self.slot_of(digest)).ok_or_else(missing)
        });
        let request = match planned {
            Ok(request) => request,
            Err(error) => {
                self.state.record.images.truncate(known);
                return Err(error);
            }
        };
        let record = Arc::new(record);
        let mut actions = self.attach_images(known);
        actions.push(self.save_container(&record));
        actions.push(Action::OpenLog(record.clone()));
        actions.push(Action::CreateContainer(Box::new(request)));
        self.container_job(actions, ContainerWork::Create { ticket, record });
        Ok(())
    }

    /// Reserves a slot for each image that has none.
    fn plan_images(&mut self, images: Vec<ContainerImage>) -> Result<(), HostError> {
        for ContainerImage { digest, rootfs } in images {
            if self.slot_of(&digest).is_none() {
                let record = &mut self.state.record;
                let slot = free_slot(&record.volumes, &record.images, true);
                let slot = slot.map_err(|message| HostError::Invalid { message })?;
                record.images.push(AttachedImage { digest, rootfs, slot });
            }
        }
        Ok(())
    }

    /// Returns the actions that attach the images from index `known` on; the record is written first.
    fn attach_images(&mut self, known: usize) -> Vec<Action> {
        let new = self.state.record.images.get(known..).unwrap_or_default().to_vec();
        let mut actions = Vec::new();
        if !new.is_empty() {
            actions.push(self.save_record());
        }
        for (number, image) in new.iter().enumerate() {
            let absent = new.iter().skip(number).map(|image| image.slot).collect();
            actions.push(Action::AttachDisk { disk: image_disk(image), absent });
        }
        actions
    }

    pub(super) fn slot_of(&self, digest: &str) -> Option<usize> {
        self.state.record.images.iter().find(|image| image.digest == digest).map(|image| image.slot)
    }

    fn start_container(&mut self, ticket: Ticket, id: ContainerId) -> Result<(), HostError> {
        let record = self.container(&id)?;
        match record.state {
            ContainerState::Running => {
                self.answer(ticket, Answer::Container(record));
                return Ok(());
            }
            ContainerState::Exited => return Err(self.container_state_error(&id, "start", "it has ended")),
            ContainerState::Created => {}
        }
        self.container_guest("start a container")?;
        self.container_job(vec![Action::StartContainer(id.clone())], ContainerWork::Start { ticket, id });
        Ok(())
    }

    /// The guest stops the container in a job beside others. The caller is answered when the exit is recorded.
    fn stop_container(&mut self, ticket: Ticket, id: ContainerId, grace: Duration) -> Result<(), HostError> {
        let record = self.container(&id)?;
        match record.state {
            ContainerState::Running => {}
            ContainerState::Exited => {
                self.answer(ticket, Answer::Container(record));
                return Ok(());
            }
            ContainerState::Created => {
                return Err(self.container_state_error(&id, "stop", "it was not started"));
            }
        }
        self.container_guest("stop a container")?;
        self.state.container_stoppers.entry(id.clone()).or_default().push(ticket);
        let stop = Action::StopContainer(id.clone(), grace);
        self.job(Scope::Run, vec![stop], Then::Container(ContainerWork::Stop { id }));
        Ok(())
    }

    fn kill_container(&mut self, ticket: Ticket, id: ContainerId, signal: i32) -> Result<(), HostError> {
        if self.container(&id)?.state != ContainerState::Running {
            return Err(self.container_state_error(&id, "signal", "it is not running"));
        }
        self.container_guest("signal a container")?;
        let kill = Action::KillContainer(id.clone(), signal);
        self.container_job(vec![kill], ContainerWork::Kill { ticket, id });
        Ok(())
    }

    fn update_container(
        &mut self,
        ticket: Ticket,
        id: ContainerId,
        resources: Resources,
        metadata: BTreeMap<String, String>,
    ) -> Result<(), HostError> {
        if self.container(&id)?.state == ContainerState::Exited {
            return Err(self.container_state_error(&id, "update", "it has ended"));
        }
        self.container_guest("update a container")?;
        let update = Action::UpdateContainer(id.clone(), Box::new(limits(&resources)));
        let resources = Box::new(resources);
        self.container_job(vec![update], ContainerWork::Update { ticket, id, resources, metadata });
        Ok(())
    }

    /// Without a running VM, there is no guest that would have to remove the container.
    fn remove_container(&mut self, ticket: Ticket, id: &ContainerId) -> Result<(), HostError> {
        let record = self.container(id)?;
        if !self.vm_state().has_vmm() {
            self.remove_container_files(ticket, record);
            return Ok(());
        }
        self.container_guest("remove a container")?;
        let remove = vec![Action::RemoveContainer(id.clone())];
        self.container_job(remove, ContainerWork::Remove { ticket, record });
        Ok(())
    }

    /// Removes the record from memory before its files, so that an exit reported meanwhile is not written afterwards.
    fn remove_container_files(&mut self, ticket: Ticket, record: Arc<ContainerRecord>) {
        Arc::make_mut(&mut self.state.containers).remove(&record.id);
        let files = Action::RemoveContainerFiles(self.write_id(), record.id.clone());
        self.container_job(vec![files], ContainerWork::Removed { ticket, record });
    }

    pub(super) fn container_work(&mut self, work: ContainerWork, result: JobResult) {
        match (work, result) {
            (ContainerWork::Create { ticket, mut record }, Ok(outcome)) => {
                if let JobOutcome::User(user) = outcome {
                    Arc::make_mut(&mut record).user = user;
                }
                let save = self.save_container(&record);
                self.container_job(vec![save], ContainerWork::UserRecorded { ticket, record });
            }
            (ContainerWork::Create { ticket, record }, Err(Failure { error, .. })) => {
                let files = Action::RemoveContainerFiles(self.write_id(), record.id.clone());
                self.detach_unused(
                    vec![Action::Try(Box::new(files))],
                    PendingAnswer { ticket, outcome: Err(error) },
                );
            }
            (ContainerWork::UserRecorded { ticket, record }, Ok(_)) => {
                let id = record.id.clone();
                self.put(record);
                self.on_container_recorded(ticket, &id);
            }
            (ContainerWork::Start { ticket, id }, Ok(outcome)) => {
                let exit = match outcome {
                    JobOutcome::NotRun(exit) => exit,
                    _ => None,
                };
                self.record_start(ticket, id, exit);
            }
            (ContainerWork::Kill { ticket, id }, Ok(_)) => self.answer_container(ticket, &id),
            (ContainerWork::Update { ticket, id, resources, metadata }, Ok(_)) => {
                self.record_update(ticket, id, *resources, metadata);
            }
            (ContainerWork::Recorded { ticket, id }, Ok(_)) => self.on_container_recorded(ticket, &id),
            (ContainerWork::Remove { ticket, record }, Ok(_)) => self.remove_container_files(ticket, record),
            (ContainerWork::Removed { ticket, record }, Ok(_)) => {
                self.detach_unused(vec![], PendingAnswer { ticket, outcome: Ok(record) });
            }
            (ContainerWork::Removed { ticket, record }, Err(failure)) => {
                self.put(record);
                self.answer(ticket, Answer::Failed(failure.error));
            }
            (ContainerWork::Detached { digests, end }, Ok(_)) if digests.is_empty() => {
                self.on_container_forgotten(*end);
            }
            (ContainerWork::Detached { digests, end }, Ok(_)) => {
                self.state.record.images.retain(|image| !digests.contains(&image.digest));
                let save = self.save_record();
                self.container_job(vec![save], ContainerWork::DetachRecorded { end });
            }
            (ContainerWork::DetachRecorded { end }, Ok(_)) => self.on_container_forgotten(*end),
            (ContainerWork::Detached { end, .. } | ContainerWork::DetachRecorded { end }, Err(failure)) => {
                let error = failure.error.chain();
                tracing::warn!(vm = %self.state.record.id, error, "image of a container not detached");
                // The slot stays taken, and is reused for the same image.
                self.on_container_forgotten(*end);
            }
            (ContainerWork::Changed { id }, result) => self.on_container_changed(&id, result),
            (ContainerWork::Stop { .. }, Ok(_)) => {}
            (ContainerWork::Stop { id }, Err(Failure { error, .. })) => {
                self.on_container_stop_failed(&id, error);
            }
            (work, Err(failure)) => {
                if let Some(ticket) = work.ticket() {
                    self.answer(ticket, Answer::Failed(failure.error));
                }
            }
        }
    }

    fn record_start(&mut self, ticket: Ticket, id: ContainerId, exit: Option<Exit>) {
        self.mark_started(&id);
        if let Some(exit) = exit {
            let termination_message = String::new();
            self.mark_exited(&ContainerEnd { id: id.clone(), exit, oom_killed: false, termination_message });
        }
        self.record_container(ticket, id);
    }

    fn record_update(
        &mut self,
        ticket: Ticket,
        id: ContainerId,
        new: Resources,
        metadata: BTreeMap<String, String>,
    ) {
        if let Some(record) = Arc::make_mut(&mut self.state.containers).get_mut(&id) {
            let record = Arc::make_mut(record);
            let old = std::mem::take(&mut record.spec.resources);
            record.spec.metadata.extend(metadata);
            record.spec.resources = Resources {
                cpu_quota_us: new.cpu_quota_us.or(old.cpu_quota_us),
                cpu_weight: new.cpu_weight.or(old.cpu_weight),
                memory_max_bytes: new.memory_max_bytes.or(old.memory_max_bytes),
                pids_max: new.pids_max.or(old.pids_max),
                unified: old.unified.into_iter().chain(new.unified).collect(),
            };
        }
        self.record_container(ticket, id);
    }

    fn record_container(&mut self, ticket: Ticket, id: ContainerId) {
        let Some(record) = self.state.containers.get(&id).cloned() else {
            return self.answer_container(ticket, &id);
        };
        let save = self.save_container(&record);
        self.container_job(vec![save], ContainerWork::Recorded { ticket, id });
    }

    fn on_container_recorded(&mut self, ticket: Ticket, id: &ContainerId) {
        self.publish(EventKind::Updated);
        self.answer_container(ticket, id);
        self.answer_stopped(id);
    }

    /// Detaches images that no container uses any more, after `actions`.
    fn detach_unused(&mut self, mut actions: Vec<Action>, end: PendingAnswer) {
        let containers = &self.state.containers;
        let used = |digest: &String| containers.values().any(|one| one.images().any(|image| image == digest));
        let unused: Vec<_> = self.state.record.images.iter().filter(|i| !used(&i.digest)).cloned().collect();
        if self.vm_state().has_vmm() {
            actions.extend(unused.iter().map(|image| Action::DetachDisk { slot: image.slot }));
        }
        if actions.is_empty() && unused.is_empty() {
            return self.on_container_forgotten(end);
        }
        let digests = unused.into_iter().map(|image| image.digest).collect();
        self.container_job(actions, ContainerWork::Detached { digests, end: Box::new(end) });
    }

    fn on_container_forgotten(&mut self, PendingAnswer { ticket, outcome }: PendingAnswer) {
        match outcome {
            Ok(record) => {
                self.answer_container_stoppers(&record.id);
                self.publish(EventKind::Updated);
                self.answer(ticket, Answer::Container(record));
            }
            Err(error) => self.answer(ticket, Answer::Failed(error)),
        }
    }

    pub(super) fn on_container_started(&mut self, id: &ContainerId) {
        if self.mark_started(id) {
            self.save_changed(id);
        }
    }

    pub(super) fn on_container_exited(&mut self, end: ContainerEnd) {
        match self.mark_exited(&end) {
            true => self.save_changed(&end.id),
            false => self.answer_stopped(&end.id),
        }
    }

    /// Marks the container as started. Returns true if it was not started before.
    fn mark_started(&mut self, id: &ContainerId) -> bool {
        let Some(record) = self.created_or_running(id) else { return false };
        if record.state != ContainerState::Created {
            return false;
        }
        let now = self.now.time;
        self.change_container(id, |record| {
            record.state = ContainerState::Running;
            record.started_at = Some(now);
        });
        true
    }

    /// Marks the container as exited. Returns true if it had not exited before.
    fn mark_exited(&mut self, end: &ContainerEnd) -> bool {
        let now = self.now.time;
        if self.created_or_running(&end.id).is_none() {
            return false;
        }
        self.change_container(&end.id, |record| {
            record.state = ContainerState::Exited;
            record.started_at = record.started_at.or(Some(now));
            record.finished_at = Some(now);
            record.exit = Some(end.exit.clone());
            record.oom_killed = end.oom_killed;
            record.termination_message.clone_from(&end.termination_message);
        });
        true
    }

    fn created_or_running(&self, id: &ContainerId) -> Option<&ContainerRecord> {
        let record = self.state.containers.get(id).map(Arc::as_ref);
        record.filter(|record| record.state != ContainerState::Exited)
    }

    fn change_container(&mut self, id: &ContainerId, change: impl FnOnce(&mut ContainerRecord)) {
        if let Some(record) = Arc::make_mut(&mut self.state.containers).get_mut(id) {
            change(Arc::make_mut(record));
        }
    }

    fn put(&mut self, record: Arc<ContainerRecord>) {
        Arc::make_mut(&mut self.state.containers).insert(record.id.clone(), record);
    }

    fn save_changed(&mut self, id: &ContainerId) {
        let Some(record) = self.state.containers.get(id).cloned() else { return };
        let save = self.save_container(&record);
        let then = Then::Container(ContainerWork::Changed { id: id.clone() });
        self.job(Scope::Vm, vec![save], then);
    }

    fn on_container_changed(&mut self, id: &ContainerId, result: JobResult) {
        if let Err(Failure { error, .. }) = result {
            tracing::warn!(vm = %self.state.record.id, container = %id, error = error.chain(), "container not up to date");
            for ticket in self.state.container_stoppers.remove(id).unwrap_or_default() {
                self.answer(ticket, Answer::Failed(copy_error(&error)));
            }
        }
        self.publish(EventKind::Updated);
        self.answer_stopped(id);
    }

    fn on_container_stop_failed(&mut self, id: &ContainerId, error: HostError) {
        let mut error = Some(error);
        for ticket in self.state.container_stoppers.remove(id).unwrap_or_default() {
            let why = || self.container_state_error(id, "stop", "the guest did not end it");
            let error = error.take().unwrap_or_else(why);
            self.answer(ticket, Answer::Failed(error));
        }
    }

    /// Marks all containers as lost, because the VM has ended; returns the actions that record it.
    pub(super) fn lose_containers(&mut self, why: &str) -> Vec<Action> {
        self.state.record.images.clear();
        let ids: Vec<_> = self.state.containers.keys().cloned().collect();
        let lost: Vec<_> = ids.into_iter().filter(|id| self.mark_lost(id, why)).collect();
        let records: Vec<_> = lost.iter().filter_map(|id| self.state.containers.get(id).cloned()).collect();
        let save = |record: &Arc<_>| Action::Try(Box::new(self.save_container(record)));
        records.iter().map(save).collect()
    }

    pub(super) fn lose_container(&mut self, id: &ContainerId, why: &str) {
        match self.mark_lost(id, why) {
            true => self.save_changed(id),
            false => self.answer_stopped(id),
        }
    }

    fn mark_lost(&mut self, id: &ContainerId, why: &str) -> bool {
        let now = self.now.time;
        let has_to = self.created_or_running(id).is_some();
        if has_to {
            self.change_container(id, |record| record.lose(why, now));
        }
        has_to
    }

    fn answer_container(&mut self, ticket: Ticket, id: &ContainerId) {
        let answer = self.container(id).map_or_else(Answer::Failed, Answer::Container);
        self.answer(ticket, answer);
    }

    /// Answers the callers that wait for the exit of the container, if it has exited.
    fn answer_stopped(&mut self, id: &ContainerId) {
        if self.created_or_running(id).is_none() {
            self.answer_container_stoppers(id);
        }
    }

    pub(super) fn answer_container_stoppers(&mut self, id: &ContainerId) {
        for ticket in self.state.container_stoppers.remove(id).unwrap_or_default() {
            self.answer_container(ticket, id);
        }
    }

    fn container(&self, id: &ContainerId) -> Result<Arc<ContainerRecord>, HostError> {
        let missing = || HostError::NoContainer { vm: self.name(), id: id.to_string() };
        self.state.containers.get(id).cloned().ok_or_else(missing)
    }

    fn container_state_error(
        &self,
        id: &ContainerId,
        operation: &'static str,
        why: &'static str,
    ) -> HostError {
        HostError::ContainerState { vm: self.name(), id: id.to_string(), operation, why }
    }

    /// Returns the session with the guest of a running sandbox.
    fn container_guest(&self, operation: &'static str) -> Result<SessionId, HostError> {
        if self.state.record.sandbox.is_none() {
            let message = format!("VM {} has a workload of its own and no containers", self.name());
            return Err(HostError::Invalid { message });
        }
        self.admit(Op::Guest)?;
        self.present_guest(operation)
    }
}

//! Reports of jobs: those of a run while they last, those of others when they have ended.

use super::input::{JobId, JobOutcome, JobResult, RunEvent, SessionId};
use super::{Effect, StepContext, Then};
use crate::events::EventKind;
use coracle_types::VmState;

impl StepContext {
    pub(super) fn on_run_event(&mut self, event: RunEvent) {
        if !self.vm_state().has_vmm() {
            return;
        }
        match event {
            RunEvent::Spawned(vmm, from) => self.on_spawned(&vmm, from),
            RunEvent::Loaded(vmm) => self.on_loaded(vmm),
            RunEvent::Booted(Ok(up)) if self.vm_state() == VmState::Starting => self.on_booted(up),
            RunEvent::Booted(Ok(_)) => {}
            RunEvent::Booted(Err(error)) => self.on_boot_failed(error),
            RunEvent::HookInterrupted(session) => {
                self.state.post_snapshot_due = true;
                // The next session may have begun before this report arrived.
                if self.state.session != Some(session) {
                    self.run_post_snapshot_hook();
                }
            }
            RunEvent::Session(session) => self.session(session),
            RunEvent::Exited(end) => self.on_exited(end),
            RunEvent::Drained => self.on_drained(),
            RunEvent::ContainerStarted(id) => self.on_container_started(&id),
            RunEvent::ContainerExited(end) => self.on_container_exited(end),
            RunEvent::Committed(outcome) => self.on_committed(outcome),
            RunEvent::VmmGone { last_words } => self.on_vmm_gone(&last_words),
        }
    }

    /// Handles a session that begins or has ended. An interrupted change of the VM's volumes can be finished now.
    fn session(&mut self, session: Option<SessionId>) {
        let before = std::mem::replace(&mut self.state.session, session);
        // The session of a start is already known, and settled since the guest was up.
        self.state.settle_due |= before != session;
        if session.is_none() {
            if before.is_some() {
                self.effect(Effect::ForgetSession(before));
            }
            self.publish(EventKind::Updated);
        }
    }

    /// Handles the result of a job. A job that was cancelled meanwhile is unknown.
    pub(super) fn on_job_ended(&mut self, job: JobId, result: JobResult) {
        let Some((_, then)) = self.state.jobs.remove(&job).map(|job| *job) else { return };
        if self.state.busy == Some(job) {
            self.state.busy = None;
        }
        match then {
            Then::Publish => {
                self.warn("write record", &result);
                self.publish(EventKind::Updated);
            }
            Then::Nothing(what) => self.warn(what, &result),
            Then::Found => {
                let found = match result {
                    Ok(JobOutcome::Found(found)) => found,
                    _ => None,
                };
                self.on_vmm_found(found);
            }
            Then::Adopted { network } => self.on_adopted(network, result),
            Then::ReadyToBoot => match result {
                Ok(_) => {
                    self.state.record.instance = None;
                    self.begin_boot();
                }
                Err(failure) => self.end_run(VmState::Failed, failure.error.chain()),
            },
            Then::BootRecorded { before } => self.on_boot_recorded(before, result),
            Then::RunRecorded { session } => self.on_run_recorded(session, result),
            Then::LoadRecorded { vmm, saved } => self.on_load_recorded(&vmm, saved, result),
            Then::StateRecorded { before, ticket } => self.on_state_recorded(before, ticket, result),
            Then::StopRecorded { grace, paused } => self.on_stop_recorded(grace, paused, result),
            Then::Ended { state, message } => self.on_ended(state, message, result),
            Then::EndRecorded { before, failed } => self.on_end_recorded(before, failed, result),
            Then::DeletionRecorded { force } => self.on_deletion_recorded(force, result),
            Then::DeletionEnded { force } => self.on_deletion_ended(force, result),
            Then::Erased { vmm_left } => self.on_erased(vmm_left, result),
            Then::Memory(work) => self.memory_work(work, result),
            Then::Volume(work) => self.volume_work(work, result),
            Then::Container(work) => self.container_work(work, result),
            Then::Settle(work) => self.settle_work(work, result),
        }
    }

    pub(super) fn warn(&self, what: &str, result: &JobResult) {
        if let Err(failure) = result {
            tracing::warn!(vm = %self.state.record.id, what, error = failure.error.chain(), "job failed");
        }
    }
}

//! Reports of jobs: those of a run while they last, those of others when they have ended.

use super::input::{JobId, JobOutcome, JobResult, RunEvent, SessionId};
use super::{Effect, StepContext, Then};
use crate::events::EventKind;
use coracle_types::VmState;

impl StepContext {
    pub(super) fn run_event(&mut self, event: RunEvent) {
        if !self.vm_state().has_vmm() {
            return;
        }
        match event {
            RunEvent::Spawned(vmm, from) => self.spawned(&vmm, from),
            RunEvent::Loaded(vmm) => self.loaded(vmm),
            RunEvent::Booted(Ok(up)) if self.vm_state() == VmState::Starting => self.booted(up),
            RunEvent::Booted(Ok(_)) => {}
            RunEvent::Booted(Err(error)) => self.boot_failed(error),
            RunEvent::HookInterrupted(session) => {
                self.state.post_snapshot_due = true;
                // The next session may have begun before this report arrived.
                if self.state.session != Some(session) {
                    self.run_post_snapshot_hook();
                }
            }
            RunEvent::Session(session) => self.session(session),
            RunEvent::Exited(end) => self.exited(end),
            RunEvent::Drained => self.drained(),
            RunEvent::ContainerStarted(id) => self.container_started(&id),
            RunEvent::ContainerExited(end) => self.container_exited(end),
            RunEvent::Committed(outcome) => self.committed(outcome),
            RunEvent::VmmGone { last_words } => self.vmm_gone(&last_words),
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
    pub(super) fn job_ended(&mut self, job: JobId, result: JobResult) {
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
                self.found(found);
            }
            Then::Adopted { network } => self.adopted(network, result),
            Then::ReadyToBoot => match result {
                Ok(_) => {
                    self.state.record.instance = None;
                    self.begin_boot();
                }
                Err(failure) => self.end_run(VmState::Failed, failure.error.chain()),
            },
            Then::BootRecorded { before } => self.boot_recorded(before, result),
            Then::RunRecorded { session } => self.run_recorded(session, result),
            Then::LoadRecorded { vmm, saved } => self.load_recorded(&vmm, saved, result),
            Then::StateRecorded { before, ticket } => self.state_recorded(before, ticket, result),
            Then::StopRecorded { grace, paused } => self.stop_recorded(grace, paused, result),
            Then::Ended { state, message } => self.ended(state, message, result),
            Then::EndRecorded { before, failed } => self.end_recorded(before, failed, result),
            Then::DeletionRecorded { force } => self.deletion_recorded(force, result),
            Then::DeletionEnded { force } => self.deletion_ended(force, result),
            Then::Erased { vmm_left } => self.erased(vmm_left, result),
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

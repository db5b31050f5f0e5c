//! Lifecycle of a VM: adoption after a restart of the daemon, start, and end of a run.
//!
//! The VMM is started while the record of the start is still being written. A VMM that no record asks for is ended at the next
//! start of the daemon (`adopt.rs`).

use std::time::Duration;

use coracle_record::{SavedMemory, millis};
use coracle_types::VmState;

use super::input::{RunningVmm, SessionId, StartedFrom, Ticket, Up};
use super::{Action, Answer, Effect, JobResult, Scope, StepContext, Then};
use crate::HostError;
use crate::adopt::{Adoption, FoundVmm, adopt};
use crate::events::EventKind;

/// Time for the guest to sync and unmount, beyond the grace period of its workload.
const SYNC_GRACE: Duration = Duration::from_secs(3);
/// Prefix of the message of a running VM whose network could not be restored.
const CUT_OFF: &str = "cut off from the network";

impl StepContext {
    /// Begins the adoption after a start of the daemon: looks for the VMM.
    pub(super) fn begin(&mut self) {
        let logs = self.state.containers.values().cloned().collect();
        self.begin_job(Scope::Run, vec![Action::OpenLogs(logs), Action::Find], Then::Found);
    }

    pub(super) fn on_vmm_found(&mut self, found: Option<RunningVmm>) {
        let record = &self.state.record;
        let seen = match &found {
            None => FoundVmm::Nothing,
            Some(vmm) if record.process == Some(vmm.process) => FoundVmm::Known,
            Some(_) => FoundVmm::Unrecorded,
        };
        let adoption = adopt(record.state, seen, record.saved.is_some());
        if adoption != Adoption::Keep {
            tracing::info!(vm = %record.id, ?adoption, "adopt");
        }
        match (adoption, found) {
            (Adoption::Keep, _) => {}
            (Adoption::Discard | Adoption::FinishDelete, _) => self.delete(None, false),
            (Adoption::EndUnrecorded, _) => {
                let (state, message) = (record.state, record.message.clone());
                self.end_run(state, message);
            }
            (Adoption::Start, _) => {
                self.begin_job(Scope::Vm, vec![Action::EndVmm], Then::ReadyToBoot);
            }
            (Adoption::FinishStop, _) => self.end_run(VmState::Stopped, String::new()),
            (Adoption::Lost, _) | (Adoption::Attach | Adoption::ResumeGuest, None) => {
                let why = "the VMM went away while the node was down".to_owned();
                self.end_run(VmState::Failed, why);
            }
            (Adoption::Attach | Adoption::ResumeGuest, Some(vmm)) => self.attach(vmm),
        }
    }

    /// Adopts a running VMM and restores the recorded power state.
    fn attach(&mut self, vmm: RunningVmm) {
        self.record_vmm(&vmm);
        self.effect(Effect::Watch(vmm.process));
        if self.vm_state() == VmState::Starting {
            self.state.boot_began = self.now.at;
            return self.effect(Effect::Boot);
        }
        self.begin_job(Scope::Run, vec![Action::RestoreNetwork], Then::Adopted { network: None });
    }

    /// Handles the restored network, then the restored power state, or the failure of either.
    pub(super) fn on_adopted(&mut self, network: Option<String>, result: JobResult) {
        let Some(message) = network else {
            let message = match result {
                Ok(_) if self.state.record.message.starts_with(CUT_OFF) => String::new(),
                Ok(_) => self.state.record.message.clone(),
                Err(failure) => {
                    let error = failure.error.chain();
                    tracing::error!(vm = %self.state.record.id, error, "restore network failed");
                    format!("{CUT_OFF}: {error}")
                }
            };
            let power = self.power_action();
            return self.begin_job(Scope::Run, vec![power], Then::Adopted { network: Some(message) });
        };
        let mut changed = self.state.record.message != message;
        self.state.record.message = message;
        match result {
            Ok(_) => changed |= self.save_was_cut_off(),
            Err(failure) => {
                tracing::warn!(vm = %self.state.record.id, error = failure.error.chain(), "restore recorded power state failed");
            }
        }
        if changed {
            self.save_quietly();
        }
        self.follow_again();
        self.forget_saved();
    }

    /// Returns true for a VM whose hibernation was interrupted; its state is set to Running.
    fn save_was_cut_off(&mut self) -> bool {
        let is_cut_off = self.vm_state() == VmState::Hibernating;
        if is_cut_off {
            self.state.record.state = VmState::Running;
            self.state.record.message = "its hibernation was cut off".to_owned();
        }
        is_cut_off
    }

    /// Returns the action that pauses or resumes the vCPUs as recorded. No call waits for a guest that is about to be paused.
    pub(super) fn power_action(&mut self) -> Action {
        let pause = self.vm_state() == VmState::Paused;
        self.effect(Effect::SetPaused(pause));
        if pause { Action::Pause } else { Action::Resume }
    }

    /// Records the VMM that runs now.
    fn record_vmm(&mut self, vmm: &RunningVmm) {
        let record = &mut self.state.record;
        record.instance = Some(vmm.instance.clone());
        record.process = Some(vmm.process);
        record.accelerator = Some(vmm.accelerator);
    }

    pub(super) fn start(&mut self, ticket: Ticket) {
        match self.vm_state() {
            VmState::Running => self.answer(ticket, Answer::Done),
            VmState::Paused => self.resume(ticket),
            VmState::Starting => self.state.starters.push(ticket),
            _ => {
                self.state.starters.push(ticket);
                self.begin_boot();
            }
        }
    }

    pub(super) fn begin_boot(&mut self) {
        let mut lost = Vec::new();
        // A guest that continues from saved memory does not boot, and its output continues.
        if self.state.record.saved.is_none() {
            self.state.record.boots += 1;
            self.state.record.output_before = 0;
            self.drop_half_volumes();
            lost = self.lose_containers("its VM was started anew");
        }
        let record = &mut self.state.record;
        record.exit = None;
        record.oom_killed = false;
        record.committed = None;
        record.finished_at = None;
        record.address_acknowledged = false;
        record.message.clear();
        let before = std::mem::replace(&mut record.state, VmState::Starting);
        self.state.boot_began = self.now.at;
        self.effect(Effect::Boot);
        lost.push(self.save_record());
        self.begin_job(Scope::Vm, lost, Then::BootRecorded { before });
    }

    pub(super) fn on_boot_recorded(&mut self, before: VmState, result: JobResult) {
        match result {
            Ok(_) => self.publish(EventKind::of_change(before, self.vm_state())),
            Err(failure) => {
                let message = failure.error.chain();
                self.state.start_error = Some(failure.error);
                self.end_run(before, message);
            }
        }
    }

    pub(super) fn on_spawned(&mut self, vmm: &RunningVmm, from: StartedFrom) {
        self.record_vmm(vmm);
        let record = &mut self.state.record;
        record.template = from.template;
        record.premounted = from.premounted;
        record.pooled = from.pooled;
        self.save_quietly();
        self.effect(Effect::Watch(vmm.process));
    }

    /// Handles a VMM that has loaded the memory. As soon as the guest runs it changes its disks, so the memory file is marked
    /// as used before.
    pub(super) fn on_loaded(&mut self, vmm: RunningVmm) {
        let saved = self.state.record.saved.take().map(Box::new);
        self.record_vmm(&vmm);
        let save = self.save_record();
        self.supersede();
        self.begin_job(Scope::Vm, vec![save], Then::LoadRecorded { vmm, saved });
    }

    pub(super) fn on_load_recorded(
        &mut self,
        vmm: &RunningVmm,
        saved: Option<Box<SavedMemory>>,
        result: JobResult,
    ) {
        match result {
            Ok(_) => {
                self.effect(Effect::Watch(vmm.process));
                self.effect(Effect::ResumeRestored);
            }
            Err(failure) => {
                self.state.record.saved = saved.map(|saved| *saved);
                let message = failure.error.chain();
                self.state.start_error = Some(failure.error);
                self.end_run(VmState::Hibernated, message);
            }
        }
    }

    pub(super) fn on_booted(&mut self, Up { session, identity, workload }: Up) {
        let took = self.now.at.saturating_duration_since(self.state.boot_began);
        let record = &mut self.state.record;
        record.started_at = Some(self.now.time);
        record.boot_ms = millis(took);
        record.identity_ms = millis(identity);
        record.workload_ms = millis(workload);
        record.address_acknowledged = session.is_some() && record.address.is_some();
        record.state = VmState::Running;
        record.message.clear();
        self.state.session = session;
        // Before the first request, because it may need the volumes.
        self.state.settle_due = session.is_some();
        let save = self.save_record();
        self.supersede();
        self.begin_job(Scope::Vm, vec![save], Then::RunRecorded { session });
    }

    /// Drops the write that is under way, because the next one contains more.
    fn supersede(&mut self) {
        if let Some(job) = self.state.busy.take() {
            self.state.jobs.remove(&job);
        }
    }

    pub(super) fn on_run_recorded(&mut self, session: Option<SessionId>, result: JobResult) {
        match result {
            Ok(_) => {
                self.publish(EventKind::of_change(VmState::Starting, VmState::Running));
                self.answer_starters(Ok(()));
            }
            Err(failure) => self.answer_starters(Err(failure.error)),
        }
        self.state.is_following = true;
        self.effect(Effect::Follow(session));
        self.forget_saved();
    }

    pub(super) fn on_boot_failed(&mut self, error: HostError) {
        let message = error.chain();
        tracing::warn!(vm = %self.state.record.id, error = message, "start VM failed");
        // The VM is intact as long as its memory exists.
        let end = if self.state.record.saved.is_some() { VmState::Hibernated } else { VmState::Failed };
        self.state.start_error = Some(error);
        self.end_run(end, message);
    }

    /// Follows a guest again that was left. A guest that was not left still has its follower; a second one would read its
    /// output twice.
    pub(super) fn follow_again(&mut self) {
        if !std::mem::replace(&mut self.state.is_following, true) {
            self.effect(Effect::Follow(None));
        }
    }

    /// Removes saved memory that no guest needs. Nothing else begins before that: a hibernation would write its own memory to
    /// the same path.
    pub(super) fn forget_saved(&mut self) {
        if self.state.record.saved.is_none() {
            self.begin_job(Scope::Vm, vec![Action::RemoveSavedMemory], Then::Nothing("remove used memory"));
        }
    }

    /// Asks the guest to power off, and sets a time limit, which a second request can only shorten. `paused`: the vCPUs may be
    /// paused.
    pub(super) fn ask_to_power_off(&mut self, grace: Duration, paused: bool) {
        if matches!(self.state.under_way(), Some(Then::Memory(_))) {
            // The workload has ended by itself while the VM is being paused, saved or copied.
            self.state.power_off_due = Some(grace);
            return;
        }
        let limit = self.now.at + grace + SYNC_GRACE;
        self.state.kill_at = Some(self.state.kill_at.map_or(limit, |earlier| earlier.min(limit)));
        if self.vm_state() == VmState::Stopping {
            return;
        }
        self.state.record.state = VmState::Stopping;
        let save = self.save_record();
        self.job(Scope::Run, vec![save], Then::StopRecorded { grace, paused });
    }

    /// Asks the guest to power off, even if the stop could not be recorded.
    pub(super) fn on_stop_recorded(&mut self, grace: Duration, paused: bool, result: JobResult) {
        match result {
            Ok(_) => self.publish(EventKind::Updated),
            Err(failure) => {
                tracing::warn!(vm = %self.state.record.id, error = failure.error.chain(), "record stop failed");
            }
        }
        let mut actions = Vec::new();
        if paused {
            self.effect(Effect::SetPaused(false));
            actions.push(Action::Try(Box::new(Action::Resume)));
            self.follow_again();
        }
        if self.state.session.is_some() {
            actions.push(Action::AskToPowerOff { grace });
        }
        self.job(Scope::Run, actions, Then::Nothing("ask guest to power off"));
    }

    pub(super) fn on_timer(&mut self) {
        if self.state.kill_at.is_some_and(|at| at <= self.now.at) {
            self.end_run(VmState::Stopped, "killed: the guest did not power off in time".to_owned());
        }
    }

    pub(super) fn on_vmm_gone(&mut self, last_words: &str) {
        let record = &self.state.record;
        match record.state {
            // The boot job notices this, too, and has more information.
            VmState::Starting => {}
            VmState::Stopping => self.end_run(VmState::Stopped, record.message.clone()),
            VmState::Running if record.disk_image_vm.is_some() => {
                self.end_run(VmState::Stopped, "the guest powered off".to_owned());
            }
            _ if record.exit.is_some() => self.end_run(VmState::Stopped, record.message.clone()),
            _ => self.end_run(VmState::Failed, format!("the VMM exited{last_words}")),
        }
    }

    /// Ends the VMM, releases the resources of a running VM, and records the end.
    pub(super) fn end_run(&mut self, state: VmState, message: String) {
        self.cancel_under_way("its VMM is being ended");
        let message = self.final_message(message);
        self.leave_run();
        let actions = vec![Action::EndVmm];
        self.begin_job(Scope::Vm, actions, Then::Ended { state, message });
    }

    /// Leaves the run: later reports of its jobs are ignored.
    pub(super) fn leave_run(&mut self) {
        self.state.run += 1;
        self.state.jobs.retain(|_, job| job.0 == Scope::Vm);
        self.state.session = None;
        self.state.settle_due = false;
        self.state.command_due = false;
        self.state.power_off_due = None;
        self.state.is_following = false;
        self.state.kill_at = None;
        self.state.post_snapshot_due = false;
        self.effect(Effect::ForgetSession(None));
        self.effect(Effect::SetPaused(false));
    }

    pub(super) fn on_ended(&mut self, state: VmState, message: String, result: JobResult) {
        let failed = result.err().map(|failure| failure.error);
        match &failed {
            Some(error) => {
                tracing::error!(vm = %self.state.record.id, error = error.chain(), "end VMM failed")
            }
            None => self.state.record.instance = None,
        }
        let mut actions = Vec::new();
        if state != VmState::Hibernated {
            actions = self.lose_containers("its VM ended");
            // An open directory keeps its file system mounted. A hibernated guest has files of it open.
            self.effect(Effect::CloseSharedDirs);
        }
        let record = &mut self.state.record;
        record.process = None;
        record.address_acknowledged = false;
        record.finished_at = Some(self.now.time);
        record.message = message;
        let before = std::mem::replace(&mut record.state, state);
        actions.push(self.save_record());
        self.begin_job(Scope::Vm, actions, Then::EndRecorded { before, failed });
    }

    /// An end that was not recorded is not acknowledged, and the callers get the reason.
    pub(super) fn on_end_recorded(&mut self, before: VmState, failed: Option<HostError>, result: JobResult) {
        self.state.unsaved = result.is_err();
        match &result {
            Ok(_) => self.publish(EventKind::of_change(before, self.vm_state())),
            Err(failure) => {
                tracing::error!(vm = %self.state.record.id, error = failure.error.chain(), "write record failed");
                self.publish(EventKind::Updated);
            }
        }
        let (name, why) = (self.name(), "it was stopped before it ran".to_owned());
        let error = self.state.start_error.take().unwrap_or(HostError::Boot { name, why });
        self.answer_starters(Err(error));
        let outcome = result.map(drop).map_err(|failure| failure.error).and(failed.map_or(Ok(()), Err));
        for ticket in std::mem::take(&mut self.state.stoppers) {
            self.answer_result(ticket, copy_result(&outcome));
        }
        for id in self.state.containers.keys().cloned().collect::<Vec<_>>() {
            self.answer_container_stoppers(&id);
        }
    }

    pub(super) fn on_state_recorded(&mut self, before: VmState, ticket: Ticket, result: JobResult) {
        self.state.unsaved = result.is_err();
        if result.is_ok() {
            self.publish(EventKind::of_change(before, self.vm_state()));
        }
        self.answer_result(ticket, result.map(drop).map_err(|failure| failure.error));
    }

    /// Answers the first caller with the error itself, the others with its text.
    fn answer_starters(&mut self, result: Result<(), HostError>) {
        let mut starters = std::mem::take(&mut self.state.starters).into_iter();
        let Some(first) = starters.next() else { return };
        let name = self.name();
        for other in starters {
            let why = |error: &HostError| HostError::Boot { name: name.clone(), why: error.chain() };
            let heard = result.as_ref().err().map(why).map_or(Ok(()), Err);
            self.answer_result(other, heard);
        }
        self.answer_result(first, result);
    }
}

/// Copies a result for one more caller.
pub(super) fn copy_result(result: &Result<(), HostError>) -> Result<(), HostError> {
    result.as_ref().err().map(copy_error).map_or(Ok(()), Err)
}

/// Copies an error for one more caller.
pub(super) fn copy_error(error: &HostError) -> HostError {
    match error {
        HostError::Files { operation, id, source } => {
            let source = std::io::Error::new(source.kind(), source.to_string());
            HostError::Files { operation, id: id.clone(), source }
        }
        error => HostError::Invalid { message: error.chain() },
    }
}

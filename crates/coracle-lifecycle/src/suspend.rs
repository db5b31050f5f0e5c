//! Pausing a guest, saving its memory, and resuming it.
//!
//! ```text
//! pause      record Paused ─▶ pause                    resume   record Running ─▶ resume
//! hibernate  record Hibernating ─▶ pause ─▶ save, sync, rename ─▶ record Hibernated ─▶ end the VMM
//! snapshot   pre-snapshot hook ─▶ pause ─▶ save, copy the disk ─▶ resume as recorded ─▶ sync; post-snapshot hook
//! start      record Starting ─▶ VMM loads ─▶ record "used up" ─▶ resume ─▶ record Running ─▶ remove the file
//! ```
//! After an interruption at any point, the record tells whether VMM or file is valid (`adopt.rs`): up to "Hibernated" the VMM,
//! from then on the file, until it is used up.

use std::path::PathBuf;

use coracle_record::SavedMemory;
use coracle_types::VmState;

use super::input::{JobOutcome, JobResult, Ticket};
use super::{Action, Answer, Effect, SaveTo, Scope, StepContext, Then};
use crate::Hook;
use crate::events::EventKind;
use crate::{HostError, Volume};

/// Work on the memory or the vCPUs of a VM that is under way; each variant names what is done when its job ends.
#[derive(Debug)]
pub(crate) enum MemoryWork {
    /// The vCPUs are paused or resumed; `before` is the state after a failure.
    Power { ticket: Ticket, before: VmState },
    /// The vCPUs are in the state before the failure.
    PowerUndone { ticket: Ticket, error: HostError },
    /// The record is written, space for the memory is reserved, and the agent has reported its version.
    Hibernating { ticket: Ticket, before: VmState },
    /// The memory is saved in its file.
    HibernationSaved { ticket: Ticket, before: VmState, agent: String },
    /// The hibernation is recorded.
    HibernationRecorded { ticket: Ticket, before: VmState },
    /// The guest runs as before the failure.
    HibernationUndone { ticket: Ticket, error: HostError },
    /// The pre-snapshot hook has run.
    HookRun { ticket: Ticket, dir: PathBuf },
    /// Space for the copy is reserved.
    CopyReserved { ticket: Ticket, dir: PathBuf },
    /// Memory and disk are copied, or the copy failed.
    Copied { ticket: Ticket, dir: PathBuf, agent: String },
    /// The guest runs as before, or could not be resumed.
    CopyResumed { ticket: Ticket, dir: PathBuf, copied: Result<Box<SavedMemory>, HostError> },
    /// The copy is synced to disk.
    CopySynced { ticket: Ticket, saved: Box<SavedMemory> },
    /// The saved memory of a hibernated VM is copied.
    RestCopied { ticket: Ticket, saved: Box<SavedMemory> },
}

impl MemoryWork {
    pub(super) fn ticket(&self) -> Ticket {
        match self {
            Self::Power { ticket, .. }
            | Self::PowerUndone { ticket, .. }
            | Self::Hibernating { ticket, .. }
            | Self::HibernationSaved { ticket, .. }
            | Self::HibernationRecorded { ticket, .. }
            | Self::HibernationUndone { ticket, .. }
            | Self::HookRun { ticket, .. }
            | Self::CopyReserved { ticket, .. }
            | Self::Copied { ticket, .. }
            | Self::CopyResumed { ticket, .. }
            | Self::CopySynced { ticket, .. }
            | Self::RestCopied { ticket, .. } => *ticket,
        }
    }
}

impl StepContext {
    pub(super) fn pause(&mut self, ticket: Ticket) {
        self.set_power(ticket, VmState::Paused);
    }

    pub(super) fn resume(&mut self, ticket: Ticket) {
        self.set_power(ticket, VmState::Running);
    }

    fn set_power(&mut self, ticket: Ticket, state: VmState) {
        let before = std::mem::replace(&mut self.state.record.state, state);
        self.state.record.message.clear();
        let save = self.save_record();
        let power = self.power_action();
        self.memory_job(vec![save, power], MemoryWork::Power { ticket, before });
    }

    fn memory_job(&mut self, actions: Vec<Action>, work: MemoryWork) {
        self.begin_job(Scope::Run, actions, Then::Memory(work));
    }

    pub(super) fn memory_work(&mut self, work: MemoryWork, result: JobResult) {
        match work {
            MemoryWork::Power { ticket, before } => self.on_power_set(ticket, before, result),
            MemoryWork::PowerUndone { ticket, error } => self.answer(ticket, Answer::Failed(error)),
            MemoryWork::Hibernating { ticket, before } => self.on_hibernating(ticket, before, result),
            MemoryWork::HibernationSaved { ticket, before, agent } => match saved_by(result, agent) {
                Ok(saved) => self.record_hibernation(ticket, before, *saved),
                Err(error) => self.undo_hibernation(ticket, before, error),
            },
            MemoryWork::HibernationRecorded { ticket, before } => match result {
                Ok(_) => {
                    self.publish(EventKind::of_change(before, VmState::Hibernated));
                    self.state.stoppers.push(ticket);
                    self.end_run(VmState::Hibernated, String::new());
                }
                Err(failure) => {
                    self.state.record.saved = None;
                    self.undo_hibernation(ticket, before, failure.error);
                }
            },
            MemoryWork::HibernationUndone { ticket, error } => {
                self.follow_again();
                self.forget_saved();
                self.answer(ticket, Answer::Failed(error));
            }
            MemoryWork::HookRun { ticket, dir } => match result {
                Ok(_) => self.reserve_copy(ticket, dir),
                Err(failure) => self.on_copy_failed(ticket, failure.error),
            },
            MemoryWork::CopyReserved { ticket, dir } => match result {
                Ok(outcome) => {
                    self.leave_guest();
                    let save = Action::SaveMemory(SaveTo::Copy(dir.clone()));
                    let work = MemoryWork::Copied { ticket, dir, agent: agent_of(outcome) };
                    self.memory_job(vec![Action::AwaitHangup, Action::Pause, save], work);
                }
                Err(failure) => self.on_copy_failed(ticket, failure.error),
            },
            MemoryWork::Copied { ticket, dir, agent } => {
                let copied = saved_by(result, agent);
                // The guest is resumed before the disk is synced, and also when the copy failed.
                let power = self.power_action();
                self.memory_job(vec![power], MemoryWork::CopyResumed { ticket, dir, copied });
            }
            MemoryWork::CopyResumed { ticket, dir, copied } => {
                self.on_copy_resumed(ticket, dir, copied, result)
            }
            MemoryWork::CopySynced { ticket, saved } => match result {
                Ok(_) => self.on_copy_done(ticket, saved),
                Err(failure) => self.on_copy_failed(ticket, failure.error),
            },
            MemoryWork::RestCopied { ticket, saved } => match result {
                Ok(_) => self.on_copy_done(ticket, saved),
                Err(failure) => self.on_copy_failed(ticket, failure.error),
            },
        }
    }

    fn on_power_set(&mut self, ticket: Ticket, before: VmState, result: JobResult) {
        let Err(failure) = result else {
            self.publish(EventKind::of_change(before, self.vm_state()));
            return self.answer(ticket, Answer::Done);
        };
        self.state.record.state = before;
        let save = self.save_record();
        let power = self.power_action();
        let actions = [save, power].map(|action| Action::Try(Box::new(action))).into();
        self.memory_job(actions, MemoryWork::PowerUndone { ticket, error: failure.error });
    }

    fn check_can_save(&self) -> Result<(), HostError> {
        let (name, driver) = (self.name(), self.state.abilities.driver);
        let what = "save the memory of a VM";
        let can_save = self.state.abilities.can_save;
        can_save.then_some(()).ok_or(HostError::Unsupported { name, driver, what })
    }

    pub(super) fn hibernate(&mut self, ticket: Ticket) {
        if let Err(error) = self.check_can_save() {
            return self.answer(ticket, Answer::Failed(error));
        }
        let before = std::mem::replace(&mut self.state.record.state, VmState::Hibernating);
        self.state.record.message.clear();
        let actions = vec![self.save_record(), Action::ReserveMemory(SaveTo::Own), Action::AskAgentVersion];
        self.memory_job(actions, MemoryWork::Hibernating { ticket, before });
    }

    fn on_hibernating(&mut self, ticket: Ticket, before: VmState, result: JobResult) {
        match result {
            Ok(outcome) => {
                self.leave_guest();
                let agent = agent_of(outcome);
                let actions = vec![Action::AwaitHangup, Action::Pause, Action::SaveMemory(SaveTo::Own)];
                self.memory_job(actions, MemoryWork::HibernationSaved { ticket, before, agent });
            }
            Err(failure) => self.undo_hibernation(ticket, before, failure.error),
        }
    }

    fn record_hibernation(&mut self, ticket: Ticket, before: VmState, saved: SavedMemory) {
        self.state.record.saved = Some(saved);
        self.state.record.state = VmState::Hibernated;
        let save = self.save_record();
        self.memory_job(vec![save], MemoryWork::HibernationRecorded { ticket, before });
    }

    /// Restores the state before the hibernation.
    fn undo_hibernation(&mut self, ticket: Ticket, before: VmState, error: HostError) {
        self.state.record.state = before;
        self.state.record.message = format!("not hibernated: {}", error.chain());
        let save = self.save_record();
        let power = self.power_action();
        let actions = [save, power].map(|action| Action::Try(Box::new(action))).into();
        self.publish(EventKind::Updated);
        self.memory_job(actions, MemoryWork::HibernationUndone { ticket, error });
    }

    /// Closes the session, so that the guest waits for the next one and does not find a dead session after it is resumed. From
    /// then on no call waits for the guest.
    fn leave_guest(&mut self) {
        if std::mem::take(&mut self.state.is_following) {
            self.effect(Effect::StopFollowing);
        }
        self.stop_committing();
        self.effect(Effect::CloseSession);
        if self.state.session.take().is_some() {
            self.publish(EventKind::Updated);
        }
        self.state.settle_due = false;
        self.effect(Effect::SetPaused(true));
    }

    /// Copies memory and disk of one instant into `dir` and restores the power state. The copy is synced before the answer.
    pub(super) fn snapshot(&mut self, ticket: Ticket, dir: PathBuf) {
        if self.state.record.volumes.iter().any(is_written) {
            let error = self.volumes_error();
            return self.on_copy_failed(ticket, error);
        }
        if self.vm_state() == VmState::Hibernated {
            let Some(saved) = self.state.record.saved.clone().map(Box::new) else {
                let (name, driver) = (self.name(), self.state.abilities.driver);
                let what = "save the memory of a VM";
                return self.on_copy_failed(ticket, HostError::Unsupported { name, driver, what });
            };
            let work = MemoryWork::RestCopied { ticket, saved };
            return self.memory_job(vec![Action::CopySaved(dir)], work);
        }
        // A running guest may prepare itself for the copy, or refuse it.
        if self.vm_state() == VmState::Running && self.state.session.is_some() {
            self.state.post_snapshot_due = true;
            let hook = Action::RunHook(Hook::PreSnapshot);
            return self.memory_job(vec![hook], MemoryWork::HookRun { ticket, dir });
        }
        self.reserve_copy(ticket, dir);
    }

    fn reserve_copy(&mut self, ticket: Ticket, dir: PathBuf) {
        if let Err(error) = self.check_can_save() {
            return self.on_copy_failed(ticket, error);
        }
        let actions = vec![Action::ReserveMemory(SaveTo::Copy(dir.clone())), Action::AskAgentVersion];
        self.memory_job(actions, MemoryWork::CopyReserved { ticket, dir });
    }

    fn on_copy_resumed(
        &mut self,
        ticket: Ticket,
        dir: PathBuf,
        copied: Result<Box<SavedMemory>, HostError>,
        result: JobResult,
    ) {
        self.follow_again();
        match (copied, result) {
            (Ok(saved), Ok(_)) => {
                self.memory_job(vec![Action::SyncCopy(dir)], MemoryWork::CopySynced { ticket, saved });
            }
            (Err(error), _) => self.on_copy_failed(ticket, error),
            (Ok(_), Err(failure)) => self.on_copy_failed(ticket, failure.error),
        }
    }

    fn on_copy_done(&mut self, ticket: Ticket, saved: Box<SavedMemory>) {
        self.run_post_snapshot_hook();
        self.answer(ticket, Answer::Copied(saved));
    }

    fn on_copy_failed(&mut self, ticket: Ticket, error: HostError) {
        self.run_post_snapshot_hook();
        self.answer(ticket, Answer::Failed(error));
    }

    /// Runs the post-snapshot hook that is due after a pre-snapshot hook, as soon as there is a session.
    pub(super) fn run_post_snapshot_hook(&mut self) {
        let Some(session) = self.state.session.filter(|_| self.state.post_snapshot_due) else { return };
        self.state.post_snapshot_due = false;
        self.effect(Effect::PostSnapshotHook(session));
    }

    /// Returns the error that a copy would use files that the original writes.
    fn volumes_error(&self) -> HostError {
        let written = self.state.record.volumes.iter().filter(|volume| is_written(volume));
        let names: Vec<_> = written.map(|volume| volume.name.as_str()).collect();
        let name = &self.state.record.name;
        let message = format!(
            "VM {name} writes to disks, and a copy of it would write the same files: detach {} first",
            names.join(", ")
        );
        HostError::Invalid { message }
    }
}

fn agent_of(outcome: JobOutcome) -> String {
    match outcome {
        JobOutcome::Agent(agent) => agent,
        _ => String::new(),
    }
}

fn saved_by(result: JobResult, agent: String) -> Result<Box<SavedMemory>, HostError> {
    match result.map_err(|failure| failure.error)? {
        JobOutcome::Saved(saved) => Ok(Box::new(SavedMemory { agent, ..*saved })),
        // A job that saves memory has no other result.
        _ => Err(HostError::Stopping),
    }
}

/// Returns whether the volume is a disk that the guest writes. A shared directory belongs to the node, and any number of guests
/// may write to it.
fn is_written(volume: &Volume) -> bool {
    volume.slot().is_some() && !volume.read_only
}

//! Deletion of a VM and of all its state.
//!
//! ```text
//! record Deleting ─▶ end the VMM ─▶ remove the files ─▶ gone
//! ```
//! A deletion may be repeated after a crash at any point. A full disk does not prevent it, since it frees space: if it is
//! interrupted then, the VM is unchanged or gone, because no part of its state is removed before the state as a whole. With
//! `force` a deletion waits neither for a disk that hangs nor for a VMM that the kernel cannot end yet. Such a VMM is cut off
//! from the network, and its instance keeps the VM's disks until it has ended.

use std::time::Duration;

use coracle_types::VmState;

use super::input::Ticket;
use super::lifecycle::copy_result;
use super::{Action, Effect, JobResult, Scope, StepContext, Then};
use crate::events::EventKind;
use crate::{HostError, files};

/// Time limit for the end of the VMM with `force`: together with [`RECORD_LIMIT_FORCED`], a deletion ends within 10 s.
const END_LIMIT_FORCED: Duration = Duration::from_secs(4);
/// Time limit for writing the record with `force`.
const RECORD_LIMIT_FORCED: Duration = Duration::from_secs(3);

impl StepContext {
    /// Deletes the VM, in any state. Cancels what is under way; with `force`, restarts a deletion that is waiting.
    pub(super) fn delete(&mut self, ticket: Option<Ticket>, force: bool) {
        self.state.deleters.extend(ticket);
        if self.state.is_deleting() && !force {
            return;
        }
        self.cancel_under_way("it is being deleted");
        let before = std::mem::replace(&mut self.state.record.state, VmState::Deleting);
        self.state.record.message.clear();
        if before == VmState::Deleting {
            return self.end_for_deletion(force);
        }
        let mut save = self.save_record();
        if force {
            save = Action::Within(RECORD_LIMIT_FORCED, Box::new(save));
        }
        self.begin_job(Scope::Vm, vec![save], Then::DeletionRecorded { force });
    }

    pub(super) fn on_deletion_recorded(&mut self, force: bool, result: JobResult) {
        match result.map_err(|failure| failure.error) {
            Ok(_) => {}
            Err(HostError::Files { source, .. })
                if files::is_out_of_space(&source)
                    || force && source.kind() == std::io::ErrorKind::TimedOut =>
            {
                tracing::warn!(vm = %self.state.record.id, error = %source, "write record failed, deleting without it");
            }
            Err(error) => return self.on_deletion_failed(error),
        }
        self.publish(EventKind::Updated);
        self.end_for_deletion(force);
    }

    fn end_for_deletion(&mut self, force: bool) {
        self.leave_run();
        let waiting = [std::mem::take(&mut self.state.starters), std::mem::take(&mut self.state.stoppers)];
        let containers = std::mem::take(&mut self.state.container_stoppers).into_values();
        for ticket in waiting.into_iter().chain(containers).flatten() {
            let error = HostError::NotFound { name: self.name() };
            self.answer_result(ticket, Err(error));
        }
        let end = match force {
            true => Action::Within(END_LIMIT_FORCED, Box::new(Action::EndVmm)),
            false => Action::EndVmm,
        };
        self.begin_job(Scope::Vm, vec![end], Then::DeletionEnded { force });
    }

    pub(super) fn on_deletion_ended(&mut self, force: bool, result: JobResult) {
        let vmm_left = result.is_err();
        if let Err(failure) = result {
            if !force {
                return self.on_deletion_failed(failure.error);
            }
            let error = failure.error.chain();
            tracing::error!(vm = %self.state.record.id, error, "VMM left behind, deleting without it");
        }
        self.effect(Effect::CloseSharedDirs);
        // The network is removed before the VM is gone: afterwards a new VM of the same name may own it.
        let mut actions = vec![Action::Try(Box::new(Action::RemoveNetwork)), Action::Erase];
        if vmm_left {
            actions.insert(0, Action::Try(Box::new(Action::CutOff)));
        }
        self.begin_job(Scope::Vm, actions, Then::Erased { vmm_left });
    }

    pub(super) fn on_erased(&mut self, vmm_left: bool, result: JobResult) {
        if let Err(failure) = result {
            return self.on_deletion_failed(failure.error);
        }
        self.state.is_gone = true;
        self.effect(Effect::Gone { vmm_left });
        self.publish(EventKind::Deleted);
        self.answer_deleters(&Ok(()));
        for (ticket, _) in std::mem::take(&mut self.state.waiting) {
            let error = HostError::NotFound { name: self.name() };
            self.answer_result(ticket, Err(error));
        }
    }

    /// The VM stays Deleting, and the deletion can be requested again.
    fn on_deletion_failed(&mut self, error: HostError) {
        tracing::error!(vm = %self.state.record.id, error = error.chain(), "delete VM failed");
        self.answer_deleters(&Err(error));
    }

    fn answer_deleters(&mut self, result: &Result<(), HostError>) {
        for ticket in std::mem::take(&mut self.state.deleters) {
            self.answer_result(ticket, copy_result(result));
        }
    }
}

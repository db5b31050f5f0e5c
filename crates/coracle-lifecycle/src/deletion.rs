//! The end of a VM: nothing is left of it.
//!
//! ```text
//! record Deleting ─▶ end the VMM ─▶ remove the files ─▶ gone
//! ```
//! May be repeated after a crash at any point. A full disk does not refuse it, since it makes room: cut off then, the VM is as
//! before or gone, because nothing of its state goes before the whole of it does. With `force` it waits neither for a disk that
//! hangs nor for a VMM that the kernel cannot end yet: such a VMM is cut off from the network, and its instance keeps the VM's
//! disks until it has ended.

use std::time::Duration;

use coracle_types::VmState;

use super::input::Ticket;
use super::lifecycle::copy;
use super::{Action, Effect, JobResult, Scope, Then, Turn};
use crate::events::EventKind;
use crate::{HostError, files};

/// Limit for the VMM to end with `force`: together with the limit of the record the whole ends within 10 s.
const END_LIMIT_FORCED: Duration = Duration::from_secs(4);
/// Limit for the record to be written with `force`.
const RECORD_LIMIT_FORCED: Duration = Duration::from_secs(3);

impl Turn {
    /// In every state. What is under way is cancelled, and a deletion that waits is begun anew with `force`.
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
        self.busy(Scope::Vm, vec![save], Then::DeletionRecorded { force });
    }

    pub(super) fn deletion_recorded(&mut self, force: bool, result: JobResult) {
        match result.map_err(|failure| failure.error) {
            Ok(_) => {}
            Err(HostError::Files { source, .. })
                if files::is_out_of_space(&source)
                    || force && source.kind() == std::io::ErrorKind::TimedOut =>
            {
                tracing::warn!(vm = %self.state.record.id, error = %source, "write record failed, deleting without it");
            }
            Err(error) => return self.deletion_failed(error),
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
        self.busy(Scope::Vm, vec![end], Then::DeletionEnded { force });
    }

    pub(super) fn deletion_ended(&mut self, force: bool, result: JobResult) {
        let vmm_left = result.is_err();
        if let Err(failure) = result {
            if !force {
                return self.deletion_failed(failure.error);
            }
            let error = failure.error.chain();
            tracing::error!(vm = %self.state.record.id, error, "VMM left behind, deleting without it");
        }
        self.effect(Effect::CloseSharedDirs);
        // A VM of the same name may be made as soon as this one is gone: then its network is not this one's to remove.
        let mut actions = vec![Action::Try(Box::new(Action::RemoveNetwork)), Action::Erase];
        if vmm_left {
            actions.insert(0, Action::Try(Box::new(Action::CutOff)));
        }
        self.busy(Scope::Vm, actions, Then::Erased { vmm_left });
    }

    pub(super) fn erased(&mut self, vmm_left: bool, result: JobResult) {
        if let Err(failure) = result {
            return self.deletion_failed(failure.error);
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

    /// It stays Deleting, and can be asked for again.
    fn deletion_failed(&mut self, error: HostError) {
        tracing::error!(vm = %self.state.record.id, error = error.chain(), "delete VM failed");
        self.answer_deleters(&Err(error));
    }

    fn answer_deleters(&mut self, result: &Result<(), HostError>) {
        for ticket in std::mem::take(&mut self.state.deleters) {
            self.answer_result(ticket, copy(result));
        }
    }
}

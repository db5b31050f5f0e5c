//! Admission of requests: which wait, which do not, and which are refused.

use std::time::Duration;

use coracle_types::{Op, VmState};

use super::containers::ContainerWork;
use super::input::{Call, Ticket};
use super::state::WAITING_MAX;
use super::{Action, Answer, Effect, Scope, StepContext, Then};
use crate::{Fence, HostError};

impl StepContext {
    pub(super) fn receive(&mut self, ticket: Ticket, call: Call) {
        if self.state.is_gone {
            let error = HostError::NotFound { name: self.name() };
            self.answer(ticket, Answer::Failed(error));
        } else if self.has_to_wait(&call) {
            match self.state.waiting.len() < WAITING_MAX {
                true => self.state.waiting.push_back((ticket, call)),
                false => {
                    let error = self.interrupted_error("too many requests wait for it");
                    self.answer(ticket, Answer::Failed(error));
                }
            }
        } else {
            self.dispatch(ticket, call);
        }
    }

    fn has_to_wait(&self, call: &Call) -> bool {
        let Some(under_way) = self.state.under_way() else { return false };
        match call {
            Call::Delete { .. } => false,
            // This stop waits for the end that is under way, like any other stop.
            Call::Stop { .. } if self.state.is_ending() || self.state.is_deleting() => false,
            Call::Stop { .. } if !self.vm_state().has_vmm() => true,
            Call::Stop { grace, .. } if !grace.is_zero() => !under_way.is_cancelled_by_graceful_stop(),
            Call::Stop { .. } => false,
            _ => true,
        }
    }

    /// Begins the next request if nothing is under way. A new session is settled first.
    pub(super) fn take_next(&mut self) {
        while self.state.busy.is_none() && !self.state.is_gone {
            if std::mem::take(&mut self.state.settle_due) && self.state.session.is_some() {
                self.begin_settling();
                continue;
            }
            if let Some(grace) = self.state.power_off_due.take().filter(|_| self.vm_state().has_vmm()) {
                self.ask_to_power_off(grace, false);
            }
            let Some((ticket, call)) = self.state.waiting.pop_front() else { return };
            if self.state.waiting.is_empty() {
                self.state.waiting.shrink_to_fit(); // most VMs wait for no other request
            }
            self.dispatch(ticket, call);
        }
    }

    fn dispatch(&mut self, ticket: Ticket, call: Call) {
        let (op, fence) = call.subject();
        let fence = fence.cloned();
        // Some container requests need no guest: each is admitted by itself.
        let is_container = matches!(call, Call::Container(_));
        let allowed = self.check_fence(fence.as_ref());
        let allowed = allowed.and_then(|()| if is_container { Ok(()) } else { self.admit(op) });
        if let Err(error) = allowed {
            return self.answer(ticket, Answer::Failed(error));
        }
        match call {
            Call::Start { .. } => self.start(ticket),
            Call::Stop { grace, .. } => self.stop(ticket, grace),
            Call::Suspend { op, .. } => self.suspend(op, ticket),
            Call::Snapshot { dir } => self.snapshot(ticket, dir),
            Call::Attach { request, found, .. } => self.attach_volume(ticket, &request, found),
            Call::Detach { volume, .. } => self.detach_volume(ticket, &volume),
            Call::Container(request) => self.container_request(ticket, request),
            Call::Delete { force, .. } => self.delete(Some(ticket), force),
        }
    }

    /// Refuses a caller that acts for another object, or for an older generation.
    fn check_fence(&mut self, fence: Option<&Fence>) -> Result<(), HostError> {
        let name = self.name();
        let owner = &mut self.state.record.owner;
        let Some(fence) = fence.filter(|_| !owner.uid.is_empty()) else { return Ok(()) };
        if fence.uid != owner.uid || fence.generation < owner.generation {
            return Err(HostError::Fenced {
                name,
                holder: format!("uid {} generation {}", owner.uid, owner.generation),
                caller: format!("uid {} generation {}", fence.uid, fence.generation),
            });
        }
        owner.generation = fence.generation;
        Ok(())
    }

    /// Cancels what is under way, and reports it to the waiting caller. Returns true if the guest may have been paused for it.
    pub(super) fn cancel_under_way(&mut self, why: &'static str) -> bool {
        let Some(job) = self.state.busy.take() else { return false };
        let Some((_, then)) = self.state.jobs.remove(&job).map(|job| *job) else { return false };
        self.effect(Effect::Cancel(job));
        if let Some(ticket) = then.ticket() {
            let error = self.interrupted_error(why);
            self.answer(ticket, Answer::Failed(error));
        }
        if let Then::Container(
            ContainerWork::Create { record, .. }
            | ContainerWork::UserRecorded { record, .. }
            | ContainerWork::Removed { record, .. },
        ) = &then
        {
            let files = Action::RemoveContainerFiles(self.write_id(), record.id.clone());
            self.job(Scope::Vm, vec![files], Then::Nothing("remove container that was cut off"));
        }
        let may_be_paused = matches!(then, Then::Memory(_));
        if let Then::LoadRecorded { saved, .. } = then {
            // The guest was not resumed, so the saved memory is still valid.
            self.state.record.saved = saved.map(|saved| *saved);
        }
        may_be_paused
    }

    pub(super) fn stop(&mut self, ticket: Ticket, grace: Duration) {
        if self.state.is_ending() {
            return self.state.stoppers.push(ticket);
        }
        let state = self.vm_state();
        if !state.has_vmm() {
            return self.rest(ticket);
        }
        let paused = self.cancel_under_way("it is being stopped") || state == VmState::Paused;
        self.state.stoppers.push(ticket);
        if state == VmState::Starting && self.state.record.saved.is_some() {
            self.end_run(VmState::Hibernated, String::new());
        } else if grace.is_zero() || matches!(state, VmState::Starting | VmState::Hibernating) {
            self.end_run(VmState::Stopped, String::new());
        } else {
            self.ask_to_power_off(grace, paused);
        }
    }

    /// Stops a VM that has no VMM.
    fn rest(&mut self, ticket: Ticket) {
        let before = self.vm_state();
        match before {
            // A VM that never ran is Stopped from now on.
            VmState::Created => self.state.record.state = VmState::Stopped,
            // The end was not recorded for lack of space, and so is not acknowledged yet.
            _ if self.state.unsaved => {}
            _ => return self.answer(ticket, Answer::Done),
        }
        self.state.record.message.clear();
        let save = self.save_record();
        self.begin_job(Scope::Vm, vec![save], Then::StateRecorded { before, ticket });
    }

    pub(super) fn suspend(&mut self, op: Op, ticket: Ticket) {
        match (op, self.vm_state()) {
            (Op::Pause, VmState::Running) => self.pause(ticket),
            (Op::Hibernate, VmState::Running | VmState::Paused) => self.hibernate(ticket),
            (Op::Resume, _) => self.start(ticket),
            _ => self.answer(ticket, Answer::Done), // already in that state
        }
    }
}

impl Then {
    /// Returns the caller that waits for the result.
    fn ticket(&self) -> Option<Ticket> {
        match self {
            Self::StateRecorded { ticket, .. } => Some(*ticket),
            Self::Memory(work) => Some(work.ticket()),
            Self::Volume(work) => Some(work.ticket()),
            Self::Container(work) => work.ticket(),
            _ => None,
        }
    }

    /// Other work ends soon by itself, and leaves a VM that can be asked to power off.
    fn is_cancelled_by_graceful_stop(&self) -> bool {
        matches!(self, Self::Memory(_) | Self::Volume(_) | Self::Container(_) | Self::Settle(_))
    }
}

//! Decisions of the task of a VM about each input. Pure: this crate accesses no file, no guest and no VMM.
//!
//! ```text
//! Input: Call · Run (jobs of a run report) · Done (a job has ended) · Timer
//!    ─▶ step(state, input, now) ─▶ (state, effects)
//! Effect: Job (actions, in order, up to the first that fails) · Boot, Follow, Watch … · Publish · Answer
//! ```
//! One request is carried out at a time, job after job; the continuation of a job is data ([`Then`]). Other requests wait,
//! except that a stop or a deletion cancels what is under way, in every state. A job that writes a record precedes the job that
//! the record announces, with one exception: the start of a VMM (`lifecycle.rs`).

mod adopt;
pub mod commit_annotation;
#[expect(missing_docs, reason = "variants say what their fields are for")]
mod container_request;
mod containers;
mod deletion;
#[expect(missing_docs, reason = "variants say what their fields are for")]
mod effect;
pub mod events;
mod finish;
pub mod guest_requests;
mod hook;
#[expect(missing_docs, reason = "variants say what their fields are for")]
mod input;
mod lifecycle;
mod requests;
mod run;
mod settle;
mod shared_record;
mod start;
mod state;
mod suspend;
#[cfg(test)]
mod tests;
pub mod volume;
mod volumes;

use std::sync::Arc;

use coracle_disk::blank as disks;
use coracle_files as files;
use coracle_instance::{HostConfig, HostError};
use coracle_record::{
    ContainerId, Exit, Fence, Filesystem, Record, TemplateKey, Volume, VolumeKind, VolumePhase,
};

pub use container_request::{ContainerEnd, ContainerImage, ContainerRequest};
pub use effect::{Action, Answer, Effect, SaveTo, Scope, WriteId};
pub use hook::Hook;
pub use input::{
    Call, Committed, Failure, Input, JobId, JobOutcome, JobResult, Now, RunEvent, RunningVmm, SessionId,
    StartedFrom, Ticket, Up, WorkloadEnd,
};
pub use shared_record::SharedRecord;
pub use start::{Facts, Source, plan_start};
pub use state::{Abilities, State};

use state::Then;

use coracle_record::ContainerRecord;
use coracle_types::{Op, Refused, VmState};

use crate::events::EventKind;
use coracle_guest_client::GuestError;

/// Applies one input to the state of a VM; returns the new state and the effects, in order.
pub fn step(state: State, input: Input, now: Now) -> (State, Vec<Effect>) {
    let mut context = StepContext { state, now, effects: Vec::new() };
    match input {
        Input::Begin => context.begin(),
        Input::Call(ticket, call) => context.receive(ticket, call),
        Input::Run(run, event) if run == context.state.run => context.on_run_event(event),
        Input::Run(..) => {}
        Input::Done(job, result) => context.on_job_ended(job, result),
        Input::Timer => context.on_timer(),
    }
    context.take_next();
    (context.state, context.effects)
}

/// State of one step while it is decided.
struct StepContext {
    state: State,
    now: Now,
    effects: Vec<Effect>,
}

impl StepContext {
    fn effect(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    fn publish(&mut self, kind: EventKind) {
        self.effect(Effect::Publish(kind));
    }

    fn answer(&mut self, ticket: Ticket, answer: Answer) {
        self.effect(Effect::Answer(ticket, answer));
    }

    fn answer_result(&mut self, ticket: Ticket, result: Result<(), HostError>) {
        self.answer(ticket, result.map_or_else(Answer::Failed, |()| Answer::Done));
    }

    /// Starts a job beside the one that is under way.
    fn job(&mut self, scope: Scope, actions: Vec<Action>, then: Then) -> JobId {
        self.state.last_job += 1;
        let id = JobId(self.state.last_job);
        self.state.jobs.insert(id, Box::new((scope, then)));
        self.effect(Effect::Job(id, scope, actions));
        id
    }

    /// Starts a job, which is under way from now on.
    fn begin_job(&mut self, scope: Scope, actions: Vec<Action>, then: Then) {
        let id = self.job(scope, actions, then);
        self.state.busy = Some(id);
    }

    fn write_id(&mut self) -> WriteId {
        self.state.last_write += 1;
        self.state.last_write
    }

    /// Returns the action that writes the present record.
    fn save_record(&mut self) -> Action {
        Action::SaveRecord(self.write_id(), Box::new((*self.state.record).clone()))
    }

    fn save_container(&mut self, record: &Arc<ContainerRecord>) -> Action {
        Action::SaveContainer(self.write_id(), record.clone())
    }

    /// Writes facts that can be observed as well: if the write is missed, adoption repairs the record.
    fn save_quietly(&mut self) {
        let save = self.save_record();
        self.job(Scope::Vm, vec![save], Then::Publish);
    }

    fn name(&self) -> String {
        self.state.record.name.to_string()
    }

    fn vm_state(&self) -> VmState {
        self.state.record.state
    }

    fn admit(&self, op: Op) -> Result<(), HostError> {
        let refused = |source| HostError::Refused { name: self.name(), source };
        self.vm_state().admit(op).map_err(refused)
    }

    /// Returns the error that something else took precedence.
    fn interrupted_error(&self, why: &'static str) -> HostError {
        let source = Refused { state: self.vm_state(), why, transient: true };
        HostError::Refused { name: self.name(), source }
    }

    /// Returns the session, for a call to the guest.
    fn present_guest(&self, operation: &'static str) -> Result<SessionId, HostError> {
        let absent =
            || self.guest_error(operation, GuestError::unavailable("the guest agent is not connected"));
        self.state.session.ok_or_else(absent)
    }

    fn guest_error(&self, operation: &'static str, source: GuestError) -> HostError {
        HostError::Guest { name: self.name(), operation, source }
    }
}

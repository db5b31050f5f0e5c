//! Attaching and detaching volumes, also while the guest runs.
//!
//! ```text
//! attach   record Attaching ─▶ slot ─▶ mount ─▶ record Attached
//! detach   record Detaching ─▶ unmount ─▶ empty the slot ─▶ record without it
//! ```
//! After an interruption or a failure, a volume that is not `Attached` is removed (`settle.rs`): it was never acknowledged.

use coracle_types::VmState;

use super::input::{JobResult, Ticket};
use super::{Action, Answer, Effect, Scope, StepContext, Then};
use crate::events::EventKind;
use crate::volume::{VolumeRequest, VolumeSource, plan_volume, sandbox_target};
use crate::{HostError, Volume, VolumeKind, VolumePhase};
use coracle_instance::vmm_config::volume_disk;

/// Work on a volume that is under way; each variant names what is done when its job ends.
#[derive(Debug)]
pub(crate) enum VolumeWork {
    /// The volume is recorded, and attached if the VM runs.
    Attached { ticket: Ticket, volume: Box<Volume> },
    /// The phase Attached is recorded.
    AttachRecorded { ticket: Ticket },
    /// The remains of a failed attachment are removed.
    AttachUndone { ticket: Ticket, name: String, error: HostError },
    /// The removal after a failed attachment is recorded.
    AttachUndoneRecorded { ticket: Ticket, error: HostError },
    /// The guest has unmounted the volume; it refuses while the volume is in use.
    Left { ticket: Ticket, volume: Box<Volume> },
    /// The volume is removed from the VM.
    Detached { ticket: Ticket, name: String },
    /// The detachment is recorded.
    DetachRecorded { ticket: Ticket },
}

impl VolumeWork {
    pub(super) fn ticket(&self) -> Ticket {
        match self {
            Self::Attached { ticket, .. }
            | Self::AttachRecorded { ticket }
            | Self::AttachUndone { ticket, .. }
            | Self::AttachUndoneRecorded { ticket, .. }
            | Self::Left { ticket, .. }
            | Self::Detached { ticket, .. }
            | Self::DetachRecorded { ticket } => *ticket,
        }
    }
}

impl StepContext {
    fn volume_job(&mut self, actions: Vec<Action>, work: VolumeWork) {
        self.begin_job(Scope::Run, actions, Then::Volume(work));
    }

    pub(super) fn attach_volume(&mut self, ticket: Ticket, request: &VolumeRequest, found: VolumeSource) {
        let record = &self.state.record;
        let planned = plan_volume(&record.volumes, &record.images, request, &found)
            .map_err(|message| HostError::Invalid { message });
        let runs = record.state == VmState::Running;
        let planned = planned.and_then(|volume| match runs {
            true => self.present_guest("mount a volume").map(|_| volume),
            false => Ok(volume),
        });
        let mut volume = match planned {
            Ok(volume) => volume,
            Err(error) => return self.answer(ticket, Answer::Failed(error)),
        };
        if self.state.record.sandbox.is_some() {
            volume.target = sandbox_target(&volume.name);
        }
        if runs {
            volume.phase = VolumePhase::Attaching;
        }
        self.state.record.volumes.push(volume.clone());
        let mut actions = vec![Action::Claim(Box::new(volume.clone()), Box::new(found)), self.save_record()];
        if runs {
            if let Some(disk) = volume_disk(&volume) {
                let absent = vec![disk.slot];
                actions.push(Action::AttachDisk { disk, absent });
            }
            actions.extend(self.mount_actions(&volume));
        }
        self.volume_job(actions, VolumeWork::Attached { ticket, volume: Box::new(volume) });
    }

    /// Returns the actions that make the guest mount the volume, which it may already have done. Idempotent in one session.
    pub(super) fn mount_actions(&self, volume: &Volume) -> Vec<Action> {
        let mut actions = vec![Action::Mount(Box::new(volume.clone()))];
        if volume.kind == VolumeKind::SharedDir {
            actions.insert(0, Action::OpenSharedDir(Box::new(volume.clone())));
        }
        actions
    }

    pub(super) fn mark_mounted(&mut self, volume: &Volume) {
        if volume.kind == VolumeKind::SharedDir {
            self.effect(Effect::ServeSharedDir(volume.name.clone()));
        }
    }

    pub(super) fn detach_volume(&mut self, ticket: Ticket, name: &str) {
        let record = &self.state.record;
        let Some(volume) = record.volumes.iter().find(|v| v.name == name).cloned() else {
            let error = HostError::NoVolume { vm: self.name(), name: name.to_owned() };
            return self.answer(ticket, Answer::Failed(error));
        };
        if record.state != VmState::Running {
            return self.detach_left(ticket, &volume);
        }
        if let Err(error) = self.present_guest("unmount a volume") {
            return self.answer(ticket, Answer::Failed(error));
        }
        // The guest refuses while the volume is in use; the volume then stays attached.
        let unmount = vec![Action::Unmount(name.to_owned())];
        self.volume_job(unmount, VolumeWork::Left { ticket, volume: Box::new(volume) });
    }

    fn detach_left(&mut self, ticket: Ticket, volume: &Volume) {
        self.set_phase(&volume.name, VolumePhase::Detaching);
        let mut actions = vec![self.save_record()];
        actions.extend(self.removal_actions(volume));
        self.volume_job(actions, VolumeWork::Detached { ticket, name: volume.name.clone() });
    }

    /// Returns the actions that remove the volume from the VM.
    pub(super) fn removal_actions(&self, volume: &Volume) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.vm_state() == VmState::Running {
            actions.push(Action::Try(Box::new(Action::Unmount(volume.name.clone()))));
            actions.extend(volume.slot().map(|slot| Action::DetachDisk { slot }));
        }
        actions.push(Action::RemoveNodeTable(volume.name.clone()));
        actions
    }

    pub(super) fn volume_work(&mut self, work: VolumeWork, result: JobResult) {
        match (work, result) {
            (VolumeWork::Attached { ticket, volume }, Ok(_)) => {
                if volume.phase == VolumePhase::Attached {
                    return self.on_volume_done(ticket);
                }
                self.mark_mounted(&volume);
                self.set_phase(&volume.name, VolumePhase::Attached);
                let save = self.save_record();
                self.volume_job(vec![save], VolumeWork::AttachRecorded { ticket });
            }
            (VolumeWork::Attached { ticket, volume }, Err(failure)) => {
                let error = failure.error;
                // The volume was not claimed or not recorded, so it was not attached.
                if failure.done < 2 {
                    self.forget_volume(&volume.name, failure.done > 0);
                    // Events that were published meanwhile have shown the volume.
                    self.publish(EventKind::Updated);
                    return self.answer(ticket, Answer::Failed(error));
                }
                self.set_phase(&volume.name, VolumePhase::Detaching);
                let actions = self.removal_actions(&volume);
                self.volume_job(actions, VolumeWork::AttachUndone { ticket, name: volume.name, error });
            }
            (VolumeWork::AttachUndone { ticket, name, error }, Ok(_)) => {
                self.forget_volume(&name, true);
                let save = self.save_record();
                self.volume_job(vec![save], VolumeWork::AttachUndoneRecorded { ticket, error });
            }
            (VolumeWork::AttachUndone { ticket, name, error }, Err(left)) => {
                let left = left.error.chain();
                tracing::warn!(vm = %self.state.record.id, volume = name, error = left, "volume not taken back");
                self.answer(ticket, Answer::Failed(error));
            }
            (VolumeWork::AttachUndoneRecorded { ticket, error }, _) => {
                self.publish(EventKind::Updated);
                self.answer(ticket, Answer::Failed(error));
            }
            (VolumeWork::Left { ticket, volume }, Ok(_)) => self.detach_left(ticket, &volume),
            (VolumeWork::Detached { ticket, name }, Ok(_)) => {
                self.forget_volume(&name, true);
                let save = self.save_record();
                self.volume_job(vec![save], VolumeWork::DetachRecorded { ticket });
            }
            (VolumeWork::AttachRecorded { ticket } | VolumeWork::DetachRecorded { ticket }, Ok(_)) => {
                self.on_volume_done(ticket);
            }
            (
                VolumeWork::Left { ticket, .. }
                | VolumeWork::Detached { ticket, .. }
                | VolumeWork::AttachRecorded { ticket }
                | VolumeWork::DetachRecorded { ticket },
                Err(failure),
            ) => self.answer(ticket, Answer::Failed(failure.error)),
        }
    }

    fn on_volume_done(&mut self, ticket: Ticket) {
        self.publish(EventKind::Updated);
        self.answer(ticket, Answer::Done);
    }

    /// Forgets volumes that are not completely attached: a new VMM starts without them.
    pub(super) fn drop_half_volumes(&mut self) {
        let half = self.state.record.volumes.iter().filter(|v| v.phase != VolumePhase::Attached);
        for name in half.map(|v| v.name.clone()).collect::<Vec<_>>() {
            self.forget_volume(&name, true);
        }
    }

    pub(super) fn forget_volume(&mut self, name: &str, is_claimed: bool) {
        self.state.record.volumes.retain(|volume| volume.name != name);
        self.effect(Effect::CloseSharedDir(name.to_owned()));
        if is_claimed {
            self.effect(Effect::ReleaseClaim(name.to_owned()));
        }
    }

    fn set_phase(&mut self, name: &str, phase: VolumePhase) {
        if let Some(volume) = self.state.record.volumes.iter_mut().find(|volume| volume.name == name) {
            volume.phase = phase;
        }
    }
}

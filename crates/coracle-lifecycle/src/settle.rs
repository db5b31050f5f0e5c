//! Settling of a new session: the volumes and containers of the guest are made equal to the records, because a daemon that was
//! killed may have left one of them incomplete. A guest that does not answer is asked once.

use std::collections::{BTreeMap, VecDeque};

use coracle_types::Op;

use super::input::{JobOutcome, JobResult};
use super::{Action, Effect, Scope, StepContext, Then};
use crate::events::EventKind;
use crate::guest_requests::{Settle, create_request, settle};
use crate::{ContainerId, Volume, VolumePhase};

/// Progress of settling; each variant names what was done, and what follows.
#[derive(Debug)]
pub(crate) enum SettleWork {
    /// The agent of a disk image VM has reported whether the guest rebooted.
    Inspected,
    /// A guest that has rebooted was configured again.
    Configured,
    /// The command of a rebooted guest was started again.
    CommandStarted,
    /// A volume was mounted or removed; `rest` follows.
    Volume { volume: Box<Volume>, rest: VecDeque<Volume> },
    /// The removal of a volume was recorded.
    VolumeRecorded { rest: VecDeque<Volume> },
    /// The guest has listed its containers.
    Listed,
    /// A container was settled; `rest` follows.
    Container { id: ContainerId, decision: Settle, rest: VecDeque<(ContainerId, Settle)> },
}

impl StepContext {
    fn settle_job(&mut self, actions: Vec<Action>, work: SettleWork) {
        self.begin_job(Scope::Run, actions, Then::Settle(work));
    }

    pub(super) fn begin_settling(&mut self) {
        if self.state.record.disk_image_vm.is_some() {
            return self.settle_job(vec![Action::InspectSystem], SettleWork::Inspected);
        }
        self.settle_volumes();
    }

    fn settle_volumes(&mut self) {
        let volumes = self.state.record.volumes.iter().cloned().collect();
        self.settle_next_volume(volumes);
    }

    /// Handles the report of a disk image VM's agent. After a reboot of the guest the agent has lost its state: it is
    /// configured, and its command is started again.
    fn on_system_inspected(&mut self, result: JobResult) {
        let Ok(JobOutcome::System { configured, has_command, output_end }) = result else {
            self.warn("inspect the system", &result);
            return self.settle_volumes();
        };
        let record = &mut self.state.record;
        self.state.command_due = !has_command && !record.workload.argv.is_empty() && record.exit.is_none();
        if configured {
            return self.settle_volumes();
        }
        tracing::info!(vm = %record.id, "the guest rebooted");
        record.output_before = output_end;
        // After a reboot the agent counts its output from zero.
        self.effect(Effect::StopFollowing);
        self.effect(Effect::Follow(self.state.session));
        let save = self.save_record();
        self.settle_job(vec![save, Action::ConfigureAgain], SettleWork::Configured);
    }

    fn settle_next_volume(&mut self, mut rest: VecDeque<Volume>) {
        let Some(volume) = rest.pop_front() else { return self.settle_containers() };
        let actions = match volume.phase {
            VolumePhase::Attached => self.mount_actions(&volume),
            VolumePhase::Attaching | VolumePhase::Detaching => self.removal_actions(&volume),
        };
        self.settle_job(actions, SettleWork::Volume { volume: Box::new(volume), rest });
    }

    pub(super) fn settle_work(&mut self, work: SettleWork, result: JobResult) {
        match work {
            SettleWork::Inspected => self.on_system_inspected(result),
            SettleWork::Configured => {
                self.warn("configure a rebooted guest", &result);
                self.settle_volumes();
            }
            SettleWork::CommandStarted => {
                self.warn("start the command of a rebooted guest", &result);
                self.on_settled();
            }
            SettleWork::Volume { volume, rest } => match result {
                Ok(_) if volume.phase == VolumePhase::Attached => {
                    self.mark_mounted(&volume);
                    self.settle_next_volume(rest);
                }
                Ok(_) => {
                    self.forget_volume(&volume.name, true);
                    let save = self.save_record();
                    self.settle_job(vec![save], SettleWork::VolumeRecorded { rest });
                }
                Err(failure) => {
                    let error = failure.error.chain();
                    tracing::warn!(vm = %self.state.record.id, volume = volume.name, error, "volumes not settled");
                    self.settle_containers();
                }
            },
            SettleWork::VolumeRecorded { rest } => self.settle_next_volume(rest),
            SettleWork::Listed => self.on_containers_listed(result),
            SettleWork::Container { id, decision, rest } => {
                match result {
                    Ok(_) => {}
                    Err(failure) => {
                        let error = failure.error.chain();
                        tracing::warn!(vm = %self.state.record.id, container = %id, ?decision, error, "container not settled");
                    }
                }
                self.settle_next_container(rest);
            }
        }
    }

    fn settle_containers(&mut self) {
        match self.state.record.sandbox.is_some() {
            true => self.settle_job(vec![Action::ListContainers], SettleWork::Listed),
            false => self.on_settled(),
        }
    }

    fn on_containers_listed(&mut self, result: JobResult) {
        let listed = match result {
            Ok(JobOutcome::Containers(listed)) => listed,
            Ok(_) => return self.on_settled(),
            Err(failure) => {
                let error = failure.error.chain();
                tracing::warn!(vm = %self.state.record.id, error, "containers not settled");
                return self.on_settled();
            }
        };
        let states: BTreeMap<ContainerId, _> =
            listed.iter().filter_map(|s| Some((s.id.parse().ok()?, s.state()))).collect();
        let recorded = &self.state.containers;
        let ids = recorded.keys().chain(states.keys().filter(|id| !recorded.contains_key(id)));
        let decide = |id: &ContainerId| {
            let state = recorded.get(id).map(|record| record.state);
            (id.clone(), settle(state, states.get(id).copied()))
        };
        let decisions = ids.map(decide).collect();
        self.settle_next_container(decisions);
    }

    fn settle_next_container(&mut self, mut rest: VecDeque<(ContainerId, Settle)>) {
        // A guest that is being asked to power off is not settled further.
        while let Some((id, decision)) = rest.pop_front().filter(|_| self.admit(Op::Guest).is_ok()) {
            let actions = match decision {
                Settle::Keep => vec![],
                Settle::Make => self.make_again(&id),
                Settle::Started => {
                    self.on_container_started(&id);
                    vec![]
                }
                Settle::Lost => {
                    self.lose_container(&id, "the guest does not have it any more");
                    vec![]
                }
                Settle::Remove => vec![Action::RemoveContainer(id.clone())],
            };
            if !actions.is_empty() {
                return self.settle_job(actions, SettleWork::Container { id, decision, rest });
            }
        }
        self.on_settled();
    }

    fn make_again(&mut self, id: &ContainerId) -> Vec<Action> {
        let Some(record) = self.state.containers.get(id) else { return vec![] };
        match create_request(record, |digest| self.slot_of(digest)) {
            Some(request) => vec![Action::CreateContainer(Box::new(request))],
            None => {
                self.lose_container(id, "its image was detached");
                vec![]
            }
        }
    }

    fn on_settled(&mut self) {
        if std::mem::take(&mut self.state.command_due) && self.admit(Op::Guest).is_ok() {
            return self.settle_job(vec![Action::StartCommand], SettleWork::CommandStarted);
        }
        self.run_post_snapshot_hook();
        self.publish(EventKind::Updated);
    }
}

//! Model in which steps are executed, interrupted before and after their effect, and forgotten by a restart.
//!
//! The guest keeps a counter. Wherever a step is interrupted, a pod that was hibernated and woken continues counting from its
//! last value, and a value that was acknowledged as saved never decreases.

use coracle_api::cocoon::LifecycleState;
use coracle_types::VmState;

use super::super::plan;
use super::{facts, vm, wanted};
use crate::facts::{Facts, Memory, Saved};
use crate::step::{Finish, Purpose, Step};

#[derive(Clone, Debug, Default)]
struct World {
    /// State and counter of the VM.
    vm: Option<(VmState, u32)>,
    is_woken: bool,
    copy: Option<(Purpose, u32)>,
    imported: Option<u32>,
    tag_hibernate: Option<u32>,
    tag_latest: Option<u32>,
    noted: Option<(LifecycleState, bool)>,
    message: String,
    hibernate: bool,
    ending: bool,
    gone: bool,
    /// Memory that a restart loses.
    memory: Memory,
    saved: Option<Saved>,
}

impl World {
    fn look(&self) -> Facts {
        let mut facts = facts();
        let mut asked = wanted();
        asked.hibernate = self.hibernate;
        facts.pod.wanted = Ok(asked);
        facts.pod.ending = self.ending;
        facts.pod.begun = self.noted.is_some();
        facts.vm = self.vm.map(|(state, _)| crate::facts::VmFacts { is_woken: self.is_woken, ..vm(state) });
        if let Some((state, has_vm)) = self.noted {
            facts.pod.noted.state = Some(state);
            facts.pod.noted.message = Some(self.message.clone()).filter(|text| !text.is_empty());
            facts.pod.noted.id = has_vm.then(|| vm(VmState::Running).id.to_string());
            facts.pod.noted.ip = has_vm.then(|| "10.0.0.5".to_owned());
        }
        facts.memory = self.memory.clone();
        facts.saved = self.saved.clone().unwrap_or(Saved::Unknown);
        facts
    }

    /// Restarts the node daemon.
    fn forget(&mut self) {
        (self.memory, self.saved) = (Memory::default(), None);
    }

    /// Applies the effect of a step.
    fn change(&mut self, step: &Step) {
        let count = self.vm.map_or(0, |(_, count)| count);
        match step {
            Step::Run => self.vm = Some((VmState::Running, 0)),
            Step::Start | Step::Resume => self.vm = Some((VmState::Running, count)),
            Step::Hibernate => self.vm = Some((VmState::Hibernated, count)),
            Step::Copy(purpose) => self.copy = Some((*purpose, count)),
            Step::Push(purpose) => {
                let (of, count) = self.copy.expect("a copy to push");
                assert_eq!(of, *purpose, "the copy of that purpose");
                match purpose {
                    Purpose::Hibernation => self.tag_hibernate = Some(count),
                    Purpose::Deletion => self.tag_latest = Some(count),
                }
            }
            Step::RemoveVm { keep_copy } => {
                let safe =
                    [self.tag_hibernate, self.tag_latest, self.copy.filter(|_| *keep_copy).map(|(_, n)| n)];
                assert!(safe.contains(&Some(count)), "state {count} is removed and nowhere saved: {self:?}");
                (self.vm, self.is_woken) = (None, false);
                self.copy = self.copy.filter(|_| *keep_copy);
            }
            Step::Import => self.imported = self.tag_hibernate,
            Step::Wake => {
                let count = self.imported.expect("an import to wake from");
                (self.vm, self.is_woken) = (Some((VmState::Running, count)), true);
            }
            Step::DropSaved => {
                assert!(
                    matches!(self.vm, Some((VmState::Running, _))),
                    "the tag is dropped before the guest runs"
                );
                self.tag_hibernate = None;
            }
            Step::Note(note) => {
                self.noted = Some((note.state, note.vm.is_some()));
                self.message.clone_from(&note.message);
            }
            Step::Finish(how) => {
                assert_ne!(*how, Finish::Kept);
                self.gone = true;
            }
            Step::FindSaved | Step::PullImage => {}
            other => panic!("{other:?} is not part of the model"),
        }
    }

    /// Updates the memory of the task, like `Task::on_step_success`.
    fn remember(&mut self, step: &Step) {
        let memory = &mut self.memory;
        match step {
            Step::FindSaved => {
                self.saved = Some(match self.tag_hibernate {
                    Some(_) => Saved::Own { same_pod: true },
                    None => Saved::Absent,
                });
            }
            Step::PullImage => memory.has_image = true,
            Step::Hibernate | Step::Resume | Step::Start => (memory.copied, memory.pushed) = (None, None),
            Step::Copy(purpose) => (memory.copied, memory.pushed) = (Some(*purpose), None),
            Step::Push(purpose) => {
                memory.pushed = Some(*purpose);
                if *purpose == Purpose::Hibernation {
                    self.saved = Some(Saved::Own { same_pod: true });
                }
            }
            Step::RemoveVm { .. } => (memory.copied, memory.pushed, memory.is_imported) = (None, None, false),
            Step::Import => memory.is_imported = true,
            Step::Wake => memory.is_imported = false,
            Step::DropSaved => self.saved = Some(Saved::Absent),
            Step::Note(note) if note.state == LifecycleState::Ready => self.saved = None,
            _ => {}
        }
    }

    /// Executes steps until none is left. `cut` counts down at each place of a possible restart: before the effect of a step
    /// when even, after it when odd.
    fn settle(&mut self, cut: &mut Option<usize>) {
        for _ in 0..60 {
            let Some(step) = plan(&self.look()).step else { return };
            let mut is_now = || match cut {
                Some(0) => {
                    *cut = None;
                    true
                }
                Some(left) => {
                    *left -= 1;
                    false
                }
                None => false,
            };
            if is_now() {
                self.forget();
                continue;
            }
            self.change(&step);
            if is_now() {
                self.forget();
                continue;
            }
            self.remember(&step);
            if self.gone {
                return;
            }
        }
        panic!("no end: {self:?}");
    }

    fn advance_guest(&mut self) {
        if let Some((VmState::Running, count)) = &mut self.vm {
            *count += 1;
        }
    }
}

/// Created, hibernated, woken, hibernated again, woken, deleted; with one restart at each possible place in turn.
#[test]
fn guest_counter_survives_a_restart_at_any_step() {
    for at in 0.. {
        let mut cut = Some(at);
        let mut world = World::default();
        world.settle(&mut cut);
        for round in 1..=2 {
            world.advance_guest();
            let before = world.vm.expect("it runs").1;
            assert_eq!(before, round, "cut {at}");
            world.hibernate = true;
            world.settle(&mut cut);
            assert_eq!(
                (world.vm, world.tag_hibernate),
                (None, Some(before)),
                "cut {at}, round {round}: {world:?}"
            );
            assert_eq!(world.noted, Some((LifecycleState::Hibernated, false)), "cut {at}");
            world.hibernate = false;
            world.settle(&mut cut);
            assert_eq!(world.vm, Some((VmState::Running, before)), "cut {at}, round {round}");
            assert_eq!(world.tag_hibernate, None, "cut {at}: the tag is used up");
            assert_eq!(world.noted, Some((LifecycleState::Ready, true)), "cut {at}");
        }
        world.advance_guest();
        world.ending = true;
        world.settle(&mut cut);
        assert!(world.gone && world.vm.is_none(), "cut {at}: {world:?}");
        assert_eq!(world.tag_latest, Some(3), "cut {at}");
        if cut.is_some() {
            assert!(at > 40, "only {at} places for a cut");
            return;
        }
    }
}

/// The desired state changes between two steps: after each number of steps, the guest counts again.
#[test]
fn desired_state_change_at_any_step_keeps_counter() {
    for steps in 0..12 {
        let mut world = World::default();
        world.settle(&mut None);
        world.advance_guest();
        world.hibernate = true;
        for _ in 0..steps {
            let Some(step) = plan(&world.look()).step else { break };
            world.change(&step);
            world.remember(&step);
        }
        world.hibernate = false;
        world.settle(&mut None);
        assert_eq!(world.vm, Some((VmState::Running, 1)), "after {steps} steps");
        assert_eq!(world.tag_hibernate, None, "after {steps} steps: {world:?}");
        world.hibernate = true;
        world.settle(&mut None);
        assert_eq!(world.tag_hibernate, Some(1), "after {steps} steps");
        world.ending = true;
        world.settle(&mut None);
        assert!(world.gone, "after {steps} steps");
    }
}

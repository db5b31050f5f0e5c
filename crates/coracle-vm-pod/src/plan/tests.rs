//! Tables of plans, and a model in which every step may be interrupted.

mod model;

use coracle_api::cocoon::LifecycleState;
use coracle_types::{UnixMillis, VmId, VmState};

use super::*;
use crate::facts::{ForkSource, Memory, Noted, PodFacts};
use crate::step::{Finish, Purpose};

pub(super) fn wanted() -> Wanted {
    Wanted {
        vm: "vk-prod-demo-0".parse().unwrap(),
        source: Source::Run { image: "app:1".into() },
        is_managed: true,
        saves_on_delete: true,
        keeps_local_copy: false,
        hibernate: false,
        restore: false,
        probe_port: None,
        generation: None,
    }
}

pub(super) fn vm(state: VmState) -> VmFacts {
    VmFacts {
        id: VmId::of_name(&"vk-prod-demo-0".parse().unwrap()),
        state,
        message: String::new(),
        owner: VmOwner::ThisPod,
        is_woken: false,
        ips: vec!["10.0.0.5".parse().unwrap(), "fd00::5".parse().unwrap()],
        has_agent: true,
        exit: None,
        oom_killed: false,
        started_at: Some(UnixMillis(0)),
        finished_at: None,
        boots: 1,
    }
}

pub(super) fn facts() -> Facts {
    Facts {
        pod: PodFacts {
            wanted: Ok(wanted()),
            ending: false,
            ended: false,
            begun: false,
            noted: Noted::default(),
            restart: Restart::Always,
            refused: None,
        },
        vm: None,
        saved: Saved::Unknown,
        has_registry: true,
        has_clone_source: false,
        fork: ForkSource::None,
        memory: Memory::default(),
        is_answering: true,
        now: UnixMillis(100_000),
    }
}

fn with(change: impl FnOnce(&mut Facts, &mut Wanted)) -> Facts {
    let (mut facts, mut asked) = (facts(), wanted());
    change(&mut facts, &mut asked);
    facts.pod.wanted = Ok(asked);
    facts
}

fn noted_as(state: LifecycleState) -> Noted {
    Noted { state: Some(state), ..Noted::default() }
}

fn step(facts: &Facts) -> Option<Step> {
    plan(facts).step
}

#[test]
fn pod_without_a_vm_table() {
    let note = |f: &mut Facts| f.pod.noted = noted_as(LifecycleState::Creating);
    let creating =
        Some(Step::Note(Note { state: LifecycleState::Creating, vm: None, message: String::new() }));
    for (why, facts, want) in [
        ("it says so first", with(|_, _| {}), creating),
        (
            "an image",
            with(|f, _| {
                note(f);
                f.has_registry = false;
            }),
            Some(Step::PullImage),
        ),
        (
            "an image that is here",
            with(|f, _| {
                note(f);
                (f.saved, f.memory.has_image) = (Saved::Absent, true);
            }),
            Some(Step::Run),
        ),
        ("it was begun: its state may be saved", with(|f, _| note(f)), Some(Step::FindSaved)),
        (
            "it was begun just now",
            with(|f, _| {
                note(f);
                f.memory.is_new = true;
            }),
            Some(Step::PullImage),
        ),
        (
            "a snapshot",
            with(|f, w| {
                note(f);
                f.saved = Saved::Absent;
                w.source = Source::Clone { snapshot: "base".into() };
            }),
            Some(Step::PullSnapshot),
        ),
        (
            "a snapshot that is here",
            with(|f, w| {
                note(f);
                (f.saved, f.has_clone_source) = (Saved::Absent, true);
                w.source = Source::Clone { snapshot: "base".into() };
            }),
            Some(Step::Clone),
        ),
    ] {
        assert_eq!(step(&facts), want, "{why}");
    }
}

#[test]
fn fork_source_table() {
    for (fork, want) in [
        (ForkSource::Saved, Some(Step::Fork)),
        (ForkSource::Live, Some(Step::SaveForkSource)),
        (ForkSource::Waiting(VmState::Starting), None),
        (ForkSource::Foreign, None),
        (ForkSource::Absent, None),
    ] {
        let facts = with(|f, w| {
            f.pod.noted = noted_as(LifecycleState::Creating);
            (f.fork, f.saved) = (fork.clone(), Saved::Absent);
            w.source = Source::Fork { from: "vk-prod-demo-9".parse().unwrap() };
        });
        assert_eq!(step(&facts), want, "{fork:?}");
    }
}

#[test]
fn hibernated_pod_is_never_made_from_its_image() {
    use LifecycleState::{Creating, Hibernated, Hibernating, Ready};
    for state in [Creating, Ready, Hibernating, Hibernated] {
        for saved in [Saved::Unknown, Saved::Own { same_pod: true }] {
            for hibernate in [true, false] {
                let facts = with(|f, w| {
                    (f.saved, f.pod.noted, f.pod.begun) = (saved.clone(), noted_as(state), true);
                    (w.hibernate, f.memory.has_image) = (hibernate, true);
                });
                let step = step(&facts);
                let makes = matches!(step, Some(Step::Run | Step::PullImage | Step::Clone | Step::Fork));
                assert!(!makes, "{state} {saved:?} hibernate {hibernate}: {step:?}");
            }
        }
    }
}

#[test]
fn missing_saved_state_is_reported_lost() {
    use LifecycleState::{Hibernated, Hibernating};
    for (state, hibernate) in [(Hibernating, true), (Hibernating, false), (Hibernated, false)] {
        let facts = with(|f, w| {
            (f.saved, f.pod.noted, f.pod.begun) = (Saved::Absent, noted_as(state), true);
            w.hibernate = hibernate;
        });
        assert!(matches!(plan(&facts).vm_pod_state, VmPodState::Lost(_)), "{state} {hibernate}");
    }
}

#[test]
fn hibernation_table() {
    let going = |f: &mut Facts, w: &mut Wanted, state| {
        let ip = Some("10.0.0.5".to_owned());
        f.vm = Some(vm(state));
        let id = f.vm.as_ref().map(|vm| vm.id.to_string());
        f.pod.noted = Noted { id, ip, ..noted_as(LifecycleState::Hibernating) };
        (w.hibernate, f.saved) = (true, Saved::Absent);
    };
    let this = Some(Purpose::Hibernation);
    for (why, facts, want) in [
        ("it runs", with(|f, w| going(f, w, VmState::Running)), Some(Step::Hibernate)),
        (
            "it is at rest",
            with(|f, w| going(f, w, VmState::Hibernated)),
            Some(Step::Copy(Purpose::Hibernation)),
        ),
        (
            "it is copied",
            with(|f, w| {
                going(f, w, VmState::Hibernated);
                f.memory.copied = this;
            }),
            Some(Step::Push(Purpose::Hibernation)),
        ),
        (
            "it is copied for a deletion that did not come",
            with(|f, w| {
                going(f, w, VmState::Hibernated);
                f.memory.copied = Some(Purpose::Deletion);
            }),
            Some(Step::Copy(Purpose::Hibernation)),
        ),
        (
            "it is pushed",
            with(|f, w| {
                going(f, w, VmState::Hibernated);
                (f.memory.copied, f.memory.pushed) = (this, this);
                f.saved = Saved::Own { same_pod: true };
            }),
            Some(Step::RemoveVm { keep_copy: false }),
        ),
        (
            "the tag was not looked for yet",
            with(|f, w| {
                going(f, w, VmState::Hibernated);
                f.saved = Saved::Unknown;
            }),
            Some(Step::FindSaved),
        ),
        (
            "the tag has the state of an earlier pod",
            with(|f, w| {
                going(f, w, VmState::Hibernated);
                f.saved = Saved::Own { same_pod: false };
            }),
            None,
        ),
        (
            "the tag is of another namespace",
            with(|f, w| {
                going(f, w, VmState::Hibernated);
                f.saved = Saved::Foreign("x".into());
            }),
            None,
        ),
        ("it is off", with(|f, w| going(f, w, VmState::Stopped)), Some(Step::Start)),
    ] {
        assert_eq!(step(&facts), want, "{why}");
    }
}

#[test]
fn tag_is_dropped_only_when_the_guest_runs_again() {
    for (why, state, saved, woken, want) in [
        ("it does not run yet", VmState::Hibernated, Saved::Own { same_pod: true }, true, Some(Step::Resume)),
        ("it runs", VmState::Running, Saved::Own { same_pod: true }, true, Some(Step::DropSaved)),
        ("after a restart of the node", VmState::Running, Saved::Unknown, true, Some(Step::FindSaved)),
        ("of another namespace", VmState::Running, Saved::Foreign(String::new()), true, None),
        ("it was not woken", VmState::Running, Saved::Own { same_pod: false }, false, None),
    ] {
        let facts = with(|f, _| {
            f.vm = Some(VmFacts { is_woken: woken, ..vm(state) });
            f.saved = saved;
        });
        match (step(&facts), want) {
            (Some(Step::Note(note)), None) => assert_eq!(note.state, LifecycleState::Ready, "{why}"),
            (got, want) => assert_eq!(got, want, "{why}"),
        }
    }
}

#[test]
fn deletion_table() {
    let ends = |f: &mut Facts, state| {
        f.pod.ending = true;
        f.vm = Some(vm(state));
    };
    let this = Some(Purpose::Deletion);
    let asleep = |f: &mut Facts, memory: Memory| {
        ends(f, VmState::Hibernated);
        f.memory = memory;
    };
    let copied = Memory { copied: this, ..Memory::default() };
    let pushed = Memory { pushed: this, ..copied.clone() };
    for (why, facts, want) in [
        ("no VM", with(|f, _| f.pod.ending = true), Step::Finish(Finish::NoVm)),
        ("it is saved at first", with(|f, _| ends(f, VmState::Running)), Step::Hibernate),
        (
            "the policy does not save",
            with(|f, w| {
                ends(f, VmState::Running);
                w.saves_on_delete = false;
            }),
            Step::RemoveVm { keep_copy: false },
        ),
        ("at rest", with(|f, _| ends(f, VmState::Hibernated)), Step::Copy(Purpose::Deletion)),
        ("copied", with(|f, _| asleep(f, copied.clone())), Step::Push(Purpose::Deletion)),
        ("pushed", with(|f, _| asleep(f, pushed.clone())), Step::RemoveVm { keep_copy: false }),
        (
            "pushed, and the copy stays",
            with(|f, w| {
                asleep(f, pushed.clone());
                w.keeps_local_copy = true;
            }),
            Step::RemoveVm { keep_copy: true },
        ),
        (
            "no registry: the copy stays",
            with(|f, _| {
                asleep(f, copied.clone());
                f.has_registry = false;
            }),
            Step::RemoveVm { keep_copy: true },
        ),
        (
            "the registry takes nothing: the copy stays",
            with(|f, _| asleep(f, Memory { push_given_up: true, ..copied.clone() })),
            Step::RemoveVm { keep_copy: true },
        ),
        (
            "it cannot be saved: it is kept",
            with(|f, _| {
                ends(f, VmState::Running);
                f.memory.save_given_up = true;
            }),
            Step::Finish(Finish::Kept),
        ),
        (
            "a VM that is not managed",
            with(|f, w| {
                ends(f, VmState::Running);
                w.is_managed = false;
            }),
            Step::Finish(Finish::LeftAlone),
        ),
        (
            "static",
            with(|f, w| {
                ends(f, VmState::Running);
                w.source = Source::Static { id: "x".into(), ip: "10.0.0.9".parse().unwrap() };
            }),
            Step::Finish(Finish::LeftAlone),
        ),
        (
            "a VM of another namespace",
            with(|f, _| {
                ends(f, VmState::Running);
                f.vm.as_mut().unwrap().owner = VmOwner::Other("elsewhere".into());
            }),
            Step::Finish(Finish::NoVm),
        ),
    ] {
        assert_eq!(step(&facts), Some(want), "{why}");
    }
}

#[test]
fn name_of_another_namespace_is_refused() {
    let facts = with(|f, _| {
        f.vm = Some(VmFacts { owner: VmOwner::Other("in use".into()), ..vm(VmState::Running) });
    });
    let plan = plan(&facts);
    assert_eq!(plan.step, None);
    assert!(matches!(plan.vm_pod_state, VmPodState::Waiting(WaitReason { reason: "VMNameTaken", .. })));
}

#[test]
fn vm_that_is_off_follows_the_restart_policy() {
    let exit = |code| Some(coracle_host::Exit { code, ..coracle_host::Exit::default() });
    for (restart, code, rested, want) in [
        (Restart::Always, 0, true, Some(Step::Start)),
        (Restart::Always, 0, false, None),
        (Restart::OnFailure, 0, true, None),
        (Restart::OnFailure, 1, true, Some(Step::Start)),
        (Restart::Never, 1, true, None),
    ] {
        let facts = with(|f, _| {
            let began = if rested { 0 } else { 90_000 };
            let vm =
                VmFacts { exit: exit(code), started_at: Some(UnixMillis(began)), ..vm(VmState::Stopped) };
            (f.vm, f.pod.restart) = (Some(vm), restart);
        });
        assert_eq!(step(&facts), want, "{restart:?} {code} {rested}");
    }
}

#[test]
fn failed_step_backs_off_and_other_steps_do_not() {
    let failure = |step| crate::facts::Failure {
        step,
        reason: "ErrImagePull",
        message: "no".into(),
        times: 1,
        rest: Duration::from_secs(2),
    };
    let facts = |step| {
        with(|f, _| {
            f.pod.noted = noted_as(LifecycleState::Creating);
            f.saved = Saved::Absent;
            f.memory.failure = Some(failure(step));
        })
    };
    let rests = plan(&facts(Step::PullImage));
    assert_eq!((rests.step, rests.again), (None, Some(Duration::from_secs(2))));
    assert_eq!(rests.vm_pod_state, VmPodState::Waiting(WaitReason::new("ErrImagePull", "no")));
    assert_eq!(step(&facts(Step::Wake)), Some(Step::PullImage));
}

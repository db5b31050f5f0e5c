//! Interruption of every request between any two inputs, by each possible event.

use super::*;

/// Runs each scenario up to each of its inputs, and then calls `cut`.
fn at_every_cut(cut: impl Fn(&mut World, &str)) -> usize {
    let mut cuts = 0;
    for Scenario { why, state, call } in scenarios() {
        for done in 0.. {
            let mut world = World::of(state);
            world.call(call());
            let reached = (0..done).all(|_| world.next());
            if !reached || world.state().is_gone {
                assert!(done > 0, "{why} does something");
                break;
            }
            cut(&mut world, &format!("{why}, cut after {done} inputs"));
            cuts += 1;
        }
    }
    cuts
}

#[test]
fn forced_deletion_at_every_cut_ends_the_vm() {
    let cuts = at_every_cut(|world, why| {
        // A frozen guest and a disk that hangs: no job that is under way ever ends.
        world.freeze();
        world.call(delete(true));
        world.settle();
        assert!(world.state().is_gone && world.is_erased && !world.has_vmm, "{why}: {:?}", world.log);
        world.assert_at_rest(why);
        assert_eq!(world.answers[&Ticket(world.callers)], ["ok"], "{why}");
    });
    println!("{cuts} cuts");
    assert!(cuts > 60, "{cuts}");
}

#[test]
fn forced_deletion_leaves_a_vmm_that_does_not_end() {
    at_every_cut(|world, why| {
        world.freeze();
        world.call(delete(true));
        while let Some(input) = world.queue.pop_front() {
            let input = match input {
                Input::Done(job, _) if world.running[&job].1.iter().any(|one| action(one) == "EndVmm") => {
                    Input::Done(job, Err(Failure { done: 0, error: time_limit_error() }))
                }
                // The state directory is on a full disk as well.
                Input::Done(job, _) if world.running[&job].1.iter().any(|one| action(one) == "Deleting") => {
                    Input::Done(job, Err(Failure { done: 0, error: no_space() }))
                }
                input => input,
            };
            world.feed(input);
        }
        assert!(world.state().is_gone && world.is_erased, "{why}: {:?}", world.log);
        assert!(
            world.log.iter().any(|verb| verb == "try CutOff+try RemoveNetwork+Erase"),
            "{why}: {:?}",
            world.log
        );
        assert_eq!(world.answers[&Ticket(world.callers)], ["ok"], "{why}");
    });
}

#[test]
fn immediate_stop_at_every_cut_ends_the_run() {
    at_every_cut(|world, why| {
        world.freeze_run();
        let ticket = world.call(stop(0));
        world.settle();
        // A request that waits for a frozen job of a VM without a VMM keeps waiting, but blocks no VMM.
        if world.state().busy.is_some() {
            assert!(!world.state().record.state.has_vmm(), "{why}");
            return;
        }
        world.assert_at_rest(why);
        let state = world.state().record.state;
        let refused = matches!(state, VmState::Hibernated) && world.answers[&ticket] != ["ok"];
        assert!(refused || !state.has_vmm(), "{why}: {state}");
        assert!(!world.has_vmm || refused, "{why}: its VMM runs");
    });
}

#[test]
fn end_of_the_vmm_at_every_cut_ends_the_run() {
    at_every_cut(|world, why| {
        world.freeze_run();
        if !world.state().record.state.has_vmm() || world.state().is_ending() || world.state().is_deleting() {
            return;
        }
        let starts = world.state().record.state == VmState::Starting;
        let run = world.state().run;
        let event = match starts {
            true => RunEvent::Booted(Err(HostError::Stopping)),
            false => RunEvent::VmmGone { last_words: String::new() },
        };
        world.feed(Input::Run(run, event));
        world.settle();
        world.assert_at_rest(why);
        assert!(!world.state().record.state.has_vmm(), "{why}: {}", world.state().record.state);
    });
}

#[test]
fn failed_job_at_every_cut_leaves_a_vm_that_answers() {
    for error in [no_space as fn() -> HostError, time_limit_error] {
        at_every_cut(|world, why| {
            let Some(Input::Done(job, _)) = world.queue.pop_front() else { return };
            let actions = world.running[&job].1.len();
            for done in 0..actions.min(1) {
                world.feed(Input::Done(job, Err(Failure { done, error: error() })));
            }
            world.settle();
            if !world.state().is_gone {
                // The task waits for a guest that was asked to stop until the time limit.
                let kill_at = world.state().kill_at;
                assert!(kill_at.is_some() || world.state().record.state != VmState::Stopping, "{why}");
                world.call(delete(true));
                world.settle();
            }
            assert!(world.state().is_gone, "{why}: {:?}", world.state().under_way());
            world.assert_at_rest(why);
        });
    }
}

#[test]
fn crash_of_the_daemon_at_every_cut_converges() {
    at_every_cut(|world, why| {
        if world.is_erased {
            return;
        }
        let (record, containers) = (world.record.clone(), world.containers.clone());
        let promised = record.state;
        let mut next = World::open(record, containers, world.has_vmm);
        next.settle();
        next.assert_at_rest(why);
        let (state, after) = (next.state().record.state, next.has_vmm);
        assert_eq!(state.has_vmm() && !next.state().is_gone, after, "{why}: {promised} became {state}");
        match promised {
            VmState::Deleting => assert!(next.is_erased, "{why}"),
            VmState::Stopping => assert_eq!(state, VmState::Stopped, "{why}"),
            VmState::Starting => assert_eq!(state, VmState::Running, "{why}"),
            VmState::Hibernated => assert!(next.state().record.saved.is_some(), "{why}"),
            _ => {}
        }
    });
}

/// Reports of a run after its end are ignored.
#[test]
fn reports_of_an_earlier_run_are_void() {
    at_every_cut(|world, why| {
        let run = world.state().run;
        world.freeze_run();
        world.call(stop(0));
        world.settle();
        if world.state().run == run {
            return;
        }
        let before = world.state().record.clone();
        world.log.clear();
        for event in [
            RunEvent::VmmGone { last_words: String::new() },
            RunEvent::Session(Some(SessionId(99))),
            RunEvent::Drained,
            RunEvent::Booted(Err(HostError::Stopping)),
            RunEvent::Spawned(vmm(), StartedFrom::default()),
        ] {
            world.feed(Input::Run(run, event));
        }
        assert_eq!((world.log.len(), &world.state().record), (0, &before), "{why}");
    });
}

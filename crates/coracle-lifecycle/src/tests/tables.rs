//! Effects of single inputs.

use super::*;

#[track_caller]
fn assert_steps(world: &mut World, why: &str, want: &[&str]) {
    world.settle();
    assert_eq!(world.log, want, "{why}");
}

/// Reason, state of the VM, request, and the effects until the VM is idle again.
type Row = (&'static str, VmState, fn() -> Call, &'static [&'static str]);

#[test]
fn effects_of_requests_table() {
    let start = || Call::Start { fence: None };
    let pause = || Call::Suspend { op: Op::Pause, fence: None };
    let hibernate = || Call::Suspend { op: Op::Hibernate, fence: None };
    let copy = || Call::Snapshot { dir: "/copy".into() };
    let deleted = [
        "Deleting",
        "updated",
        "ForgetSession",
        "SetPaused",
        "EndVmm",
        "CloseSharedDirs",
        "try RemoveNetwork+Erase",
        "Gone",
        "deleted",
        "answer",
    ];
    let table: [Row; 8] = [
        ("it is so already", VmState::Running, start, &["answer"]),
        ("it never ran", VmState::Created, || stop(0), &["Stopped", "stopped", "answer"]),
        ("it is off", VmState::Stopped, || stop(0), &["answer"]),
        (
            "the record comes before the pause",
            VmState::Running,
            pause,
            &["SetPaused", "Paused+Pause", "updated", "answer"],
        ),
        ("nothing to save", VmState::Stopped, hibernate, &["refuse"]),
        ("only with force", VmState::Running, || delete(false), &["refuse"]),
        ("a snapshot of nothing", VmState::Stopped, copy, &["refuse"]),
        ("only a guest that runs can be asked", VmState::Stopped, make_container, &["refuse"]),
    ];
    for (why, state, call, want) in table {
        let mut world = World::of(state);
        world.call(call());
        assert_steps(&mut world, why, want);
    }
    let mut world = World::of(VmState::Stopped);
    world.call(delete(false));
    assert_steps(&mut world, "the record says so before anything goes", &deleted);
}

#[test]
fn vmm_starts_while_its_record_is_written() {
    let mut world = World::of(VmState::Stopped);
    world.call(Call::Start { fence: None });
    assert_eq!(world.log, ["Boot", "try main Exited+try new Exited+Starting"]);
}

#[test]
fn hibernation_saves_before_it_ends_the_vmm() {
    let mut world = World::of(VmState::Running);
    world.call(Call::Suspend { op: Op::Hibernate, fence: None });
    let want = [
        "Hibernating+ReserveMemory+AskAgentVersion",
        "StopFollowing",
        "CloseSession",
        "updated",
        "SetPaused",
        "AwaitHangup+Pause+SaveMemory",
        "Hibernated",
        "stopped",
        "ForgetSession",
        "SetPaused",
        "EndVmm",
        "Hibernated",
        "updated",
        "answer",
    ];
    assert_steps(&mut world, "hibernate", &want);
    assert_eq!(world.state().record.saved.as_ref().map(|saved| saved.agent.as_str()), Some("1"));
}

#[test]
fn saved_memory_is_unrecorded_before_the_guest_resumes() {
    let mut world = World::of(VmState::Hibernated);
    world.call(Call::Start { fence: None });
    let at = |world: &World, verb: &str| world.log.iter().position(|one| one == verb);
    while at(&world, "ResumeRestored").is_none() {
        assert!(world.next(), "{:?}", world.log);
    }
    assert_eq!((&world.record.saved, world.record.state), (&None, VmState::Starting));
    world.settle();
    assert!(at(&world, "RemoveSavedMemory") > at(&world, "Running"), "{:?}", world.log);
}

#[test]
fn used_memory_is_removed_before_the_next_is_written() {
    let mut world = World::of(VmState::Hibernated);
    let started = world.call(Call::Start { fence: None });
    while !world.answers.contains_key(&started) {
        assert!(world.next(), "{:?}", world.log);
    }
    world.call(Call::Suspend { op: Op::Hibernate, fence: None });
    // The disk is slow: the removal ends after all work that does not wait for it.
    let mut removed = None;
    while let Some(input) = world.queue.pop_front() {
        match input {
            Input::Done(job, _)
                if world.running[&job].1.iter().any(|one| action(one) == "RemoveSavedMemory") =>
            {
                removed = Some(input);
            }
            input => world.feed(input),
        }
    }
    assert!(!world.log.iter().any(|verb| verb.contains("ReserveMemory")), "both are at one place");
    world.queue.extend(removed);
    world.settle();
    world.assert_at_rest("hibernated again");
    assert_eq!(world.state().record.state, VmState::Hibernated);
}

#[test]
fn graceful_stop_sets_a_limit_that_only_shrinks() {
    let mut world = World::of(VmState::Running);
    let mut limits = Vec::new();
    for grace in [30, 60, 5] {
        world.call(stop(grace));
        world.settle();
        limits.push((world.state().kill_at.unwrap() - world.began).as_secs());
    }
    assert_eq!(limits, [34, 34, 9]);
    let asked = world.log.iter().filter(|verb| *verb == "AskToPowerOff").count();
    assert_eq!((asked, world.answers.len()), (1, 0), "{:?}", world.log);
    world.began += Duration::from_secs(10);
    world.feed(Input::Timer);
    world.settle();
    assert_eq!((world.state().record.state, world.answers.len()), (VmState::Stopped, 3));
    world.assert_at_rest("killed in time");
}

#[test]
fn requests_wait_for_the_one_that_is_under_way() {
    let mut world = World::of(VmState::Running);
    world.call(make_container());
    let second = world.call(attach());
    assert!(!world.log.iter().any(|verb| verb.contains("Claim")), "{:?}", world.log);
    world.settle();
    world.assert_at_rest("both are done");
    assert_eq!(world.answers[&second], ["ok"]);
}

#[test]
fn graceful_stop_cancels_waiting_guest_requests() {
    let mut world = World::of(VmState::Running);
    let made = world.call(make_container());
    let stopped = world.call(stop(30));
    assert_eq!(world.answers[&made], ["VM web: VM is Running: it is being stopped"]);
    assert_eq!(world.state().record.state, VmState::Stopping);
    let run = world.state().run;
    world.settle();
    world.feed(Input::Run(run, RunEvent::VmmGone { last_words: String::new() }));
    world.settle();
    assert_eq!(
        (world.state().record.state, &world.answers[&stopped][..]),
        (VmState::Stopped, &["ok".to_owned()][..])
    );
}

#[test]
fn stop_that_cannot_be_recorded_is_answered_with_the_reason() {
    let mut world = World::of(VmState::Running);
    let ticket = world.call(stop(0));
    while let Some(input) = world.queue.pop_front() {
        let input = match input {
            Input::Done(job, _) if world.running[&job].1.iter().any(|one| action(one) == "Stopped") => {
                Input::Done(job, Err(Failure { done: 2, error: no_space() }))
            }
            input => input,
        };
        world.feed(input);
    }
    assert!(world.answers[&ticket][0].contains("No space left"), "{:?}", world.answers);
    assert_eq!(world.state().record.state, VmState::Stopped, "it is off all the same");
    let again = world.call(stop(0));
    world.settle();
    assert_eq!(world.answers[&again], ["ok"], "it is recorded when there is space");
    assert_eq!(world.record.state, VmState::Stopped);
}

#[test]
fn new_session_settles_before_the_next_request() {
    let mut world = World::of(VmState::Running);
    let run = world.state().run;
    world.feed(Input::Run(run, RunEvent::Session(None)));
    let refused = world.call(make_container());
    assert!(world.answers[&refused][0].contains("not connected"));
    world.feed(Input::Run(run, RunEvent::Session(Some(SessionId(50)))));
    let made = world.call(make_container());
    world.log.clear();
    assert_steps(
        &mut world,
        "volumes, containers, then the request",
        &[
            "ListContainers",
            "updated",
            "Running+AttachDisk+third Created+OpenLog+CreateContainer",
            "third Created",
            "updated",
            "answer",
        ],
    );
    assert_eq!(world.answers[&made], ["ok"]);
}

#[test]
fn rebooted_disk_image_vm_is_configured_and_reruns_command() {
    let system = || {
        let (mut record, _) = vm(VmState::Running);
        record.disk_image_vm = Some(Default::default());
        (record.sandbox, record.volumes) = (None, vec![]);
        let mut world = World::open(record, BTreeMap::new(), true);
        world.settle();
        world.log.clear();
        world
    };
    let again = |world: &mut World| {
        for session in [None, Some(SessionId(70))] {
            world.feed(Input::Run(world.state().run, RunEvent::Session(session)));
        }
        world.settle();
        world.log.clone()
    };
    let mut world = system();
    let log = again(&mut world);
    assert!(
        log.contains(&"InspectSystem".to_owned()) && !log.iter().any(|step| step.contains("ConfigureAgain"))
    );
    world.rebooted = true;
    world.log.clear();
    let log = again(&mut world);
    let steps = ["InspectSystem", "StopFollowing", "Follow", "Running+ConfigureAgain", "StartCommand"];
    let found: Vec<_> = log.iter().map(String::as_str).filter(|step| steps.contains(step)).collect();
    assert_eq!(found, steps, "{log:?}");
    assert_eq!(world.record.output_before, 42, "on record before the guest is configured");
    world.assert_at_rest("after a reboot");
    let mut without = system();
    without.rebooted = true;
    without.state.as_mut().unwrap().record.exit = Some(Default::default());
    assert!(!again(&mut without).contains(&"StartCommand".to_owned()), "its command has ended");
}

#[test]
fn disk_image_vm_without_an_agent_runs_with_its_vmm() {
    let (mut record, _) = vm(VmState::Stopped);
    let settings = coracle_record::DiskImageVm { without_agent: true, ..Default::default() };
    (record.disk_image_vm, record.sandbox, record.volumes) = (Some(settings), None, vec![]);
    let mut world = World::open(record, BTreeMap::new(), false);
    let started = world.call(Call::Start { fence: None });
    world.settle();
    assert_eq!(
        (world.answers[&started].as_slice(), world.record.state),
        (&["ok".to_owned()][..], VmState::Running)
    );
    assert!(world.state().session.is_none() && !world.record.address_acknowledged);
    // An agent that connects later is configured, as after a reboot.
    world.rebooted = true;
    world.feed(Input::Run(world.state().run, RunEvent::Session(Some(SessionId(50)))));
    world.settle();
    assert!(world.log.contains(&"Running+ConfigureAgain".to_owned()), "{:?}", world.log);
    world.feed(Input::Run(world.state().run, RunEvent::VmmGone { last_words: String::new() }));
    world.settle();
    assert_eq!(world.record.state, VmState::Stopped, "it powered off");
}

#[test]
fn request_right_after_a_start_waits_for_the_volumes() {
    let (mut record, _) = vm(VmState::Stopped);
    record.volumes[0].kind = crate::VolumeKind::SharedDir;
    let mut world = World::open(record, BTreeMap::new(), false);
    let started = world.call(Call::Start { fence: None });
    while !world.answers.contains_key(&started) {
        assert!(world.next(), "{:?}", world.log);
    }
    world.log.clear();
    let made = world.call(make_container());
    world.settle();
    let place = |what: &str| world.log.iter().position(|effect| effect.contains(what)).unwrap();
    assert!(place("ServeSharedDir") < place("CreateContainer"), "{:?}", world.log);
    assert_eq!(world.log.iter().filter(|effect| *effect == "ServeSharedDir").count(), 1, "{:?}", world.log);
    assert_eq!(world.answers[&made], ["ok"]);
}

#[test]
fn containers_end_with_the_run_and_waiters_are_answered() {
    let mut world = World::of(VmState::Running);
    let waits =
        world.call(container(ContainerRequest::Stop { id: id("main"), grace: Duration::from_secs(9) }));
    world.settle();
    assert!(!world.answers.contains_key(&waits), "its end is not reported yet");
    let run = world.state().run;
    world.feed(Input::Run(run, RunEvent::VmmGone { last_words: String::new() }));
    world.settle();
    assert_eq!(world.answers[&waits], ["ok"]);
    assert!(world.containers.values().all(|one| one.state == ContainerState::Exited));
    assert!(world.record.images.is_empty());
}

/// The guest reports the end of a container because it removes it.
#[test]
fn removed_container_is_not_written_again() {
    for at in 0..4 {
        let mut world = World::of(VmState::Running);
        let removed = world.call(container(ContainerRequest::Remove { id: id("main") }));
        for _ in 0..at {
            world.next();
        }
        let run = world.state().run;
        let exit = Exit { code: 137, signal: 9, error: String::new() };
        let end =
            ContainerEnd { id: id("main"), exit, oom_killed: false, termination_message: String::new() };
        world.feed(Input::Run(run, RunEvent::ContainerExited(end)));
        world.settle();
        assert_eq!(world.answers[&removed], ["ok"]);
        assert!(!world.containers.contains_key(&id("main")), "after {at} reports it is on disk again");
    }
}

#[test]
fn refused_volume_is_taken_out_of_view_before_the_answer() {
    let mut world = World::of(VmState::Running);
    let before = world.state().record.volumes.clone();
    let ticket = world.call(attach());
    let Some(Input::Done(job, _)) = world.queue.pop_front() else { panic!("no job: {:?}", world.log) };
    // Events that are published now show the volume.
    assert_ne!(world.state().record.volumes, before);
    let error = HostError::Invalid { message: "another VM has it".to_owned() };
    world.feed(Input::Done(job, Err(Failure { done: 0, error })));
    let at = |verb: &str| world.log.iter().position(|one| one.starts_with(verb)).unwrap();
    assert!(at("updated") < at("refuse"), "{:?}", world.log);
    assert_eq!((&world.state().record.volumes, world.answers[&ticket].len()), (&before, 1));
}

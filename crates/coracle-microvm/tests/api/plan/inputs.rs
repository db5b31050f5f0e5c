//! Plans for the guest's inputs, and for its grace period.

use super::*;

fn observed_without_inputs<'a>(vm: &'a MikromVM, view: AgentView, policy: &'a Policy) -> Observed<'a> {
    Observed { inputs: Err("Secret \"login\" not found".into()), ..observed(vm, view, policy) }
}

#[test]
fn vm_without_its_inputs_is_not_created() {
    let policy = Policy::default();
    let config_error = Some(Finding::ConfigError("Secret \"login\" not found".into()));
    let mut never = object(Stage::Live);
    never.spec.restart_policy = RestartPolicy::Never;
    let outdated = AgentView::Answered(Some(VmInfo {
        state: State::Creating,
        uid: OWN.map(str::to_owned),
        spec: Some("another".into()),
        ..VmInfo::default()
    }));
    for (why, vm, view, refused) in [
        ("a new VM", object(Stage::Bound), AgentView::Answered(None), true),
        ("one that vanished", object(Stage::Live), AgentView::Answered(None), true),
        ("one that stays away", never, AgentView::Answered(None), false),
        ("one of an older spec is not deleted, either", object(Stage::Bound), outdated, true),
        ("one that runs", object(Stage::Live), vm_in(State::Running, OWN), false),
        ("one that waits for its start", object(Stage::Bound), vm_in(State::Creating, OWN), false),
        ("one that is unbound is bound first", object(Stage::Held), AgentView::Unbound, false),
        ("one that is deleted", object(Stage::BoundDeleted), AgentView::Answered(None), false),
    ] {
        let mut world = observed_without_inputs(&vm, view, &policy);
        world.memo.down_since = Some(at(0)); // its backoff is over
        let with = plan(&Observed { inputs: Ok(Arc::default()), ..world.clone() });
        let without = plan(&world);
        if refused {
            assert!(may_create(&vm, &world.view, &world.memo), "{why}");
            assert_eq!((without.steps, without.finding), (vec![], config_error.clone()), "{why}");
            assert!(with.steps.iter().any(|step| step.name() == "create"), "{why}: {:?}", with.steps);
        } else {
            assert_eq!(without, with, "{why}");
        }
    }
}

#[test]
fn inputs_are_read_wherever_a_plan_creates() {
    let policy = Policy::default();
    let views = [
        AgentView::Unbound,
        AgentView::Answered(None),
        vm_in(State::Running, OWN),
        vm_in(State::Stopped, OWN),
        vm_in(State::Error, OWN),
        silent(None, true),
        silent(Some(1_000_000), true),
    ];
    for stage in [Stage::New, Stage::Held, Stage::Bound, Stage::Live, Stage::LiveDeleted] {
        for (view, recreate) in views.iter().flat_map(|view| [(view.clone(), false), (view.clone(), true)]) {
            let vm = object(stage);
            let mut world = observed(&vm, view, &policy);
            (world.memo.recreate, world.memo.down_since) = (recreate, Some(at(0)));
            let creates = plan(&world).steps.iter().any(|step| step.name() == "create");
            let read = may_create(&vm, &world.view, &world.memo);
            assert!(read || !creates, "{stage:?} {:?} {recreate}", world.view);
        }
    }
}

#[test]
fn created_vm_is_given_its_inputs() {
    let policy = Policy::default();
    let vm = object(Stage::Bound);
    let inputs = coracle_vm_inputs::Inputs { env: vec!["A=1".into()], ..Default::default() };
    let world = Observed {
        inputs: Ok(Arc::new(inputs.clone())),
        ..observed(&vm, AgentView::Answered(None), &policy)
    };
    let given = plan(&world).steps.into_iter().find_map(|step| match step {
        Step::CreateVm(_, spec) => Some(spec.inputs),
        _ => None,
    });
    assert_eq!(given.as_deref(), Some(&inputs));
}

#[test]
fn deleted_vm_has_its_grace_period() {
    let policy = Policy::default();
    for (seconds, want) in [(None, None), (Some(0), Some(0)), (Some(20), Some(20))] {
        let mut vm = object(Stage::LiveDeleted);
        vm.spec.termination_grace_period_seconds = seconds;
        let plan = plan(&observed(&vm, vm_in(State::Running, OWN), &policy));
        let grace = plan.steps.iter().find_map(|step| match step {
            Step::StopVm(vm) => Some(vm.grace),
            _ => None,
        });
        assert_eq!(grace, Some(want.map(Duration::from_secs)));
    }
}

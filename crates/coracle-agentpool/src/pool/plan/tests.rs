//! Specification as tables: each test is a rule of the original operator, each row a case of it.

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::agentpool::{
    AgentSpec, CleanupPolicy, NameRef, OwnedVm, VsphereAgent, VsphereAgentPool, VsphereAgentPoolSpec,
    names::{self, phase, phase_reason, source},
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;

use super::{Adoption, Pin, Plan, RequestView, Snapshot, Step, plan, plan_deletion};
use crate::{
    demand::Counters,
    identity::{AgentFacts, HardwareId},
    pool::rows::{Graces, Machines, agent_ref, machine_ref, matches, refresh},
};

const NOW: i64 = 1_800_000_000;

fn now() -> Timestamp {
    Timestamp::from_second(NOW).unwrap()
}

fn graces() -> Graces {
    Graces { discovery: SignedDuration::from_mins(30), orphan: SignedDuration::from_mins(30) }
}

fn pool() -> VsphereAgentPool {
    let name = |n: &str| NameRef { name: n.into() };
    let mut pool = VsphereAgentPool::new(
        "demo-worker",
        VsphereAgentPoolSpec {
            hosted_cluster_ref: name("demo"),
            node_pool_ref: name("demo-worker"),
            infra_env_ref: name("demo"),
            control_plane_namespace: "demo-demo".into(),
            agent: AgentSpec {
                labels: [("customer".into(), "example".into())].into(),
                ..AgentSpec::default()
            },
            ..VsphereAgentPoolSpec::default()
        },
    );
    pool.metadata.namespace = Some("demo".into());
    pool
}

/// Row `name` that has been in the phase for `minutes`, with `machine` and an Agent of the same name as recorded.
fn row(name: &str, phase: &str, reason: &str, machine: Option<&str>, minutes: i64) -> OwnedVm {
    OwnedVm {
        name: name.into(),
        owner_uid: format!("uid-{name}"),
        source: source::VSPHERE_AGENT.into(),
        bios_uuid: uuid(name),
        phase: phase.into(),
        reason: reason.into(),
        machine_ref: machine.map(|m| machine_ref(&pool(), m)),
        agent_ref: (phase != phase::PROVISIONING).then(|| agent_ref(&pool(), name)),
        last_transition_time: Some(Time(Timestamp::from_second(NOW - minutes * 60).unwrap())),
        ..OwnedVm::default()
    }
}

fn uuid(name: &str) -> String {
    coracle_vsphere::uuid_v5(name)
}

fn agent(name: &str, bound: bool) -> AgentFacts {
    AgentFacts {
        name: name.into(),
        approved: true,
        role: "worker".into(),
        hostname: name.into(),
        identity: HardwareId { uuid: uuid(name), mac: String::new() },
        is_bound: bound,
        is_usable: true,
        infra_env: "demo".into(),
        labels: [(names::ROLE_LABEL, "worker"), (names::AGENT_MACHINE, name)]
            .map(|(k, v)| (k.into(), v.into()))
            .into(),
        ..AgentFacts::default()
    }
}

fn decide(
    pool: &VsphereAgentPool,
    rows: &[OwnedVm],
    agents: &[AgentFacts],
    demand: Counters,
    machines: &Machines,
) -> Plan {
    let matches = matches(rows, agents);
    plan(&Snapshot {
        pool,
        rows,
        agents,
        matches: &matches,
        demand,
        machines,
        pins: &[],
        requests: &[],
        unmet: &BTreeSet::new(),
        adoptable: &[],
        iso_due: None,
        graces: graces(),
        now: now(),
    })
}

fn verbs(plan: &Plan) -> String {
    let all: Vec<_> =
        plan.actions().iter().map(|a| format!("{} {}", a.kind, a.name).trim().to_owned()).collect();
    all.join(", ")
}

fn waiting(n: i32) -> Counters {
    Counters { all: n, waiting: n, unready: n, without_agent: n }
}

#[test]
fn deficit_is_demand_minus_available_and_provisioning() {
    let free = agent("a", false);
    let pending = row("p", phase::PROVISIONING, phase_reason::CREATE_REQUESTED, None, 1);
    for (reason, demand, rows, agents, want) in [
        ("no AgentMachine waits", 0, vec![], vec![], 0),
        ("all are missing", 3, vec![], vec![], 3),
        ("a free Agent meets one", 3, vec![], vec![free.clone()], 2),
        ("a VM that provisions meets one", 3, vec![pending.clone()], vec![free.clone()], 1),
        ("never below zero", 1, vec![pending], vec![free], 0),
        (
            "an Agent that the provider would refuse meets none",
            1,
            vec![],
            vec![AgentFacts { is_usable: false, ..agent("b", false) }],
            1,
        ),
    ] {
        assert_eq!(
            decide(&pool(), &rows, &agents, waiting(demand), &Machines::new()).deficit,
            want,
            "{reason}"
        );
    }
}

#[test]
fn agent_is_matched_by_uuid_or_mac_before_hostname() {
    let rows = [row("w-0", phase::PROVISIONING, phase_reason::CREATE_REQUESTED, None, 1)];
    let with = |name: &str, uuid: &str, hostname: &str| AgentFacts {
        name: name.into(),
        hostname: hostname.into(),
        identity: HardwareId { uuid: uuid.into(), mac: String::new() },
        ..AgentFacts::default()
    };
    let own = uuid("w-0");
    for (why, agents, want) in [
        ("UUID wins over hostname and order", vec![with("h", "", "w-0"), with("u", &own, "x")], Some(1)),
        ("hostname when nothing better is known", vec![with("h", "", "w-0")], Some(0)),
        ("a hostname with another UUID is another's", vec![with("h", &uuid("other"), "w-0")], None),
        ("what two Agents share tells nothing", vec![with("a", &own, "x"), with("b", &own, "y")], None),
    ] {
        assert_eq!(matches(&rows, &agents).get(&0).copied(), want, "{why}");
    }
}

#[test]
fn preparation_sets_labels_role_approval_and_hostname() {
    let rows = [row("w-0", phase::AVAILABLE, phase_reason::AGENT_AVAILABLE, None, 1)];
    let fresh = AgentFacts {
        approved: false,
        role: String::new(),
        hostname: String::new(),
        labels: BTreeMap::new(),
        ..agent("w-0", false)
    };
    let plan = decide(&pool(), &rows, std::slice::from_ref(&fresh), waiting(1), &Machines::new());
    let p = plan.preparations().next().unwrap();
    assert_eq!((p.hostname.as_str(), p.role.as_str(), p.approve), ("w-0", "worker", Some(true)));
    let want = [("customer", "example"), (names::ROLE_LABEL, "worker"), (names::AGENT_MACHINE, "w-0")];
    assert_eq!(p.labels, want.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    let done = decide(&pool(), &rows, &[agent("w-0", false)], waiting(1), &Machines::new());
    assert_eq!(verbs(&done), "Noop", "a prepared Agent is left alone");
    let mut manual = pool();
    manual.spec.agent.approve = Some(false);
    let unapproved = AgentFacts { approved: false, ..agent("w-0", false) };
    assert_eq!(
        decide(&manual, &rows, &[unapproved], waiting(1), &Machines::new()).preparations().count(),
        0,
        "optionally approves"
    );
    let bound = decide(
        &pool(),
        &rows,
        &[AgentFacts { hostname: String::new(), ..agent("w-0", true) }],
        waiting(1),
        &Machines::new(),
    );
    assert_eq!(bound.preparations().count(), 0, "a claimed Agent is not touched");
}

#[test]
fn removal_that_was_cut_off_is_finished_and_its_vm_replaced() {
    let rows = [row("w-0", phase::AVAILABLE, phase_reason::AGENT_AVAILABLE, None, 1)];
    let fenced = AgentFacts { approved: false, is_going: true, is_fenced: true, ..agent("w-0", false) };
    let plan = decide(&pool(), &rows, std::slice::from_ref(&fenced), waiting(1), &Machines::new());
    let removals: Vec<_> = plan.removals().map(|removal| removal.reason).collect();
    assert_eq!((removals, plan.deficit), (vec!["RemovalCutOff"], 1));
    let bound = AgentFacts { is_bound: true, ..fenced.clone() };
    let plan = decide(&pool(), &rows, &[bound], waiting(1), &Machines::new());
    assert_eq!(plan.removals().count(), 0, "a claimed Agent is not touched");
    let mut retaining = pool();
    retaining.spec.cleanup_policy = CleanupPolicy::Retain;
    let plan = decide(&retaining, &rows, &[fenced], waiting(1), &Machines::new());
    assert_eq!(plan.removals().count(), 0, "nothing is destroyed");
}

#[test]
fn scale_down_waits_until_machine_has_disappeared() {
    let there: Machines = [("m".to_owned(), false)].into();
    let going: Machines = [("m".to_owned(), true)].into();
    let gone = Machines::new();
    let bound = || Some((agent("w-0", true), Some("m".to_owned())));
    let free = || Some((agent("w-0", false), None));
    let b = || row("w-0", phase::BOUND, phase_reason::AGENT_BOUND, Some("m"), 5);
    let d = || row("w-0", phase::RELEASED, phase_reason::MACHINE_DELETING, Some("m"), 5);
    for (reason, before, seen, machines, want) in [
        ("bound and wanted", b(), bound(), &there, "Bound/AgentBound"),
        ("its Machine goes", b(), bound(), &going, "Released/MachineDeleting"),
        ("unbound while it goes", d(), free(), &going, "Released/MachineDeleting"),
        ("the Machine has disappeared", d(), free(), &gone, "Released/MachineDeleted"),
        ("the Agent vanished first", d(), None, &going, "Released/MachineDeleting"),
        ("both are gone", d(), None, &gone, "Released/MachineDeleted"),
        ("unbound and its Machine stays", b(), free(), &there, "Released/AgentReleased"),
        ("its Machine was deleted between reconciles", b(), free(), &gone, "Released/MachineDeleted"),
        ("Agent gone, Machine there: unchanged", b(), None, &there, "Bound/AgentBound"),
    ] {
        let next =
            refresh(&before, seen.as_ref().map(|(a, m)| (a, m.clone())), &pool(), machines, now(), &graces());
        assert_eq!(format!("{}/{}", next.phase, next.reason), want, "{reason}");
        assert_eq!(next.machine_ref, before.machine_ref, "the last known machineRef is retained: {reason}");
        let plan = decide(&pool(), &[next], &[], waiting(0), machines);
        assert_eq!(
            plan.removals().count() > 0,
            want == "Released/MachineDeleted",
            "only then is it deleted: {reason}"
        );
    }
}

#[test]
fn row_phase_follows_the_observed_vm_and_agent() {
    let r = |phase, reason, minutes| row("w-0", phase, reason, None, minutes);
    let free = || Some(agent("w-0", false));
    for (reason, before, seen, want) in [
        (
            "no VM yet, however long",
            r(phase::PROVISIONING, phase_reason::VM_CREATE_PENDING, 99),
            None,
            "Provisioning/VMCreatePending",
        ),
        (
            "the VM was made",
            r(phase::PROVISIONING, phase_reason::CREATE_REQUESTED, 1),
            None,
            "Provisioning/AgentNotDiscovered",
        ),
        (
            "29 minutes are not yet too long",
            r(phase::PROVISIONING, phase_reason::AGENT_NOT_DISCOVERED, 29),
            None,
            "Provisioning/AgentNotDiscovered",
        ),
        (
            "no Agent within 30 minutes",
            r(phase::PROVISIONING, phase_reason::AGENT_NOT_DISCOVERED, 30),
            None,
            "Orphaned/AgentDiscoveryExpired",
        ),
        (
            "it came",
            r(phase::PROVISIONING, phase_reason::AGENT_NOT_DISCOVERED, 3),
            free(),
            "Available/AgentAvailable",
        ),
        (
            "it came late",
            r(phase::ORPHANED, phase_reason::AGENT_DISCOVERY_EXPIRED, 9),
            free(),
            "Available/AgentAvailable",
        ),
        (
            "it is prepared",
            r(phase::AVAILABLE, phase_reason::AGENT_PREPARED, 9),
            free(),
            "Available/AgentPrepared",
        ),
        ("it vanished", r(phase::AVAILABLE, phase_reason::AGENT_PREPARED, 9), None, "Orphaned/AgentMissing"),
    ] {
        let next =
            refresh(&before, seen.as_ref().map(|a| (a, None)), &pool(), &Machines::new(), now(), &graces());
        assert_eq!(format!("{}/{}", next.phase, next.reason), want, "{reason}");
        let moved = next.last_transition_time != before.last_transition_time;
        assert_eq!(
            moved,
            (&next.phase, &next.reason) != (&before.phase, &before.reason),
            "time moves with it: {reason}"
        );
    }
}

#[test]
fn surplus_agent_is_deleted_only_if_all_machines_have_one() {
    let rows = [row("w-0", phase::AVAILABLE, phase_reason::AGENT_PREPARED, None, 1)];
    let agents = [agent("w-0", false)];
    for (reason, waits, without, want) in [
        ("every AgentMachine has an Agent", 0, 0, "DeleteVM w-0, DeleteAgent w-0"),
        ("one waits", 1, 1, "Noop"),
        ("one has none and does not say that it waits", 0, 1, "Noop"),
    ] {
        let demand = Counters { all: 1, waiting: waits, unready: without, without_agent: without };
        assert_eq!(verbs(&decide(&pool(), &rows, &agents, demand, &Machines::new())), want, "{reason}");
    }
}

#[test]
fn cleanup_policy_retain_keeps_vms() {
    let mut retain = pool();
    retain.spec.cleanup_policy = CleanupPolicy::Retain;
    let rows = [
        row("a", phase::RELEASED, phase_reason::MACHINE_DELETED, Some("m"), 1),
        row("b", phase::AVAILABLE, phase_reason::AGENT_PREPARED, None, 1),
        row("c", phase::ORPHANED, phase_reason::AGENT_MISSING, None, 99),
    ];
    assert_eq!(
        decide(&retain, &rows, &[agent("b", false)], waiting(0), &Machines::new()).removals().count(),
        0
    );
}

#[test]
fn orphan_is_removed_after_grace_without_its_machine() {
    let there: Machines = [("m".to_owned(), false)].into();
    for (reason, minutes, machine, machines, goes) in [
        ("30 minutes and never bound", 30, None, Machines::new(), true),
        ("29 minutes", 29, None, Machines::new(), false),
        ("its Machine is there", 99, Some("m"), there, false),
        ("its Machine is gone", 99, Some("m"), Machines::new(), true),
    ] {
        let rows = [row("w-0", phase::ORPHANED, phase_reason::AGENT_MISSING, machine, minutes)];
        assert_eq!(
            decide(&pool(), &rows, &[], waiting(0), &machines).removals().count() > 0,
            goes,
            "{reason}"
        );
    }
}

#[test]
fn released_discovered_agent_is_not_deleted() {
    let mut found = row("old", phase::RELEASED, phase_reason::MACHINE_DELETED, None, 99);
    found.source = source::DISCOVERED_AGENT.into();
    assert_eq!(
        verbs(&decide(&pool(), &[found], &[agent("old", false)], waiting(0), &Machines::new())),
        "Noop"
    );
}

fn any_row(index: usize) -> impl Strategy<Value = OwnedVm> {
    let phases = prop::sample::select(vec![
        (phase::PROVISIONING, phase_reason::VM_CREATE_PENDING),
        (phase::PROVISIONING, phase_reason::AGENT_NOT_DISCOVERED),
        (phase::AVAILABLE, phase_reason::AGENT_PREPARED),
        (phase::BOUND, phase_reason::AGENT_BOUND),
        (phase::RELEASED, phase_reason::AGENT_RELEASED),
        (phase::RELEASED, phase_reason::MACHINE_DELETING),
        (phase::RELEASED, phase_reason::MACHINE_DELETED),
        (phase::ORPHANED, phase_reason::AGENT_MISSING),
        (phase::ORPHANED, phase_reason::AGENT_DISCOVERY_EXPIRED),
    ]);
    (phases, prop::option::of(0..6usize), 0..90i64, any::<bool>()).prop_map(
        move |((p, r), machine, minutes, found)| {
            let machine = machine.map(|m| format!("m-{m}"));
            let mut row = row(&format!("w-{index}"), p, r, machine.as_deref(), minutes);
            if found {
                row.source = source::DISCOVERED_AGENT.into();
            }
            row
        },
    )
}

fn any_rows() -> impl Strategy<Value = Vec<OwnedVm>> {
    (0..6usize).prop_flat_map(|n| (0..n).map(any_row).collect::<Vec<_>>())
}

/// Steps of a pool with these inputs, as text.
fn steps_of(pool: &VsphereAgentPool, pins: &[Pin], unmet: &[&str], adoptable: &[Adoption]) -> String {
    let (rows, agents) =
        ([row("w-0", phase::RELEASED, phase_reason::MACHINE_DELETED, None, 0)], [agent("w-0", false)]);
    let unprepared = [AgentFacts { hostname: String::new(), ..agent("w-1", false) }];
    let rows: Vec<_> = rows
        .into_iter()
        .chain([row("w-1", phase::AVAILABLE, phase_reason::CREATE_REQUESTED, None, 0)])
        .collect();
    let agents: Vec<_> = agents.into_iter().chain(unprepared).collect();
    let matches = matches(&rows, &agents);
    let plan = plan(&Snapshot {
        pool,
        rows: &rows,
        agents: &agents,
        matches: &matches,
        demand: waiting(2),
        machines: &Machines::new(),
        pins,
        requests: &[],
        unmet: &unmet.iter().map(|term| (*term).to_owned()).collect(),
        adoptable,
        iso_due: None,
        graces: graces(),
        now: now(),
    });
    words(&plan.steps)
}

fn words(steps: &[Step]) -> String {
    let word = |step: &Step| match step {
        Step::AddFinalizer => "add-finalizer".to_owned(),
        Step::PinSelector(pin) => format!("pin:{}", pin.vm),
        Step::PrepareAgents(all) => format!("prepare:{}", all.len()),
        Step::RemoveVm(removal) => format!("remove:{}", removal.row.name),
        Step::AdoptVm(adoption) => format!("adopt:{}", adoption.note),
        Step::WarnSelectors(_) => "warn".to_owned(),
        Step::DeleteRequest(request) => format!("delete:{}", request.name),
        Step::DeleteImages => "delete-images".to_owned(),
        Step::RemoveFinalizer => "remove-finalizer".to_owned(),
    };
    steps.iter().map(word).collect::<Vec<_>>().join(" ")
}

#[test]
fn steps_table() {
    let held = || {
        let mut pool = pool();
        pool.metadata.finalizers = Some(vec![names::POOL_FINALIZER.into()]);
        pool
    };
    let pin = Pin { namespace: "cp".into(), name: "am".into(), resource_version: None, vm: "w-1".into() };
    let adoption = Adoption { request: VsphereAgent::default(), note: "old".into() };
    let (pins, adoptions) = ([pin], [adoption]);
    for (reason, pool, pins, unmet, adoptable, want) in [
        (
            "the finalizer comes before any effect",
            pool(),
            &pins[..],
            &[][..],
            &[][..],
            "add-finalizer pin:w-1 prepare:1 remove:w-0",
        ),
        ("steady: preparations before removals", held(), &[], &[], &[], "prepare:1 remove:w-0"),
        ("pins come before preparations", held(), &pins, &[], &[], "pin:w-1 prepare:1 remove:w-0"),
        ("adoptions come after removals", held(), &[], &[], &adoptions, "prepare:1 remove:w-0 adopt:old"),
        ("unmet selectors are an event", held(), &[], &["a=b"], &[], "prepare:1 remove:w-0 warn"),
    ] {
        assert_eq!(steps_of(&pool, pins, unmet, adoptable), want, "{reason}");
    }
}

#[test]
fn deletion_table() {
    let request =
        |name: &str, is_deleting| RequestView { name: name.into(), is_deleting, ..RequestView::default() };
    let deletes_images = || {
        let mut pool = pool();
        pool.metadata.annotations = Some([(names::DELETE_ISOS.to_owned(), "true".to_owned())].into());
        pool
    };
    for (reason, pool, requests, want) in [
        ("VsphereAgents go first", pool(), vec![request("a", false), request("b", true)], "delete:a"),
        ("their ends are waited for", pool(), vec![request("b", true)], ""),
        ("images wait for the VMs that use them", deletes_images(), vec![request("b", true)], ""),
        ("images stay by default", pool(), vec![], "remove-finalizer"),
        ("images go by annotation", deletes_images(), vec![], "delete-images remove-finalizer"),
    ] {
        assert_eq!(words(&plan_deletion(&pool, &requests)), want, "{reason}");
    }
}

proptest! {
    #[test]
    fn plan_never_removes_vms_in_use_retained_or_discovered(
        rows in any_rows(),
        bound in prop::collection::vec(prop::option::of(any::<bool>()), 6),
        there in prop::collection::btree_map((0..6usize).prop_map(|m| format!("m-{m}")), any::<bool>(), 0..6),
        waits in 0..5i32,
        without in 0..5i32,
        retain in any::<bool>(),
    ) {
        let mut pool = pool();
        pool.spec.cleanup_policy = if retain { CleanupPolicy::Retain } else { CleanupPolicy::Delete };
        let agents: Vec<_> = bound.iter().enumerate().filter_map(|(i, b)| b.map(|b| agent(&format!("w-{i}"), b))).collect();
        let machine = |r: &OwnedVm| r.machine_ref.as_ref().and_then(|m| m.name.clone());
        let matched = matches(&rows, &agents);
        let next: Vec<_> = rows.iter().enumerate().map(|(i, r)| {
            let seen = matched.get(&i).map(|a| (&agents[*a], machine(r)));
            refresh(r, seen, &pool, &there, now(), &graces())
        }).collect();
        let demand = Counters { all: 9, waiting: waits, unready: without, without_agent: without };
        let plan = decide(&pool, &next, &agents, demand, &there);
        for removal in plan.removals() {
            prop_assert!(!retain && removal.row.source != source::DISCOVERED_AGENT);
            prop_assert!(machine(&removal.row).is_none_or(|m| !there.contains_key(&m)), "its Machine exists");
            prop_assert!(rows.iter().any(|r| r.name == removal.row.name));
        }
        prop_assert!(plan.deficit + plan.available + plan.pending >= waits);
        let again: Vec<_> = next.iter().enumerate().map(|(i, r)| {
            let seen = matched.get(&i).map(|a| (&agents[*a], machine(r)));
            refresh(r, seen, &pool, &there, now(), &graces())
        }).collect();
        // While the end of its old Machine is being observed, an Agent that is claimed again passes through both states.
        let settled = |i: &usize| matched.get(i).is_none_or(|a| !agents[*a].is_bound);
        let phases = |rows: &[OwnedVm]| -> Vec<String> {
            rows.iter().enumerate().filter(|(i, _)| settled(i)).map(|(_, r)| r.phase.clone()).collect()
        };
        prop_assert_eq!(phases(&next), phases(&again), "a second look moves nothing");
    }
}

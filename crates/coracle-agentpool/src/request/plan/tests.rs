//! Plan of a VsphereAgent as a table: states of the object and its pool as input, steps as output.

use coracle_api::agentpool::{IsoEjection, NameRef, VsphereAgentSpec, VsphereAgentStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;

const NOW: i64 = 1_800_000_000;

fn now() -> Timestamp {
    Timestamp::from_second(NOW).unwrap()
}

fn request() -> VsphereAgent {
    let mut request =
        VsphereAgent::new("w-0", VsphereAgentSpec { pool_ref: NameRef { name: "pool".into() } });
    request.metadata.uid = Some("uid".into());
    request.metadata.namespace = Some("ns".into());
    request.metadata.finalizers = Some(vec![names::AGENT_FINALIZER.into()]);
    request
}

fn vm(phase: &str, reason: &str, age_s: i64) -> OwnedVm {
    OwnedVm {
        name: "w-0".into(),
        owner_uid: "uid".into(),
        bios_uuid: "42".into(),
        phase: phase.into(),
        reason: reason.into(),
        last_transition_time: Some(Time(Timestamp::from_second(NOW - age_s).unwrap())),
        ..OwnedVm::default()
    }
}

fn with_vm(mut request: VsphereAgent) -> VsphereAgent {
    let status = VsphereAgentStatus { vm: Some(vm("Provisioning", "x", 0)), ..VsphereAgentStatus::default() };
    request.status = Some(status);
    request
}

fn deleted(mut request: VsphereAgent) -> VsphereAgent {
    request.metadata.deletion_timestamp = Some(Time(now()));
    request
}

fn without_finalizer(mut request: VsphereAgent) -> VsphereAgent {
    request.metadata.finalizers = None;
    request
}

fn adopted(mut request: VsphereAgent) -> VsphereAgent {
    request.labels_mut().insert(names::CREATED_FOR.into(), names::FOR_ADOPTED.into());
    request
}

fn ejecting(mut request: VsphereAgent) -> VsphereAgent {
    let ejection: IsoEjection = serde_json::from_value(serde_json::json!({
        "vmName": "w-0", "biosUUID": "42", "datacenter": "DC0", "deviceKey": 1, "isoPath": "x", "startedAt": "2026-01-01T00:00:00Z",
    })).unwrap();
    request.status.get_or_insert_default().iso_ejection = Some(ejection);
    request
}

fn pool(policy: CleanupPolicy) -> VsphereAgentPool {
    let mut pool = VsphereAgentPool::default();
    (pool.metadata.name, pool.metadata.namespace) = (Some("pool".into()), Some("ns".into()));
    pool.spec.cleanup_policy = policy;
    pool
}

fn steps(request: &VsphereAgent, pool: Option<&VsphereAgentPool>, is_shared: bool) -> Vec<Step> {
    plan(&Snapshot { request, pool, is_shared, now: now(), steady: Duration::from_secs(60) })
}

fn verbs(steps: &[Step]) -> String {
    let verb = |step: &Step| match step {
        Step::AddFinalizer => "add-finalizer",
        Step::ReportPoolMissing { is_deleted: false, .. } => "report",
        Step::ReportPoolMissing { is_deleted: true, .. } => "report-orphan",
        Step::RemoveFinalizer => "remove-finalizer",
        Step::FinishEjection(_) => "finish-ejection",
        Step::DestroyVm(_) => "destroy",
        Step::AdoptVm => "adopt",
        Step::CreateVm(_) => "create",
        Step::CheckVm { adopted: false, .. } => "check",
        Step::CheckVm { adopted: true, .. } => "check-adopted",
        Step::EjectIso(_) => "eject",
    };
    steps.iter().map(verb).collect::<Vec<_>>().join(" ")
}

#[test]
fn plan_table() {
    let (deletes, retains) = (&pool(CleanupPolicy::default()), &pool(CleanupPolicy::Retain));
    for (why, request, pool, is_shared, want) in [
        (
            "finalizer before any effect",
            without_finalizer(request()),
            Some(deletes),
            false,
            "add-finalizer create",
        ),
        ("no VM is recorded", request(), Some(deletes), false, "create"),
        ("an existing VM is recorded, not created", adopted(request()), Some(deletes), false, "adopt"),
        ("a recorded VM is checked", with_vm(request()), Some(deletes), false, "check eject"),
        ("so is an adopted one", adopted(with_vm(request())), Some(deletes), false, "check-adopted eject"),
        ("without a pool nothing is created", request(), None, false, "report"),
        (
            "without a pool the VM of a deleted object stays",
            deleted(with_vm(request())),
            None,
            false,
            "report-orphan remove-finalizer",
        ),
        (
            "the VM goes before the object",
            deleted(with_vm(request())),
            Some(deletes),
            false,
            "destroy remove-finalizer",
        ),
        ("a creation may be under way", deleted(request()), Some(deletes), false, "destroy remove-finalizer"),
        ("policy Retain keeps the VM", deleted(with_vm(request())), Some(retains), false, "remove-finalizer"),
        (
            "another object manages the VM",
            deleted(with_vm(request())),
            Some(deletes),
            true,
            "remove-finalizer",
        ),
        (
            "an ejection ends before the VM",
            ejecting(deleted(with_vm(request()))),
            Some(deletes),
            false,
            "finish-ejection destroy remove-finalizer",
        ),
        ("nothing after the finalizer", without_finalizer(deleted(request())), Some(deletes), false, ""),
    ] {
        assert_eq!(verbs(&steps(&request, pool, is_shared)), want, "{why}");
    }
}

#[test]
fn recorded_phase_table() {
    for (why, row, want) in [
        ("a new phase is copied at once", vm("Bound", "Bound", 0), ("Bound", "Bound")),
        ("a new reason alone waits", vm("Provisioning", "New", 1), ("Provisioning", "x")),
        ("until it has lasted", vm("Provisioning", "New", 60), ("Provisioning", "New")),
        (
            "a row from before the creation is ignored",
            vm("Bound", names::phase_reason::VM_CREATE_PENDING, 90),
            ("Provisioning", "x"),
        ),
        (
            "a row of another owner is ignored",
            OwnedVm { owner_uid: "other".into(), ..vm("Bound", "Bound", 0) },
            ("Provisioning", "x"),
        ),
    ] {
        let mut pool = pool(CleanupPolicy::default());
        pool.status.get_or_insert_default().owned_vms = vec![row];
        let steps = steps(&with_vm(request()), Some(&pool), false);
        let Step::CheckVm { vm, .. } = &steps[0] else { panic!("{why}: {steps:?}") };
        assert_eq!((vm.phase.as_str(), vm.reason.as_str()), want, "{why}");
    }
}

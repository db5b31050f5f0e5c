//! Custom resource definitions, as they are applied. A change of these files is a change of the public API.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

#[test]
fn golden_custom_resource_definitions() {
    for (file, yaml) in coracle_api::crd_files().unwrap() {
        insta::assert_snapshot!(file, yaml);
    }
}

#[test]
fn manifest_round_trip_is_unchanged() {
    let vm: coracle_api::MikromVM = serde_saphyr::from_str(include_str!("seed_mikromvm.yaml")).unwrap();
    assert_eq!((vm.spec.vcpu_count, vm.spec.memory_mib, vm.vm_id().as_str()), (2, 1024, "production-my-app"));
    let json = serde_json::to_value(&vm.spec).unwrap();
    for (field, want) in [("vcpuCount", "2"), ("memoryMB", "1024"), ("agentAddress", "\"10.0.0.5:50051\"")] {
        assert_eq!(json[field].to_string(), want, "{field}");
    }
}

#[test]
fn status_round_trip_is_unchanged() {
    let mut seed: serde_json::Value = serde_saphyr::from_str(include_str!("seed_status.yaml")).unwrap();
    // The seed omits fields that the API server requires in a condition.
    seed["status"]["conditions"][0]["lastTransitionTime"] = "2026-04-09T10:00:00Z".into();
    seed["status"]["conditions"][0]["message"] = "".into();
    let status: coracle_api::MikromVMStatus = serde_json::from_value(seed["status"].clone()).unwrap();
    assert_eq!(serde_json::to_value(&status).unwrap(), seed["status"]);
}
